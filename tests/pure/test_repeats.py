"""Repeated blocks replayed once give the result of replaying every block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.derivation import in_flight, pipeline
from ptrain.derivation.estimate import derive
from ptrain.derivation.ghosts.fsdp2 import FullySharded
from ptrain.derivation.layers import Representatives, all_represented, played_places
from ptrain.errors import SpecError
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.facts.stages import Stage
from ptrain.spec.dials import GatherAfterUpdate
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.pure.work import calls_of

SPECS = [
    "zero3", "zero3-keep", "hsdp", "fsdp-mixed", "zero2", "zero1", "tp", "tp-zero3", "pp-zero3",
    "pp-1f1b", "pp-interleaved", "pp-zero-bubble", "checkpoint-selective", "activation-offload",
    "zero-offload", "3d",
]  # fmt: skip
# Deep and with few tokens, so that what reductions leave decides the peak.
IN_HALVES = {
    "zero-bubble": {"mesh": {"pp": 2, "dp_replicate": 2, "dp_shard": 2}, "unit": "sub-block"},
    "zbv": {"mesh": {"pp": 2, "dp_shard": 2}, "unit": "sub-block"},
    "dualpipev": {"mesh": {"pp": 2, "dp_shard": 2}, "unit": "block"},
}
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
        return require_runnable(load(name, ["model.layers=40", *overrides]))
    except SpecError:
        return None


def by_itself(spec: Spec, facts: ModelFacts, stage: Stage, stages: int) -> int:
    return stage.index


def every_block(
    spec: Spec, units: tuple[UnitFacts, ...], blocks: Sequence[str], reach: int | None
) -> Representatives:
    return all_represented(units, len(blocks))


def difference(spec: Spec) -> str:
    """Return the figures that change if every block and every stage is replayed."""
    once = derive(spec).exact
    with ExitStack() as patches:
        patches.enter_context(patch.object(in_flight, "represent", every_block))
        patches.enter_context(patch.object(pipeline, "_kind", by_itself))
        every = derive(spec).exact
    assert every.peak
    figures = ("memory", "peak", "traffic", "accounts", "account_of")
    return " ".join(name for name in figures if getattr(once, name) != getattr(every, name))


@pytest.mark.parametrize("name", SPECS)
def test_a_repeated_block_has_the_figures_of_its_repetitions(name):
    specs = [legal(name, *overrides) for overrides in DIALS.values()]
    assert sum(spec is not None for spec in specs) >= 3
    assert not any(difference(spec) for spec in specs if spec is not None)


@pytest.mark.parametrize(
    "words",
    [
        ["placement.dp_shard=[R, S, R, R]", "gather_after_update=during-update"],
        ["placement.dp_shard=[S*, S, S, R]", "activations=O", "prefetch=1", "sync.gradients=every"],
        ["placement.dp_shard=[M, S, S, R]", "overlap=backward", "prefetch=2"],
        ["placement.dp_shard=[R, S, S, R]", "sync.gradients=last", "unit=sub-block"],
    ],
    ids=lambda words: words[-1],
)
def test_the_backlog_of_transfers_equals_the_backlog_of_all_blocks(words):
    mesh = ["mesh={dp_shard: 2}", "model.layers=12", "cluster.preset=h100-64"]
    batch = ["batch={global: 16, micro: 2, sequence: 1024}"]
    spec = require_runnable(load("70b-zero3", [*mesh, *batch, *words]))
    once = derive(spec).exact.step
    with patch.object(in_flight, "represent", every_block):
        every = derive(spec).exact.step
    assert once is not None and every is not None
    assert once.seconds == pytest.approx(every.seconds, rel=1e-9)


def test_gathers_longer_than_the_overlapped_updates_are_awaited_once():
    spec = legal("7b5-zero2", "mesh.dp_shard=64", "sync.gradients=last")
    assert spec is not None
    once = derive(spec).exact.step
    with patch.object(in_flight, "represent", every_block):
        every = derive(spec).exact.step
    alone = derive(replace(spec, gather_after_update=GatherAfterUpdate.BLOCKING)).exact.step
    assert once is not None and every is not None and alone is not None
    assert once.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert once.seconds < alone.seconds


@pytest.mark.parametrize("schedule", IN_HALVES)
def test_units_of_a_block_take_turns_when_a_half_is_over(schedule):
    """A reduction's input goes with the next one: of attention with the block's, and so on."""
    written: dict[str, Any] = {
        "model": {
            "family": "gpt",
            "layers": 89,
            "hidden": 128,
            "heads": 4,
            "ffn": 400,
            "vocab": 262,
        },
        "placement": {"pp": "S,S,S,R", "dp_shard": "M,S,S,R", "dp_replicate": "R,R,R,R"},
        "batch": {"micro": 1, "sequence": 2, "accumulate": 8},
        "precision": {"layout": "megatron18"},
        "pipeline": {"schedule": schedule},
        **IN_HALVES[schedule],
    }
    written["placement"] = {axis: written["placement"][axis] for axis in written["mesh"]}
    assert not difference(require_runnable(load(written)))


@pytest.mark.parametrize("split", ["[4, 8, 8, 20]", "[10, 10, 10, 10]", "[9, 13, 9, 9]"])
def test_equal_stages_have_the_figures_of_separate_ones(split):
    mesh = ["mesh={pp: 4, dp_shard: 3}", f"pipeline.split={split}", "batch.global=24"]
    spec = legal("pp-zero3", *mesh)
    assert spec is not None and not difference(spec)


def test_shards_of_different_sizes_cost_no_more_than_equal_ones():
    """Slices of an odd vocabulary differ; what a rank has is put together by kind."""

    def work(replicas: int) -> int:
        mesh = [f"mesh={{dp_replicate: {replicas}, tp: 2}}", f"cluster.devices={2 * replicas}"]
        spec = legal("tp-dp", *mesh, f"batch.global={2 * replicas}", "model.vocab=4097")
        assert spec is not None and len(derive(spec).exact.accounts) == 2
        return calls_of(lambda: derive(spec))

    assert work(512) < 4 * work(64)


def test_a_resident_unit_counts_for_all_its_repetitions():
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


def count_unit_entries(spec: Spec) -> int:
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
    assert 0 < count_unit_entries(short) == count_unit_entries(long)


@pytest.mark.parametrize(
    ("kinds", "apart", "expected"),
    [
        ("aaaaaaaa", 2, ((0, 1), (1, 1), (2, 4), (6, 1), (7, 1))),
        ("aaaaa", 2, ((0, 1), (1, 1), (2, 1), (3, 1), (4, 1))),
        ("aaaabbbb", 1, ((0, 1), (1, 2), (3, 1), (4, 1), (5, 2), (7, 1))),
        ("abababab", 1, tuple((place, 1) for place in range(8))),
    ],
)
def test_the_first_and_last_of_equal_blocks_are_replayed_separately(kinds, apart, expected):
    assert played_places(kinds, apart) == expected
    assert sum(times for _, times in expected) == len(kinds)
