"""Flat units on fake ranks: no mode, tier or option reads a value or makes a needless copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Collective, Estimate, Phase, State
from ptrain.data.sampler import LocalBatch
from ptrain.interpreter.program import interpret
from ptrain.meters.measure import measure
from ptrain.runtime.world import fake_tensors, fake_world
from ptrain.spec.load import load
from tests.gloo.cases import ODD

SEQUENCE = 16
BOTH = ("dp_replicate", "dp_shard")
CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "files": ({"dp_shard": "S@file,S@file,S@file,R"}, {}),
    "whole on the host": ({"dp_shard": "R@host,R@host,R@host,R"}, {}),
    "materialized over two axes": ({"dp_replicate": "R,S,S,R", "dp_shard": "M,S,S,R"}, {}),
    "gathered for the update": ({"dp_shard": "S*,S*@host,S*@host,R"}, {}),
    "whole matrices": ({"dp_shard": "S*,S*,S*,R"}, {"optimizer": {"name": "muon"}}),
    "consumed": ({"dp_shard": "O,O,M,R"}, {"optimizer": {"clip": None}}),
    "prefetch": ({"dp_shard": "S*,R,S,R"}, {"prefetch": 2}),
    "overlap": ({"dp_shard": "R,S,S,R"}, {"overlap": "backward"}),
    "next forward": ({"dp_shard": "R,S,S,R"}, {"gather_after_update": "next-forward"}),
    "during the update": ({"dp_shard": "R,O,S,R"}, {"gather_after_update": "during-update"}),
}


BY_DEFAULT = {"files", "materialized over two axes", "whole matrices", "consumed", "overlap"}


def simulate_rank(placement: dict[str, str], changes: dict[str, Any]) -> Estimate:
    """The third step of rank 1 of 4."""
    spec = require_runnable(
        load(
            {
                "name": "fake",
                "model": dict(ODD),
                "mesh": dict.fromkeys(BOTH, 2) if len(placement) == 2 else {"dp_shard": 4},
                "placement": placement,
                "precision": {"layout": "zero16"},
                "batch": {"global": 4, "micro": 1, "sequence": SEQUENCE},
                **changes,
            }
        )
    )
    world = fake_world(rank=1, size=4)
    try:
        with fake_tensors():
            program = interpret(spec, world=world)
            tokens = torch.zeros(1, SEQUENCE + 1, dtype=torch.int64)
            batch = LocalBatch(tokens=tokens, global_tokens=spec.batch.tokens, sample_ids=())
            for _ in range(2):
                program.forward_backward(batch, 1e-2)
                program.step(1e-2)
            with measure(program) as measurement:
                program.forward_backward(batch, 1e-2)
                program.step(1e-2)
    finally:
        world.close()
    return measurement.estimate()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.nightly) for name in CASES],
)
def test_every_move_of_a_step_belongs_to_a_state(name: str) -> None:
    placement, changes = CASES[name]
    found = simulate_rank(placement, changes)
    assert found.traffic
    assert not [row for row in found.traffic if row.key.state is State.OTHER]
    assert all(found.bytes_of(state) >= 0 for state in State)


def test_file_states_are_no_device_memory() -> None:
    found = simulate_rank(*CASES["files"])
    resident = {row.state: row for row in found.memory}
    for state in (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS):
        assert resident[state].file_bytes > 0, state
        assert resident[state].device_bytes == resident[state].host_bytes == 0, state


def test_the_bytes_of_a_consumed_offloaded_unit_cross_once_each_way() -> None:
    """Theta to the device in forward and in backward, G to the host once; nothing else is moved."""
    found = simulate_rank(*CASES["consumed"])
    moved = {
        (row.key.collective, row.key.state, row.key.phase): row.payload_bytes
        for row in found.traffic
        if row.key.collective in (Collective.HOST_TO_DEVICE, Collective.DEVICE_TO_HOST)
    }
    shard = next(row.host_bytes for row in found.memory if row.state is State.PARAMETERS)
    assert moved == {
        (Collective.HOST_TO_DEVICE, State.PARAMETERS, Phase.FORWARD): shard,
        (Collective.HOST_TO_DEVICE, State.PARAMETERS, Phase.BACKWARD): shard,
        (Collective.DEVICE_TO_HOST, State.GRADIENTS, Phase.BACKWARD): shard,
    }
