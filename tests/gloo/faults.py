"""Faults that a comparison with a single device must detect: each violates Theorem 3 or 4 once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum

import torch
import torch.distributed as dist

from ptrain.data.sampler import LocalBatch
from ptrain.interpreter.program import Program
from ptrain.runtime.interface import PendingResult

FAULTY_STEP = 4
FAULTY_RANK = 1


class Fault(StrEnum):
    """A fault in step FAULTY_STEP, on all ranks or on FAULTY_RANK."""

    SKIPPED_REDUCTION = "the gradients of one step stay local"
    DIVIDED_BY_N = "the gradients are divided by the number of ranks"
    DOUBLED_SAMPLE = "one sample takes the place of another"
    STALE_PARAMETERS = "one rank keeps its parameters of the step before"
    ZERO_GRADIENTS = "all gradients are zero, in every step"


def sabotage(
    fault: Fault | None, program: Program, local: LocalBatch, step: int
) -> AbstractContextManager[LocalBatch]:
    """Temporarily plant the fault during one step's batch, if the step is the faulty one."""
    if fault is Fault.ZERO_GRADIENTS:
        return _scaled_gradients(program, local, 0.0)
    if fault is None or step != FAULTY_STEP:
        return nullcontext(local)
    match fault:
        case Fault.SKIPPED_REDUCTION:
            return _without_reductions(local)
        case Fault.DIVIDED_BY_N:
            return _scaled_gradients(program, local, 1 / program.world.size)
        case Fault.DOUBLED_SAMPLE:
            return nullcontext(
                _repeat_first_sample(local) if program.world.rank == FAULTY_RANK else local
            )
        case Fault.STALE_PARAMETERS:
            if program.world.rank == FAULTY_RANK:
                return _undo_update(program, local)
            return nullcontext(local)


def _repeat_first_sample(local: LocalBatch) -> LocalBatch:
    tokens = local.tokens.clone()
    tokens[-1] = tokens[0]
    return LocalBatch(tokens=tokens, global_tokens=local.global_tokens, sample_ids=local.sample_ids)


@contextmanager
def _scaled_gradients(program: Program, local: LocalBatch, scale: float) -> Iterator[LocalBatch]:
    """Temporarily multiply every gradient by `scale` between reduction and update."""
    reduce_gradients = program.wrapped.reduce_gradients

    def reduce_and_scale() -> None:
        reduce_gradients()
        torch._foreach_mul_(program.gradients(), scale)

    program.wrapped.reduce_gradients = reduce_and_scale
    yield local
    program.wrapped.reduce_gradients = reduce_gradients


@contextmanager
def _without_reductions(local: LocalBatch) -> Iterator[LocalBatch]:
    """Temporarily replace all_reduce and reduce_scatter by functions that keep the local values."""
    import ptrain.runtime.comm as comm

    def keep_local(shard, whole, group=None, *_, **__):  # type: ignore[no-untyped-def]
        shard.copy_(whole.view(group.size(), -1)[group.rank()])
        return PendingResult(shard, whole)

    def ignore_call(tensor, **_):  # type: ignore[no-untyped-def]
        return _CompletedWork()

    real = comm._reduce_scatter, comm._exchange_halves, dist.all_reduce
    comm._reduce_scatter, comm._exchange_halves, dist.all_reduce = (
        keep_local,
        keep_local,
        ignore_call,
    )
    yield local
    comm._reduce_scatter, comm._exchange_halves, dist.all_reduce = real


class _CompletedWork:
    def wait(self) -> None:
        """Return at once."""


@contextmanager
def _undo_update(program: Program, local: LocalBatch) -> Iterator[LocalBatch]:
    """Temporarily restore the rank's parameters to their values before the step."""
    stored = [value for state, value in program.storages() if state == "parameters"]
    before = [value.detach().clone() for value in stored]
    yield local
    with torch.no_grad():
        torch._foreach_copy_([value.detach() for value in stored], before)
