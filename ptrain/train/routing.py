"""Which steps' routers are watched: those that have a line of their own, and those that are
measured, whose counts by layer, rank and micro-batch are written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from ptrain.interpreter.program import Program
from ptrain.meters.routing import RoutingMeter, histogram, summed
from ptrain.report.routing import LayerRouting, routes, rows
from ptrain.spec.layout import ranks_over
from ptrain.spec.routing import Histogram
from ptrain.train.exchange import Exchange
from ptrain.train.folder import RunFolder, write_text
from ptrain.train.journal import is_shown


class RoutingLog:
    """Of one training. A step counts from 0. `is_measured` says of a step whether the meters run in
    it; `counted` are the counts of those that did, by step."""

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        folder: RunFolder,
        is_measured: Callable[[int], bool],
    ) -> None:
        self._spec, self._exchange, self._folder = program.spec, exchange, folder
        self._meter = RoutingMeter(program)
        self._is_measured = is_measured
        self._last: tuple[int, Sequence[LayerRouting]] | None = None
        self.counted: dict[int, Histogram] = {}

    def around(
        self, step: int, watch: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        """Return a step's context, inside of which its routers are watched where it is due."""
        return self._watching(watch) if self._is_due(step) else watch

    def of_step(self, step: int) -> Sequence[LayerRouting]:
        """Return what all ranks counted in a step that is over; nothing where it has no line of its
        own. All ranks call it."""
        if not self._is_due(step):
            return ()
        everyone = self._exchange.gather((self._meter.rows(), self._meter.choices()))
        if self._is_measured(step):
            self._write(step, histogram([choices for _, choices in everyone]))
        if not is_shown(self._spec, step + 1):
            return ()
        layers = summed([of_rank for of_rank, _ in everyone])
        self._last = step, layers
        return layers

    def record(self) -> dict[str, object] | None:
        """Return the step with a line that was watched last, from 1, and its layers; None where
        none was."""
        if self._last is None:
            return None
        step, layers = self._last
        ranks = ranks_over(self._spec, self._spec.expert_axes)
        return {"step": step + 1, "layers": rows(layers, ranks)}

    @contextmanager
    def _watching(self, watch: AbstractContextManager[object]) -> Iterator[None]:
        with watch, self._meter.watching():
            yield

    def _write(self, step: int, counts: Histogram) -> None:
        self.counted[step] = counts
        if self._exchange.world.is_first:
            file = self._folder.routing(step + 1)
            file.parent.mkdir(mode=0o700, exist_ok=True)
            write_text(file, json.dumps(counts.plain()) + "\n")

    def _is_due(self, step: int) -> bool:
        return routes(self._spec) and (is_shown(self._spec, step + 1) or self._is_measured(step))
