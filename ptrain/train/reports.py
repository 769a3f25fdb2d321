"""Steps that are launched and not yet written down: where the host runs ahead of its device, the
last one; elsewhere none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from signal import Signals
from types import TracebackType
from typing import Self

from ptrain.errors import TrainingStopped
from ptrain.report.routing import LayerRouting
from ptrain.rooms.queue import Milestone
from ptrain.train.finite import Guard
from ptrain.train.journal import Journal, StepReport
from ptrain.train.look import Look, StepFigures


@dataclass(frozen=True, slots=True)
class Launched:
    """A step (from 0) whose update is launched. The device does it between two marks; `seen` is
    what `Journal.seen` gave."""

    step: int
    rate: float
    look: Look
    span: tuple[Milestone, Milestone]
    routing: Sequence[LayerRouting]
    seen: Mapping[str, float]


class Reports:
    """Of one training: each step is judged and written down once, in order, when its figures are
    there. All ranks see the same figures, and so call the same at the same time."""

    def __init__(
        self,
        guard: Guard,
        journal: Journal,
        judge: Callable[[int, float, float | None], None],
        *,
        most: int,
    ) -> None:
        """`most`: steps that may wait while the next one is launched."""
        self._guard, self._journal, self._judge, self._most = guard, journal, judge, most
        self._waiting: deque[Launched] = deque()
        self.loss: float | None = None  # of the last step that was written down
        self.interrupt: Signals | None = None  # that was seen so far

    def add(self, launched: Launched) -> None:
        """Take a step, and write down those before it that may not wait any longer, or it too.
        Raises TrainingStopped, on all ranks alike, where one of them is not sound."""
        self._waiting.append(launched)
        self._write(self._most)

    def settle(self) -> None:
        """Wait for those that were launched, and write them down. Raises as `add` does."""
        self._write(0)

    def _write(self, left: int) -> None:
        while len(self._waiting) > left:
            launched = self._waiting.popleft()
            figures = self._guard.figures(launched.step, launched.look)
            self._write_down(launched, figures)
            self._judge(launched.step, figures.loss, figures.gradient_norm)

    def _write_down(self, launched: Launched, figures: StepFigures) -> None:
        began, ended = launched.span
        ended.wait()
        seconds, known = ended.seconds_since(began), (launched.routing, launched.seen)
        self._journal.step(StepReport(launched.step + 1, figures, launched.rate, seconds, *known))
        self.loss = figures.loss
        self.interrupt = self.interrupt or figures.interrupt

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Whatever ends a training, a sound step that the device was done with is written down;
        where all ranks stop alike, the device is waited for."""
        waits = isinstance(error, TrainingStopped)
        with suppress(RuntimeError, OSError):  # of a device that is lost, of a disk that is full
            while self._waiting and (waits or self._waiting[0].span[1].is_passed):
                launched = self._waiting.popleft()
                if (figures := launched.look.figures()).is_sound:
                    self._write_down(launched, figures)
