"""`verify_every: n`: every n steps one device takes a training's own state, and must have the loss
and the gradient of the step, and the loss of the step after: the induction of Theorem 5
(`induction`), while the run goes on.

A step in which the meters run, or after which they do, is passed over for the next: what is looked
at here would be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ptrain.errors import TrainingStopped, refused
from ptrain.interpreter.program import Program
from ptrain.models.modes import forked
from ptrain.train.exchange import Exchange
from ptrain.train.journal import LOG
from ptrain.verification.capture import Capture
from ptrain.verification.trajectory import Onward
from ptrain.verification.variants import dropping, without_dropout


class BesideOneDevice:
    """Of one training. `resume()` is the command that continues from its last checkpoint, "" where
    there is none. All ranks call all, for states are gathered."""

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        is_measured: Callable[[int], bool],
        resume: Callable[[], str],
    ) -> None:
        """Raises SpecError for a training that drops out, which draws other masks than one device
        would."""
        spec = program.spec
        if without_dropout(spec) is not spec or dropping(spec, exchange):
            finding = "the model drops out, and ranks may draw other masks than one device does"
            raise refused("verify_every", finding, "set dropout to 0, or leave verify_every out")
        self.every = spec.verify_every
        self._program, self._exchange = program, exchange
        self._is_measured, self._resume = is_measured, resume
        self._is_owed = False
        self._onward: Onward | None = None
        self._capture: Capture | None = None

    @contextmanager
    def around(self, step: int, watch: AbstractContextManager[object]) -> Iterator[None]:
        """A step's context (`step` counts from 0), with the state before it taken where it is
        due."""
        if not self._is_due(step):
            with watch:
                yield
            return
        self._is_owed = False
        self._onward = Onward(self._program, self._exchange)
        with forked():
            self._onward.take(step)
        self._capture = Capture(self._program, set())
        with watch, self._capture:
            yield

    def _is_due(self, step: int) -> bool:
        """Step 0 has a state that nothing has come to, which `ptrain verify` looks at; after the
        last there is none to compare."""
        self._is_owed |= step > 0 and step % self.every == 0
        is_metered = self._is_measured(step) or self._is_measured(step + 1)
        is_last = step + 1 == self._program.spec.train.steps
        return self._is_owed and not (is_metered or is_last) and self._onward is None

    def judge(self, step: int, loss: float, norm: float | None) -> None:
        """Compare what is known after a step. Raises TrainingStopped on all ranks where it
        departs."""
        onward = self._onward
        if onward is None:
            return
        is_first = self._capture is not None
        if self._capture is not None:
            onward.compare(loss, self._capture.unclipped(self._exchange, norm))
            self._capture = None
        else:
            onward.compare_following(step, loss)
        if onward.departs(step):
            self._stop(onward, step)
        if not is_first:
            self._onward = None
            LOG.debug("step %d  one device goes on as the run does", step + 1)

    def _stop(self, onward: Onward, step: int) -> None:
        departing = [
            f"{check.name.removeprefix('from its own state: ')} is off by {check.measured:.3g}, "
            f"{check.tolerance:.3g} is allowed"
            for check in onward.checks()
            if not check.holds
        ]
        words = self._exchange.first("; ".join(departing))
        command = self._resume()
        again = f"; then go on from the last checkpoint: {command}" if command else ""
        raise TrainingStopped(
            f"step {step + 1}: from the run's own state one device goes on otherwise\n  {words}\n"
            f"  remedy: `ptrain verify` of this spec names the culprit{again}"
        )
