"""`consistency_every: n`: every n steps, and before every checkpoint, the ranks compare what they
hold alike, and all of them stop where they differ.

So a checkpoint is never of a state that the ranks did not agree on, and what is lost is at most
what was trained since the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ptrain.errors import TrainingStopped
from ptrain.interpreter.program import Program
from ptrain.meters.replicas import ReplicaMeter
from ptrain.train.exchange import Exchange
from ptrain.train.journal import LOG


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
