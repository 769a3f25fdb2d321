"""A rank on fake ranks with fake tensors has the memory, traffic and peaks of the same rank on
gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.cost import Estimate
from ptrain.data.corpus import open_corpus
from ptrain.interpreter.program import interpret
from ptrain.meters.measure import measure
from ptrain.report.record import compare_estimates
from ptrain.runtime.world import World
from ptrain.selection.recompute import resolve_auto
from ptrain.simulation.execute import simulate
from ptrain.spec.load import load
from ptrain.spec.names import list_files
from ptrain.spec.placement import M
from ptrain.spec.spec import Spec
from ptrain.train.loop import local_batch
from ptrain.train.loop_inputs import FIRST_STEADY, setup_traffic
from tests.gloo import context_cases, expert_cases
from tests.gloo.matrix import compare_simulation
from tests.gloo.test_exact import failed_checks
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

SHORT = ("batch={global: 8, micro: 1, sequence: 32}",)
ONCE = ("batch={global: 8, micro: 4, sequence: 32}",)  # where backward updates
LR = 1e-3
DROPPED = {"dropout": 0.1, "attention_dropout": 0.0}
# By default tests/unit/test_simulation.py compares them with `exact`, which test_exact.py measures.
BY_DEFAULT = ("zero3",)
OTHERS = [each for each in list_files("strategies") if each not in BY_DEFAULT]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", BY_DEFAULT)
def test_a_rank_on_fake_ranks_matches_the_rank_on_gloo(ranks: Ranks, strategy: str) -> None:
    assert not differences(ranks, short_spec(strategy, "model.layers=2", "batch.global=4"))


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", OTHERS)
def test_every_rank_of_every_strategy_matches_the_rank_on_gloo(ranks: Ranks, strategy: str) -> None:
    assert not differences(ranks, short_spec(strategy))


# What no strategy of tests/unit/test_simulation.py has: slices of the tokens, by how attention
# reaches the others, and experts, whole and apart. On ranks they run in other modules, which
# simulate every case at night (`Matrix.differences`).
BESIDE: dict[str, Spec] = {
    "ring": context_cases.context_spec("ring", states="S*,S,S", other={"dp_shard": "zero3"}),
    "all-gather": context_cases.context_spec("all-gather", activations="M"),
    "ulysses": context_cases.context_spec("ulysses", "llama", shape=DROPPED),
    "zigzag, experts": expert_cases.expert_spec(
        "capacity", {"cp": "S*,S,S,S"}, context={"attention": "zigzag"}
    ),
    "experts apart in stages": expert_cases.expert_spec(
        "deep", {"pp": "S,S,S,R", "ep": "S*,S,S,R"}
    ),
}


@pytest.mark.parametrize("case", BESIDE)
def test_the_last_rank_on_fake_ranks_matches_the_prediction(case: str) -> None:
    assert not failed_checks(compare_simulation(BESIDE[case]))


def short_spec(strategy: str, *shorter: str) -> Spec:
    spec = load(strategy).spec
    consumes = any(factor.placement.gradients == M for factor in spec.factors)
    return resolve_auto(load(strategy, (*(ONCE if consumes else SHORT), *shorter)))


def measure_third_step(spec: Spec) -> Estimate:
    """Return this rank's measurement of the third step, in which only the program holds tensors."""
    program = interpret(spec, world=World.join(spec.timeout))
    source = open_corpus(spec.data)
    estimates = []
    for step in range(FIRST_STEADY + 1):
        found = local_batch(program, source, step)
        with measure(program) as measurement:
            program.forward_backward(found, LR)
            program.step(LR)
        estimates.append(measurement.estimate())
    _, before, after = estimates
    return replace(after, traffic=(*after.traffic, *setup_traffic(before.traffic, after.traffic)))


def differences(ranks: Ranks, spec: Spec) -> list[str]:
    """Return the differences of all ranks."""
    return [
        f"rank {rank} {check.name}: {check.predicted} simulated, {check.measured} measured"
        for rank, measured in enumerate(ranks.run(spec.world_size, measure_third_step, spec))
        for check in compare_estimates(simulate(spec, rank).estimate, measured)
        if check.predicted != check.measured
    ]
