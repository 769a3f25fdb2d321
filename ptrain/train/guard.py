"""What may look at steps of a training beside the training itself, and stop it. Torch-free.

`verify_every: n` runs one device beside the ranks. That is verification, which trainings know
nothing of: a module of its own starts such a training, and hands over what looks.
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
    """A guard of one training, on every rank. This one looks at nothing."""

    def __init__(self, *_: object) -> None:
        """Take what `MakeGuard` gives."""

    def around(
        self, step: int, watch: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        """Return the context of a step (from 0), around what else watches it."""
        return watch

    def judge(self, step: int, loss: float, norm: float | None) -> None:
        """Look at a step that is done. Raises TrainingStopped on all ranks."""


# The program, its exchange, which steps the meters run in, and the command that continues the run.
MakeGuard: TypeAlias = (
    "Callable[[Program, Exchange, Callable[[int], bool], Callable[[], str]], StepGuard]"
)


def module_of(spec: Spec) -> str:
    """Return the module that is a rank of a training of this spec."""
    return GUARDED if spec.verify_every else PLAIN
