"""Make the tables of a block's allocations by how its activations are kept (events of forward and
backward, what is saved and moved off the device, operators, repeated collectives), and of the
allocations of a loss in chunks after the last block, of a full model and of a last stage.

Events that repeat with each chunk are found by comparing traces of two numbers of chunks, odd
primes that divide nothing else. Sizes are found by exact division: no product of some dimensions is
one of others.

A trace at prime dimensions is encoded as sizes in a table and events by layers. Events are as short
as possible: they keep only how high the allocation rises and ends, for all sizes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from ptrain.derivation.blocks import VARIANTS
from ptrain.derivation.tables import (
    MARKS,
    SYMBOLS,
    Pieces,
    Place,
    Setting,
    has_own_tables,
    values_of,
)
from ptrain.models.kernels import kernels_of
from ptrain.models.trace import Born, Completion, Died, Event, Recording
from ptrain.models.units import Units
from ptrain.models.work import OperatorSizes, OperatorWork, SentTensor, When
from ptrain.spec.activations import Kept
from ptrain.spec.model import Attention, Family, ModelShape
from ptrain.spec.spec import LossSpec
from ptrain.steps.step import Keep
from ptrain.timeline import Boundary, Mark
from ptrain.traces.settings import (
    DTYPES,
    KINDS,
    TP,
    UNEVEN,
    VOCAB,
    Coded,
    CutKind,
    TableWriter,
    cuts_of,
    factorised,
    model_of,
    of_shape,
    part_of,
    smallest_units,
    symbols,
)

_SIGNS = {mark: sign for sign, mark in MARKS.items()}
_OTHER = re.compile(r"blocks\.(?!\*)|\*\d")  # a block's name that is not the layer's


class CodedTrace:
    """A recording, and others of wider dtypes, whose sizes tell which of its own follow the compute
    dtype. `values` are the primes of its dimensions."""

    def __init__(
        self,
        recordings: Sequence[Recording],
        units: Units,
        values: Mapping[str, int],
        writer: TableWriter,
    ) -> None:
        self.recording, *self._wider = recordings
        self.units, self.values, self.writer = units, values, writer
        for other in self._wider:
            assert _course(self.recording) == _course(other), "operators depend on the dtype"

    def size(self, storage: int) -> int:
        """Return the number of a storage's size."""
        size = self.recording.sizes[storage]
        wider = [other.sizes[storage] for other in self._wider]
        assert all(other in (size, 2 * size) for other in wider), (
            "sizes differ by a factor other than 1 or 2"
        )
        return self.writer.size(
            size,
            self.values,
            follows=any(other == 2 * size > 0 for other in wider),
            is_statistics=storage in self.recording.statistics,
        )

    def coded(self, events: Iterable[Event], layer: int) -> Coded:
        """Return a layer's events as JSON, as short as they can be; `*` stands for its index."""
        ordered = events if self.recording.output is None else _sorted(events)
        written = self.in_full(ordered, f"blocks.{layer}")
        names = [event[0] if isinstance(event, list) else event for event in written]
        others = [name for name in names if isinstance(name, str) and _OTHER.search(name)]
        assert not others, f"layer {layer} has events of the layers {others}"
        return _shortest(written)

    def in_full(self, events: Iterable[Event], layer: str = "") -> Coded:
        """Return events as JSON, every one of them."""
        return [self._coded(event, layer) for event in events]

    def _coded(self, event: Event, layer: str) -> object:
        match event:
            case Born(storage):
                return self.size(storage) + 1
            case Died(storage):
                return -self.size(storage) - 1
            case Boundary(mark, unit):
                name = self.units[unit][0]
                return _SIGNS[mark] + (name.replace(layer, "*") if layer else name)
            case Completion(parameter, storage, cloned, freed):
                assert not freed, "a gradient is copied from a tensor that is freed at once"
                name = parameter.replace(f"{layer}.", "blocks.*.") if layer else parameter
                return [name, self.size(storage), int(cloned)]

    def layers(self, name: str) -> list[Coded]:
        """Return a pass layer by layer, in its own order: what comes before the first is the
        first's, what comes after the last the last's."""
        return [self.coded(events, layer) for layer, events in self.split(name)]

    def split(self, name: str) -> list[tuple[int, Sequence[Event]]]:
        """Return the events of a pass by layer. The halves of weights have no boundaries: there a
        layer ends with its last gradient."""
        events = self.recording.passes[name]
        blocks = {int(unit[0].split(".")[1]): place for place, unit in enumerate(self.units)
                  if unit[0].startswith("blocks.") and unit[0].count(".") == 1}  # fmt: skip
        layers = sorted(blocks, reverse=name in ("backward", "input"))
        if name == "weight":
            ends = [
                1 + max(i for i, event in enumerate(events) if _is_of(event, f"blocks.{layer}."))
                for layer in layers
            ]
            starts = [0, *ends[:-1]]
        else:
            mark = Mark.ENTER if name == "forward" else Mark.PRE_BACKWARD
            starts = [events.index(Boundary(mark, blocks[layer])) for layer in layers]
            starts[0] = 0
        bounds = zip(layers, starts, [*starts[1:], len(events)], strict=True)
        return [(layer, events[start:end]) for layer, start, end in bounds]


def _course(recording: Recording) -> list[object]:
    """What traces of one model have in common whatever its dtype."""
    return [
        (event.id, event.operator) if isinstance(event, Born) else event
        for events in recording.passes.values()
        for event in _sorted(events)
    ]


def _sorted(events: Iterable[Event]) -> Iterator[Event]:
    """Gradients that are complete at once are in the order of their names: in a stage's passes,
    which autograd runs for their gradients, they have none of their own."""
    for is_complete, group in itertools.groupby(events, lambda e: isinstance(e, Completion)):
        together = list(group)
        if is_complete:
            together.sort(key=lambda event: event.parameter)  # type: ignore[union-attr]
        yield from together


def _is_of(event: Event, prefix: str) -> bool:
    return isinstance(event, Completion) and event.parameter.startswith(prefix)


def _shortest(events: Sequence[object]) -> Coded:
    """Events that rise as high and end as high, whatever the sizes: between two boundaries only
    levels count that no other one contains."""
    shortened: Coded = []
    for is_size, group in itertools.groupby(events, lambda event: isinstance(event, int)):
        together = list(group)
        shortened += _highest(together) if is_size else together  # type: ignore[arg-type]
    return shortened


def _highest(deltas: Sequence[int]) -> Iterator[int]:
    """Signed numbers of sizes; what is freed on the way to the next level goes first."""
    levels = [Counter[int]()]
    for delta in deltas:
        level = Counter(levels[-1])
        level[abs(delta)] += 1 if delta > 0 else -1
        levels.append(level)
    now = levels[0]
    for place, level in enumerate(levels[1:], 1):
        is_last = place == len(levels) - 1
        earlier = any(_contains(other, level) for other in levels[:place])
        later = any(
            _contains(other, level) and not _contains(level, other) for other in levels[place:]
        )
        if is_last or not (earlier or later):
            yield from _between(now, level)
            now = level


def _contains(other: Counter[int], level: Counter[int]) -> bool:
    return all(other[number] >= level[number] for number in {*other, *level})


def _between(now: Counter[int], then: Counter[int]) -> Iterator[int]:
    change = {number: then[number] - now[number] for number in sorted({*now, *then})}
    for number, more in change.items():
        yield from [-number] * -more
    for number, more in change.items():
        yield from [number] * more


SEVERAL = 2  # samples, where they are not one
CHUNKS = (5, 7)  # from so many what repeats is learnt
HEAD_DIM, FFN = 34, 5
_PLACES = (Place.ALONE, Place.LAST)
_PRIMES = (97, 89, 83, 79, 73, 71, 61, 59, 53, 47, 43, 41, 37, 31, 29, 19, 13)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a micro-batch: so many chunks, and what is left."""

    chunks: int
    chunk: int
    rest: int

    @property
    def number(self) -> int:
        return self.chunks * self.chunk + self.rest


def tokens_of(samples: int, chunks: int, *, has_rest: bool) -> Tokens:
    """Divisible among samples and ranks."""
    unit = samples * TP
    if not has_rest:
        return Tokens(chunks, unit * _PRIMES[-1], 0)
    return next(
        Tokens(chunks, chunk, rest)
        for chunk, prime in itertools.combinations(_PRIMES, 2)
        for rest in (prime, 2 * prime, 3 * prime)  # of 2 and 3 chunks, divisible by 2 and by 3
        if rest < chunk and (chunks * chunk + rest) % unit == 0
    )


@dataclass(frozen=True, slots=True)
class CodedHead:
    """Forward and backward as JSON, and the number of the output's size."""

    phases: tuple[Coded, Coded]
    output: int | None


class LossTable:
    """One table in the making, from models in these `dtypes`. The setting's tokens and chunks are
    no matter."""

    def __init__(
        self,
        setting: Setting,
        mesh: DeviceMesh | None = None,
        *,
        dtypes: Sequence[torch.dtype] = (),
    ) -> None:
        self.setting, self.mesh = setting, mesh
        self.dtypes = dtypes or DTYPES[setting.compute]
        self.writer = TableWriter(SYMBOLS)

    def build(self) -> dict[str, object]:
        """Return the table as JSON."""
        return self.writer.table(**{place: self._place(place) for place in _PLACES})

    def _place(self, place: Place) -> dict[str, object]:
        table: dict[str, object] = {}
        for has_rest in (False, True):
            coded = partial(self._coded, place, has_rest=has_rest)
            less, more = map(coded, CHUNKS)
            pieces = [*map(repeating, less.phases, more.phases)]
            few = [coded(number) for number in range(1, max(split.least for split in pieces))]
            table["rest" if has_rest else "even"] = {
                name: {
                    "few": [
                        self.writer.part(code.phases[phase])
                        for code in few[: pieces[phase].least - 1]
                    ],
                    "pieces": [self.writer.part(piece) for piece in pieces[phase].listed],
                }
                for phase, name in enumerate(("forward", "backward"))
            }
            table["output"] = less.output
        return table

    def _coded(self, place: Place, chunks: int, *, has_rest: bool) -> CodedHead:
        """Of a trace with so many chunks."""
        trace = self.trace(place, chunks, has_rest=has_rest)
        recording = trace.recording
        units = [unit for (unit,) in trace.units]
        last = max(units.index(unit) for unit in units if unit.count(".") == 1)
        forward, backward = recording.passes["forward"], recording.passes["backward"]
        behind = forward[forward.index(Boundary(Mark.LEAVE, last)) + 1 :]
        before = backward[: backward.index(Boundary(Mark.PRE_BACKWARD, last))]
        output = None if recording.output is None else trace.size(recording.output)
        return CodedHead((trace.in_full(behind), trace.in_full(before)), output)

    def trace(self, place: Place, chunks: int, *, has_rest: bool) -> CodedTrace:
        """Return the trace of a model, or of a last stage, with so many full chunks."""
        tokens = tokens_of(self.setting.batch, chunks, has_rest=has_rest)
        setting = replace(
            self.setting,
            sequence=tokens.number // self.setting.batch,
            loss=replace(self.setting.loss, chunk=tokens.chunk),
        )
        values = {symbol: value for symbol, value in values_of(setting).items() if value > 1}
        return self._trace(setting, place, values)

    def _trace(self, setting: Setting, place: Place, values: dict[str, int]) -> CodedTrace:
        counts = (1,) if place is Place.ALONE else (1, 1)  # a stage has one in front of it
        setting = replace(setting, shape=replace(setting.shape, layers=len(counts)))
        part = part_of(setting, self.mesh)
        models = (model_of(setting, dtype) for dtype in self.dtypes)
        if place is Place.ALONE:
            units = smallest_units(setting)
            recordings = [part.trace(model, units) for model in models]
        else:
            cuts = cuts_of(setting, counts)
            units = smallest_units(setting, cuts.stages[1])
            recordings = [
                recording
                for model in models
                for recording in part.trace_stage(model, units, cuts, 1, in_halves=False)
            ]
        return CodedTrace(recordings, units, values, self.writer)


def settings() -> Iterator[Setting]:
    """Yield every setting of a loss in chunks, whole, fused, and with every kind of cut."""
    for family, tied, compute, samples in itertools.product(
        Family, (False, True), DTYPES, (SEVERAL, 1)
    ):
        for kind in (None, *KINDS):
            shape = _shape(family, kind, tied=tied)
            setting = of_shape(shape, kind, compute=compute, batch=samples, sequence=1)
            if setting.cut is None:
                yield setting
                yield replace(setting, loss=LossSpec(fused=True))
            elif has_own_tables(setting.cut.kind):
                yield setting


def settings_of_operators() -> Iterator[Setting]:
    """Yield one of each kind whose loss shows its operators: a fused one is a single one, of which
    nobody sees what it computes; and a tied head computes what another does."""
    return (setting for setting in settings() if not (setting.loss.fused or setting.shape.tied))


def _shape(family: Family, kind: CutKind | None, *, tied: bool) -> ModelShape:
    degree = TP if kind else 1
    is_uneven = kind is None or kind.loss_parallel  # and larger than hidden
    return ModelShape(
        family=family,
        layers=1,
        hidden=degree * HEAD_DIM,
        heads=degree,
        kv_heads=degree,
        ffn=degree * FFN,
        vocab=UNEVEN if is_uneven else degree * VOCAB,
        tied=tied,
    )


def repeating(less: Coded, more: Coded) -> Pieces:
    """Return what is there once, and what for each chunk, of as few chunks as it is true of."""
    split = next(_splits(less, more, CHUNKS[1] - CHUNKS[0]), None)
    assert split is not None, "the chunks do not repeat"
    assert not any(isinstance(e, str | list) for e in (*split.every, *split.later)), "a boundary"
    return split.fewest()


def _splits(less: Coded, more: Coded, times: int) -> Iterator[Pieces]:
    """Ways to make the longer one of the shorter one by at most two insertions of that which is
    `times` the same."""
    start = _common(less, more)
    rear = min(_common(less[::-1], more[::-1]), len(less) - start)
    inserted = len(more) - len(less)
    middle, behind = less[start : len(less) - rear], less[len(less) - rear :]
    for size in range(inserted, -1, -times):
        first = more[start : start + size]
        between = more[start + size : start + size + len(middle)]
        second = more[start + size + len(middle) : len(more) - rear]
        x, y = first[: size // times], second[: (inserted - size) // times]
        if between == middle and x * times == first and y * times == second:
            yield Pieces(CHUNKS[0], less[:start], x, middle, y, behind)


def _common(one: Coded, other: Coded) -> int:
    """Events in front that are the same."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


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
        bounds = {
            "forward": _bounds(trace, "forward", Mark.ENTER, Mark.LEAVE, unit),
            "backward": _bounds(trace, "backward", Mark.PRE_BACKWARD, Mark.POST_BACKWARD, unit),
        }
        yield [
            work
            for name, (first, last) in bounds.items()
            for place, work in trace.recording.works[name]
            if first < place <= last
        ]


def _bounds(trace: CodedTrace, name: str, first: Mark, last: Mark, unit: int) -> tuple[int, int]:
    """The places in a pass where a unit is entered and left."""
    events = trace.recording.passes[name]
    return events.index(Boundary(first, unit)), events.index(Boundary(last, unit))


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
    assert len(freed) <= 1, "a block has several inputs"
    return bool(freed)
