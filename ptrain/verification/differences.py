"""The differences of one rank in a step, and those of all ranks in all steps: what departs from one
device, the first first, and the largest difference of each kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torch import Tensor

from ptrain.report.finding import Departure, Moment, Subject, Way
from ptrain.report.record import Check
from ptrain.verification.compare import at_most
from ptrain.verification.jobs.job import Ranks

Kind: TypeAlias = tuple[Moment, Subject]

_NAMES = {
    (Moment.BATCH, Subject.BATCH): "samples",
    (Moment.FORWARD, Subject.PARAMETERS): "parameters in use",
    (Moment.BACKWARD, Subject.ACTIVATIONS): "gradients of activations",
    (Moment.UPDATE, Subject.PARAMETERS): "parameters after the update",
    (Moment.UPDATE, Subject.OPTIMIZER): "optimizer state",
    (Moment.UPDATE, Subject.AVERAGE): "moving averages",
}


def _name(moment: Moment, subject: Subject) -> str:
    """Return how the check of a kind is called."""
    if moment is Moment.START and subject in (Subject.PARAMETERS, Subject.OPTIMIZER):
        return f"initial {subject}"
    return _NAMES.get((moment, subject), str(subject))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterMove:
    """A parameter's way on this rank: its elements at the start of the run, before and after the
    step, of the reference and of the loop. `sure`: those whose gradients have been more than
    rounding so far."""

    parameter: Tensor
    origin: Tensor
    before: Tensor
    after: Tensor
    run_before: Tensor
    run_after: Tensor
    sure: Tensor

    @property
    def stood_still(self) -> bool:
        return self.run_before.equal(self.run_after)

    @property
    def reference_moved(self) -> bool:
        """Most of the elements of which it is sure: no rounding is why the loop did not."""
        moved = (self.after != self.before) & self.sure
        return 2 * int(moved.sum()) > int(self.sure.sum())


@dataclass(slots=True)
class LargestDifference:
    """The largest difference of a kind, over steps, ranks and tensors."""

    name: str
    tolerance: float
    difference: float = 0.0
    place: str = ""
    count: int = 0

    def see(self, difference: float, place: str, tolerance: float = 0.0) -> None:
        self.count += 1
        self.tolerance = max(self.tolerance, tolerance)
        if not difference <= self.difference:
            self.difference, self.place = difference, place

    def check(self, first: Departure | None = None) -> Check:
        """Return the check that nothing of the kind departs; `first` is what does."""
        why = f"differs by {self.difference:.3g} (relative) at {self.place}"
        check = at_most(self.name, self.difference, self.tolerance, why)
        if first is None:
            return check
        words = f" ({first.told})" if first.told else ""
        why = f"departs at {first.place}, step {first.step}, rank {first.rank}{words}"
        return replace(check, holds=False, why=why)


@dataclass(slots=True, kw_only=True)
class Differences:
    """The differences of one rank in one step."""

    step: int
    rank: int
    departures: list[Departure] = field(default_factory=list)
    courses: dict[str, ParameterMove] = field(default_factory=dict)
    largest: dict[Kind, LargestDifference] = field(default_factory=dict)

    def see(self, kind: Kind, difference: float, tolerance: float, name: str = "") -> None:
        """Keep the largest difference of a kind."""
        largest = self.largest.setdefault(kind, LargestDifference(_name(*kind), tolerance))
        largest.see(difference, name, tolerance)

    def most(self, moment: Moment, subject: Subject) -> float:
        """Return the largest difference of a kind."""
        largest = self.largest.get((moment, subject))
        return largest.difference if largest else 0.0

    def compare(
        self,
        moment: Moment,
        subject: Subject,
        name: str,
        *,
        difference: float,
        tolerance: float,
        way: Way = Way.VALUE,
        index: int = 0,
        words: str = "",
    ) -> None:
        """See a difference; add a departure where it is beyond the tolerance, or not one of
        values."""
        self.see((moment, subject), difference, tolerance, name)
        if way is not Way.VALUE or difference > tolerance:
            self.departures.append(
                Departure(
                    step=self.step, moment=moment, subject=subject, name=name, rank=self.rank,
                    way=way, difference=difference, tolerance=tolerance, index=index, told=words,
                )
            )  # fmt: skip

    def add(
        self, moment: Moment, subject: Subject, name: str, words: str, way: Way = Way.VALUE
    ) -> None:
        """Add a departure of something that is no tensor, or that one side alone has."""
        self.see((moment, subject), math.inf, 0.0, name)
        self.departures.append(
            Departure(
                step=self.step, moment=moment, subject=subject, name=name, rank=self.rank, way=way,
                told=words,
            )
        )  # fmt: skip


_OF_RANK = tuple[dict[str, int], list[Departure], dict[Kind, LargestDifference]]


class AllDifferences:
    """What all ranks see, step after step: `departures`, the first first, the same on all ranks.

    `parameters`: in the order in which the model has them. A rank tells of so many departures of
    a kind at `most`."""

    def __init__(
        self, ranks: Ranks, parameters: Iterable[str] = (), *, most: int | None = None
    ) -> None:
        self.ranks = ranks
        self.departures: list[Departure] = []
        self._largest: dict[Kind, LargestDifference] = {}
        self._parameters = {name: place for place, name in enumerate(parameters)}
        self._modules: dict[str, int] = {}
        self._most = most

    def take(self, own: Differences, modules: Mapping[str, int] | None = None) -> bool:
        """Add every rank's differences of a step; `modules` are places along the model. Return
        whether anything departs. All ranks call it."""
        self._modules |= modules or {}
        own.departures = self._first_of_each_kind(own.departures)
        departures = list(self.departures)
        mine = self._modules, own.departures, own.largest
        for places, its, largest in self.ranks.gather(mine, _OF_RANK):
            self._modules |= places
            departures += its
            for kind, of_rank in largest.items():
                self._see(kind, of_rank, own.step)
        self.departures = []
        self.add(departures)
        return bool(self.departures)

    def add(self, departures: Iterable[Departure]) -> None:
        """Add what is known on all ranks."""
        self.departures = sorted([*self.departures, *departures], key=self._when)

    @property
    def first(self) -> list[Departure]:
        """Those of the earliest step and moment."""
        return [its for its in self.departures if its.when == self.departures[0].when]

    def checks(self, since: Moment = Moment.START) -> Iterator[Check]:
        """Yield a check of each kind since a moment of the step, the start's counters and buffers
        with those of later; copies that are not alike are no difference from one device."""
        departures = [its for its in self.departures if not its.between]
        first = {_name(its.moment, its.subject): its for its in reversed(departures)}
        rows: dict[str, LargestDifference] = {}
        for its in (its for (moment, _), its in self._largest.items() if moment >= since):
            rows[its.name] = max(rows.get(its.name, its), its, key=lambda row: row.difference)
        yield from (largest.check(first.get(name)) for name, largest in rows.items())

    def _see(self, kind: Kind, of_rank: LargestDifference, step: int) -> None:
        largest = self._largest.setdefault(kind, LargestDifference(of_rank.name, 0.0))
        largest.see(of_rank.difference, f"{of_rank.place}, step {step}", of_rank.tolerance)

    def _first_of_each_kind(self, departures: Iterable[Departure]) -> list[Departure]:
        groups: dict[Kind, list[Departure]] = {}
        for departure in sorted(departures, key=self._when):
            groups.setdefault((departure.moment, departure.subject), []).append(departure)
        return [departure for group in groups.values() for departure in group[: self._most]]

    def _when(self, departure: Departure) -> tuple[int, ...]:
        """Parameters that are used stand before what their module makes of them."""
        is_used = departure.moment is Moment.FORWARD and departure.subject is Subject.PARAMETERS
        module = departure.name.rpartition(".")[0] if is_used else departure.name
        place = self._parameters.get(departure.name, len(self._modules))
        place = self._modules.get(module, place)
        is_loss = departure.subject is Subject.LOSS
        return (
            *departure.when, int(is_loss), departure.index,
            -place if departure.moment is Moment.BACKWARD else place, not is_used, departure.rank,
        )  # fmt: skip
