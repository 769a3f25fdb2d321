"""Routed tokens are counted once over all ranks like on one device, without changing other
meters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.cost import Estimate
from ptrain.interpreter.program import interpret
from ptrain.meters.measure import measure
from ptrain.meters.routing import Placed, RoutingMeter, Rows, sum_histograms, sum_routing
from ptrain.report.routing import LayerRouting
from ptrain.spec.routing import Histogram
from ptrain.spec.spec import ActivationSpec, Spec
from tests.gloo.expert_cases import expert_spec
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

STEADY, RATE = 2, 1e-3
PLACEMENTS = (
    pytest.param({"dp_shard": "zero3", "tp": "S,S,S,S"}, {}),
    pytest.param({"pp": "S,S,S,R", "dp_replicate": "ddp"}, {}, marks=pytest.mark.nightly),
    pytest.param({"dp_shard": "zero2"}, {"activations": "M"}, marks=pytest.mark.nightly),
)


def count_on_rank(spec: Spec, *, is_watched: bool = True) -> tuple[Rows, Estimate, Placed]:
    """Return this rank's counts in a steady step, the other meters' readings, and the counts of
    each micro-batch."""
    program = interpret(spec)
    meter = RoutingMeter(program)
    for step in range(STEADY):
        program.forward_backward(program.samples(step))
        program.step(RATE)
    samples = program.samples(STEADY)
    with measure(program) as measurement:
        if is_watched:
            with meter.watch():
                program.forward_backward(samples)
        else:
            program.forward_backward(samples)
        program.step(RATE)
    return meter.rows(), measurement.estimate(), meter.choices()


def routed_layers(ranks: Ranks, spec: Spec) -> tuple[tuple[LayerRouting, ...], Histogram]:
    rows, _, choices = zip(*ranks.run(spec.world_size, count_on_rank, spec), strict=True)
    return sum_routing(rows), sum_histograms(choices)


@pytest.mark.parametrize(("placement", "besides"), PLACEMENTS)
def test_all_ranks_have_the_counts_of_one_device(ranks: Ranks, placement, besides) -> None:
    spec = expert_spec("capacity", placement, accumulate=4 if "pp" in placement else 2, **besides)
    (here, by_rank), (there, _) = (
        routed_layers(ranks, spec),
        routed_layers(ranks, _single_device_counts(spec)),
    )
    choices = spec.batch.tokens * spec.model.experts_per_token
    assert len(here) == spec.model.layers
    assert all(sum(layer.tokens) == choices for layer in here)
    assert [(one.layer, one.tokens, one.dropped) for one in here] == [
        (other.layer, other.tokens, other.dropped) for other in there
    ]
    assert [layer.entropy for layer in here] == pytest.approx([layer.entropy for layer in there])
    assert any(layer.dropped for layer in here)
    of_micro_batch = spec.batch.micro * spec.batch.sequence * spec.model.experts_per_token
    assert by_rank.layers == tuple(layer.layer for layer in here)
    for layer, of_layer in zip(here, by_rank.counts, strict=True):
        assert len(of_layer) == spec.data_degree
        counts = [of_experts for of_rank in of_layer for of_experts in of_rank]
        assert {sum(of_experts) for of_experts in counts} == {of_micro_batch}
        assert tuple(map(sum, zip(*counts, strict=True))) == layer.tokens


def test_counting_changes_no_other_meter(ranks: Ranks) -> None:
    spec = expert_spec("capacity", {"dp_shard": "zero3"})
    ((_, watched, _), *_) = ranks.run(2, count_on_rank, spec)
    ((_, alone, _), *_) = ranks.run(2, _count_without_ranks, spec)
    assert (watched.memory, watched.peak, watched.traffic) == (
        alone.memory,
        alone.peak,
        alone.traffic,
    )


def _single_device_counts(spec: Spec) -> Spec:
    """Return the counts of the same training on one device, with all samples in one micro-batch."""
    batch = replace(spec.batch, micro=spec.batch.global_samples, accumulate=1)
    return replace(spec, factors=(), batch=batch, activations=ActivationSpec())


def _count_without_ranks(spec: Spec) -> tuple[Rows, Estimate, Placed]:
    return count_on_rank(spec, is_watched=False)
