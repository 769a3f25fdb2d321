"""What routers' biases cost: counts of choices that ranks keep, and what is sent to add them up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ptrain.axes.ring import Calls, group_over
from ptrain.costs import Collective, Phase, State, Traffic
from ptrain.derivation.tape import Tape
from ptrain.facts.model import ModelFacts
from ptrain.facts.parameters import COUNTS
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan


def counts_bytes(facts: ModelFacts) -> int:
    """Return the bytes of a model's counts, or those of a part of it, which all ranks keep that
    have the part."""
    return sum(size for name, size in facts.buffers if name.endswith(f".{COUNTS}"))


def summed(spec: Spec, plan: Plan, parts: Iterable[ModelFacts]) -> Iterator[Traffic]:
    """Yield what a rank that has these parts of the model sends in a step: one all-reduce of all
    counts, where there are any and other ranks have tokens of their own."""
    size, step = sum(map(counts_bytes, parts)), plan.balance
    if step is not None and step.axes and size:
        calls = Calls(Collective.ALL_REDUCE, State.OTHER, Phase.UPDATE)
        yield calls.over(group_over(spec, step.axes), size)


def sum_in_time(plan: Plan, tape: Tape, parts: Iterable[ModelFacts]) -> None:
    """The same on a tape whose clock goes along. What is computed is a few hundred numbers."""
    size, step = sum(map(counts_bytes, parts)), plan.balance
    if tape.clock is not None and step is not None and step.axes and size:
        tape.clock.send(Collective.ALL_REDUCE, step.axes, size).wait()
