"""The update of a program's own optimizers, repeated: what the leaves of its targets were given, as
parameters by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ptrain.axes.data.run.target import NamedTarget
from ptrain.interpreter.program import Program
from ptrain.report.finding import Culprit, Departure, Moment, Subject
from ptrain.verification.causes.scene import Investigation
from ptrain.verification.differences import Differences, ParameterMove
from ptrain.verification.jobs.job import TOLERANCES
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import held
from ptrain.verification.states import of_program
from ptrain.verification.updates.case import UpdateCase
from ptrain.verification.updates.explain import UpdateExplainer
from ptrain.verification.updates.record import UpdateRecord
from ptrain.verification.updates.repeat import Ingredients, UpdateOutcome, is_row

_UPDATED = (Subject.PARAMETERS, Subject.OPTIMIZER, Subject.COUNTER)


def proven_update(scene: Investigation) -> Culprit | None:
    """Return the cause of an update that is one device's once it is repeated with some of one
    device's settings, state or values; None where it is not. Collective."""
    one = scene.one
    if one.moment is not Moment.UPDATE or one.subject not in _UPDATED or not scene.has_evidence:
        return None
    case = _case(scene)
    if case is None or not any(scene.ranks.gather(_parameter(one) in case.own)):
        return None
    departures = [
        replace(departure, name=_parameter(departure))
        for subject in _UPDATED
        for departure in scene.at(Moment.UPDATE, subject)
    ]
    culprit = UpdateExplainer(departures, case, scene.ranks).exchanged()
    if culprit is None:
        return None
    return replace(culprit, state=one.subject, axis=scene.axis_of(culprit.ranks))


def _parameter(departure: Departure) -> str:
    """Of optimizer state the parameter that it is kept beside."""
    is_state = departure.subject is not Subject.PARAMETERS
    return departure.name.rpartition(".")[0] if is_state else departure.name


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
