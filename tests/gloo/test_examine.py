"""A program compared with one device, for every tensor of every moment, under all wrappers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptrain.interpreter.program import interpret
from ptrain.runtime.world import World
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.examine import TOLERANCE, examine
from ptrain.verification.jobs.job import LoopVerdict
from tests.gloo.expert_cases import expert_spec
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

SMALL = (
    "precision.compute=fp64", "model.hidden=32", "model.heads=4", "model.ffn=48",
    "batch.sequence=16",
)  # fmt: skip
BY_DEFAULT = ("pp-1f1b", "optimizer-in-backward")  # of zero3, test_protocol.py
STRATEGIES = sorted(
    path.stem for path in (Path(__file__).parents[2] / "specs" / "strategies").glob("*.yaml")
)
COMPARED = {
    "same weights at the start", "buffers", "activations",
    "gradients of activations", "loss", "learning rate", "gradients", "parameters after the update",
    "optimizer state", "samples",
}  # fmt: skip


def run_examination(spec: Spec, steps: int) -> LoopVerdict:
    world = World.join(spec.timeout)
    exchange = Exchange(world)
    try:
        return examine(interpret(spec, world=world), exchange, steps)
    finally:
        exchange.close()


@pytest.mark.parametrize("activations", ["S", pytest.param("R", marks=pytest.mark.nightly)])
def test_partial_expert_outputs_are_not_compared_as_sums(ranks: Ranks, activations: str) -> None:
    """Over tp they are summed after the layer, like the gradients of the routing weights."""
    spec = expert_spec("deep", {"tp": f"S,S,S,{activations}"}, shape={"aux_loss": 0.5})
    for examination in ranks.run(spec.world_size, run_examination, spec, 1):
        assert not examination.mismatches


@pytest.mark.parametrize("activations", [pytest.param("S", marks=pytest.mark.nightly), "S*"])
def test_tensors_by_expert_are_not_compared_for_token_slices(
    ranks: Ranks, activations: str
) -> None:
    """An expert's rows are then local tokens, as many as on one device, and the router's loss is a
    share."""
    states = {"cp": f"S*,S,S,{activations}"}
    spec = expert_spec("deep", states, shape={"aux_loss": 0.5, "capacity_factor": 1.0})
    for examination in ranks.run(spec.world_size, run_examination, spec, 1):
        assert not examination.mismatches


def test_received_rows_are_not_compared_with_as_many_local_rows(ranks: Ranks) -> None:
    """Every token goes to all experts, so a rank receives as many rows as it sends."""
    shape = {"experts": 2, "experts_per_token": 2}
    spec = expert_spec("top-2", {"ep": "R,R,R,R"}, shape=shape)
    for examination in ranks.run(spec.world_size, run_examination, spec, 1):
        assert not examination.mismatches


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.nightly)
        for name in STRATEGIES
    ],
)
def test_no_tensor_of_a_step_differs_from_one_device(ranks: Ranks, strategy: str) -> None:
    spec = resolve_auto(load(strategy, SMALL))
    everyone = ranks.run(spec.world_size, run_examination, spec, 3)
    assert all(part == everyone[0] for part in everyone)
    (found, *_) = everyone
    assert found.root_cause is None and not found.mismatches
    assert found.steps == 3
    checks = {check.name: check for check in found.checks}
    clipped = {"gradient norm"} if spec.optimizer.clip else set()
    assert COMPARED | clipped <= checks.keys()
    assert all(check.holds for check in found.checks)
    assert all(its.measured < TOLERANCE for its in checks.values() if its.measured is not None)
