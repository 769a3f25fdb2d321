"""What a rank says when its pipeline fails: at which stage and micro-batch, or whom it waited for.

torch puts a message of its own around what a backward pass raises; a reader wants the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ptrain.axes.pipeline.instructions import Message
from ptrain.costs import Phase
from ptrain.errors import PtrainError, RankFailed

# What a module's code raises: mistakes of Python, and torch's own errors.
_RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def named(stage: int, micro_batch: int) -> Iterator[None]:
    """Raises RankFailed with the place of what is raised inside, and its cause."""
    try:
        yield
    except _RAISED as error:
        cause = error.__cause__ or error
        if isinstance(cause, PtrainError):
            raise cause from error
        place = f"stage {stage}, micro-batch {micro_batch}"
        raise RankFailed(f"{place}: {type(cause).__name__}: {cause}") from cause


class Waits:
    """The message that a rank posts or waits for, and whether it receives it: whom the rank names
    where that fails."""

    def __init__(self, rank_of: tuple[int, ...], group: dist.ProcessGroup) -> None:
        self._rank_of, self._group = rank_of, group
        self._message: Message | None = None
        self._is_received = False

    def receives(self, message: Message) -> None:
        self._message, self._is_received = message, True

    def sends(self, message: Message) -> None:
        self._message, self._is_received = message, False

    def clear(self) -> None:
        """Nobody is waited for: what fails now is the rank's own."""
        self._message = None

    @contextmanager
    def watched(self, stages: str) -> Iterator[None]:
        """Raises RankFailed where a neighbour is gone or silent; it names that rank. `stages` are
        those of this rank."""
        try:
            yield
        except RuntimeError as error:
            raise RankFailed(f"{stages}: {self._waiting()}{error}") from error

    def _waiting(self) -> str:
        if self._message is None:
            return ""
        phase, source, micro_batch = self._message
        stage, verb = (source, "send") if self._is_received else (self._message.target, "take")
        rank = dist.get_global_rank(self._group, self._rank_of[stage])
        what = f"{'gradients of ' * (phase is Phase.BACKWARD)}micro-batch {micro_batch}"
        return f"waiting for rank {rank} (stage {stage}) to {verb} {what}: "
