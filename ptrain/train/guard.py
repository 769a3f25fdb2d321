"""The interface by which verification watches the steps of a training and may stop it.

`verify_every: n` compares steps with a single-device reference. Training code imports no
verification: a separate module starts such a training and passes the guard. This module imports no
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeAlias

from ptrain.spec.spec import Spec

if TYPE_CHECKING:
    from ptrain.interpreter.program import Program
    from ptrain.train.exchange import Exchange

PLAIN, GUARDED = "ptrain.train", "ptrain.verification.guarded"


class StepGuard:
    """A guard of the steps of a training, on every rank. This base class checks nothing."""

    def __init__(self, *_: object) -> None:
        """Accept the arguments of `MakeGuard`."""

    def step_context(
        self, step: int, watch: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        """Return the context of a step (from 0), which contains the context `watch`."""
        return watch

    def check_step(self, step: int, loss: float, norm: float | None) -> None:
        """Check a finished step.

        Args:
            step: The step, from 0.
            loss: The global loss.
            norm: The gradient norm before clipping. None: not computed.

        Raises:
            TrainingStopped: The check failed. Raised on all ranks.
        """


# Args: the program, its exchange, a predicate of the measured steps (from 0), and a function that
# returns the command that continues the run.
MakeGuard: TypeAlias = (
    "Callable[[Program, Exchange, Callable[[int], bool], Callable[[], str]], StepGuard]"
)


def rank_module(spec: Spec) -> str:
    """Return the module that runs a rank of a training of this spec."""
    return GUARDED if spec.verify_every else PLAIN
