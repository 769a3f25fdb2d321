"""What a rank does in the tests of state consistency: train a spec, look after every step what the
ranks have in common, with a fault planted at one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from ptrain.data.corpus import corpus
from ptrain.interpreter.program import Program, interpret
from ptrain.interpreter.world import World
from ptrain.meters import holdings
from ptrain.meters.collectives import Ledger
from ptrain.meters.replicas import Replicas
from ptrain.report.finding import Culprit, Departure, Moment
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.drive import drive

Fault = Callable[[Program, int], None]  # program, step: before that step's check


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of one rank: what departed, step by step until something did, whose fault it was, and how
    many things a check compares that some other rank has too."""

    departures: tuple[Departure, ...]
    culprit: Culprit | None
    shared: int
    steps: int = 0
    names: list[str] = field(default_factory=list)


def watch(spec: Spec, steps: int, fault: Fault | None = None) -> Seen:
    """`steps` updates on this rank of the pool, each checked."""
    world = World.join(spec.timeout)
    program = interpret(spec, world=world, allow_import=True)
    exchange = Exchange(world)
    replicas = Replicas(program, exchange)
    source = corpus(spec.data)
    departures = replicas.check(0, Moment.START)
    done = 0
    while not departures and done < steps:
        with replicas.noted():
            drive(program, source, done)
        done += 1
        if fault is not None:
            fault(program, done)
        departures = replicas.check(done)
    found = replicas.culprit(departures)
    exchange.close()
    held = [identity for identity, ranks in replicas._holders.items() if len(ranks) > 1]
    return Seen(
        departures=departures,
        culprit=found,
        shared=len(held),
        steps=done,
        names=sorted({f"{subject} {name}" for _, subject, name, _ in held}),
    )


def listen(spec: Spec, steps: int, fault: Fault | None = None) -> Seen:
    """The same with every collective looked at, and a fault that begins before a step."""
    world = World.join(spec.timeout)
    program = interpret(spec, world=world, allow_import=True)
    exchange = Exchange(world)
    source = corpus(spec.data)
    ledger = Ledger(program)
    departures: tuple[Departure, ...] = ()
    done = calls = 0
    while not departures and done < steps:
        if fault is not None:
            fault(program, done + 1)
        with ledger:
            drive(program, source, done)
        done += 1
        calls += sum(map(len, ledger.calls.values()))
        kinds = {f"{c.operator} {c.carries}" for calls in ledger.calls.values() for c in calls}
        departures = ledger.check(exchange, done)
    found = ledger.culprit(departures)
    exchange.close()
    return Seen(departures=departures, culprit=found, shared=calls, steps=done, names=sorted(kinds))


@torch.no_grad()
def flip(
    subject: str, name: str, bit: int, on: int, program: Program, step: int, *, at: int = 2
) -> None:
    """One bit of the last element of one tensor, on one rank after one step."""
    if program.world.rank != on or step != at:
        return
    for held in (*holdings.parameters(program), *holdings.optimizer(program)):
        if held.subject == subject and f"{held.name}.{held.key}".rstrip(".") == name:
            data = held.tensor.view(-1)[-1:].view(torch.uint8)
            data[bit // 8] ^= 1 << bit % 8
            return
    raise AssertionError(f"no {subject} {name} on rank {on}")


def flipped(subject: str, name: str, bit: int, on: int) -> Fault:
    return partial(flip, subject, name, bit, on)
