"""With routing stated in the spec, fake ranks have the predicted memory, traffic and
computation."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ptrain.derivation.estimate import derive
from ptrain.facts.parameters import expert_modules
from ptrain.report.record import compare_estimates
from ptrain.simulation.execute import simulate
from ptrain.spec.model import ModelShape
from ptrain.spec.routing import Bound, Histogram, Routing, read_routing
from ptrain.spec.spec import Spec
from ptrain.steps.experts import token_places
from ptrain.traces.facts import facts_of
from tests.gloo.expert_cases import expert_spec

pytestmark = pytest.mark.gloo

ZERO2, ZERO3 = "R,S,S,R", "S*,S,S,R"
CASES: tuple[tuple[str, dict[str, str], dict[str, Any]], ...] = (
    ("top-1", {"ep": "R,R,R,R"}, {}),
    ("top-2", {"ep": ZERO3}, {"accumulate": 3}),
    ("deep", {"dp_shard": "zero3", "ep": ZERO3}, {}),
    ("top-2", {"ep": ZERO3}, {"activations": "M"}),
    ("top-2", {"ep": ZERO3}, {"activations": "M", "recompute": "selective"}),
    ("top-2", {"ep": ZERO3}, {"activations": "O"}),
    ("top-2", {"ep": ZERO3, "tp": "S,S,S,S"}, {}),
    ("top-1", {"ep": ZERO3, "cp": "S*,S,S,S"}, {}),
    ("top-2", {"ep": ZERO2}, {"precision": {"layout": "bf16"}}),
    ("deep", {"pp": "S,S,S,R", "ep": ZERO3}, {"accumulate": 4}),
    ("top-2", {"pp": "S,S,S,R", "ep": ZERO2}, {"accumulate": 4, "activations": "M"}),
    (
        "top-2",
        {"pp": "S,S,S,R", "ep": ZERO2},
        {"accumulate": 4, "pipeline": {"schedule": "zbv"}},
    ),
)


def random_counts(spec: Spec) -> Histogram:
    """Draw token counts, many for some experts."""
    draw, shape = random.Random(spec.world_size), spec.model
    assert isinstance(shape, ModelShape) and shape.experts is not None
    tokens = range(spec.batch.micro * spec.own_tokens)

    def of_micro_batch() -> list[int]:
        counts = [0] * (shape.experts or 0)
        weights = [draw.random() ** 3 + 0.01 for _ in counts]
        for _ in tokens:
            left = [*range(len(counts))]
            for _ in range(shape.experts_per_token):
                (expert,) = draw.choices(left, [weights[number] for number in left])
                left.remove(expert)
                counts[expert] += 1
        return counts

    ranks, times = {*token_places(spec)}, range(spec.batch.accumulate)
    counts = {
        module.rpartition(".")[0]: [[of_micro_batch() for _ in times] for _ in ranks]
        for module in expert_modules(spec)
    }
    stated = read_routing(counts)
    assert isinstance(stated, Histogram)
    return stated


def differing_checks(spec: Spec, routing: Routing, rank: int) -> list[str]:
    spec = replace(spec, routing=routing)
    exact = derive(spec, facts_of(spec)).exact
    assert exact.peak, "it is predicted"
    checks = compare_estimates(exact.of_rank(rank), simulate(spec, rank).estimate)
    return [check.name for check in checks if check.predicted != check.measured]


@pytest.mark.parametrize(
    ("model", "placement", "more"),
    [
        case if case == CASES[0] else pytest.param(*case, marks=pytest.mark.nightly)
        for case in CASES
    ],
    ids=str,
)
def test_stated_counts_and_the_worst_case_are_predicted(model, placement, more):
    spec = expert_spec(model, placement, **more)
    assert not differing_checks(spec, random_counts(spec), spec.world_size - 1)
    assert not differing_checks(spec, Bound.WORST, 0)
