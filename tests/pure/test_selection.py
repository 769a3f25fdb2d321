"""The preflight check: whether a prediction fits, and the variants offered if it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.algebra.legality import check, find_unsupported, require_runnable
from ptrain.cost import PLACED
from ptrain.derivation.estimate import derive
from ptrain.errors import DoesNotFit
from ptrain.report.selection import describe_settings
from ptrain.selection.fit import fit
from ptrain.selection.preflight import (
    ChangeKind,
    find_changes,
    host_overrides,
    require_fit,
    sharding_overrides,
)
from ptrain.spec.cluster import Cluster
from ptrain.spec.dials import Overlap
from ptrain.spec.load import load
from ptrain.spec.placement import Axis, Mode, Tier
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_mapping
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


def needed_at_start(spec: Spec) -> int:
    """The memory of a host that holds what its ranks draw at start-up, and no offloaded states."""
    return fit(spec, derive(spec).exact).startup_host_bytes


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


def test_without_a_cluster_nothing_is_rejected():
    require_fit(REPLICATED, derive(REPLICATED).exact)


def test_a_misfit_is_rejected_with_variants_that_fit():
    spec = on_devices_of(PEAK - 1, REPLICATED)
    with pytest.raises(DoesNotFit, match=r"does not fit by 1 B.*") as refused:
        require_fit(spec, derive(spec).exact)
    lines = str(refused.value).splitlines()
    assert sum(line.startswith("  fits: ") for line in lines) == 3
    assert lines[-1] == "  remedy: Add one of these overrides, or train anyway with `--force`."


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
    before = derive(spec).exact.peak_bytes()
    spec = on_devices_of(round(before * share) - 1, spec, host_memory=needed_at_start(spec))
    offers = find_changes(spec).variants
    assert 0 < len(offers) <= 3
    for offer in offers:
        assert not check(offer.spec)
        assert not find_unsupported(offer.spec)
        assert (offer.spec.world_size == spec.world_size) is (ChangeKind.RANKS not in offer.kinds)
        if ChangeKind.RANKS not in offer.kinds:
            assert offer.spec.batch.global_samples == spec.batch.global_samples
        assert offer.fit == fit(offer.spec, derive(offer.spec).exact)
        assert offer.fit.fits or offer.fit.peak_bytes < before
        assert offer.overrides


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_optimizer_gets_tuples_on_the_host_that_it_takes(optimizer):
    placed = tuple_of("S*,S*,S*") if optimizer == "muon" else GATHERED
    smallest = make_spec({Axis.DP_SHARD: (4, placed)}, micro=1, optimizer=optimizer, momentum=0.95)
    words = (*host_overrides(smallest),)
    assert len(set(words)) == len(words) >= 2
    for said in words:
        assert not check(load(to_mapping(smallest, sync_is_written=True), said).spec)


@pytest.mark.parametrize(
    ("kept", "override"),
    [
        ({"reshard_after_forward": False}, "sync.reshard_after_forward=true"),
        ({"gradients": "last"}, "sync.gradients=every"),
    ],
)
def test_memory_kept_by_an_option_is_freed_before_a_tuple_changes(kept, override):
    job = OWN | {"mesh": {"dp_shard": 4}, "placement": "zero3", "sync": kept}
    peak = derive(load(job).spec).exact.peak_bytes()
    cluster = OWN["cluster"] | {"device_memory": peak - 1}
    said = sharding_overrides(load(job | {"cluster": cluster}).spec)
    assert (override,) in said
    after = load(job | {"cluster": cluster}, [override]).spec
    assert fit(after, derive(after).exact).fits


def modes(spec: Spec) -> list[Mode]:
    return [spec.factors[0].placement[state] for state in PLACED]


def test_nothing_goes_to_the_host_where_something_on_the_device_fits():
    for offer in find_changes(on_devices_of(PEAK - 1, REPLICATED)).variants:
        assert all(mode.tier is Tier.DEVICE for mode in modes(offer.spec))


def test_where_the_host_has_too_little_states_come_back_to_the_device():
    spec = make_spec({Axis.DP_SHARD: (4, tuple_of("S*,O,O"))})
    host = needed_at_start(spec)
    (first, *_) = find_changes(on_devices_of(2**40, spec, host_memory=host)).variants
    assert first.fit.fits
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
def test_an_offered_variant_loads_on_the_file_at_the_stated_cost(job, share):
    """Every key that the file has stays, so an offer must set back what it does not obey."""
    peak = derive(load(OWN | job).spec).exact.peak_bytes()
    cluster = OWN["cluster"] | {"device_memory": max(1, round(peak * share))}
    written = OWN | job | {"cluster": cluster}
    advice = find_changes(load(written).spec, reload=lambda more: load(written, more))
    for offer in advice.variants:
        spec = require_runnable(load(written, list(offer.overrides)))
        assert derive(spec).exact.peak_bytes() == offer.fit.peak_bytes
        assert replace(spec, resolved={}) == replace(offer.spec, resolved={})


def test_smaller_micro_batches_keep_the_global_batch():
    job = OWN | {"mesh": {"dp_shard": 4}, "placement": "zero3", "activations": "M"}
    for batch in (
        {"global": 64, "micro": 8, "sequence": 64},
        {"micro": 8, "accumulate": 2, "sequence": 64},
    ):
        spec = load(job | {"batch": batch}).spec
        small = load(job | {"batch": batch}, ["batch.micro=1", "batch.accumulate=16"]).spec
        peak = derive(small).exact.peak_bytes()
        written = job | {
            "batch": batch,
            "loss": "chunked",
            "cluster": OWN["cluster"] | {"device_memory": peak},
        }
        offers = find_changes(load(written).spec, reload=lambda more, w=written: load(w, more))
        for offer in offers.variants:
            assert offer.spec.batch.global_samples == spec.batch.global_samples == 64
        chosen = next(o for o in offers.variants if ChangeKind.MICRO in o.kinds)
        assert ("batch.accumulate=16" in chosen.overrides) is ("accumulate" in batch)


def test_the_smallest_number_of_ranks_that_fits_is_named_last():
    written = OWN | {
        "batch": {"global": 4, "micro": 1, "sequence": 16},
        "mesh": {"dp_shard": 4},
        "placement": {"dp_shard": "S*,S,S,M"},
        "precision": {"layout": "zero16"},
        "loss": "chunked",
        "unit": "block",
    }
    wide = load(written, ["mesh.dp_shard=16", "batch.global=16"]).spec
    room = derive(wide).exact.peak_bytes()
    host = 2 * needed_at_start(wide)  # the node of the wider spec has 16 ranks
    written["cluster"] = OWN["cluster"] | {"device_memory": room, "host_memory": host}
    spec = load(written).spec
    (found,) = find_changes(spec, reload=lambda more: load(written, more)).variants
    assert found.kinds == (ChangeKind.RANKS,) and found.fit.fits
    assert found.overrides == ("mesh.dp_shard=16", "batch.global=16", "cluster.devices=16")
    assert found.spec.world_size == 16 and found.fit.peak_bytes == room
    assert not check(found.spec)
    with pytest.raises(DoesNotFit, match=r"  fits on 16 ranks: .*\n  remedy: Add one"):
        require_fit(spec, derive(spec).exact)


def test_a_change_that_does_not_fit_is_not_offered_as_a_fix():
    spec = on_devices_of(1, REPLICATED, host_memory=1)
    assert not any(variant.fit.fits for variant in find_changes(spec).variants)
    with pytest.raises(DoesNotFit, match="  closest: ") as refused:
        require_fit(spec, derive(spec).exact)
    assert "  remedy: Use a smaller model or sequence" in str(refused.value)


def test_more_ranks_are_not_looked_for_where_something_fits():
    spec = on_devices_of(PEAK - 1, REPLICATED)
    assert all(ChangeKind.RANKS not in variant.kinds for variant in find_changes(spec).variants)


@pytest.mark.parametrize("spare", [0, -1])
def test_host_memory_counts_if_the_cluster_states_it(spare):
    spec = on_devices_of(2**40, make_spec({Axis.DP_SHARD: (4, tuple_of("R,O,O"))}))
    exact = derive(spec).exact
    needed = 4 * max(
        sum(row.host_bytes for row in exact.memory if row.rank == rank) for rank in range(4)
    )
    unknown = fit(spec, exact)
    assert unknown.fits is None and unknown.host_bytes == needed > 0
    assert "a node's host" in unknown.unknown
    assert spec.cluster is not None
    limited = replace(spec, cluster=replace(spec.cluster, host_memory=needed + spare))
    assert fit(limited, exact).fits is (spare == 0)
    if spare:
        with pytest.raises(DoesNotFit, match=r"by 1 B: its ranks need .* on a node's host"):
            require_fit(limited, exact)


def test_a_dial_that_another_tuple_cannot_obey_is_set_back_with_it():
    written = OWN | {"mesh": {"dp_replicate": 4}, "placement": "ddp", "bucket": 2**20}
    peak = derive(load(written).spec).exact.peak_bytes()
    written["cluster"] = OWN["cluster"] | {"device_memory": peak // 3}
    offered = find_changes(load(written).spec, reload=lambda more: load(written, more)).variants
    sharded = [variant for variant in offered if ChangeKind.SHARDING in variant.kinds]
    assert sharded
    for variant in sharded:
        assert not check(load(written, variant.overrides).spec)
        assert ("bucket=size" in variant.overrides) is (variant.spec.bucket_bytes != 2**20)
    assert any("bucket=size" in variant.overrides for variant in sharded)


@pytest.mark.parametrize(
    ("overlap", "end"),
    [(None, "sync every"), (Overlap.NONE, "every no overlap"), (Overlap.BACKWARD, "every overlap")],
)
def test_a_candidate_with_exposed_reductions_is_marked(overlap, end):
    assert describe_settings(replace(load("zero2").spec, overlap=overlap)).endswith(end)
