"""Makes the tables of what a block allocates, by how its activations are kept: the events of one
block in forward and in backward, what of it forward saves and moves off the device, what its
operators compute, and the collectives that recomputation repeats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from ptrain.derivation.blocks import VARIANTS
from ptrain.derivation.tables import Setting
from ptrain.models.kernels import kernels_of
from ptrain.models.trace import Born, Died
from ptrain.models.work import OperatorSizes, OperatorWork, SentTensor, When
from ptrain.spec.activations import Kept
from ptrain.spec.model import Attention
from ptrain.steps.step import Keep
from ptrain.timeline import Boundary, Mark
from ptrain.traces.coded import CodedTrace
from ptrain.traces.settings import DTYPES, model_of, part_of, smallest_units, symbols
from ptrain.traces.table_format import Coded, TableWriter, factorised

ATTENTIONS = (Attention.SDPA, Attention.EAGER)
LAYERS = 4  # one in front of what repeats, two that do, and the last one

Did = TypeVar("Did")


class BlockTable:
    """One table in the making, from models of so many `layers`, in these `dtypes`."""

    def __init__(
        self,
        setting: Setting,
        mesh: DeviceMesh | None = None,
        *,
        layers: int = LAYERS,
        dtypes: Sequence[torch.dtype] = (),
    ) -> None:
        self.setting, self.mesh, self.layers = setting, mesh, layers
        self.dtypes = dtypes or DTYPES[setting.compute]
        self.values = symbols(setting)
        self.writer = TableWriter(tuple(self.values))

    def build(self) -> dict[str, object]:
        """Return the table as JSON."""
        return self.writer.table(
            **{
                attention.value: {name: self._variant(attention, kept) for name, kept in VARIANTS}
                for attention in ATTENTIONS
            }
        )

    def _variant(self, attention: Attention, kept: Kept) -> dict[str, object]:
        trace = self.trace(attention, kept)
        return {
            "forward": self.writer.part(alike(trace.layers("forward")[1:-1])),
            "backward": self.writer.part(alike(trace.layers("backward")[1:-1])),
            "saved": self.writer.part(_saved(trace)),
            "moved": self.writer.part(_moved(trace)),
            "frees_input": frees_input(trace),
            "work": self.writer.part([self._work(trace)]),
        }

    def trace(self, attention: Attention, kept: Kept, *, has_learnt: bool = False) -> CodedTrace:
        """Return the trace of a model of such blocks. `has_learnt`: torch has cut these operators
        before."""
        shape = replace(self.setting.shape, attention=attention, layers=self.layers)
        setting = replace(self.setting, shape=shape)
        units = smallest_units(setting)
        blocks = tuple((f"blocks.{index}", kept) for index in range(self.layers))
        keep = None if kept.is_plain else Keep(blocks=blocks)
        part = part_of(setting, self.mesh, keep, has_learnt=has_learnt)
        with kernels_of(is_for_cuda=setting.is_for_cuda):
            recordings = [part.trace(model_of(setting, dtype), units) for dtype in self.dtypes]
        return CodedTrace(recordings, units, self.values, self.writer)

    def _work(self, trace: CodedTrace) -> dict[str, object]:
        """The operations of one block by pass, and the collectives that it repeats."""
        works = alike([*_works(trace)])
        record: dict[str, object] = {}
        for when in When:
            flops = Counter(
                self._operations(work.what)
                for work in works
                if work.when is when
                and isinstance(work.what, OperatorSizes)
                and work.what.operator.flops
            )
            record[when.value] = [[times * c, list(e)] for (c, e), times in flops.items()]
        first: dict[int, int] = {}  # storage by size: what is sent is what some operator allocated
        for storage, size in trace.recording.sizes.items():
            first.setdefault(size, storage)
        record["sent"] = [
            [work.what.collective, trace.size(first[work.what.payload])]
            for work in works
            if work.when is When.AGAIN and isinstance(work.what, SentTensor)
        ]
        return record

    def _operations(self, ran: OperatorSizes) -> tuple[int, tuple[int, ...]]:
        """Coefficient and exponents: how many there are of each product of the dimensions is no
        factor of them, though it may be as large as one."""
        size = math.prod(ran.sizes)
        coefficient, exponents = factorised(size, self.values, self.values)
        return ran.operator.flops // size * coefficient, exponents


def alike(layers: Sequence[Did]) -> Did:
    """What each of these layers does."""
    first, *others = layers
    assert all(other == first for other in others), "the blocks do not repeat"
    return first


def _entered(trace: CodedTrace, block: int) -> int:
    """The place in forward where a block is entered."""
    unit = trace.units.index((f"blocks.{block}",))
    return trace.recording.forward.index(Boundary(Mark.ENTER, unit))


def _works(trace: CodedTrace) -> Iterator[list[OperatorWork]]:
    """Of each block, between its boundaries in forward and in backward."""
    for block in range(LAYERS):
        unit = trace.units.index((f"blocks.{block}",))
        yield [
            work
            for name, first, last in (
                ("forward", Mark.ENTER, Mark.LEAVE),
                ("backward", Mark.PRE_BACKWARD, Mark.POST_BACKWARD),
            )
            for place, work in trace.recording.works[name]
            if _place(trace, name, first, unit) < place <= _place(trace, name, last, unit)
        ]


def _place(trace: CodedTrace, name: str, mark: Mark, unit: int) -> int:
    return trace.recording.passes[name].index(Boundary(mark, unit))


def _moved(trace: CodedTrace) -> Coded:
    """The sizes of the storages that one block's forward takes off the device."""
    counts = Counter(trace.size(number) for number, _ in trace.recording.moved)
    assert all(times % LAYERS == 0 for times in counts.values()), "the blocks do not repeat"
    return [size for size, times in counts.items() for _ in range(times // LAYERS)]


def _saved(trace: CodedTrace) -> Coded:
    """What the first block leaves on the device, by operator: its output, which is the next one's
    input, stands for its own input."""
    alive, events = set(trace.recording.saved), trace.recording.forward
    end = events.index(Boundary(Mark.LEAVE, trace.units.index(("blocks.0",))))
    return [
        (event.operator.removeprefix("aten::"), trace.size(event.id))
        for event in events[_entered(trace, 0) : end]
        if isinstance(event, Born) and event in alive
    ]


def frees_input(trace: CodedTrace) -> bool:
    """Whether a block's input is gone when the next block begins: what the second one frees of what
    was there before it."""
    events, start, end = trace.recording.forward, _entered(trace, 1), _entered(trace, 2)
    older = {event.id for event in events[:start] if isinstance(event, Born)}
    freed = [event for event in events[start:end] if isinstance(event, Died) and event.id in older]
    assert len(freed) <= 1, "a block has one input"
    return bool(freed)
