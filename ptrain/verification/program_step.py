"""One step of a program beside the reference, as the explainers of any training loop take it: which
elements of each tensor this rank has, what each micro-batch gives to the gradients, and what the
optimizers were given and left.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from ptrain.interpreter.program import Program
from ptrain.optimizers.update import COUNTER, MASTER
from ptrain.report.finding import Moment, Subject, Way
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, coordinates
from ptrain.verification.capture import TokensOfRank, modules
from ptrain.verification.compare import Differences
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.jobs.shards import part_of
from ptrain.verification.parts import Magnitude, held, relative, without_masks
from ptrain.verification.reference import ReferenceTraining

States: TypeAlias = dict[tuple[Subject, str], Tensor]


def of_program(program: Program) -> States:
    """Return full tensors, or DTensors of which this rank has a part. Collective."""
    state = program.state_dict()
    states: States = {(Subject.PARAMETERS, name): tensor for name, tensor in state["model"].items()}
    for name, tensor in state["optimizer"].items():
        parameter, _, key = name.rpartition(".")
        states[_subject(name), f"{parameter} · {key}"] = tensor
    for module in modules(program):
        for name, buffer in module.named_buffers():
            states[Subject.BUFFERS, name] = buffer
    return states


def of_reference(device: ReferenceTraining, rank: int = 0) -> States:
    """Return states as torch's optimizers have them; zeros of what they have not made yet. Of
    tables of tokens those that a rank of the spec has."""
    own = TokensOfRank(device.spec, rank)
    updater = device.updater
    states: States = {
        (Subject.PARAMETERS, name): parameter for name, parameter in device.parameters.items()
    }
    held = {
        id(tensor): values
        for optimizer in updater.optimizers.values()
        for tensor, values in optimizer.state.items()
    }
    for name, updated in updater.updated.items():
        if updated is not updater.parameters[name]:
            states[Subject.OPTIMIZER, f"{name} · {MASTER}"] = updated.detach()
        values = held.get(id(updated)) or updater.initial(name)
        for key, value in values.items():
            if value is not None:
                states[_subject(key), f"{name} · {key}"] = torch.as_tensor(value)
    for name, buffer in device.module.named_buffers():
        states[Subject.BUFFERS, name] = own.of_buffer(name, buffer)
    return states


def _subject(name: str) -> Subject:
    return Subject.COUNTER if name.rpartition(".")[2] == COUNTER else Subject.OPTIMIZER


MASKED = (Subject.BUFFERS, Subject.ACTIVATIONS)  # that may be a mask of attention, infinite
Sides: TypeAlias = (
    "tuple[Mapping[str, Tensor], Mapping[str, Tensor]]"  # a program's, its reference's
)


def compare_states(
    differences: Differences,
    program: Program,
    device: ReferenceTraining,
    moment: Moment,
    ranks: Ranks,
    *,
    tolerance: float,
    subjects: Collection[Subject] = tuple(Subject),
) -> None:
    """Compare parameters, optimizer state, counters and buffers, each part where it is. All ranks
    call it."""
    sides = of_program(program), of_reference(device, ranks.rank)
    for subject in dict.fromkeys(kind for kind, _ in sides[1] if kind in subjects):
        own, its = ({n: t for (kind, n), t in side.items() if kind is subject} for side in sides)
        compare_tensors(differences, moment, subject, (own, its), device.spec, tolerance=tolerance)
        known = {name for names in ranks.gather(sorted(own)) for name in names}
        if subject in MASKED or ranks.rank:
            continue
        for name in known.symmetric_difference(its):
            where = "in the reference, but on no rank" if name in its else "not in the reference"
            differences.add(moment, subject, name, where, Way.MISSING)


def compare_tensors(
    differences: Differences,
    moment: Moment,
    subject: Subject,
    sides: Sides,
    spec: Spec,
    *,
    tolerance: float,
    index: int = 0,
) -> None:
    """Compare what both sides have of a name, with the reference's part. An activation of which
    nothing tells the part is left out: it is of another shape on purpose."""
    actual, expected = sides
    shown = {n: _shown(its) for n, its in expected.items()} if subject in MASKED else expected
    scale = Magnitude.of(shown)
    for name in (name for name in actual if name in expected):
        tensor, right = actual[name], expected[name]
        own, its = held(tensor), tensor_part(spec, differences.rank, right, tensor)
        way, words = Way.VALUE, ""
        if its is None:
            if subject is Subject.ACTIVATIONS:
                continue
            way, size = Way.SHAPE, math.inf
            words = f"shape {tuple(tensor.shape)} for {tuple(right.shape)}"
        else:
            if subject in MASKED:
                own, its = without_masks(own, its)
            if own.dtype != its.dtype:
                way, words = Way.DTYPE, f"{tensor.dtype} for {right.dtype}"
            size = relative(own, its, scale.length(shown[name], its))
        differences.compare(
            moment, subject, name, difference=size, tolerance=tolerance, way=way, index=index,
            words=words,
        )  # fmt: skip


def tensor_part(spec: Spec, rank: int, whole: Tensor, tensor: Tensor) -> Tensor | None:
    """Return the elements of the reference's tensor that a rank's tensor stands for, a plain one
    sharded over tp; None if nothing tells which."""
    place = coordinates(spec, rank).get(Axis.TP, 0)
    return part_of(whole, tensor, degree=spec.degree(Axis.TP), place=place)


def _shown(tensor: Tensor) -> Tensor:
    """Return it without what a mask of attention hides, which is infinite: nothing is small beside
    that."""
    return without_masks(tensor, tensor)[0]
