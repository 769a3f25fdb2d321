"""What Theorem 5 presupposes, each a check with a name: that a run goes on, that it is a function
of its spec (deterministic: the same run twice has the same bits), that it starts where one device
starts, and that all ranks count the same steps. All by digests, so that nothing is sent but
these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch

from ptrain.cost import State
from ptrain.data.corpus import corpus
from ptrain.interpreter.program import Program
from ptrain.meters.randomness import digests, kind
from ptrain.report.finding import Subject
from ptrain.report.record import Check
from ptrain.rooms.world import World
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.capture import drive
from ptrain.verification.compare import counted
from ptrain.verification.parts import held, part_of
from ptrain.verification.reference import ReferenceTraining
from ptrain.verification.states import States, of_program, of_reference

STEPS = 3
REPEATED = "the same run twice"
Make: TypeAlias = "Callable[[Spec, World], Program]"
Digests: TypeAlias = "dict[str, str]"


def preconditions(spec: Spec, world: World, exchange: Exchange, make: Make) -> tuple[Check, ...]:
    """Two programs of the spec as it is, of STEPS steps each. All ranks call it; equal on all."""
    with deterministic():
        program = make(spec, world)
        starts = list(_starts(program, exchange))
        losses, skipped, broken = _steps(program, exchange)
        if broken:
            why = f"{broken}; what departs before, if anything does, is told below"
            return (counted("steps that end", STEPS, STEPS - len(losses), why), *starts)
        first = _digests(program)
        counters = _counters(program, exchange, STEPS - skipped)
        del program
        again = make(spec, world)
        losses_again, *_ = _steps(again, exchange)
        second = _digests(again)
        del again
    return (
        _same_bits(losses, losses_again),
        _same_tensors(first, second, exchange),
        *starts,
        *counters,
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """While entered, torch computes as with `deterministic: true` in a spec."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)


def _steps(program: Program, exchange: Exchange) -> tuple[list[float], int, str]:
    """Return the losses of the steps that ended, how many were skipped because a scaled gradient
    overflowed, and what broke the first that did not end: its cause may be in a step before."""
    source = corpus(program.spec.data)
    losses: list[float] = []
    skipped = 0
    for step in range(STEPS):
        broken, share = "", 0.0
        try:
            share, _ = drive(program, source, step)
        except (RuntimeError, TypeError) as error:
            words = str(error).strip().partition("\n")[0]
            broken = f"step {step} breaks off: {type(error).__name__}: {words}"
        if everyone := [its for its in exchange.gather(broken) if its]:
            return losses, skipped, everyone[0]
        losses.append(exchange.add([share])[0])
        scaling = program.scaling
        skipped += scaling is not None and bool(scaling.found_inf)
    return losses, skipped, ""


def _digests(program: Program) -> Digests:
    """Return digests of every local tensor: by canonical name, and what is stored of parameters and
    optimizer state by its place among them (16-bit copies have no name of their own)."""
    digests = {
        f"{subject} {name}": _digest(tensor)
        for (subject, name), tensor in of_program(program).items()
    }
    counts: Counter[State] = Counter()
    for state, tensor in program.storages():
        if state in (State.PARAMETERS, State.OPTIMIZER) and not tensor.is_meta:
            digests[f"{state} storage {counts[state]}"] = _digest(tensor)
            counts[state] += 1
    return digests


def _same_bits(losses: Sequence[float], again: Sequence[float]) -> Check:
    texts, texts_again = list(map(repr, losses)), list(map(repr, again))  # NaN is no other than NaN
    differing = [step for step in range(len(losses)) if texts[step] != texts_again[step]]
    why = ""
    if differing:
        step = differing[0]
        why = f"step {step}: {texts[step]} the first time, {texts_again[step]} the second"
    return counted(f"{REPEATED}: losses", len(losses), len(differing), why)


def _same_tensors(first: Digests, second: Digests, exchange: Exchange) -> Check:
    names = first | second
    own = [name for name in names if first.get(name) != second.get(name)]
    why = (
        f"{{name}} has other bits on rank {{rank}} after {STEPS} steps: something is not a "
        "function of the spec (an operator, an order of arrival, the random state)"
    )
    return _of_all_ranks(f"{REPEATED}: tensors", len(names), own, why, exchange)


def _starts(program: Program, exchange: Exchange) -> Iterator[Check]:
    """Compare Theta_0 and Omega_0, every part against the same part of one device's."""
    expected = of_reference(ReferenceTraining(program.spec), program.world.rank)
    states = of_program(program)
    for subject in (Subject.PARAMETERS, Subject.OPTIMIZER):
        own = {name: tensor for (kind, name), tensor in states.items() if kind is subject}
        whole = {name: tensor for (kind, name), tensor in expected.items() if kind is subject}
        wrong = [name for name, tensor in own.items() if not _is_part_of(tensor, whole.get(name))]
        wrong += _lacking(own, whole, exchange)
        why = "{name} is not what one device starts from, on rank {rank}"
        yield _of_all_ranks(f"initial {subject}", len(own), wrong, why, exchange)


def _is_part_of(tensor: torch.Tensor, whole: torch.Tensor | None) -> bool:
    part = part_of(tensor, whole.shape) if whole is not None else None
    if whole is None or part is None:
        return False
    return _digest(tensor) == _digest(part.of(whole.detach()))


def _digest(tensor: torch.Tensor) -> str:
    """With dtype and shape."""
    return f"{kind(tensor)} {digests([tensor])[0]}"


def _lacking(
    own: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], exchange: Exchange
) -> list[str]:
    """What no rank has, told by rank 0."""
    known = {name for its in exchange.gather(sorted(own)) for name in its}
    return [name for name in whole if name not in known] if exchange.world.is_first else []


def _counters(program: Program, exchange: Exchange, expected: int) -> Iterator[Check]:
    """Compare the optimizer's own counts. One device tells which parameters have no gradient: they
    are not updated, and count none."""
    updates = _counts(of_program(program))
    wrong = [name for name, count in updates.items() if count != expected]
    if wrong and any(updates[name] == 0 for name in wrong):
        updated = ReferenceTraining(program.spec).accumulate(0).sums
        wrong = [name for name in wrong if updates[name] or name.rpartition(".")[0] in updated]
    everywhere = exchange.gather(len(updates))
    if any(everywhere):  # SGD counts nothing
        counts = sorted({updates[name] for name in wrong})
        said = ", ".join(f"{count:g}" for count in counts)
        why = f"{{name}} on rank {{rank}} counts {said}, and {expected} updates were made"
        yield _of_all_ranks("step counters", len(updates), wrong, why, exchange)


def _counts(states: States) -> dict[str, float]:
    return {
        name: float(held(tensor))
        for (subject, name), tensor in states.items()
        if subject is Subject.COUNTER
    }


def _of_all_ranks(
    name: str, number: int, wrong: Sequence[str], why: str, exchange: Exchange
) -> Check:
    """Tell of all ranks how many things were compared, and which of them first is not as it should
    be. `why` has places for `name` and `rank`, and is the telling rank's own."""
    everyone = exchange.gather(
        [number, len(wrong), why.replace("{name}", wrong[0]) if wrong else ""]
    )
    failures = [(rank, its[2]) for rank, its in enumerate(everyone) if its[1]]
    total, differing = (sum(its[i] for its in everyone) for i in (0, 1))
    first = failures[0][1].replace("{rank}", str(failures[0][0])) if failures else ""
    more = f" ({differing - 1} more)" if differing > 1 else ""
    return counted(name, total, differing, first + more)
