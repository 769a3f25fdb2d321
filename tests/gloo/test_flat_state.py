"""The state of flat units outside of training: it moves between placements and training continues;
evaluation uses updated parameters; one device accepts every layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ptrain.data.corpus import open_corpus
from ptrain.interpreter.program import Program, interpret
from ptrain.runtime.world import World
from ptrain.spec.precision import LAYOUTS
from ptrain.spec.spec import Spec
from ptrain.train import saving
from ptrain.train.exchange import Exchange
from ptrain.train.loop import local_batch
from tests.gloo.runs import full_parameters
from tests.gloo.test_checkpoint import STEPS, full_state, load_saved
from tests.gloo.test_exact import failed_checks
from tests.gloo.test_flat_modes import REPLICATE, SHARD, odd_spec, reference, train_spec
from tests.ranks import Ranks
from tests.trajectories import FP64
from tests.trajectories import compare as compare_runs

pytestmark = pytest.mark.gloo

RATE = 1e-3
State = dict[str, torch.Tensor]


def advance(program: Program, steps: range) -> None:
    source = open_corpus(program.spec.data)
    for step in steps:
        program.forward_backward(local_batch(program, source, step), RATE)
        program.step(RATE)


def save_and_continue(spec: Spec, folder: str) -> tuple[State, State]:
    """Save after some steps; return the saved state, and the parameters one step later."""
    program = interpret(spec, world=World.join(spec.timeout))
    advance(program, range(STEPS))
    saved = full_state(program)
    saving.save_checkpoint(program, Path(folder), STEPS, Exchange(program.world))
    advance(program, range(STEPS, STEPS + 1))
    return saved, full_parameters(program)


def load_and_continue(spec: Spec, folder: str) -> tuple[State, State]:
    program = interpret(spec, world=World.join(spec.timeout))
    loaded = load_saved(program, folder)
    advance(program, range(STEPS, STEPS + 1))
    return loaded, full_parameters(program)


PLACES: dict[str, dict[str, str]] = {
    "sharded": {SHARD: "S*,S,S,R"},
    "on files": {SHARD: "S@file,S@file,S@file,R"},
    "materialized on the host": {SHARD: "M,O,S,R"},
    "whole on the host": {SHARD: "R@host,R@host,R@host,R"},
    "gathered for the update": {SHARD: "S*,S*@host,O,R"},
    "replicated": {REPLICATE: "R,R,R,R"},
}
CHAIN = list(zip(PLACES, [*list(PLACES)[1:], next(iter(PLACES))], strict=True))
MASTER = {"precision": {"layout": "zero16"}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(*pair, marks=() if place % 2 else pytest.mark.nightly)
        for place, pair in enumerate(CHAIN)
    ],
)
def test_a_state_is_bitwise_equal_under_another_placement_and_training_continues(
    ranks: Ranks, tmp_path: Path, before: str, after: str
) -> None:
    one, other = (odd_spec(PLACES[name], 2, **MASTER) for name in (before, after))
    require_a_move(ranks, tmp_path, one, other)


def require_a_move(ranks: Ranks, tmp_path: Path, one: Spec, other: Spec) -> None:
    """Require a bitwise equal state under `other`, and equal parameters after one more step."""
    saved, expected = ranks.run(2, save_and_continue, one, str(tmp_path))[0]
    loaded, found = ranks.run(2, load_and_continue, other, str(tmp_path))[0]
    assert saved.keys() == loaded.keys()
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("S*,S*,S*,R", "R,S*@host,S*,R"),
        pytest.param("R,S*@host,S*,R", "S*,S*,S*,R", marks=pytest.mark.nightly),
    ],
)
def test_a_muon_state_moves_to_another_placement(
    ranks: Ranks, tmp_path: Path, before: str, after: str
) -> None:
    changes = {"optimizer": {"name": "muon"}, **MASTER}
    one, other = (odd_spec({SHARD: tuple_}, 2, **changes) for tuple_ in (before, after))
    require_a_move(ranks, tmp_path, one, other)


def evaluate_between_steps(spec: Spec) -> list[float]:
    """Return the evaluation loss before training and after every step."""
    program = interpret(spec, world=World.join(spec.timeout))
    losses = []
    for step in range(STEPS + 1):
        total = program.evaluate(local_batch(program, open_corpus(spec.data), 100)).double()
        torch.distributed.all_reduce(total)
        losses.append(total.item())
        advance(program, range(step, step + 1))
    return losses


@pytest.mark.parametrize(
    ("placement", "changes"),
    [
        ({SHARD: "O,O,O,R"}, {}),
        ({SHARD: "R,S,S,R"}, {"gather_after_update": "next-forward"}),
        ({SHARD: "R@host,O,S,R"}, {"gather_after_update": "during-update"}),
        ({SHARD: "S*,R,S,R"}, {"prefetch": 2}),
        ({SHARD: "S*,S,M,R"}, {"optimizer": {"clip": None}, "prefetch": 1}),
    ],
    ids=str,
)
def test_evaluation_sees_every_update(
    ranks: Ranks, placement: Mapping[str, str], changes: dict[str, Any]
) -> None:
    spec = odd_spec(placement, 2, **changes)
    plain = odd_spec(
        {SHARD: "S*,S,S,R"}, 2, **{k: v for k, v in changes.items() if k == "optimizer"}
    )
    found = ranks.run(2, evaluate_between_steps, spec)[0]
    expected = ranks.run(2, evaluate_between_steps, plain)[0]
    assert found == pytest.approx(expected, rel=1e-12)
    assert found[0] > found[-1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_device_accepts_every_layout(ranks: Ranks, layout: str) -> None:
    changes = {"precision": {"layout": layout, "compute": "fp64"}, "accumulate": 2}
    spec = odd_spec({SHARD: "R,R,R,R"}, 1, **changes)
    assert not failed_checks(compare_runs(reference(spec), train_spec(ranks, spec), FP64))
