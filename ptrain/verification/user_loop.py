"""Verification of a user's model, wrappers and training loop against a single device.

    ptrain.verify(reference, distributed, batches, share=...)

The reference is the same loop on the plain module and the full global batch. It runs on every rank,
next to the distributed loop and without collectives, so each rank compares its local tensors. The
comparison covers the weights before the first step; then, per step, each parameter's gradient when
the optimizer reads it, parameters and optimizer state after the update, bitwise equality of
replicas, and the loss. The run ends at the first step that differs. The first module that differs
is named, and the ranks exchange enough to name the state, the axis and the factor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count as counted
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ptrain.errors import PtrainError
from ptrain.internals.process_groups import default_store
from ptrain.verification.jobs.job import Job, LoopVerdict, Terms, map_tensors
from ptrain.verification.jobs.root_causes import list_families
from ptrain.verification.jobs.run import Examiner
from ptrain.verification.jobs.step import UnattributedDraws

Make = Job | Callable[[], Job]


def verify(
    reference: Make,
    distributed: Make,
    batches: Iterable[Any],
    *,
    share: Callable[[Any], Any] | Sequence[Any] | None = None,
    terms: Terms | None = None,
) -> LoopVerdict:
    """Compare a distributed training loop with the same loop on a single device.

    Call it on every rank. It works with any wrapper, and every rank gets the same verdict.

    Args:
        reference: The loop on a single device: the plain module, and a step on the global batch.
        distributed: The distributed loop: a step on this rank's share. Both are a `Job`, or a
            function that makes one; with functions the loop runs twice from its start, and both
            runs must be identical to the bit.
        batches: The global batches, identical on every rank.
        share: This rank's share of each batch: a function of the global batch (`share_of`: equal
            parts), or a list of this rank's batches. None: the full batch (tensor parallelism
            only).
        terms: Number of steps, tolerance, and how losses are averaged (`Terms`).

    Returns:
        The verdict. `holds` is True if nothing differs; printed, it shows the first difference and
        its root cause if one was found.

    Raises:
        PtrainError: The loops cannot be compared, for example because the reference communicates or
            there is no batch; or another rank raised while this one waited for it. Such a wait ends
            when the other process does, or with the timeout of the process group.

    Example:
        >>> import copy, torch, ptrain
        >>> plain = torch.nn.Linear(4, 1)
        >>> def job(model):
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     def step(batch):
        ...         optimizer.zero_grad()
        ...         loss = model(batch).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         return loss
        ...     return ptrain.Job(model=model, step=step)
        >>> batches = list(torch.randn(3, 8, 4))
        >>> ptrain.verify(job(copy.deepcopy(plain)), job(plain), batches).holds
        True
    """
    # Around both runs: an exception in a step ends this rank while others wait for it.
    with _RaisedOnAnyRank():
        return _compare_jobs(reference, distributed, batches, share, terms or Terms())


def _compare_jobs(
    reference: Make,
    distributed: Make,
    batches: Iterable[Any],
    share: Callable[[Any], Any] | Sequence[Any] | None,
    terms: Terms,
) -> LoopVerdict:
    """Run both loops, a second time if a random draw could not be attributed to samples."""
    whole = list(batches)
    if not whole:
        raise PtrainError("verify: no batch\n  remedy: Pass at least one global batch.")
    shares = _shares(whole, share)
    count = len(whole) if terms.steps is None else terms.steps
    steps = [whole[step % len(whole)] for step in range(count)]
    own = [shares[step % len(whole)] for step in range(count)]

    is_built = not (isinstance(reference, Job) or isinstance(distributed, Job))

    def run(still: tuple[str, ...]) -> LoopVerdict:
        again = distributed if not isinstance(distributed, Job) else None
        examiner = Examiner(_build_job(reference), _build_job(distributed), terms, still)
        return examiner.run(steps, own, again)

    try:
        return run(())
    except UnattributedDraws as first:
        if not is_built:
            raise _not_told(
                first, "Pass functions that make the jobs, so that both can run again."
            ) from None
        try:
            return run(first.paths)
        except UnattributedDraws as second:
            raise _not_told(second, "Set its rate to 0 for the verdict, on both sides.") from None


_VERDICTS = counted()  # all ranks verify equally often, so the keys in the store agree


class _RaisedOnAnyRank:
    """A context that shares exceptions between ranks.

    It publishes this rank's exception. If a collective fails because another rank raised, it raises
    PtrainError with that rank's exception.
    """

    def __init__(self) -> None:
        self._key = f"ptrain/verify/{next(_VERDICTS)}"

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not dist.is_initialized():
            return
        own = f"rank {dist.get_rank()} raised {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the process that hosts the store has exited
            # Only the first rank that raises writes, and all others read its text.
            first = default_store().compare_set(self._key, "", own).decode()
            if first != own and _OF_COLLECTIVES.search(str(error)):
                remedy = "Find why that rank raised."
                raise PtrainError(f"verify: {first}\n  remedy: {remedy}") from error


_OF_COLLECTIVES = re.compile("gloo|NCCL|c10d|[Cc]onnection|[Tt]imed out")


def share_of(batch: Any, rank: int | None = None, size: int | None = None) -> Any:
    """Return one of `size` equal parts of a batch.

    Tensors are split by samples (dimension 0), also inside lists, tuples and mappings. Other values
    stay unchanged.

    Args:
        batch: The global batch.
        rank: The index of the part. Default: this process's rank in the default group.
        size: Number of parts. Default: the number of ranks in it.

    Returns:
        The part, in the structure of the batch.

    Raises:
        PtrainError: The samples do not divide evenly.

    Example:
        >>> import torch, ptrain
        >>> ptrain.share_of({"inputs": torch.arange(6)}, rank=1, size=3)
        {'inputs': tensor([2, 3])}
    """
    if rank is None or size is None:
        rank, size = dist.get_rank(), dist.get_world_size()

    def part(samples: Tensor) -> Tensor:
        if len(samples) % size:
            raise PtrainError(
                f"verify: {len(samples)} samples cannot be split evenly over {size} ranks\n  "
                f"remedy: Use global batches of a multiple of {size} samples."
            )
        return samples.chunk(size)[rank]

    return map_tensors(batch, part)


def _not_told(unattributed: UnattributedDraws, remedy: str) -> PtrainError:
    return PtrainError(
        f"verify: {list_families(unattributed.paths)}: its random draws cannot be attributed to "
        f"samples\n  remedy: {remedy}"
    )


def _build_job(job: Make) -> Job:
    built = job if isinstance(job, Job) else job()
    if not isinstance(built, Job):
        raise PtrainError(
            "verify: a ptrain.Job is needed, or a function that makes one; got "
            f"{built!r:.60}\n  remedy: Pass `ptrain.Job(model=..., step=...)`."
        )
    return built


def _shares(whole: Sequence[Any], share: Callable[[Any], Any] | Sequence[Any] | None) -> list[Any]:
    if share is None:
        return list(whole)
    shares = [share(batch) for batch in whole] if callable(share) else list(share)
    if len(shares) != len(whole):
        raise PtrainError(
            f"verify: {len(whole)} global batches, but {len(shares)} shares of this rank\n  "
            "remedy: Pass `share` as a function, or one share per batch."
        )
    return shares
