"""Explain why parameters, optimizer state, counters or buffers differ from those of one device. An
update is explained by repeating it with the inputs that the program's optimizers received.

The norm by which gradients are clipped differs from one device's if squares count for one rank
alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ptrain.axes.data.run.target import NamedTarget
from ptrain.cost import State
from ptrain.interpreter.program import Program
from ptrain.report.finding import Certainty, Mismatch, Moment, RootCause, Subject
from ptrain.spec.placement import CUT, Axis, Distribution
from ptrain.spec.spec import Spec
from ptrain.verification.causes.scene import EXACT, Investigation
from ptrain.verification.compare import Differences, ParameterMove
from ptrain.verification.jobs.job import TOLERANCES
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import (
    TensorBox,
    flipped_bit,
    held,
    odd_element,
    products,
    relative,
    rounded,
)
from ptrain.verification.preconditions import of_program, of_reference
from ptrain.verification.updates.clip import UpdateCase
from ptrain.verification.updates.explain import UpdateExplainer
from ptrain.verification.updates.repeat import Ingredients, UpdateOutcome, UpdateRecord, is_row


def norm_cause(scene: Investigation) -> RootCause | None:
    """Say whether the norm is that of this rank's shards alone, or of gradients with the loss's
    scale, or a product of degrees. Collective."""
    evidence = scene.evidence
    norms = scene.ranks.gather(evidence.seen.norm)
    expected = evidence.expected.norm
    if axes := _of_own_shards(scene):
        text = " and ".join(axes)
        sentence = (
            f"Clipping uses the norm of each rank's local shards. Sum the squared norm over {text}."
        )
        cause = scene.root_cause(axes[0], f"missing all-reduce over {text}", sentence)
        tried = (
            f"the squared norms of the local shards, summed over {text}, give the reference norm"
        )
        return cause.proven(tried)
    norm = norms[scene.first.rank]
    ratio = norm / expected if expected else math.inf
    if evidence.scale != 1.0 and math.isclose(ratio, evidence.scale, rel_tol=EXACT):
        sentence = (
            "The gradients are clipped while they have the loss scale. Divide by the "
            "loss scale first."
        )
        cause = scene.root_cause(
            "", f"× {evidence.scale:g}: the loss scale is not undone", sentence
        )
        return cause.proven("divided by the loss scale it matches the reference")
    sentence = f"The gradient norm differs: {scene.first.told}. Count every element once."
    return of_a_product(scene, ratio, sentence)


def of_a_product(scene: Investigation, ratio: float, sentence: str) -> RootCause | None:
    """Say of a number how large it is beside the reference's, and, apart from that, of which
    degrees this is a product; None where it is of none. An axis is named where no other has as
    many ranks."""
    fits = products(ratio, scene.degrees, EXACT) if math.isfinite(ratio) else ()
    if not fits:
        return None
    text, axes = str(fits[0]), fits[0].axes if len(fits) == 1 else ()
    axis = axes[0] if len(axes) == 1 and axes != ("K",) else ""
    causes = " or ".join(" and ".join(_degree(scene, name) for name in fit.axes) for fit in fits)
    sentence += f" The factor {text} may come from {causes}."
    return scene.root_cause(axis, text, sentence)


def _degree(scene: Investigation, name: str) -> str:
    what = "the number of micro-batches" if name == "K" else name
    return f"{what} ({scene.degrees[name]})"


def _of_own_shards(scene: Investigation) -> tuple[str, ...]:
    """Return the axes along which the ranks' squares are not summed: the norm is that of the right
    gradient's parts that this rank has, or the squares of the ranks of some axes make up the right
    one."""
    evidence = scene.evidence
    square = 0.0
    for name, whole in evidence.expected.gradients.items():
        tensor = evidence.seen.gradients.get(name)
        part = scene.own_part(tensor, whole) if tensor is not None else None
        if part is not None:
            own = part.of(whole).double()
            square += float(own.square().sum())
    norm = evidence.seen.norm if evidence.seen.norm is not None else math.nan
    is_own = math.isclose(math.sqrt(square), norm, rel_tol=EXACT)
    right = evidence.expected.norm or math.nan
    norms, are_own = zip(*scene.ranks.gather([norm, is_own]), strict=True)
    cut = tuple(str(axis) for axis in scene.axes if _cuts(scene.spec, axis))
    for axis, groups in scene.ranks.summed.items():
        axes = axis.split("+")
        sums = (math.hypot(*(norms[rank] for rank in group)) for group in groups)
        is_right = any(math.isclose(its, right, rel_tol=EXACT) for its in sums)
        if is_right and set(axes) <= set(cut):
            return tuple(name for name in cut if name in axes)
    return cut if all(are_own) else ()


def _cuts(spec: Spec, axis: Axis) -> bool:
    """Whether ranks along it have other parts of a gradient."""
    placed = next(factor.placement for factor in spec.factors if factor.axis is axis)
    return axis in spec.expert_axes or any(
        placed[state].distribution in CUT for state in (State.GRADIENTS, State.OPTIMIZER)
    )


_UPDATED = (Subject.PARAMETERS, Subject.OPTIMIZER, Subject.COUNTER)


def proven_update(scene: Investigation) -> RootCause | None:
    """Return the cause of an update that is one device's once it is repeated with some of one
    device's settings, state or values; None where it is not. Collective."""
    one = scene.one
    if one.moment is not Moment.UPDATE or one.subject not in _UPDATED or not scene.has_evidence:
        return None
    case = _case(scene)
    if case is None or not any(scene.ranks.gather(_parameter(one) in case.own)):
        return None
    mismatches = [
        replace(mismatch, name=_parameter(mismatch))
        for subject in _UPDATED
        for mismatch in scene.at(Moment.UPDATE, subject)
    ]
    root_cause = UpdateExplainer(mismatches, case, scene.ranks).exchanged()
    if root_cause is None:
        return None
    return replace(root_cause, state=one.subject, axis=scene.axis_of(root_cause.ranks))


def _parameter(mismatch: Mismatch) -> str:
    """Of optimizer state the parameter that it is kept beside."""
    is_state = mismatch.subject is not Subject.PARAMETERS
    return mismatch.name.rpartition(".")[0] if is_state else mismatch.name


def _case(scene: Investigation) -> UpdateCase | None:
    """None where some rank's optimizers did not step what others' did."""
    evidence, program = scene.evidence, scene.program
    taken = [
        (target, str(index))
        for index, (target, _) in enumerate(program.update.leaves())
        if str(index) in evidence.seen.record.after
        and evidence.seen.record.before[str(index)].value.numel()
    ]
    mine = [[name, _rows(evidence.seen.record.before[name])] for _, name in taken]
    stage = program.pieces[0].index
    everyones = scene.ranks.gather([stage, mine])
    alike = dict(everyones)
    if any(not its or its != alike[place] for place, its in everyones):
        return None
    record, tensors = UpdateRecord(obstacle=evidence.seen.record.obstacle), dict[str, Tensor]()
    for target, name in taken:
        _split(program, target, evidence.seen.record, name, record, tensors)
    holds = {}
    for name, tensor in tensors.items():
        whole = scene.reference.parameters.get(name)
        if whole is not None and (shard := scene.shard(name, tensor, whole)) is not None:
            holds[name] = shard
    courses = _courses(program, record, evidence.expected.record, holds)
    sides = evidence.expected, replace(evidence.seen, record=record, gradients={})
    its = {name: holds[name] for name in courses}
    differences = Differences(step=evidence.step, rank=scene.rank, courses=courses)
    return UpdateCase.of(differences, sides, its, TOLERANCES[torch.float64])


def _rows(taken: Ingredients) -> list[str]:
    """What is mapped to parameters by collectives, the same on all ranks of a stage."""
    keys = sorted(key for key, value in taken.state.items() if is_row(value, taken.value))
    return [*keys, *(["gradient"] if taken.gradient is not None else [])]


def _split(
    program: Program,
    target: NamedTarget,
    leaves: UpdateRecord,
    leaf: str,
    record: UpdateRecord,
    tensors: dict[str, Tensor],
) -> None:
    """Add what a leaf was given and left, by the names of the parameters that it stands for."""
    before, after = leaves.before[leaf], leaves.after[leaf]

    def named(row: Tensor) -> dict[str, Tensor]:
        return program.canonical(target.named(row.view(before.shape)))

    def named_state(state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        return {key: named(state[key]) for key in sorted(state) if is_row(state[key], before.value)}

    values, left = named(before.value), named(after.value)
    gradients = {} if before.gradient is None else named(before.gradient)
    states = named_state(before.state), named_state(after.state)
    for name, tensor in values.items():
        own, its = (
            {key: _row(rows[key][name]) if key in rows else value for key, value in entries.items()}
            for rows, entries in zip(states, (before.state, after.state), strict=True)
        )
        tensors[name] = tensor
        record.before[name] = replace(
            before,
            shape=held(tensor).shape,
            value=_row(tensor),
            gradient=_row(gradients[name]) if name in gradients else None,
            state=own,
        )
        record.after[name] = UpdateOutcome(_row(left[name]), its)


def _row(tensor: Tensor) -> Tensor:
    return held(tensor).flatten()


def _courses(
    program: Program,
    record: UpdateRecord,
    expected: UpdateRecord,
    holds: Mapping[str, ParameterShard],
) -> dict[str, ParameterMove]:
    now = of_program(program)
    courses = {}
    for name, shard in holds.items():
        if name not in expected.after or (Subject.PARAMETERS, name) not in now:
            continue
        before = shard.of(expected.before[name].value)
        courses[name] = ParameterMove(
            parameter=shard.parameter,
            origin=before,
            before=before,
            after=shard.of(expected.after[name].value),
            run_before=record.before[name].value,
            run_after=_row(now[Subject.PARAMETERS, name]),
            sure=torch.ones_like(before, dtype=torch.bool),
        )
    return courses


Key: TypeAlias = tuple[Subject, str]
ALIKE = EXACT * 1e-4  # relative: what is closer than this is the same


class Explanation(NamedTuple):
    """What one rank says of its part: the factor, what to do, and what came of undoing it ("" where
    that was not tried)."""

    factor: str
    sentence: str
    tried: str = ""


@dataclass(frozen=True, slots=True)
class Sides:
    """What this rank has, the reference's whole tensor, and which part of it this should be."""

    own: Tensor
    whole: Tensor
    part: TensorBox

    @property
    def expected(self) -> Tensor:
        return self.part.of(self.whole)

    @property
    def wrong(self) -> Tensor:
        """Which elements are: a rank's rows may be made of several ranks' shards."""
        expected = self.expected.double()
        return (self.own.double() - expected).abs() > ALIKE * expected.abs()


_OTHER = "other values"
_COMPARED = "it equals no earlier state of the reference, and more than one element differs"
_AS_BEFORE = "the differing elements equal the earlier reference values, to the last digits"


def state_cause(scene: Investigation) -> RootCause:
    """Explain a mismatch of state. Collective."""
    one = scene.one
    if (proven := proven_update(scene)) is not None:
        return proven
    alike = _alike(scene, one)
    said = {
        key: _said(scene, replace(one, subject=key[0], name=key[1]), sides)
        for key, sides in alike.items()
    }
    first = one.subject, one.name
    everyone = scene.ranks.gather(
        (said.get(first), [bool(its.tried) for its in said.values() if its is not None]),
        tuple[Explanation | None, list[bool]],
    )
    wrong = Counter(its for its, _ in everyone if its) or {_other(one): 1}
    agreed = max(wrong, key=lambda its: wrong[its])
    cause = scene.root_cause(_axis(scene, one), agreed.factor, agreed.sentence)
    known = [its for _, tried in everyone for its in tried]
    if known and all(known):
        others = f"; the same holds for all {len(known)} differences" * (len(known) > 1)
        return cause.proven(agreed.tried + others)
    if agreed.factor == _OTHER:
        return replace(cause, certainty=Certainty.UNEXPLAINED, tried=_COMPARED)
    words = f"this holds for {sum(known)} of the {len(known)} differences" if any(known) else ""
    return replace(cause, tried=words)


def _alike(scene: Investigation, one: Mismatch) -> dict[Key, Sides]:
    """Return what differs with it, as far as this rank has it."""
    if one.moment is Moment.FORWARD:  # as it is used
        parameters = scene.evidence.states[-1]
        its = {(one.subject, name): tensor for name, tensor in scene.evidence.seen.in_use.items()}
        states, wholes = its, parameters
    else:
        states, wholes = of_program(scene.program), of_reference(scene.reference, scene.rank)
    sides = {}
    # what is counted wrong is a step that was left out, or nothing else differs
    subject = None if one.subject is Subject.COUNTER else one.subject
    for mismatch in scene.at(one.moment, subject):
        key = mismatch.subject, mismatch.name
        own, whole = (its.get(key) for its in (states, wholes))
        part = None if own is None or whole is None else scene.own_part(own, whole)
        if own is not None and whole is not None and part is not None:
            sides[key] = Sides(held(own), whole, part)
    return sides


def _axis(scene: Investigation, one: Mismatch) -> str:
    """Along which some ranks are wrong; where all are, the one that cuts the state."""
    if along := scene.axis_of(scene.ranks_of(one)):
        return along
    state = State.OPTIMIZER if one.subject is Subject.OPTIMIZER else State.PARAMETERS
    cut = scene.spec.axes_where(state, Distribution.SHARDED, Distribution.GATHERED)
    return str(cut[0]) if cut and one.subject is not Subject.COUNTER else ""


def _said(scene: Investigation, one: Mismatch, sides: Sides) -> Explanation | None:
    """Return what is wrong; None where this rank has it right."""
    own, expected = sides.own, sides.expected
    if own.dtype != expected.dtype:
        actual, right = (str(tensor.dtype).removeprefix("torch.") for tensor in (own, expected))
        same = torch.equal(rounded(expected, own.dtype), own.to(expected.dtype))
        tried = f"the reference in {actual} has the same values" if same else ""
        sentence = f"{one.name} is in {actual}. Keep it in {right}."
        return Explanation(f"{actual} for {right}", sentence, tried)
    if one.subject is Subject.COUNTER:
        return _counted(float(own), float(expected))
    if relative(own, expected) <= ALIKE:
        return None
    if (odd := _of_one_element(one, sides)) is not None:
        return odd
    is_used = one.moment is Moment.FORWARD
    for cause in _CAUSES[:1] if is_used else _CAUSES if scene.has_evidence else ():
        if (known := cause(scene, one, sides)) is not None:
            return known
    return _other(one)


def _of_one_element(one: Mismatch, sides: Sides) -> Explanation | None:
    bit = flipped_bit(sides.own, sides.expected)
    if bit is None and odd_element(sides.own, sides.expected) is None:
        return None
    what = "one element" if bit is None else f"flipped bit {bit}"
    sentence = (
        f"One element of {one.name} differs, and nothing else. Suspect the memory, and "
        "restore the tensor from a replica or a checkpoint."
    )
    return Explanation(
        what, sentence, "with the reference value of this element the tensor matches the reference"
    )


def _counted(own: float, expected: float) -> Explanation | None:
    if own == expected:
        return None
    steps = expected - own
    factor = f"stale by {steps:g} step{'s' * (steps != 1)}" if steps > 0 else f"ahead by {-steps:g}"
    return Explanation(
        factor,
        f"The optimizer counts {own:g} steps, but {expected:g} were taken. Step it once in "
        "each step, and load its state together with the parameters.",
        "with the reference count it matches the reference",
    )


def _stale(scene: Investigation, one: Mismatch, sides: Sides) -> Explanation | None:
    """What is wrong of it is as it was at the start of a step."""
    own, wrong = sides.own, sides.wrong
    is_used = one.moment is Moment.FORWARD  # in the step at whose start it is right
    for back, states in enumerate(reversed(scene.evidence.states)):
        before = states.get((one.subject, one.name))
        if before is None or relative(own[wrong], sides.part.of(before)[wrong]) > ALIKE:
            continue
        if is_used:
            sentence = (
                f"{one.name} is used as it was {back} updates ago. Gather or copy it after "
                "the updates."
            )
            return Explanation(f"stale by {back} step{'s' * (back > 1)}", sentence, _AS_BEFORE)
        if not back:
            sentence = f"{one.name} is as before the update, which did not reach these ranks."
            return Explanation("stale by 1 step", sentence, _AS_BEFORE)
        start = scene.evidence.step - back
        sentence = (
            f"{one.name} is as at the start of step {start}: the state of another step was loaded."
        )
        return Explanation(f"stale by {back + 1} steps", sentence, _AS_BEFORE)
    return None


def _frozen(scene: Investigation, one: Mismatch, sides: Sides) -> Explanation | None:
    if not is_frozen(scene, one.name):
        return None
    before = scene.evidence.states[-1].get((one.subject, one.name))
    is_still = before is not None and torch.equal(sides.part.of(before), sides.expected)
    if not is_still:
        return None  # one device writes it too
    tried = "its value before the step equals the reference value after the step"
    sentence = f"{one.name} has no gradient in the reference. Exclude it from the update."
    return Explanation("frozen parameter updated", sentence, tried)


def is_frozen(scene: Investigation, name: str) -> bool:
    """Return whether nothing of one device's gradients is of this parameter or of its state."""
    known = scene.evidence.expected.gradients
    return name not in known and name.rpartition(".")[0] not in known


_CAUSES = (_stale, _frozen)


def _other(one: Mismatch) -> Explanation:
    sentence = (
        f"{one.name} ({one.subject}) differs from the reference. Check its last write "
        "(initialization, load, gather, copy or update)."
    )
    return Explanation(_OTHER, sentence)
