"""If recomputation raises a predicted peak, it raises the program's peak too."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.cost import Estimate
from ptrain.derivation.estimate import derive
from ptrain.simulation.execute import simulate
from ptrain.spec.load import load

BF16 = 2  # bytes
ONE_BLOCK: dict[str, Any] = {
    "model": {"layers": 1, "hidden": 64, "heads": 4, "ffn": 1024, "vocab": 264},
    "mesh": {},
    "placement": {},
    "batch": {"micro": 1, "sequence": 256, "accumulate": 2},
    "precision": {"layout": "fsdp-mixed"},
}
# The peak is in the backward pass of the first block, when all gradients are complete.
FIRST_BLOCK: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 64, "heads": 4, "ffn": 1024, "vocab": 1000},
    "mesh": {"dp_shard": 2},
    "placement": {"dp_shard": "R,S,R,R"},
    "batch": {"micro": 1, "sequence": 16, "accumulate": 1},
    "precision": {"layout": "zero16"},
    "optimizer": {"name": "sgd"},
    "unit": "block",
}


def peak(estimate: Estimate) -> int:
    return max(row.device_bytes for row in estimate.peak if row.rank == 0)


@pytest.mark.parametrize("written", [ONE_BLOCK, FIRST_BLOCK], ids=["one block", "first block"])
def test_a_block_that_runs_again_holds_its_input_longer(written: dict[str, Any]) -> None:
    plain, recomputed = (
        load(written | change).spec for change in ({}, {"activations": "M", "recompute": "full"})
    )
    measured = [peak(simulate(spec, 0).estimate) for spec in (plain, recomputed)]
    assert measured == [peak(derive(spec).exact) for spec in (plain, recomputed)]
    size = written["batch"]["sequence"] * written["model"]["hidden"] * BF16
    assert measured[1] - measured[0] == size
