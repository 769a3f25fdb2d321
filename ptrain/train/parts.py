"""The inputs of the training loop in addition to its program, and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from signal import Signals

from ptrain.data.sampler import SampleSource
from ptrain.errors import TrainingStopped
from ptrain.interpreter.program import Program
from ptrain.meters.replicas import ReplicaMeter
from ptrain.report.routing import LayerRouting
from ptrain.train.exchange import Exchange
from ptrain.train.interrupt import Interrupts
from ptrain.train.journal import LOG, Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopInputs:
    """The objects that the training loop uses in addition to its program.

    Attributes:
        corpus: The source of samples.
        exchange: The exchange of the ranks.
        interrupts: The received signals.
        journal: The reports of this rank.
        watch: Returns the context of a step (from 0), with the meters and profilers that are due.
        routing: Returns the routing counts of a step (from 0); empty if it was not watched.
        check_step: Called with step, loss and gradient norm; may stop the training.
        consistency: The comparison of replicas; may stop the training when it is due.
        save: Writes a checkpoint after this number of steps.
    """

    corpus: SampleSource
    exchange: Exchange
    interrupts: Interrupts
    journal: Journal
    watch: Callable[[int], AbstractContextManager[object]]
    routing: Callable[[int], Sequence[LayerRouting]]
    check_step: Callable[[int, float, float | None], None]
    consistency: Consistency
    save: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a training.

    Attributes:
        steps: The number of finished steps, including those before a resume.
        loss: The loss of the last step. None: no step was done.
        held_out_loss: The last held-out loss. None: no evaluation was done.
        interrupt: The signal that ended the training early. None: it is complete.
    """

    steps: int
    loss: float | None = None
    held_out_loss: float | None = None
    interrupt: Signals | None = None


class Consistency:
    """The comparison of values that must be equal on several ranks.

    Args:
        program: The program.
        exchange: The exchange of the ranks.
        resume: Returns the command that continues from the last checkpoint, "" without one.
    """

    def __init__(self, program: Program, exchange: Exchange, resume: Callable[[], str]) -> None:
        self.every = program.spec.consistency_every
        self._replicas = ReplicaMeter(program, exchange)
        self._resume = resume
        self._checked = 0  # the number of steps at the last comparison

    def step_context(
        self, step: int, watch: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        """Return the context of a step (from 0).

        It records the gradients of the step if `require_agreement` is due after it.
        """
        return self._record_gradients(watch) if self.is_due(step + 1) else watch

    def is_due(self, steps: int) -> bool:
        """Return True if the ranks are compared after this number of steps.

        The caller settles the reports of all steps first: a value that is not finite is another
        finding, with another fix.
        """
        return self.every > 0 and steps % self.every == 0

    def require_agreement(self, steps: int) -> None:
        """Require that the ranks agree after this number of steps.

        It does nothing if they were compared after this step already, or if the check is off.

        Raises:
            TrainingStopped: Values differ. Raised on all ranks.
        """
        if not self.every or steps == self._checked:
            return
        self._checked = steps  # before the check, which raises on all ranks if it fails
        if (root_cause := self._replicas.root_cause(self._replicas.check(steps))) is None:
            LOG.debug("step %d  the ranks agree", steps)
            return
        command = self._resume()
        remedy = (
            f"Continue from the last checkpoint, where the ranks agreed: `{command}`"
            if command
            else "Train again with `checkpoint.every=N`; no checkpoint was saved."
        )
        raise TrainingStopped(
            f"step {steps}: values that must be identical on the ranks differ\n  {root_cause}\n "
            f" remedy: {remedy}"
        )

    @contextmanager
    def _record_gradients(self, watch: AbstractContextManager[object]) -> Iterator[None]:
        """Temporarily record gradients, inside the context `watch`."""
        with watch, self._replicas.record_gradients():
            yield
