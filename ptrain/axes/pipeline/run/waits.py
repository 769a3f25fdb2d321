"""What a rank says when its pipeline fails: at which stage and micro-batch, or whom it waited for.

torch puts a message of its own around what a pass raises, and logs the whole schedule beside it; a
reader wants the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ptrain.costs import Phase
from ptrain.errors import PtrainError, RankFailed
from ptrain.steps.step import Pipeline

_TORCH = logging.getLogger("torch.distributed.pipelining.schedules")
_Move = tuple[int, int, Phase]  # from or to which stage, which micro-batch, in which pass


@contextmanager
def named(stage: int, micro_batch: int) -> Iterator[None]:
    """Raises RankFailed with the place of what is raised inside, and its cause."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, PtrainError):
            raise cause from error
        place = f"stage {stage}, micro-batch {micro_batch}"
        raise RankFailed(f"{place}: {type(cause).__name__}: {cause}") from cause


class Waits:
    """What the stages of a rank have asked of others and not got yet. The oldest of that is what
    the rank waits for when a wait fails."""

    def __init__(self, step: Pipeline, group: dist.ProcessGroup) -> None:
        self._rank_of, self._group = step.rank_of, group
        self._open: dict[_Move, None] = {}
        self._sent: _Move | None = None

    def clear(self) -> None:
        self._open.clear()
        self._sent = None

    def receives(self, source: int, micro_batch: int, phase: Phase) -> None:
        """`source` is the stage that sends it."""
        self._open[source, micro_batch, phase] = None

    def has(self, source: int, micro_batch: int, phase: Phase) -> None:
        self._open.pop((source, micro_batch, phase), None)

    def sends(self, target: int, micro_batch: int, phase: Phase) -> None:
        """`target` is the stage that receives it."""
        self._sent = target, micro_batch, phase

    @contextmanager
    def watched(self, stages: str) -> Iterator[None]:
        """Raises RankFailed where a neighbour is gone or silent; it names that rank. `stages` are
        those of this rank."""
        level = _TORCH.level
        _TORCH.setLevel(logging.CRITICAL)
        try:
            yield
        except RuntimeError as error:
            raise RankFailed(f"{stages}: {self._told()}{error}") from error
        finally:
            _TORCH.setLevel(level)

    def _told(self) -> str:
        asked = next(iter(self._open), None)
        move = asked or self._sent
        if move is None:  # the first step begins with a greeting
            return f"waiting for {' or '.join(map(self._named, self._neighbours()))}: "
        stage, micro_batch, phase = move
        what = f"{'gradients of ' * (phase is Phase.BACKWARD)}micro-batch {micro_batch}"
        return f"waiting for {self._named(stage)} to {'send' if asked else 'take'} {what}: "

    def _named(self, stage: int) -> str:
        rank = dist.get_global_rank(self._group, self._rank_of[stage])
        return f"rank {rank} (stage {stage})"

    def _neighbours(self) -> Iterator[int]:
        """Stages of other ranks beside one of this rank."""
        own, stages = dist.get_rank(self._group), range(len(self._rank_of))
        for stage in stages:
            beside = [each for each in (stage - 1, stage + 1) if each in stages]
            if self._rank_of[stage] != own and own in (self._rank_of[each] for each in beside):
                yield stage
