"""Makes the tables of a stage's passes.

Like `traces.model_tables` and `traces.tensor_tables`, at prime shapes, for the first stage, one in
the middle and the last one. A pass is `begin`, `block` for each layer but two, and `end`; that of
one layer is `only`. Equal parts are written once, and named by their place.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from ptrain.axes.pipeline.run.cut import part_of
from ptrain.axes.pipeline.stage_facts import TIED, stage_roles
from ptrain.axes.tensor.run.apply import parallelize, whole_loss
from ptrain.facts.parameters import facts
from ptrain.facts.stages import ENDS, Stage, cut, layers_of
from ptrain.models.build import build
from ptrain.models.initialize import cast
from ptrain.models.trace import Completion, Event
from ptrain.models.units import Units, unit_modules
from ptrain.rooms.registry import Registry
from ptrain.spec.model import Family, ModelShape
from ptrain.steps.step import Parallelize
from ptrain.timeline import Boundary, Mark
from ptrain.traces import model_tables as tables
from ptrain.traces import tensor_tables
from ptrain.traces.model_tables import DTYPES, SMALLEST, Make
from ptrain.traces.stage_trace import PassEvents, TracedStage, record_passes
from ptrain.traces.table_format import TableWriter, coded, course
from ptrain.traces.tensor_tables import KINDS, TP, CutKind

PLACES = ("first", "middle", "last")
MOST = 3  # layers: with as many, begin, block and end are all there


@dataclass(frozen=True)
class Case:
    """A stage of so many layers, at its place."""

    place: str
    layers: int
    in_halves: bool = False

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self.layers if place == self.place else 1 for place in PLACES)


@dataclass(frozen=True)
class TableSetting:
    """What the operators of a table depend on."""

    family: Family
    tied: bool
    special: bool
    precision: str
    batch: int
    kind: CutKind | None = None
    is_for_cuda: bool = False

    @property
    def shape(self) -> ModelShape:
        if self.kind is None:
            return tables._shape(self.family, tied=self.tied, special=self.special)
        return tensor_tables.shape_of(self.family, self.kind, tied=self.tied, special=self.special)

    @property
    def sequence(self) -> int:
        """Tokens of this rank."""
        return tables.SEQUENCE if self.kind is None else tensor_tables.SEQUENCE

    @property
    def symbols(self) -> dict[str, int]:
        if self.kind is None:
            primes = {**tables.PRIMES[self.family], **tables.COMMON}
        else:
            primes = tensor_tables.symbols_of(self.family, self.kind)
        if self.shape.family is Family.LLAMA and self.shape.heads == self.shape.kv_heads:
            del primes["repeats"]
        if self.batch == 1:
            del primes["batch"]
        return primes


def stages_of(shape: ModelShape, counts: Sequence[int], sequence: int) -> tuple[Stage, ...]:
    """A built-in model's, with as many layers each."""
    model = layers_of(
        facts(shape, sequence).units,
        front=ENDS.front,
        tied=(TIED,) if shape.tied else (),
    )
    return cut(model, counts)


def smallest_units(part: torch.nn.Module, stage: Stage) -> Units:
    """Those that a unit of any size begins and ends with."""
    *inner, root = unit_modules(part, SMALLEST)
    shared = [(tensor.rpartition(".")[0],) for tensor in stage.shared]
    return (*inner, *shared, root)


def traced(
    setting: TableSetting, case: Case, dtype: torch.dtype, mesh: DeviceMesh | None
) -> tuple[TracedStage, AbstractContextManager[None]]:
    """Return the stage, and what surrounds its passes."""
    step = setting.kind.step(setting.shape) if setting.kind else None
    batch, tokens = setting.batch, setting.sequence
    whole = tokens * TP if step is not None and step.is_sequence else tokens
    shape = replace(setting.shape, layers=sum(case.counts))
    with torch.device("meta"):
        model = build(shape, sequence=whole)
    cast(model, dtype)
    stages = stages_of(shape, case.counts, whole)
    stage = stages[PLACES.index(case.place)]
    part = part_of(model, stages, stage.index, ENDS)
    if step is not None and mesh is not None:
        roles = stage_roles(step.roles, stage, len(stages))
        parallelize(part, replace(step, roles=roles), mesh, Registry())
    part.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.zero_()  # no size depends on it
    samples = torch.zeros(batch, whole + 1, dtype=torch.int64)

    def loss(logits: Tensor) -> Tensor:
        return whole_loss(logits, samples[:, 1:]) / (batch * whole)

    traced_stage = TracedStage(
        module=part,
        units=smallest_units(part, stage),
        hidden=torch.zeros(batch, tokens, shape.hidden, dtype=dtype),
        given=samples[:, :-1] if stage.index == 0 else None,
        loss=loss if stage.index == len(stages) - 1 else None,
    )
    return traced_stage, loss_parallel() if _is_parallel(step) else nullcontext()


def _is_parallel(step: Parallelize | None) -> bool:
    return step is not None and step.loss_parallel


def passes_of(
    setting: TableSetting, case: Case, dtype: torch.dtype, mesh: DeviceMesh | None
) -> tuple[PassEvents, TracedStage]:
    """Return the passes of a stage, and the stage; of one cut layer those of the second time, when
    torch has learnt what each operator is cut to."""
    stage, around = traced(setting, case, dtype, mesh)
    with around:
        if mesh is not None and case.layers == 1:
            record_passes(stage, in_halves=case.in_halves)
        return record_passes(stage, in_halves=case.in_halves), stage


class StageTableBuilder:
    """One table in the making: sizes and parts are numbered as they come."""

    def __init__(self, setting: TableSetting, mesh: DeviceMesh | None = None) -> None:
        self.setting, self.mesh = setting, mesh
        self.symbols = setting.symbols
        self.writer = TableWriter(tuple(self.symbols))
        self.follows: dict[int, bool] = {}
        self.ambiguous = False  # whether one size in bytes follows here and does not there

    def build(self, most: int = MOST) -> dict[str, object]:
        """Return the tables as JSON."""
        by_place: dict[str, dict[str, object]] = {place: {} for place in PLACES}
        for place, in_halves in itertools.product(PLACES, (False, True)):
            if not (in_halves and place == PLACES[0]):
                by_place[place] |= self._passes(place, in_halves, most)
        return self.writer.table(**by_place)

    def _passes(self, place: str, in_halves: bool, most: int) -> dict[str, object]:
        one, output = self._encoded(Case(place, 1, in_halves))
        several, _ = self._encoded(Case(place, most, in_halves))
        parts: dict[str, object] = {"output": output}
        for name, (only,) in one.items():
            begin, *blocks, end = several[name]
            assert all(block == blocks[0] for block in blocks), "the layers do not repeat"
            listed = (only, begin, blocks[0], end)
            parts[name] = [self.writer.part(part) for part in listed]
        return parts

    def _encoded(self, case: Case) -> tuple[dict[str, list[list[object]]], int]:
        """Return every pass as JSON, layer by layer in the order of the pass, and the index of the
        output's size."""
        dtypes = DTYPES[self.setting.precision]
        learns = case.layers == 1 or self.ambiguous
        (first, stage), *others = (
            passes_of(self.setting, case, dtype, self.mesh)
            for dtype in (dtypes if learns else dtypes[:1])
        )
        size = self._sizes(first, [other for other, _ in others])
        start = PLACES.index(case.place)  # one layer on each stage before
        passes = {}
        for name, events in first.events.items():
            layers = range(start, start + case.layers)
            order = layers[::-1] if name in ("backward", "input") else layers
            parts = [*_layers(name, events, stage.units, order)]
            passes[name] = [
                _shortest(coded(_sorted(part), size.__getitem__, stage.units, layer))
                for layer, part in zip(order, parts, strict=True)
            ]
        return passes, size[first.output]

    def _sizes(self, first: PassEvents, others: Sequence[PassEvents]) -> dict[int, int]:
        """Return the index of each storage's size. Which sizes follow the compute dtype's is learnt
        where passes of two dtypes are given."""
        for other in others:
            assert _shape(first) == _shape(other), "the passes depend on the dtype"
        indices = {}
        for number, size in first.sizes.items():
            if others:
                follows = all(_follows(first, other, number) for other in others)
                self.ambiguous |= self.follows.setdefault(size, follows) is not follows
            else:
                follows = self.follows.get(size, False)
            indices[number] = self.writer.size(
                size,
                self.symbols,
                follows=follows,
                is_statistics=number in first.statistics,
            )
        return indices


def _follows(first: PassEvents, other: PassEvents, number: int) -> bool:
    """Whether a storage's size doubles with the compute dtype's."""
    size, twice = first.sizes[number], other.sizes[number]
    assert twice in (size, 2 * size)
    return size > 0 and twice == 2 * size


def _shape(passes: PassEvents) -> list[object]:
    return [row for events in passes.events.values() for row in course(_sorted(events))]


def _sorted(events: Sequence[Event]) -> list[Event]:
    """Sort by parameter the gradients that are complete at once, which have no order of their
    own."""
    ordered: list[Event] = []
    for is_complete, group in itertools.groupby(events, lambda e: isinstance(e, Completion)):
        together = list(group)
        if is_complete:
            together.sort(key=lambda event: event.parameter)  # type: ignore[union-attr]
        ordered += together
    return ordered


def _layers(
    name: str, events: Sequence[Event], units: Units, order: Sequence[int]
) -> Iterator[Sequence[Event]]:
    """A part for each layer; what comes before the first is the first's, what comes after the last
    the last's. The halves of weights have no boundaries: there a layer ends with its last
    gradient."""
    if name == "weight":
        ends = [
            1 + max(i for i, e in enumerate(events) if _is_of(e, f"blocks.{layer}."))
            for layer in order
        ]
        starts = [0, *ends[:-1]]
    else:
        mark = Mark.ENTER if name == "forward" else Mark.PRE_BACKWARD
        starts = [
            events.index(Boundary(mark, units.index((f"blocks.{layer}",)))) for layer in order
        ]
        starts[0] = 0
    for start, end in zip(starts, [*starts[1:], len(events)], strict=True):
        yield events[start:end]


def _shortest(events: Sequence[object]) -> list[object]:
    """Return events that rise as high and end as high, whatever the sizes: between two boundaries
    only levels count that no other one contains."""
    shortened: list[object] = []
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
            yield from _between_levels(now, level)
            now = level


def _contains(other: Counter[int], level: Counter[int]) -> bool:
    return all(other[number] >= level[number] for number in {*other, *level})


def _between_levels(now: Counter[int], then: Counter[int]) -> Iterator[int]:
    change = {number: then[number] - now[number] for number in sorted({*now, *then})}
    for number, more in change.items():
        yield from [-number] * -more
    for number, more in change.items():
        yield from [number] * more


def _is_of(event: Event, prefix: str) -> bool:
    return isinstance(event, Completion) and event.parameter.startswith(prefix)


def settings() -> Iterator[tuple[str, TableSetting, tuple[TableSetting, ...]]]:
    """Yield the name of the file, what is not cut over tp, and every way in which it is."""
    choices = itertools.product(Family, (False, True), (False, True), DTYPES, (False, True))
    for family, tied, special, precision, is_one in choices:
        alone, *cut_over_tp = (
            TableSetting(family, tied, special, precision, 1 if is_one else tables.BATCH, kind)
            for kind in (None, *KINDS)
        )
        if not is_one:
            cut_over_tp = [replace(setting, batch=tensor_tables.BATCH) for setting in cut_over_tp]
        yield tables.name(alone.shape, precision, alone.batch), alone, tuple(cut_over_tp)


def whole_tables() -> Iterator[tuple[str, Make]]:
    """Yield the name of every table of stages that are whole, and what makes it."""
    for title, alone, _ in settings():
        yield title, partial(_built, alone)


def cut_tables(mesh: DeviceMesh | None) -> Iterator[tuple[str, Make]]:
    """Yield the same of stages whose operators are cut, of every kind of cut."""
    for title, _, cut_over_tp in settings():
        yield title, partial(_of_every_kind, cut_over_tp, mesh)


def _built(setting: TableSetting, mesh: DeviceMesh | None = None) -> dict[str, object]:
    return StageTableBuilder(setting, mesh).build()


def _of_every_kind(settings: Sequence[TableSetting], mesh: DeviceMesh | None) -> dict[str, object]:
    built = [_built(setting, mesh) for setting in settings]
    return dict(zip((kind.name for kind in KINDS), built, strict=True))
