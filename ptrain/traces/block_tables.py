"""Makes the tables of what a block allocates, by how its activations are kept.

Like `traces.model_tables` and `traces.tensor_tables`, at prime shapes, of a model all of whose
blocks are kept alike: the events of one block in forward and in backward, what of it forward saves
and moves off the device, what its operators compute, and the collectives that recomputation
repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from ptrain.activations.run.apply import keep
from ptrain.axes.tensor.run.apply import parallelize, whole_loss
from ptrain.derivation.blocks import CUTS, PLAIN_NAME, VARIANTS
from ptrain.models.build import build
from ptrain.models.initialize import cast
from ptrain.models.kernels import kernels_of
from ptrain.models.trace import Born, Died, Recording, record
from ptrain.models.units import unit_modules
from ptrain.models.work import OperatorWork, When, WorkRecorder
from ptrain.rooms.registry import Registry
from ptrain.rooms.tiers import Tiers
from ptrain.spec.activations import Kept
from ptrain.spec.model import Attention, ModelShape
from ptrain.steps.step import Keep
from ptrain.timeline import Boundary, Mark
from ptrain.traces.model_tables import SMALLEST, BlockTableBuilder, Make
from ptrain.traces.stage_tables import TableSetting, settings
from ptrain.traces.table_format import TableWriter, factorised
from ptrain.traces.tensor_tables import TP

ATTENTIONS = (Attention.SDPA, Attention.EAGER)


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """`works`: each with the number of events before it."""

    recording: Recording
    works: list[tuple[int, OperatorWork]]


def trace(
    setting: TableSetting,
    shape: ModelShape,
    kept: Kept,
    dtype: torch.dtype,
    mesh: DeviceMesh | None,
) -> BlockTrace:
    """One micro-batch, of rank 0's part where operators are cut, when torch has learnt the cuts."""
    step = setting.kind.step(shape) if setting.kind else None
    is_sequence = step is not None and step.is_sequence
    sequence = setting.sequence * (TP if is_sequence else 1)
    registry = Registry()
    model = build(shape, sequence=sequence)
    cast(model, dtype)
    if step is not None and mesh is not None:
        parallelize(model, step, mesh, registry)
    if not kept.is_plain:
        blocks = tuple((f"blocks.{index}", kept) for index in range(shape.layers))
        keep(model, Keep(blocks=blocks), Tiers(torch.device("cpu"), registry))
    tokens = torch.zeros(setting.batch, sequence + 1, dtype=torch.int64)
    units = unit_modules(model, SMALLEST)

    def forward() -> Tensor:
        return whole_loss(model(tokens[:, :-1]), tokens[:, 1:]) / (setting.batch * sequence)

    kernels = kernels_of(is_for_cuda=setting.is_for_cuda)
    with kernels, loss_parallel() if step is not None else nullcontext():
        if step is not None:
            record(model, units, forward, tokens)
        recorder = WorkRecorder()
        recorder.follow(model)
        return BlockTrace(record(model, units, forward, tokens, recorder=recorder), recorder.works)


class Blocks:
    """The tables of one setting in the making: sizes are numbered as they come."""

    def __init__(self, setting: TableSetting, mesh: DeviceMesh | None = None) -> None:
        self.setting, self.mesh = setting, mesh
        self.writer = TableWriter(tuple(setting.symbols))

    def build(self) -> dict[str, object]:
        """Return the tables as JSON; equal parts are written once, and named by their place."""
        variants = {
            attention.value: {name: self._variant(attention, kept) for name, kept in VARIANTS}
            for attention in ATTENTIONS
        }
        return self.writer.table(**variants)

    def _variant(self, attention: Attention, kept: Kept) -> dict[str, object]:
        setting = self.setting
        shape = replace(setting.shape, attention=attention)
        traced: list[BlockTrace] = []

        def tracer(shape: ModelShape, dtype: torch.dtype, batch: int) -> Recording:
            traced.append(trace(setting, shape, kept, dtype, self.mesh))
            return traced[-1].recording

        table = BlockTableBuilder(
            shape, setting.precision, setting.batch, setting.symbols, tracer, self.writer
        )
        first = table.recordings[0]
        parts = table.parts(first)
        return {
            "forward": self.writer.part(parts["forward"]["block"]),
            "backward": self.writer.part(parts["backward"]["block"]),
            "saved": self.writer.part(_saved(table, first)),
            "moved": self.writer.part(self._moved(table, first)),
            "frees_input": _frees_input(table, first),
            **self._work(traced[0], table),
        }

    def _moved(self, table: BlockTableBuilder, recording: Recording) -> list[object]:
        """Return the sizes of the storages that one block's forward takes off the device."""
        layers = table.shape.layers
        counts = Counter(table.size(number) for number, _ in recording.moved)
        assert all(times % layers == 0 for times in counts.values()), "the blocks do not repeat"
        return [size for size, times in counts.items() for _ in range(times // layers)]

    def _work(self, traced: BlockTrace, table: BlockTableBuilder) -> dict[str, object]:
        """Return the part that holds the operations of one block by pass, and the collectives that
        it repeats."""
        record: dict[str, object] = {}
        by_block = [*_works(traced, table)]
        assert all(works == by_block[0] for works in by_block), "the blocks do not repeat"
        for when in When:
            flops = Counter(
                factorised(work.size, self.setting.symbols, self.setting.symbols)
                for work in by_block[0]
                if work.when is when and work.collective is None
            )
            record[when.value] = [[times * c, list(e)] for (c, e), times in flops.items()]
        record["sent"] = [
            [work.collective, self._size_of(work.size, traced.recording, table)]
            for work in by_block[0]
            if work.when is When.AGAIN and work.collective is not None
        ]
        return {"work": self.writer.part([record])}

    def _size_of(self, size: int, recording: Recording, table: BlockTableBuilder) -> int:
        """What is sent is what some operator allocated."""
        number = next(number for number, bytes_ in recording.sizes.items() if bytes_ == size)
        return table.size(number)


def _saved(table: BlockTableBuilder, recording: Recording) -> list[object]:
    """What the first block leaves on the device, by operator: its output, which is the next one's
    input, stands for its own input."""
    alive = set(recording.saved)
    unit, events = table.units.index(("blocks.0",)), recording.forward
    start, end = (events.index(Boundary(mark, unit)) for mark in (Mark.ENTER, Mark.LEAVE))
    return [
        (event.operator.removeprefix("aten::"), table.size(event.id))
        for event in events[start:end]
        if isinstance(event, Born) and event in alive
    ]


def _frees_input(table: BlockTableBuilder, recording: Recording) -> bool:
    """Whether a block's input is gone when the next block begins: what the second one frees of what
    was there before it."""
    starts = [
        recording.forward.index(Boundary(Mark.ENTER, table.units.index((f"blocks.{block}",))))
        for block in (1, 2)
        if block < table.shape.layers
    ]
    events = recording.forward[starts[0] : starts[1] if len(starts) > 1 else None]
    born = {event.id for event in recording.forward[: starts[0]] if isinstance(event, Born)}
    freed = [event.id for event in events if isinstance(event, Died) and event.id in born]
    assert len(freed) <= 1, "a block has one input"
    return bool(freed)


def _works(traced: BlockTrace, table: BlockTableBuilder) -> Iterator[list[OperatorWork]]:
    """Of each block, between its boundaries in forward and in backward."""
    recording = traced.recording
    events = (*recording.forward, *recording.backward)
    for block in range(table.shape.layers):
        unit = table.units.index((f"blocks.{block}",))
        yield [
            work
            for first, last in (
                (Mark.ENTER, Mark.LEAVE),
                (Mark.PRE_BACKWARD, Mark.POST_BACKWARD),
            )
            for place, work in traced.works
            if events.index(Boundary(first, unit)) < place <= events.index(Boundary(last, unit))
        ]


def block_settings() -> Iterator[tuple[str, dict[str, TableSetting]]]:
    """Yield the name of the file, and how the operators are cut; whether embedding and head are
    tied, and how logits are, is nothing to a block."""
    for title, alone, cut in settings():
        if not alone.tied:
            kinds = {setting.kind.name: setting for setting in cut if setting.kind is not None}
            chosen = {name: kinds[name] for name in CUTS}
            title = title.replace("-untied", "")
            yield title, {PLAIN_NAME: alone, **chosen}
            if alone.shape.dropout:
                of_gpus = replace(alone, is_for_cuda=True)
                yield title.replace("dropout", "dropout-cuda"), {PLAIN_NAME: of_gpus}


def tables(mesh: DeviceMesh | None) -> Iterator[tuple[str, Make]]:
    """Yield the name of every table and what makes it."""
    for title, by_cut in block_settings():
        yield title, partial(_of_every_cut, by_cut, mesh)


def _of_every_cut(by_cut: dict[str, TableSetting], mesh: DeviceMesh | None) -> dict[str, object]:
    return {name: Blocks(setting, mesh).build() for name, setting in by_cut.items()}
