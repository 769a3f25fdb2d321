"""Why parameters, optimizer state, counters or buffers are not those of one device."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import Tensor

from ptrain.costs import State
from ptrain.interpreter.program import Program
from ptrain.report.finding import Departure, Subject
from ptrain.spec.placement import Distribution
from ptrain.verification.causes.rounding import flipped_bit, rounded_to
from ptrain.verification.causes.scene import EXACT, Cause, Scene
from ptrain.verification.factors import multiple
from ptrain.verification.parts import Part, held, relative
from ptrain.verification.states import of_program, of_reference

_ALIKE = EXACT * 1e-4  # relative: what is closer than this is the same


class Said(NamedTuple):
    """What one rank says of its part."""

    factor: str
    sentence: str


def state_cause(scene: Scene, one: Departure, program: Program) -> Cause:
    """Of a departure of state. Collective."""
    own = of_program(program).get((one.subject, one.name))
    whole = of_reference(scene.reference).get((one.subject, one.name))
    said = None
    if own is not None and whole is not None:
        part = scene.own_part(own, whole)
        said = _said(scene, one, held(own), part.of(whole), part) if part else None
    wrong = Counter(Said(*its) for its in scene.exchange.gather(said) if its)
    told = wrong.most_common(1)[0][0] if wrong else _other(one)
    return Cause(_axis(scene, one), told.factor, told.sentence)


def _axis(scene: Scene, one: Departure) -> str:
    """Along which some ranks are wrong; where all are, the one that cuts the state."""
    if along := scene.axis_of(scene.ranks_of(one)):
        return along
    state = State.OPTIMIZER if one.subject is Subject.OPTIMIZER else State.PARAMETERS
    cut = scene.spec.axes_where(state, Distribution.SHARDED, Distribution.GATHERED)
    return str(cut[0]) if cut and one.subject is not Subject.COUNTER else ""


def _said(scene: Scene, one: Departure, own: Tensor, expected: Tensor, part: Part) -> Said | None:
    """None where this rank has it right."""
    if own.dtype != expected.dtype:
        found, right = (str(each.dtype).removeprefix("torch.") for each in (own, expected))
        return Said(f"{found} for {right}", f"{one.name} is in {found}: keep it in {right}")
    if one.subject is Subject.COUNTER:
        return _counted(float(own), float(expected))
    if relative(own, expected) <= _ALIKE:
        return None
    if (bit := flipped_bit(own, expected)) is not None:
        sentence = (
            f"one bit of one element of {one.name} is another: suspect the memory, and restore it "
            "from a replica or a checkpoint"
        )
        return Said(f"flipped bit {bit}", sentence)
    return (
        (_stale(scene, one, own, expected, part) if scene.has_evidence else None)
        or (_update(scene, one, own, expected, part) if scene.has_evidence else None)
        or _by_values(one, own, expected)
    )


def _counted(own: float, expected: float) -> Said | None:
    if own == expected:
        return None
    steps = expected - own
    factor = f"stale by {steps:g} step{'s' * (steps != 1)}" if steps > 0 else f"ahead by {-steps:g}"
    return Said(
        factor,
        f"the optimizer counts {own:g} steps where {expected:g} were taken: its state is of "
        "another step",
    )


def _stale(scene: Scene, one: Departure, own: Tensor, expected: Tensor, part: Part) -> Said | None:
    """What is wrong of it is as it was at the start of a step."""
    wrong = (own.double() - expected.double()).abs() > _ALIKE * expected.double().abs()
    for back, states in enumerate(reversed(scene.evidence.states)):
        before = states.get((one.subject, one.name))
        if before is None or relative(own[wrong], part.of(before)[wrong]) > _ALIKE:
            continue
        if not back:
            sentence = f"{one.name} is as before the update, which did not reach these ranks"
            return Said("stale by 1 step", sentence)
        start = scene.evidence.step - back
        sentence = f"{one.name} is that of the start of step {start}: another step's was loaded"
        return Said(f"stale by {back + 1} steps", sentence)
    return None


def _update(scene: Scene, one: Departure, own: Tensor, expected: Tensor, part: Part) -> Said | None:
    """Parameters that moved where they should not, or by another multiple."""
    before = scene.evidence.states[-1].get((one.subject, one.name))
    if one.subject is not Subject.PARAMETERS or before is None:
        return None
    if one.name not in scene.evidence.expected_gradients:
        sentence = f"{one.name} has no gradient on one device: leave it out of the update"
        return Said("frozen parameter updated", sentence)
    start = part.of(before).double()
    fit = multiple(own.double() - start, expected.double() - start)
    if not fit.holds(1e-4):
        return None
    sentence = (
        f"{one.name} moves {fit.factor:.4g} times as far as it should: its learning rate is "
        "another, or it is updated more than once"
    )
    return Said(f"update × {fit.factor:.4g}", sentence)


def _by_values(one: Departure, own: Tensor, expected: Tensor) -> Said:
    if dtype := rounded_to(own, expected):
        sentence = f"{one.name} has the rounding of {dtype}: keep it in the spec's dtype"
        return Said(f"rounded to {dtype}", sentence)
    fit = multiple(own, expected)
    if fit.holds(EXACT):
        factor = f"× {fit.factor:.4g}"
        return Said(factor, f"{one.name} is {factor} of what one device has")
    one_sorted, other = (each.double().reshape(-1).sort().values for each in (own, expected))
    if relative(one_sorted, other) <= EXACT:
        sentence = f"{one.name} has its elements in other places: its shards are swapped"
        return Said("elements in another order", sentence)
    return _other(one)


def _other(one: Departure) -> Said:
    return Said("other values", f"{one.subject} of {one.name} is not what one device has")
