"""A trace at prime dimensions as it is written: sizes as numbers in a table, events by layers, each
as short as what rises as high and ends as high, whatever the sizes.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ptrain.derivation.tables import MARKS
from ptrain.models.trace import Born, Completion, Died, Event, Recording
from ptrain.models.units import Units
from ptrain.timeline import Boundary, Mark
from ptrain.traces.settings import Coded, TableWriter

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
        assert all(other in (size, 2 * size) for other in wider), "as wide, or twice"
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
        assert not others, f"layer {layer} has events of {others}"
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
                assert not freed, "no built-in model's gradient is copied from what goes at once"
                name = parameter.replace(f"{layer}.", "blocks.*.") if layer else parameter
                return [name, self.size(storage), int(cloned)]

    def layers(self, name: str) -> list[Coded]:
        """Return a pass layer by layer, in its own order: what comes before the first is the
        first's, what comes after the last the last's."""
        parts = self.split(name)
        return [self.coded(events, layer) for layer, events in parts]

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
