"""Make the tables of a built-in model's passes (of the full model and of its first, a middle and
its last stage), and of one block by its way to keep activations.

A trace at prime dimensions is encoded as a table of sizes and lists of events by layer. Event lists
are as short as possible: they keep only the peaks and the final level of allocation, for any sizes.
A pass over one layer is stored as `only`, a pass over three as `begin`, `block` and `end`. In
passes over more layers the block repeats, which is checked with four layers. Each of these is
stored as segments: before the layer's boundaries, the layer, and after it. Segments are shared, so
a block is stored once if it is the same everywhere. Computation comes from the same traces
(`settings.WorkWriter`). The table of blocks has the computation of a block; the table of passes has
that before and after the blocks.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from ptrain.derivation.blocks import VARIANTS
from ptrain.derivation.tables import (
    MARKS,
    Place,
    Setting,
)
from ptrain.models.kernels import kernels_of
from ptrain.models.trace import Event, GradientComplete, Recording, StorageAllocated, StorageFreed
from ptrain.models.units import Units
from ptrain.spec.activations import PLAIN, ActivationMode
from ptrain.spec.model import Attention
from ptrain.spec.placement import Tier
from ptrain.steps.step import Keep
from ptrain.timeline import Boundary, Mark
from ptrain.traces.layer_works import LayerWorks, by_layer, layer_bounds
from ptrain.traces.settings import (
    DTYPES,
    Coded,
    TableWriter,
    WorkWriter,
    cuts_of,
    model_of,
    part_of,
    smallest_units,
    symbols,
)

_SIGNS = {mark: sign for sign, mark in MARKS.items()}
_OWN_MARKS = [f"{sign}*" for sign in MARKS]
_OTHER = re.compile(r"blocks\.(?!\*)|\*\d")  # the name of another block than the current layer's


class CodedTrace:
    """A recording whose sizes are encoded, with recordings in wider dtypes for comparison.

    A size that doubles with the dtype follows the compute dtype. `values` are the primes of the
    dimensions.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        units: Units,
        values: Mapping[str, int],
        writer: TableWriter,
    ) -> None:
        self.recording, *self._wider = recordings
        self.widest = recordings[-1]  # its compute dtype differs from fp32
        self.units, self.values, self.writer = units, values, writer
        for other in self._wider:
            assert _event_course(self.recording) == _event_course(other), (
                "operators depend on the dtype"
            )

    def size(self, storage: int) -> int:
        """Return the number of a storage's size in the table."""
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

    def encode_layer(self, events: Iterable[Event], layer: int) -> Coded:
        """Return a layer's events as JSON in the shortest form; `*` replaces the layer's index.

        Args:
            events: The layer's events, with storages by number.
            layer: Index of the layer in the model.
        """
        ordered = events if self.recording.output is None else _sort_completions(events)
        written = self.in_full(ordered, f"blocks.{layer}")
        names = [event[0] if isinstance(event, list) else event for event in written]
        others = [name for name in names if isinstance(name, str) and _OTHER.search(name)]
        assert not others, f"layer {layer} has events of the layers {others}"
        return _shorten_events(written)

    def in_full(self, events: Iterable[Event], layer: str = "") -> Coded:
        """Return all events as JSON, without shortening.

        Args:
            events: Events of any part of a pass.
            layer: Name of a layer, which `*` replaces in the events. Empty replaces nothing.
        """
        return [self._encode_event(event, layer) for event in events]

    def _encode_event(self, event: Event, layer: str) -> object:
        """Return one event as JSON."""
        match event:
            case StorageAllocated(storage):
                return self.size(storage) + 1
            case StorageFreed(storage):
                return -self.size(storage) - 1
            case Boundary(mark, unit):
                name = self.units[unit][0]
                return _SIGNS[mark] + (name.replace(layer, "*") if layer else name)
            case GradientComplete(parameter, storage, cloned, freed):
                assert not freed, "a gradient is copied from a tensor that is freed at once"
                name = parameter.replace(f"{layer}.", "blocks.*.") if layer else parameter
                return [name, self.size(storage), int(cloned)]

    def layers(self, name: str) -> list[Coded]:
        """Return a pass by layer, in its order.

        Events before the first layer belong to the first, events after the last layer to the last.
        """
        return [self.encode_layer(events, layer) for layer, events in self.split(name)]

    def split(self, name: str) -> list[tuple[int, Sequence[Event]]]:
        """Return the layers of a pass with their events."""
        events = self.recording.passes[name]
        blocks = {int(unit[0].split(".")[1]): place for place, unit in enumerate(self.units)
                  if unit[0].startswith("blocks.") and unit[0].count(".") == 1}  # fmt: skip
        layers = sorted(blocks, reverse=name in ("backward", "input"))
        names, numbers = zip(*((f"blocks.{n}", blocks[n]) for n in sorted(blocks)), strict=True)
        bounds = layer_bounds(name, events, numbers, names)
        assert bounds is not None, "the layers do not run one after the other"
        is_end = name == "weight"  # its bounds are the last events of layers, not the first ones
        starts = [0, *(place + is_end for place in bounds[1:-1])]
        spans = zip(layers, starts, [*starts[1:], len(events)], strict=True)
        return [(layer, events[start:end]) for layer, start, end in spans]


def _event_course(recording: Recording) -> list[object]:
    """Return the part of a recording that does not depend on the dtype."""
    return [
        (event.id, event.operator) if isinstance(event, StorageAllocated) else event
        for events in recording.passes.values()
        for event in _sort_completions(events)
    ]


def _sort_completions(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events, with gradients that complete together in the order of their names.

    Autograd runs a stage's backward for given inputs and parameters, where gradients have no fixed
    order.
    """
    for is_complete, group in itertools.groupby(events, lambda e: isinstance(e, GradientComplete)):
        together = list(group)
        if is_complete:
            together.sort(key=lambda event: event.parameter)  # type: ignore[union-attr]
        yield from together


def _shorten_events(events: Sequence[object]) -> Coded:
    """Return events with the same peaks and end level for any sizes.

    Between two boundaries only levels that no other level contains are kept.
    """
    shortened: Coded = []
    for is_size, group in itertools.groupby(events, lambda event: isinstance(event, int)):
        together = list(group)
        shortened += _kept_changes(together) if is_size else together  # type: ignore[arg-type]
    return shortened


def _kept_changes(deltas: Sequence[int]) -> Iterator[int]:
    """Yield the size changes between the kept levels; frees come before allocations."""
    levels = [Counter[int]()]
    for delta in deltas:
        level = Counter(levels[-1])
        level[abs(delta)] += 1 if delta > 0 else -1
        levels.append(level)
    now = levels[0]
    for place, level in enumerate(levels[1:], 1):
        is_last = place == len(levels) - 1
        # A level that another one contains is never the peak, whatever the sizes are. Equal levels
        # are kept once.
        earlier = any(_contains(other, level) for other in levels[:place])
        later = any(
            _contains(other, level) and not _contains(level, other) for other in levels[place:]
        )
        if is_last or not (earlier or later):
            yield from _level_changes(now, level)
            now = level


def _contains(other: Counter[int], level: Counter[int]) -> bool:
    """Return True if a level has at least as many storages of each size as another."""
    return all(other[number] >= level[number] for number in {*other, *level})


def _level_changes(now: Counter[int], then: Counter[int]) -> Iterator[int]:
    """Yield the frees, then the allocations that lead from one level to another."""
    # Frees first: the path between two kept levels then never exceeds the higher one.
    change = {number: then[number] - now[number] for number in sorted({*now, *then})}
    for number, more in change.items():
        yield from [-number] * -more
    for number, more in change.items():
        yield from [number] * more


FEW = 3  # layers: the fewest with begin, block and end
_STAGES = (Place.FIRST, Place.MIDDLE, Place.LAST)


def split_segments(part: Coded) -> Iterator[Coded]:
    """Yield the segments of a layer's events: before its boundaries, the layer, and after it.

    The weight half has no boundaries and is one segment.
    """
    own = [place for place, event in enumerate(part) if event in _OWN_MARKS]
    bounds = [0, own[0], own[-1] + 1, len(part)] if own else [0, len(part)]
    yield from (part[start:end] for start, end in itertools.pairwise(bounds) if start < end)


def trace_model(
    setting: Setting,
    writer: TableWriter,
    mesh: DeviceMesh | None = None,
    kept: ActivationMode = PLAIN,
) -> CodedTrace:
    """Return the trace of a setting's full model, with this way to keep activations.

    Args:
        setting: The setting.
        writer: Collects the sizes.
        mesh: The mesh of sharded operators, from `fake_mesh`.
        kept: How each block keeps its activations.
    """
    units = smallest_units(setting)
    blocks = tuple((f"blocks.{index}", kept) for index in range(setting.shape.layers))
    part = part_of(setting, mesh, None if kept.is_plain else Keep(blocks=blocks))
    with kernels_of(is_for_cuda=setting.is_for_cuda):
        recordings = [
            *(part.traces(model_of(setting, dtype), units)[0] for dtype in DTYPES[setting.compute]),
        ]
    return CodedTrace(recordings, units, symbols(setting), writer)


def trace_stage(
    setting: Setting,
    writer: TableWriter,
    mesh: DeviceMesh | None,
    place: Place,
    layers: int,
    *,
    in_halves: bool = True,
) -> list[CodedTrace]:
    """Return the traces of a stage: full backward, and halves except for the first stage.

    Args:
        setting: The setting.
        writer: Collects the sizes.
        mesh: The mesh of sharded operators, from `fake_mesh`.
        place: The stage; each of the others has one layer.
        layers: The number of its layers.
        in_halves: False to trace the full backward pass only.
    """
    # The other stages are not run. One layer each is the smallest model that has them.
    counts = tuple(layers if other is place else 1 for other in _STAGES)
    setting = replace(setting, shape=replace(setting.shape, layers=sum(counts)))
    cuts, index = cuts_of(setting, counts), _STAGES.index(place)
    units = smallest_units(setting, cuts.stages[index])
    part = part_of(setting, mesh, has_learnt=layers > 1)
    with kernels_of(is_for_cuda=setting.is_for_cuda):
        by_dtype: list[list[Recording]] = [
            part.trace_stage(
                model_of(setting, dtype, is_meta=True),
                units,
                cuts,
                index,
                in_halves=in_halves and index > 0,
            )
            for dtype in DTYPES[setting.compute]
        ]
    values = symbols(setting)
    return [
        CodedTrace(recordings, units, values, writer) for recordings in zip(*by_dtype, strict=True)
    ]


def with_layers(setting: Setting, layers: int, attention: Attention = Attention.SDPA) -> Setting:
    """Return a setting whose model has another number of layers, with this attention.

    Args:
        setting: The setting, which is not changed.
        layers: Number of layers of the new model.
        attention: Attention implementation of the new model.
    """
    return replace(setting, shape=replace(setting.shape, attention=attention, layers=layers))


class TableBuilder:
    """A table of one setting under construction."""

    def __init__(self, setting: Setting, mesh: DeviceMesh | None = None) -> None:
        self.setting, self.mesh = setting, mesh
        self.writer, self.works = TableWriter(tuple(symbols(setting))), WorkWriter(setting)


class PassTable(TableBuilder):
    """A table of passes under construction."""

    def build(self, several: int = FEW) -> dict[str, object]:
        """Return the table as JSON.

        Args:
            several: Number of layers of the larger trace, which is compared with a trace of one
                layer. A full model has one more.
        """
        content: dict[str, object] = {}
        works: dict[str, object] = {}
        for place in Place:
            few = self._traces(place, 1)
            # a full model has one more layer, so that two inner blocks are compared
            many = self._traces(place, several + (place is Place.ALONE))
            content[place] = self._place(few, many)
            works |= self._works(place, few)
        return self.writer.table(**content, work=self.works.table(**works))

    def _traces(self, place: Place, layers: int) -> list[CodedTrace]:
        """Return the traces of a place; a stage has several passes."""
        if place is Place.ALONE:
            return [trace_model(with_layers(self.setting, layers), self.writer, self.mesh)]
        return trace_stage(self.setting, self.writer, self.mesh, place, layers)

    def _place(self, few: list[CodedTrace], many: list[CodedTrace]) -> dict[str, object]:
        """Return the entry of one place in the table."""
        less, more = (
            {name: trace.layers(name) for trace in traces for name in trace.recording.passes}
            for traces in (few, many)
        )
        passes = {name: self._parts(less[name], more[name]) for name in less}
        whole = many[0]
        if whole.recording.output is None:
            return dict[str, object](passes)
        return {**passes, "output": whole.size(whole.recording.output)}

    def _parts(self, few: Sequence[Coded], many: Sequence[Coded]) -> list[list[int]]:
        """Return the segments' numbers of `only`, `begin`, `block` and `end`."""
        (only,), (begin, *blocks, end) = few, many
        written = only, begin, common_entry(blocks), end
        return [[*map(self.writer.part, split_segments(part))] for part in written]

    def _works(self, place: Place, few: list[CodedTrace]) -> dict[str, object]:
        """Return the computation before and after the blocks.

        Stages compute the same as an untied full model, except the halves of a last stage.
        """
        works = works_by_layer(few[-1])
        if place is Place.ALONE:
            passes = {"front": works.front, "behind": works.behind}
        elif place is Place.LAST and not self.setting.shape.tied:
            passes = {"halves": works.behind}
        else:
            passes = {}
        return {name: self.works.passes(computed) for name, computed in passes.items()}


def works_by_layer(trace: CodedTrace) -> LayerWorks:
    """Return the computation of a trace by layer."""
    blocks = [
        unit for (unit,) in trace.units if unit.startswith("blocks.") and unit.count(".") == 1
    ]
    works = by_layer(trace.widest, trace.units, sorted(blocks))
    assert works is not None, "the blocks are not units"
    return works


ATTENTIONS = (Attention.SDPA, Attention.EAGER)
LAYERS = 4  # the first, two that repeat, and the last

Did = TypeVar("Did")


class BlockTable(TableBuilder):
    """A table of blocks under construction; events and computation come from the same traces."""

    def build(self) -> dict[str, object]:
        """Return the table as JSON. Backward halves are stored for plain blocks only."""
        content: dict[str, dict[str, object]] = {attention.value: {} for attention in ATTENTIONS}
        works: dict[str, Any] = {attention.value: {} for attention in ATTENTIONS}
        for attention, (name, kept) in itertools.product(ATTENTIONS, VARIANTS):
            setting = with_layers(self.setting, LAYERS, attention)
            trace = trace_model(setting, self.writer, self.mesh, kept)
            content[attention.value][name] = self._events(trace)
            if kept.tier is Tier.DEVICE:  # copies between tiers are no operators
                passes = self.works.passes(common_entry(works_by_layer(trace).layers))
                works[attention.value][name] = passes
        *_, halves = trace_stage(self.setting, self.writer, self.mesh, Place.MIDDLE, FEW)
        # The weight half has no boundaries, so work of one layer may be recorded with the next.
        # With three layers the middle one has the work of exactly one.
        _, middle, _ = works_by_layer(halves).layers
        works["halves"] = self.works.passes(middle)
        return self.writer.table(**content, work=self.works.table(**works))

    def _events(self, trace: CodedTrace) -> dict[str, object]:
        """Return the events of a block, and the storages that it moves."""
        return {
            "forward": self.writer.part(common_entry(trace.layers("forward")[1:-1])),
            "backward": self.writer.part(common_entry(trace.layers("backward")[1:-1])),
            "moved": self.writer.part(_moved_sizes(trace)),
            "frees_input": frees_input(trace),
        }


def common_entry(layers: Sequence[Did]) -> Did:
    """Return the common entry of layers that must be equal."""
    first, *others = layers
    assert all(other == first for other in others), "the blocks do not repeat"
    return first


def _entry_index(trace: CodedTrace, block: int) -> int:
    """Return the index in forward at which a block starts."""
    unit = trace.units.index((f"blocks.{block}",))
    return trace.recording.forward.index(Boundary(Mark.ENTER, unit))


def _moved_sizes(trace: CodedTrace) -> Coded:
    """Return the sizes of the storages that a block's forward moves off the device."""
    counts = Counter(trace.size(number) for number, _ in trace.recording.moved)
    # Storages that leave the device are listed for the full model, not by layer.
    assert all(times % LAYERS == 0 for times in counts.values()), "the blocks do not repeat"
    return [size for size, times in counts.items() for _ in range(times // LAYERS)]


def frees_input(trace: CodedTrace) -> bool:
    """Return True if a block's input is freed before the next block starts.

    Seen at the second block: it then frees one storage that is older than the block.
    """
    events, start, end = trace.recording.forward, _entry_index(trace, 1), _entry_index(trace, 2)
    older = {event.id for event in events[:start] if isinstance(event, StorageAllocated)}
    freed = [
        event
        for event in events[start:end]
        if isinstance(event, StorageFreed) and event.id in older
    ]
    assert len(freed) <= 1, "a block has several inputs"
    return bool(freed)
