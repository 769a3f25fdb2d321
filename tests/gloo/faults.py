"""Faults that a comparison with one device must notice: one violation each of Theorem 3 or 4."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum

import torch
import torch.distributed as dist

from ptrain.data.sampler import LocalBatch
from ptrain.interpreter.program import Program
from ptrain.rooms.room import PendingResult

FAULTY_STEP = 4
FAULTY_RANK = 1


class Fault(StrEnum):
    """Each happens in step FAULTY_STEP, on all ranks or on FAULTY_RANK."""

    SKIPPED_REDUCTION = "the gradients of one step stay local"
    DIVIDED_BY_N = "the gradients are divided by the number of ranks"
    DOUBLED_SAMPLE = "one sample takes the place of another"
    STALE_PARAMETERS = "one rank keeps its parameters of the step before"
    ZERO_GRADIENTS = "all gradients are zero, in every step"


def sabotage(
    fault: Fault | None, program: Program, local: LocalBatch, step: int
) -> AbstractContextManager[LocalBatch]:
    """One step's batch, inside of which the fault happens if it is time."""
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
            return nullcontext(_doubled(local) if program.world.rank == FAULTY_RANK else local)
        case Fault.STALE_PARAMETERS:
            if program.world.rank == FAULTY_RANK:
                return _stale(program, local)
            return nullcontext(local)


def _doubled(local: LocalBatch) -> LocalBatch:
    tokens = local.tokens.clone()
    tokens[-1] = tokens[0]
    return LocalBatch(tokens=tokens, global_tokens=local.global_tokens, sample_ids=local.sample_ids)


@contextmanager
def _scaled_gradients(program: Program, local: LocalBatch, scale: float) -> Iterator[LocalBatch]:
    """Every gradient times `scale` between its reduction and its use."""
    reduce_gradients = program.wrapped.reduce_gradients

    def scaled() -> None:
        reduce_gradients()
        torch._foreach_mul_(program.gradients(), scale)

    program.wrapped.reduce_gradients = scaled
    yield local
    program.wrapped.reduce_gradients = reduce_gradients


@contextmanager
def _without_reductions(local: LocalBatch) -> Iterator[LocalBatch]:
    """all_reduce and reduce_scatter do nothing but keep the rank's own part."""
    import ptrain.rooms.comm as comm

    def keep(shard, whole, group=None, *_, **__):  # type: ignore[no-untyped-def]
        shard.copy_(whole.view(group.size(), -1)[group.rank()])
        return PendingResult(shard, whole)

    def ignore(tensor, **_):  # type: ignore[no-untyped-def]
        return _Done()

    real = comm._reduce_scatter, comm._exchange_halves, dist.all_reduce
    comm._reduce_scatter, comm._exchange_halves, dist.all_reduce = keep, keep, ignore
    yield local
    comm._reduce_scatter, comm._exchange_halves, dist.all_reduce = real


class _Done:
    def wait(self) -> None:
        """Nothing is on its way."""


@contextmanager
def _stale(program: Program, local: LocalBatch) -> Iterator[LocalBatch]:
    """What the rank stores of the parameters is put back to what it was before the step."""
    stored = [value for state, value in program.storages() if state == "parameters"]
    before = [value.detach().clone() for value in stored]
    yield local
    with torch.no_grad():
        torch._foreach_copy_([value.detach() for value in stored], before)
