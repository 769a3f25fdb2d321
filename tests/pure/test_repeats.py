"""Equal blocks that are played once come to what every block played by itself comes to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from ptrain.algebra.legality import require
from ptrain.derivation import in_flight, timeline
from ptrain.derivation.estimate import derive
from ptrain.derivation.ghosts.fsdp2 import FullySharded
from ptrain.derivation.repeats import Cast, everyone, turns
from ptrain.errors import SpecError
from ptrain.facts.model import UnitFacts
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

SPECS = [
    "zero3", "zero3-keep", "hsdp", "fsdp-mixed", "zero2", "tp", "tp-zero3", "pp-zero3", "3d",
    "pp-1f1b", "pp-interleaved", "pp-zero-bubble", "checkpoint-selective", "activation-offload",
]  # fmt: skip
DIALS = {
    "as it stands": [],
    "several micro-batches": ["batch.global=96", "batch.micro=1"],
    "reduced at last": ["batch.global=96", "batch.micro=1", "sync.gradients=last"],
    "reduced each time": ["batch.global=96", "batch.micro=1", "sync.gradients=every"],
    "far ahead": ["prefetch=3"],
    "nothing ahead": ["prefetch=0"],
    "less than a block": ["unit=sub-block"],
    "in bf16": ["precision.layout=fsdp-mixed"],
}


def legal(name: str, *overrides: str) -> Spec | None:
    """The spec with more layers, so that most of each stage's blocks are equal; None where it is
    not legal so."""
    try:
        return require(load(name, ["model.layers=40", *overrides]))
    except SpecError:
        return None


def every_block(
    spec: Spec, units: tuple[UnitFacts, ...], blocks: Sequence[str], reach: int | None
) -> Cast:
    return everyone(units, len(blocks))


@pytest.mark.parametrize("name", SPECS)
def test_a_block_that_stands_for_its_equals_comes_to_what_they_come_to(name):
    specs = {dial: legal(name, *overrides) for dial, overrides in DIALS.items()}
    assert sum(spec is not None for spec in specs.values()) >= 3
    for dial, spec in specs.items():
        if spec is None:
            continue
        once = derive(spec).exact
        with ExitStack() as patches:
            for module in (timeline, in_flight):
                patches.enter_context(patch.object(module, "cast", every_block))
            each = derive(spec).exact
        assert each.peak and tuple(each.peak) == tuple(once.peak), dial
        assert tuple(each.memory) == tuple(once.memory), dial


def test_a_kept_unit_counts_for_all_that_it_stands_for():
    """Units that stay gathered are there when forward is over, every one of them."""
    spec = legal("zero3-keep")
    assert spec is not None
    transient = {row.device_bytes for row in derive(spec).exact.memory if row.state == "transient"}
    units = derive(spec).plan.units
    assert len(units) == 41
    few = legal("zero3-keep", "model.layers=20")
    assert few is not None
    less = {row.device_bytes for row in derive(few).exact.memory if row.state == "transient"}
    assert max(transient) > 1.9 * max(less)


def entered(spec: Spec) -> int:
    """How often a unit of FSDP2 is entered in the prediction of a step."""
    calls: list[Any] = []
    enter = FullySharded.enter

    def counted(self: FullySharded, unit: int) -> None:
        calls.append(unit)
        enter(self, unit)

    with patch.object(FullySharded, "enter", counted):
        derive(spec)
    return len(calls)


@pytest.mark.parametrize("name", ["zero3", "3d", "activation-offload"])
def test_more_equal_blocks_are_no_more_work(name):
    short, long = (legal(name, f"model.layers={layers}") for layers in (24, 96))
    assert short is not None and long is not None
    assert 0 < entered(short) == entered(long)


@pytest.mark.parametrize(
    ("kinds", "apart", "expected"),
    [
        ("aaaaaaaa", 2, ((0, 1), (1, 1), (2, 4), (6, 1), (7, 1))),
        ("aaaaa", 2, ((0, 1), (1, 1), (2, 1), (3, 1), (4, 1))),
        ("aaaabbbb", 1, ((0, 1), (1, 2), (3, 1), (4, 1), (5, 2), (7, 1))),
        ("abababab", 1, tuple((place, 1) for place in range(8))),
    ],
)
def test_the_ends_of_a_row_of_equal_blocks_are_played_by_themselves(kinds, apart, expected):
    assert turns(kinds, apart) == expected
    assert sum(times for _, times in expected) == len(kinds)
