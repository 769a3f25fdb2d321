"""Which steps' routers are watched: those that have a line of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod

from ptrain.interpreter.program import Program
from ptrain.meters.routing import RoutingMeter, summed
from ptrain.report.routing import LayerRouting, routes, rows
from ptrain.spec.axis import EXPERT_AXES
from ptrain.train.exchange import Exchange
from ptrain.train.journal import is_shown


class RoutingLog:
    """Of one training. A step counts from 0."""

    def __init__(self, program: Program, exchange: Exchange) -> None:
        self._spec, self._exchange = program.spec, exchange
        self._meter = RoutingMeter(program)
        self._last: tuple[int, Sequence[LayerRouting]] | None = None

    @contextmanager
    def around(self, step: int, watch: AbstractContextManager[object]) -> Iterator[None]:
        """A step's context, inside of which its routers are watched where it is due."""
        if not self._is_due(step):
            with watch:
                yield
            return
        with watch, self._meter.watching():
            yield

    def of_step(self, step: int) -> Sequence[LayerRouting]:
        """Return what all ranks counted in a step that is over; nothing where it was not due. All
        ranks call it."""
        if not self._is_due(step):
            return ()
        layers = summed(self._exchange.gather(self._meter.rows()))
        self._last = step, layers
        return layers

    def record(self) -> dict[str, object] | None:
        """Return the step that was watched last, from 1, and its layers; None where none was."""
        if self._last is None:
            return None
        step, layers = self._last
        ranks = prod(self._spec.degree(axis) for axis in EXPERT_AXES)
        return {"step": step + 1, "layers": rows(layers, ranks)}

    def _is_due(self, step: int) -> bool:
        return routes(self._spec) and is_shown(self._spec, step + 1)
