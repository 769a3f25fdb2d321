"""The committed tables compared with the command that writes them, and a stage's passes compared
with torch's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart
from ptrain.derivation.tables import Place, Setting
from ptrain.internals.dtensor import clear_shape_caches
from ptrain.models.trace import GradientComplete, StorageAllocated, StorageFreed
from ptrain.traces import work_tables, write
from ptrain.traces.block_tables import PassTable, trace_stage
from ptrain.traces.settings import TableWriter, symbols

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
    "block/gpt-plain-full/plain",
    "loss/gpt-untied-full/plain",
}


def name_of(part: TablePart, setting: Setting) -> str:
    return f"{part}/{setting.name(part)}/{setting.way(part)}"


def cases() -> Iterator[Any]:
    for part, setting in WHOLE:
        name = name_of(part, setting)
        marks = () if name in DEFAULT else pytest.mark.nightly
        yield pytest.param(part, setting, id=name, marks=marks)


def write_tables(part: TablePart, setting: Setting) -> Any:
    maker, _ = write.MAKERS[part]
    return json.loads(json.dumps(maker(setting, None).build()))


@pytest.mark.parametrize(("part", "setting"), list(cases()))
def test_the_committed_tables_equal_the_output_of_the_command(part, setting):
    stored = archive.read_table(part, setting.name(part))[setting.way(part)]
    if not torch.__version__.startswith(stored["torch"]):
        pytest.skip(f"traced with torch {stored['torch']}, this is {torch.__version__}")
    assert write_tables(part, setting) == stored


def written_of_cuts(part: TablePart, name: str, ways: list[str]) -> dict[str, Any]:
    """In another process, as torch has one world a process: it plays the first of the ranks that
    share the operators."""
    mesh = write.fake_mesh()
    maker, of_part = write.MAKERS[part]
    settings = [s for s in of_part() if s.cut and s.name(part) == name]
    by_way = {setting.way(part): setting for setting in settings}
    try:
        tables = {way: maker(by_way[way], mesh).build() for way in ways or by_way}
    finally:
        dist.destroy_process_group()
        clear_shape_caches()  # which DTensor keeps with the group that is gone
    again: dict[str, Any] = json.loads(json.dumps(tables))
    return again


def of_cuts() -> Iterator[Any]:
    """One way of each part in every run, all of them at night."""
    yield TablePart.PASSES, "llama-untied-mha-bf16-one", ["cut"]
    yield TablePart.LOSS, "gpt-tied-bf16-one", ["whole-gathered"]
    for part in write.MAKERS:
        for name in sorted(archive.table_names(part)):
            if "cuda" not in name:
                yield pytest.param(part, name, [], marks=pytest.mark.nightly, id=f"{part}/{name}")


@pytest.mark.parametrize(("part", "name", "ways"), list(of_cuts()))
def test_the_committed_tables_of_sharded_operators_equal_the_output_of_the_command(
    ranks, part, name, ways
):
    stored = archive.read_table(part, name)
    if not torch.__version__.startswith(stored["plain"]["torch"]):
        pytest.skip("traced with another torch")
    (again,) = ranks.run(1, written_of_cuts, part, name, ways)
    assert again and again == {way: stored[way] for way in again}


def over_context() -> Iterator[Any]:
    """The smallest of them in every run, all at night."""
    for name, make in work_tables.tables():
        marks = () if name == "llama-mha-bf16-one-ulysses" else pytest.mark.nightly
        yield pytest.param(name, make, id=name, marks=marks)


@pytest.mark.parametrize(("name", "make"), list(over_context()))
def test_the_committed_tables_over_cp_equal_the_output_of_the_command(name, make):
    stored = archive.read_table(TablePart.CONTEXT, name)
    if not all(torch.__version__.startswith(table["torch"]) for table in stored.values()):
        pytest.skip("traced with another torch")
    assert make() == stored


def test_the_command_writes_every_table_that_is_committed():
    """Attention's kernels only where CUDA's operators can be asked; elsewhere that table stays."""
    names = {(part, name) for part, name, _ in write.tables(None)}
    assert names | {(TablePart.KERNEL, "attention")} == set(archive.read_tables())


def test_every_way_of_a_table_is_committed():
    for part, (_, of_part) in write.MAKERS.items():
        ways = {(setting.name(part), setting.way(part)) for setting in of_part()}
        assert ways == {
            (n, way) for n in archive.table_names(part) for way in archive.read_table(part, n)
        }


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
def test_both_halves_leave_the_memory_of_the_full_backward_pass(place):
    """What is left of the whole pass, handed on, gradients and loss, is left of the halves too;
    there what the graph keeps goes in the end, which is not listed."""
    left = []
    own = OF_STAGES[NAMES[0]]
    for trace in trace_stage(own, TableWriter(tuple(symbols(own))), None, place, 2):
        recording = trace.recording
        events = [event for events in recording.passes.values() for event in events]
        gone = {event.id for event in events if isinstance(event, StorageFreed | GradientComplete)}
        alive = sorted(
            recording.sizes[event.id]
            for event in events
            if isinstance(event, StorageAllocated) and event.id not in gone
        )
        complete = sorted(
            event.parameter for event in events if isinstance(event, GradientComplete)
        )
        left.append((complete, alive))
    (names, whole), (again, halves) = left
    assert names == again
    assert Counter(whole) <= Counter(halves)
