"""The committed tables against the command that writes them, and a stage's passes against those of
torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart
from ptrain.derivation.tables import Place, Setting
from ptrain.models.trace import Born, Completion, Died
from ptrain.traces import write
from ptrain.traces.pass_tables import PassTable

WHOLE = [
    (part, setting)
    for part, (_, of_part) in write.MAKERS.items()
    for setting in of_part()
    if setting.cut is None
]
DEFAULT = {
    "passes/llama-untied-gqa-bf16/plain",
    "passes/gpt-tied-dropout-cuda-full/plain",
    "block/llama-gqa-bf16-one/plain",
    "loss/gpt-tied-bf16-one/plain",
}


def name_of(part: TablePart, setting: Setting) -> str:
    return f"{part}/{setting.name(part)}/{setting.way(part)}"


def cases() -> Iterator[Any]:
    for part, setting in WHOLE:
        name = name_of(part, setting)
        marks = () if name in DEFAULT else pytest.mark.nightly
        yield pytest.param(part, setting, id=name, marks=marks)


def written(part: TablePart, setting: Setting) -> Any:
    maker, _ = write.MAKERS[part]
    return json.loads(json.dumps(maker(setting, None).build()))


@pytest.mark.parametrize(("part", "setting"), list(cases()))
def test_the_committed_tables_are_what_the_command_writes(part, setting):
    stored = archive.table(part, setting.name(part))[setting.way(part)]
    if not torch.__version__.startswith(stored["torch"]):
        pytest.skip(f"traced with torch {stored['torch']}, this is {torch.__version__}")
    assert written(part, setting) == stored


def test_the_command_writes_every_table_that_is_committed():
    """Attention's kernels only where CUDA's operators can be asked; elsewhere that table stays."""
    names = {(part, name) for part, name, _ in write.tables(None)}
    assert names | {(TablePart.KERNEL, "attention")} == set(archive.tables())


def test_every_way_of_a_table_is_committed():
    for part, (_, of_part) in write.MAKERS.items():
        ways = {(setting.name(part), setting.way(part)) for setting in of_part()}
        assert ways == {(n, way) for n in archive.names(part) for way in archive.table(part, n)}


OF_STAGES = {
    setting.name(TablePart.PASSES): setting
    for part, setting in WHOLE
    if part is TablePart.PASSES and not setting.is_for_cuda
}
NAMES = ("llama-untied-gqa-bf16", "gpt-tied-dropout-bf16-one")


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_begin_block_and_end_make_a_stage_of_any_length(name):
    table = PassTable(OF_STAGES[name])
    assert PassTable(OF_STAGES[name]).build(several=4) == table.build()


@pytest.mark.parametrize("place", [Place.MIDDLE, Place.LAST])
def test_both_halves_leave_what_the_whole_backward_pass_leaves(place):
    """All that forward and backward allocated is freed, but for what is handed on, the gradients
    and the loss."""
    left = []
    for trace in PassTable(OF_STAGES[NAMES[0]]).stage(place, 2):
        recording = trace.recording
        events = [event for events in recording.passes.values() for event in events]
        gone = {event.id for event in events if isinstance(event, Died | Completion)}
        alive = sorted(
            recording.sizes[event.id]
            for event in events
            if isinstance(event, Born) and event.id not in gone
        )
        complete = sorted(event.parameter for event in events if isinstance(event, Completion))
        left.append((complete, alive))
    (names, whole), (again, halves) = left
    assert names == again
    # what is left of the graph goes in the end of the half of the weights, and is not listed
    assert set(whole) <= set(halves)
