"""Preflight: whether a prediction fits, and what is offered when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.algebra.legality import check, executed, require
from ptrain.costs import PLACED
from ptrain.derivation.estimate import derive
from ptrain.errors import DoesNotFit
from ptrain.report.selection import described
from ptrain.selection.fit import fit
from ptrain.selection.preflight import cheaper, more_ranks, require_fit
from ptrain.spec.axis import Axis
from ptrain.spec.cluster import Cluster
from ptrain.spec.dials import Overlap
from ptrain.spec.load import load
from ptrain.spec.placement import Mode, Tier
from ptrain.spec.spec import Spec
from tests.pure.build import GATHERED, WHOLE, ZERO_1, make_spec, tuple_of


def on_devices_of(memory: int, spec: Spec, host_memory: int | None = None) -> Spec:
    cluster = Cluster(
        name="small",
        devices=8,
        devices_per_node=8,
        device_memory=memory,
        reserve=0,  # a device of the test has no CUDA context
        host_memory=host_memory,
        intra_node_bandwidth=1e9,
        inter_node_bandwidth=1e9,
    )
    return replace(spec, cluster=cluster)


OWN = {
    "model": {"layers": 3, "hidden": 42, "heads": 3, "kv_heads": 1, "ffn": 101, "vocab": 259},
    "batch": {"global": 16, "micro": 2, "sequence": 16},
    "cluster": {"devices": 8, "device_memory": 1, "reserve": 0, "intra_node_bandwidth": 10**9},
}

REPLICATED = make_spec({Axis.DP_REPLICATE: (4, WHOLE)})
PEAK = derive(REPLICATED).exact.peak_bytes()


@pytest.mark.parametrize(("memory", "fits"), [(PEAK, True), (PEAK - 1, False)])
def test_a_peak_fits_up_to_the_last_byte(memory, fits):
    spec = on_devices_of(memory, REPLICATED)
    found = fit(spec, derive(spec).exact)
    assert found.fits is fits
    assert found.short_bytes == PEAK - memory


def test_without_a_cluster_nothing_is_refused():
    require_fit(REPLICATED, derive(REPLICATED).exact)


def test_what_does_not_fit_is_refused_with_what_would():
    spec = on_devices_of(PEAK - 1, REPLICATED)
    with pytest.raises(DoesNotFit, match=r"does not fit by 1 B.*") as refused:
        require_fit(spec, derive(spec).exact)
    lines = str(refused.value).splitlines()
    assert sum(line.startswith("  fits: ") for line in lines) == 3
    assert "--force" in lines[-1]


@pytest.mark.parametrize("share", [1.0, 0.8, 0.5, 0.1])
@pytest.mark.parametrize(
    "spec",
    [
        REPLICATED,
        make_spec({Axis.DP_SHARD: (4, ZERO_1)}, accumulate=2),
        make_spec({Axis.DP_REPLICATE: (2, WHOLE), Axis.DP_SHARD: (2, ZERO_1)}),
    ],
    ids=lambda spec: str(spec.factors[0].placement),
)
def test_every_offer_is_legal_runs_on_as_many_ranks_and_needs_less(spec, share):
    spec = on_devices_of(round(PEAK * share), spec)
    before = derive(spec).exact.peak_bytes()
    offers = cheaper(spec)
    assert 0 < len(offers) <= 3
    for offer in offers:
        assert not check(offer.spec)
        assert not executed(offer.spec)
        assert offer.spec.world_size == spec.world_size
        assert offer.spec.batch.global_samples == spec.batch.global_samples
        assert offer.peak_bytes == derive(offer.spec).exact.peak_bytes() < before
        assert offer.fits == (offer.peak_bytes <= round(PEAK * share))
        assert offer.overrides


def test_what_fits_comes_first_and_what_sends_least_before_the_rest():
    offers = cheaper(on_devices_of(PEAK - 1, REPLICATED))
    keys = [(not offer.fits, len(offer.spec.factors), offer.sent_bytes) for offer in offers]
    assert keys == sorted(keys)


def test_the_smallest_spec_has_nothing_cheaper():
    smallest = make_spec({Axis.DP_SHARD: (4, GATHERED)}, micro=1)
    assert cheaper(on_devices_of(1, smallest, host_memory=1)) == ()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_states_go_to_the_host_where_nothing_on_the_device_fits(optimizer):
    placed = tuple_of("S*,S*,S*") if optimizer == "muon" else GATHERED
    smallest = make_spec({Axis.DP_SHARD: (4, placed)}, micro=1, optimizer=optimizer, momentum=0.95)
    on_device = derive(smallest).exact.peak_bytes()
    offers = cheaper(on_devices_of(on_device - 1, smallest, host_memory=2**30))
    assert len(offers) == 3
    for offer in offers:
        assert offer.fits and offer.peak_bytes < on_device
        assert not check(offer.spec) and not executed(offer.spec)
        assert fit(offer.spec, derive(offer.spec).exact).host_bytes > 0
    hosted = [sum(mode.tier is Tier.HOST for mode in modes(offer.spec)) for offer in offers]
    assert hosted == sorted(hosted)  # the fewest states first
    assert cheaper(on_devices_of(on_device - 1, smallest, host_memory=1)) == ()
    unknown = cheaper(on_devices_of(on_device - 1, smallest))
    assert not any(offer.fits for offer in unknown) and unknown[0].may_fit


@pytest.mark.parametrize(
    ("kept", "override"),
    [
        ({"reshard_after_forward": False}, "sync.reshard_after_forward=true"),
        ({"gradients": "last"}, "sync.gradients=every"),
    ],
)
def test_what_a_dial_keeps_is_given_back_before_a_tuple_changes(kept, override):
    job = OWN | {"mesh": {"dp_shard": 4}, "placement": "zero3", "sync": kept}
    peak = derive(load(job).spec).exact.peak_bytes()
    cluster = OWN["cluster"] | {"device_memory": peak - 1}
    offers = cheaper(load(job | {"cluster": cluster}).spec)
    assert (override,) in [offer.overrides for offer in offers if offer.fits]


def modes(spec: Spec) -> list[Mode]:
    return [spec.factors[0].placement[state] for state in PLACED]


def test_nothing_goes_to_the_host_where_something_on_the_device_fits():
    for offer in cheaper(on_devices_of(PEAK - 1, REPLICATED)):
        assert all(mode.tier is Tier.DEVICE for mode in modes(offer.spec))


def test_where_the_host_has_too_little_states_come_back_to_the_device():
    spec = make_spec({Axis.DP_SHARD: (4, tuple_of("S*,O,O"))})
    (first, *_) = cheaper(on_devices_of(2**40, spec, host_memory=1))
    assert first.fits
    assert all(mode.tier is Tier.DEVICE for mode in modes(first.spec))


@pytest.mark.parametrize("share", [0.95, 0.7, 0.4, 0.1])
@pytest.mark.parametrize(
    "job",
    [
        {"mesh": {"dp_shard": 4}, "placement": "zero3", "sync": {"reshard_after_forward": 2}},
        {"mesh": {"dp_shard": 4}, "placement": "zero3", "sync": {"reshard_after_backward": False}},
        {"mesh": {"dp_shard": 4}, "placement": "zero3", "prefetch": 1, "unit": "2 blocks"},
        {"mesh": {"dp_shard": 4}, "placement": "zero3", "sync": {"gradients": "every"}},
        {"mesh": {"dp_replicate": 4}, "placement": "ddp", "sync": {"gradients": "last"}},
        {"mesh": {"dp_replicate": 4}, "placement": "ddp", "bucket": "whole", "overlap": "backward"},
        {"mesh": {"dp_shard": 4}, "placement": "zero2", "gather_after_update": "next-forward"},
        {"mesh": {"dp_shard": 4}, "placement": "muon", "optimizer": {"name": "muon"}},
        {
            "mesh": {"dp_shard": 4},
            "placement": {"dp_shard": "R,O,O,R"},
            "offload": {"tier": "file", "update": "device"},
        },
        {"mesh": {"dp_shard": 4}, "placement": "checkpoint-selective"},
        {
            "mesh": {"dp_replicate": 4},
            "placement": {"dp_replicate": "R,R,R,O"},
            "offload": {"tier": "file"},
        },
        {
            "mesh": {"dp_shard": 4},
            "placement": "zero2",
            "activations": {"0-1": "M", "2-": "O"},
            "offload": {"tier": "file", "path": "/tmp"},
        },
    ],
    ids=lambda job: str(list(job.values())[1:]),
)
def test_what_is_offered_loads_on_the_very_file_and_costs_what_was_said(job, share):
    """Every key that the file has stays, so an offer must set back what it does not obey."""
    peak = derive(load(OWN | job).spec).exact.peak_bytes()
    cluster = OWN["cluster"] | {"device_memory": max(1, round(peak * share))}
    written = OWN | job | {"cluster": cluster}
    for offer in cheaper(load(written).spec):
        spec = require(load(written, list(offer.overrides)))
        assert derive(spec).exact.peak_bytes() == offer.peak_bytes
        assert replace(spec, resolved={}) == replace(offer.spec, resolved={})


def test_smaller_micro_batches_are_offered_where_activations_are_the_load():
    spec = on_devices_of(1, make_spec({Axis.DP_SHARD: (4, GATHERED)}, micro=8))
    offers = cheaper(spec)
    assert offers[0].overrides == ("batch.micro=1", "batch.accumulate=8")


def test_the_fewest_ranks_on_which_it_fits_are_named_where_nothing_else_does():
    def gathered(degree: int) -> Spec:
        return make_spec({Axis.DP_SHARD: (degree, GATHERED)}, micro=1)

    room = derive(gathered(16)).exact.peak_bytes()
    spec = on_devices_of(room, gathered(4), host_memory=1)
    found = more_ranks(spec, cheaper(spec))
    assert found is not None
    assert found.spec.world_size == 16
    assert found.peak_bytes == room
    assert not check(found.spec)
    assert "mesh={dp_shard: 16}" in found.overrides
    assert "cluster.devices=16" in found.overrides
    with pytest.raises(DoesNotFit, match=r"  fits on 16 ranks: .*\n  remedy: one that fits"):
        require_fit(spec, derive(spec).exact)


def test_what_does_not_fit_is_not_offered_as_a_remedy():
    spec = on_devices_of(1, REPLICATED)
    assert more_ranks(spec, cheaper(spec)) is None
    with pytest.raises(DoesNotFit, match="closer, but does not fit: ") as refused:
        require_fit(spec, derive(spec).exact)
    assert "  remedy: a smaller model or sequence" in str(refused.value)


def test_more_ranks_are_not_looked_for_where_something_fits():
    spec = on_devices_of(PEAK - 1, REPLICATED)
    assert more_ranks(spec, cheaper(spec)) is None


@pytest.mark.parametrize("spare", [0, -1])
def test_host_memory_counts_where_the_cluster_says_it(spare):
    spec = on_devices_of(2**40, make_spec({Axis.DP_SHARD: (4, tuple_of("R,O,O"))}))
    exact = derive(spec).exact
    needed = 4 * max(
        sum(row.host_bytes for row in exact.memory if row.rank == rank) for rank in range(4)
    )
    unknown = fit(spec, exact)
    assert unknown.fits is None and unknown.host_bytes == needed > 0
    assert "memory of a node's host" in unknown.unknown
    assert spec.cluster is not None
    limited = replace(spec, cluster=replace(spec.cluster, host_memory=needed + spare))
    assert fit(limited, exact).fits is (spare == 0)
    if spare:
        with pytest.raises(DoesNotFit, match=r"by 1 B: its ranks need .* on a node's host"):
            require_fit(limited, exact)


def test_a_dial_that_another_tuple_cannot_obey_is_set_back_with_it():
    spec = on_devices_of(PEAK - 1, replace(REPLICATED, bucket_bytes=1))
    offered = cheaper(spec)
    assert offered
    for variant in offered:
        assert not check(variant.spec)
        is_set_back = variant.spec.bucket_bytes != 1
        assert ("bucket=size" in variant.overrides) is is_set_back
    assert any("bucket=size" in variant.overrides for variant in offered)


def test_what_is_offered_in_place_of_offloaded_states_loads_on_the_very_file():
    written = {
        "model": {"layers": 3, "hidden": 42, "heads": 3, "kv_heads": 1, "ffn": 101, "vocab": 259},
        "mesh": {"dp_shard": 4},
        "placement": {"dp_shard": "R,R@host,O,R"},
        "batch": {"micro": 2, "sequence": 16},
        "offload": {"tier": "file", "update": "device"},
    }
    spec = on_devices_of(1, load(written).spec)
    for variant in cheaper(spec):
        assert ("offload={}" in variant.overrides) is (variant.spec.factors != spec.factors)
        assert load(written, list(variant.overrides)).spec.factors == variant.spec.factors


def test_slices_of_the_tokens_are_offered_where_tp_has_them_whole():
    spec = require(load("8b-tp", ["cluster.device_memory=15GiB", "cluster.reserve=0"]))
    first, *_ = cheaper(spec)
    assert first.overrides == ("placement=tp-sp",) and first.fits
    assert require(load("8b-tp", ["placement=tp-sp"])).factors == first.spec.factors
    sliced = require(load("8b-tp-sp", ["cluster.device_memory=12GiB", "cluster.reserve=0"]))
    assert all(each.spec.factors != sliced.factors for each in cheaper(sliced))


def test_an_offer_never_changes_which_sums_tp_takes():
    for name in ("8b-tp", "8b-tp-dp", "8b-tp-zero3"):
        spec = require(load(name, ["cluster.device_memory=8GiB"]))
        for variant in cheaper(spec):
            after = require(load(name, list(variant.overrides)))
            assert (after.factors, after.tensor) == (variant.spec.factors, spec.tensor)


@pytest.mark.parametrize(
    ("overlap", "end"),
    [(None, "sync every"), (Overlap.NONE, "every no overlap"), (Overlap.BACKWARD, "every overlap")],
)
def test_a_candidate_that_waits_for_its_reductions_is_said_to(overlap, end):
    assert described(replace(load("zero2").spec, overlap=overlap)).endswith(end)
