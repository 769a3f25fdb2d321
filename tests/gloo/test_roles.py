"""Programs declare the state of each storage; the declaration matches its use, and a wrong
declaration is detected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from ptrain.algebra.legality import require_runnable
from ptrain.cost import State
from ptrain.data.corpus import open_corpus
from ptrain.interpreter.program import Program, interpret
from ptrain.meters.memory import RoleFinder, RoleRow
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.train.loop import local_batch
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

RATE = 1e-3
DDP, ZERO1, SHARDED = {"dp_replicate": 2}, {"dp_shard": "zero1"}, {"dp_shard": 2}
CASES: tuple[tuple[Mapping[str, int], Mapping[str, str], str, str], ...] = (
    (DDP, {"dp_replicate": "ddp"}, "fp32", "adamw"),
    (SHARDED, {"dp_shard": "M,S,S,R"}, "fsdp-mixed", "adamw"),
    (SHARDED, {"dp_shard": "S*,S*,S*,R"}, "zero16", "muon"),
    (SHARDED, {"dp_shard": "O,O,O,R"}, "zero16", "adamw"),
    (SHARDED, {"dp_shard": "S*,S,M,R"}, "zero16", "adamw"),
    ({"pp": 2, "dp_shard": 2}, {"pp": "S,S,S,R", "dp_shard": "zero3"}, "fp32", "adamw"),
)
OTHERS = ("zero1", "S*,S*,S*,R")
MORE = (
    (DDP, {"dp_replicate": "R,S,R,R"}, "fp32", "adamw"),
    (SHARDED, ZERO1, "zero16", "adamw"),
    (SHARDED, {"dp_shard": "zero2"}, "fp32", "sgd"),
    (SHARDED, {"dp_shard": "zero3"}, "zero16", "adamw"),
    (SHARDED, {"dp_shard": "M,O,S,R"}, "fsdp-mixed", "adamw"),
    ({"dp_shard": 2, "tp": 2}, {"dp_shard": "zero3", "tp": "S,S,S,S"}, "fp32", "adamw"),
    ({"dp_shard": 2, "tp": 2}, {"dp_shard": "zero2", "tp": "S,S,S,R"}, "zero16", "adamw"),
    ({"pp": 2, "dp_shard": 2}, {"pp": "S,S,S,R", **ZERO1}, "zero16", "adamw"),
)


def role_spec(
    mesh: Mapping[str, int], placement: Mapping[str, str], layout: str, rule: str
) -> Spec:
    is_consumed = placement.get("dp_shard", "").endswith("M,R")
    optimizer: dict[str, Any] = {"name": rule, "lr": RATE, "clip": None if is_consumed else 1.0}
    mapping: dict[str, Any] = {
        "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 104, "vocab": 259},
        "mesh": dict(mesh),
        "placement": dict(placement),
        "precision": {"layout": layout},
        "batch": {"accumulate": 1 if is_consumed else 2, "micro": 1, "sequence": 16},
        "optimizer": optimizer,
        "data": {"corpus": "python-docs", "tokenizer": "bytes"},
    }
    return require_runnable(load(mapping))


def find_roles(spec: Spec, fault: str = "") -> tuple[RoleRow, ...]:
    """Return the roles in the third step on this rank, with `fault` declared wrongly."""
    program = interpret(spec, world=World.join(spec.timeout))
    if fault:
        declare_wrongly(program, State(fault))
    for step in range(3):
        local = local_batch(program, open_corpus(spec.data), step)
        with RoleFinder(program) if step == 2 else nullcontext() as finder:
            program.forward_backward(local, RATE)
            program.step(RATE)
    assert finder is not None
    return finder.rows()


def declare_wrongly(program: Program, state: State) -> None:
    """Temporarily declare tensors of `state` as the next state."""
    states = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
    said = states[(states.index(state) + 1) % len(states)]
    storages = program.storages

    def declared() -> Iterator[tuple[State, torch.Tensor]]:
        for held, tensor in storages():
            yield (said if held is state else held), tensor

    program.storages = declared  # type: ignore[method-assign]


def role_ranks(mesh: Mapping[str, int]) -> int:
    count = 1
    for degree in mesh.values():
        count *= degree
    return count


@pytest.mark.parametrize(
    ("mesh", "placement", "layout", "rule"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE)],
    ids=str,
)
def test_declared_states_match_the_use_of_storages(
    ranks: Ranks, mesh: Mapping[str, int], placement: Mapping[str, str], layout: str, rule: str
) -> None:
    spec = role_spec(mesh, placement, layout, rule)
    for rows in ranks.run(role_ranks(mesh), find_roles, spec):
        assert all(row.agrees for row in rows), rows
        seen = sum(row.nbytes for row in rows if row.role is not None)
        assert seen == sum(row.nbytes for row in rows), rows


@pytest.mark.parametrize("state", ["parameters", "optimizer", "gradients"])
@pytest.mark.parametrize(
    "placement", ["zero3", *(pytest.param(each, marks=pytest.mark.nightly) for each in OTHERS)]
)
def test_a_wrongly_declared_state_is_detected(ranks: Ranks, placement: str, state: str) -> None:
    spec = role_spec({"dp_shard": 2}, {"dp_shard": placement}, "zero16", "adamw")
    for rows in ranks.run(2, partial(find_roles, fault=state), spec):
        wrong = [row for row in rows if not row.agrees]
        assert wrong and {row.role for row in wrong} == {State(state)}
