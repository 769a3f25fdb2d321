"""What a training loop is given beside its program, and what it gives back."""

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
class Parts:
    """What the loop uses beside the program. `watch(step)` surrounds a step with the meters and
    profilers that are due, `routing(step)` gives what its routers chose, where they were watched;
    `judge(step, loss, norm)` may stop the training, and so may `consistency` where it is due;
    `save(steps_done)` writes a checkpoint."""

    corpus: SampleSource
    exchange: Exchange
    interrupts: Interrupts
    journal: Journal
    watch: Callable[[int], AbstractContextManager[object]]
    routing: Callable[[int], Sequence[LayerRouting]]
    judge: Callable[[int, float, float | None], None]
    consistency: Consistency
    save: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`steps` done altogether, `loss` of the last one; `interrupt` is what ended it early."""

    steps: int
    loss: float | None = None
    held_out_loss: float | None = None
    interrupt: Signals | None = None


class Consistency:
    """Of one training. `resume()` is the command that continues from its last checkpoint, "" where
    there is none."""

    def __init__(self, program: Program, exchange: Exchange, resume: Callable[[], str]) -> None:
        self.every = program.spec.consistency_every
        self._replicas = ReplicaMeter(program, exchange)
        self._resume = resume
        self._checked = 0  # steps done when it was last looked

    def around(
        self, step: int, watch: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        """Return a step's context (`step` counts from 0) inside of which its gradients are noted
        where `require` is due after it."""
        return self._noting(watch) if self.is_due(step + 1) else watch

    def is_due(self, steps: int) -> bool:
        """Return whether the ranks are compared after so many steps. What is not finite is another
        finding, with a remedy of its own, which goes before: the steps' figures are settled
        first."""
        return self.every > 0 and steps % self.every == 0

    def require(self, steps: int) -> None:
        """Require that the ranks agree after so many steps. Raises TrainingStopped on all of them;
        costs nothing where that was looked at already, or is never to be."""
        if not self.every or steps == self._checked:
            return
        self._checked = steps
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
    def _noting(self, watch: AbstractContextManager[object]) -> Iterator[None]:
        with watch, self._replicas.noted():
            yield
