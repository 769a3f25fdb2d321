"""Functions that run on ranks for the tests of state consistency: they train a spec with a fault
planted on one rank, and compare the ranks' replicated state after every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ptrain.data.corpus import open_corpus
from ptrain.errors import TrainingStopped
from ptrain.interpreter.program import Program, interpret
from ptrain.meters import holdings
from ptrain.meters.replicas import ReplicaMeter, random_state_digest
from ptrain.meters.traffic import CollectiveLedger
from ptrain.report.finding import Mismatch, Moment, RootCause
from ptrain.runtime.world import World
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.train import session
from ptrain.train.exchange import Exchange
from ptrain.train.options import MakeGuard, Options
from ptrain.verification.capture import run_training_step

Fault = Callable[[Program, int], None]  # program, step: before that step's check


@dataclass(frozen=True, kw_only=True)
class ConsistencyReport:
    """One rank's report: the differences of the first step that had any, the rank at fault, and the
    number of compared values that some other rank holds too."""

    mismatches: tuple[Mismatch, ...]
    root_cause: RootCause | None
    shared: int
    steps: int = 0
    names: tuple[str, ...] = ()  # of those things, or kinds of calls
    draws: bool = False  # whether generator states are compared


def train_and_check(spec: Spec, steps: int, fault: Fault | None = None) -> ConsistencyReport:
    """Train `steps` updates on this rank and check the replicated state after each."""
    world = World.join(spec.timeout)
    program = interpret(spec, world=world, allow_import=True)
    exchange = Exchange(world)
    replicas = ReplicaMeter(program, exchange)
    source = open_corpus(spec.data)
    mismatches = replicas.check(0, Moment.START)
    done = 0
    while not mismatches and done < steps:
        with replicas.record_gradients():
            run_training_step(program, source, done)
        done += 1
        if fault is not None:
            fault(program, done)
        mismatches = replicas.check(done)
    found = replicas.root_cause(mismatches)
    exchange.close()
    held = [identity for identity, ranks in replicas._holders.items() if len(ranks) > 1]
    return ConsistencyReport(
        mismatches=mismatches,
        root_cause=found,
        shared=len(held),
        steps=done,
        names=tuple(sorted({f"{subject} {name}" for _, subject, name, _ in held})),
        draws=random_state_digest(program) is not None,
    )


def train_and_check_collectives(
    spec: Spec, steps: int, fault: Fault | None = None
) -> ConsistencyReport:
    """Train like `train_and_check`, also check every collective, and plant a fault before a
    step."""
    world = World.join(spec.timeout)
    program = interpret(spec, world=world, allow_import=True)
    exchange = Exchange(world)
    source = open_corpus(spec.data)
    ledger = CollectiveLedger(program)
    mismatches: tuple[Mismatch, ...] = ()
    done = calls = 0
    untouched = dist.all_reduce
    while not mismatches and done < steps:
        if fault is not None:
            fault(program, done + 1)
        with ledger:
            run_training_step(program, source, done)
        dist.all_reduce = untouched
        done += 1
        calls += sum(map(len, ledger.calls.values()))
        kinds = {f"{c.operator} {c.carries}" for calls in ledger.calls.values() for c in calls}
        mismatches = ledger.check(exchange, done)
    found = ledger.root_cause(mismatches)
    exchange.close()
    return ConsistencyReport(
        mismatches=mismatches,
        root_cause=found,
        shared=calls,
        steps=done,
        names=tuple(sorted(kinds)),
    )


@torch.no_grad()
def flip_bit_once(
    subject: str, name: str, bit: int, where: tuple[int, int], program: Program, step: int
) -> None:
    """Return a fault that flips one bit of the last element of one tensor on one rank after one
    step."""
    if (program.world.rank, step) != where:
        return
    for held in (*holdings.parameters(program), *holdings.optimizer_state(program)):
        if held.subject == subject and f"{held.name}.{held.key}".rstrip(".") == name:
            data = held.tensor.view(-1)[-1:].view(torch.uint8)
            data[bit // 8] ^= 1 << bit % 8
            return
    raise AssertionError(f"no {subject} {name} on rank {where[0]}")


def flip_bit(subject: str, name: str, bit: int, on: int, after: int = 2) -> Fault:
    return partial(flip_bit_once, subject, name, bit, (on, after))


def reduce_by_maximum(program: Program, step: int) -> None:
    """Return a fault: one rank takes the maximum where the others sum."""
    _replace_all_reduce(program, step, lambda tensor: (tensor, dist.ReduceOp.MAX))


def reduce_as_integers(program: Program, step: int) -> None:
    """Return a fault: one rank sends its values reinterpreted as integers, which no backend
    notices."""
    _replace_all_reduce(program, step, lambda tensor: (tensor.view(torch.int32), dist.ReduceOp.SUM))


def _replace_all_reduce(
    program: Program,
    step: int,
    change: Callable[[torch.Tensor], tuple[torch.Tensor, dist.ReduceOp.RedOpType]],
) -> None:
    if step != 2 or program.world.rank != 1:
        return
    original, own = dist.all_reduce, program.wrapped.group

    def changed_all_reduce(tensor: torch.Tensor, group: object = None, **options: Any) -> Any:
        if group is own:
            tensor, options["op"] = change(tensor)
        return original(tensor, group=group, **options)

    dist.all_reduce = changed_all_reduce


def reorder_buckets(program: Program, step: int) -> None:
    """Return a fault: one rank reduces two buckets of equal size in the other order. Only the names
    of the calls differ."""
    if step != 2 or program.world.rank != 1:
        return
    wrapped = program.wrapped
    reduce_kept = wrapped._reduce_kept

    def changed() -> None:
        _swap_two_of_one_size(wrapped._unreduced)
        reduce_kept()
        del wrapped._reduce_kept  # the method is the class's again

    wrapped._reduce_kept = changed


def skip_first_sum(program: Program, step: int) -> None:
    """Return a fault: the ranks at one tp coordinate skip their first sum over dp, so no rank waits
    for them."""
    if step != 2 or program.mesh.coordinate(Axis.TP) != 1:
        return
    original, own = dist.all_reduce, program.mesh.group((Axis.DP_REPLICATE,))
    skipped = False

    def changed(tensor: torch.Tensor, group: object = None, **options: Any) -> Any:
        nonlocal skipped
        if group is own and not skipped:
            skipped = True
            return None
        return original(tensor, group=group, **options)

    dist.all_reduce = changed


def _swap_two_of_one_size(buckets: list[torch.Tensor]) -> None:
    sizes = [bucket.numel() for bucket in buckets]
    one = next(place for place, size in enumerate(sizes) if size in sizes[place + 1 :])
    other = sizes.index(sizes[one], one + 1)
    buckets[one], buckets[other] = buckets[other], buckets[one]


def train_with_fault(
    overrides: tuple[str, ...],
    folder: Path,
    fault: Fault,
    spec: str = "ddp",
    guarded: MakeGuard | None = None,
) -> tuple[int, str]:
    """Run a full training with a fault after a step; return its exit code and output."""
    done = 0

    def sabotaged(*args: Any, **kwargs: Any) -> Program:
        program = interpret(*args, **kwargs)
        apply = program.apply

        def faulty(lr: float, *halted: torch.Tensor | None) -> None:
            nonlocal done
            apply(lr, *halted)
            done += 1
            fault(program, done)

        program.apply = faulty  # type: ignore[method-assign]
        return program

    session.interpret = sabotaged
    try:
        options = Options(spec=spec, overrides=overrides, run_dir=folder, quiet=True)
        return session.train_rank(options, guarded), ""
    except TrainingStopped as stopped:
        return stopped.exit_code, str(stopped)
    finally:
        session.interpret = interpret
