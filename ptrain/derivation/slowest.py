"""Of several ranks that one clock plays, the one that decides."""

from __future__ import annotations

from ptrain.derivation.clock import Clock
from ptrain.derivation.clock_state import ClockState


class Slowest:
    """Of what different ranks do from a moment on, one after the other on one clock, that which
    takes longest stays. Without a clock nothing happens."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._start = clock.moment() if clock else None
        self._end: ClockState | None = None
        self._most = -1.0

    def begin(self) -> None:
        """A rank starts where all do."""
        if self._clock is not None and self._start is not None:
            self._clock.back_to(self._start)

    def end(self) -> None:
        """It is there."""
        if self._clock is not None and self._clock.seconds > self._most:
            self._most, self._end = self._clock.seconds, self._clock.moment()

    def stay(self) -> None:
        """No other comes."""
        if self._clock is not None and self._end is not None:
            self._clock.back_to(self._end)
