"""Products with fp8 factors on ranks: bytes are what is predicted, traffic is that without fp8, and
gradients, losses and states are those of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Estimate, Phase
from ptrain.derivation.estimate import derive
from ptrain.interpreter.program import interpret
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from ptrain.train import checkpoint, saving
from ptrain.train.exchange import Exchange
from ptrain.verification.reference import ReferenceTraining
from tests.gloo.compiled_runs import Steps, run_compiled, run_pair, run_steps
from tests.gloo.test_checkpoint import full_state, step
from tests.gloo.test_compile import SMALL, needs_compiler, traffic
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

TRUE_DTYPES = [*SMALL[:-1], "precision.layout=zero16"]
RECIPES = ("fp8-tensorwise", "fp8-rowwise")
M = "activations=M"
ROWS = {
    "ddp": ("ddp",),
    "zero1": ("zero1",),
    "zero3": ("zero3",),
    "fsdp-mixed": ("fsdp-mixed",),
    "pp": ("pp-1f1b",),
    "recomputed": ("ddp", M),
    "recomputed in part": ("zero3", M, "recompute=selective"),
    "recomputed, pp": ("pp-1f1b", M),
    "biases": ("ddp", "model.bias=all"),
    "parameters off the device": ("fsdp-offload",),
}
BY_DEFAULT = ("recomputed in part", "fp8-rowwise"), ("pp", "fp8-tensorwise")
CASES = [
    pytest.param(row, recipe, marks=() if (row, recipe) in BY_DEFAULT else pytest.mark.nightly)
    for row in ROWS
    for recipe in RECIPES
]


def float8_spec(row: str, recipe: str, base: list[str]) -> Spec:
    name, *overrides = ROWS[row]
    return require_runnable(load(name, [*base, *overrides, f"precision.matmul={recipe}"]))


def traffic_by_call(estimate: Estimate) -> dict[Any, tuple[int, int]]:
    return {key: figures for key, figures in traffic(estimate).items() if any(figures)}


@pytest.mark.parametrize(("row", "recipe"), CASES)
def test_bytes_are_predicted_and_traffic_is_that_without_fp8(ranks: Ranks, row, recipe):
    spec = float8_spec(row, recipe, TRUE_DTYPES)
    exact = derive(spec, facts_of(spec)).exact
    plain = float8_spec(row, "none", TRUE_DTYPES)
    assert traffic(exact) == traffic(derive(plain, facts_of(plain)).exact)
    steps: list[Steps] = ranks.run(spec.world_size, run_steps, spec, timeout=300.0)
    require_measured(exact, steps)


def require_measured(exact: Estimate, steps: list[Steps]) -> None:
    """Assert that the peaks and the traffic of each rank's step are the predicted ones."""
    for rank, measured in enumerate(own.measured for own in steps):
        for peak in measured.peak:
            (own,) = (p for p in exact.peak if (p.rank, p.phase) == (rank, peak.phase))
            assert own.device_bytes == peak.device_bytes, f"{peak.phase} of rank {rank}"
        expected = traffic_by_call(exact.of_rank(rank))
        expected = {key: row for key, row in expected.items() if key.phase is not Phase.SETUP}
        assert traffic_by_call(measured) == expected, f"rank {rank}"


@pytest.mark.parametrize(("row", "recipe"), CASES)
def test_in_fp64_losses_are_those_of_one_device(ranks: Ranks, row, recipe):
    spec = float8_spec(row, recipe, SMALL)
    steps: list[Steps] = ranks.run(spec.world_size, run_steps, spec, timeout=300.0)
    device = ReferenceTraining(spec)
    for number, shares in enumerate(zip(*(own.losses for own in steps), strict=True)):
        accumulated = device.accumulate(number)
        assert sum(shares) == pytest.approx(accumulated.loss, rel=1e-12), f"step {number}"
        device.updater.update(accumulated.sums, 1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_blocks_have_the_gradients_of_eager_ones(ranks: Ranks, recipe):
    eager = float8_spec("zero3", recipe, SMALL)
    compiled = require_runnable(
        load("zero3", [*SMALL, f"precision.matmul={recipe}", "compile=block"])
    )
    pairs = ranks.run(eager.world_size, run_pair, eager, compiled, "aot_eager", timeout=600.0)
    for pair in pairs:
        assert pair.difference <= 1e-12 and pair.without_gradient == 0
        assert pair.compiled.programs == (1, 1) and pair.compiled.breaks == 0
        assert traffic_by_call(pair.compiled.measured) == traffic_by_call(pair.eager.measured)


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
def test_peaks_and_traffic_of_compiled_products_are_predicted(ranks: Ranks, recipe):
    words = [*TRUE_DTYPES, f"precision.matmul={recipe}", "compile=block"]
    spec = require_runnable(load("zero3", words))
    exact = derive(spec, facts_of(spec)).exact
    assert exact.peak
    require_measured(exact, ranks.run(spec.world_size, run_compiled, spec, timeout=300.0))


def run_resumed(spec: Spec, folder: str) -> bool:
    """Return whether a step after loading a checkpoint changes the state as the step after saving
    it did, to the bit."""
    exchange = Exchange(World.join(spec.timeout))
    saved, loaded = (interpret(spec, world=exchange.world) for _ in range(2))
    step(saved, 0)
    path = saving.save_checkpoint(saved, Path(folder), 1, exchange)
    step(saved, 1)
    _, found, _ = checkpoint.find_newest_sound([path], exchange)
    assert found is not None, "the checkpoint is whole"
    checkpoint.load(loaded, path, found, exchange)
    step(loaded, 1)
    states = full_state(saved), full_state(loaded)
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_training_continues_to_the_bit(ranks: Ranks, tmp_path: Path, recipe):
    spec = float8_spec("zero3", recipe, TRUE_DTYPES)
    assert all(ranks.run(spec.world_size, run_resumed, spec, str(tmp_path)))
