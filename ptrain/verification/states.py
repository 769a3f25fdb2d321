"""Parameters, optimizer state, step counters and buffers by canonical name, of a program and of one
device alike."""

from __future__ import annotations

from typing import TypeAlias

import torch

from ptrain.interpreter.program import Program
from ptrain.optimizers.update import COUNTER, MASTER
from ptrain.report.finding import Subject
from ptrain.verification.capture import modules
from ptrain.verification.places import TokensOfRank
from ptrain.verification.reference import ReferenceTraining

States: TypeAlias = dict[tuple[Subject, str], torch.Tensor]


def of_program(program: Program) -> States:
    """Return full tensors, or DTensors of which this rank has a part. Collective."""
    state = program.state_dict()
    states: States = {(Subject.PARAMETERS, name): tensor for name, tensor in state["model"].items()}
    for name, tensor in state["optimizer"].items():
        states[_subject(name), name] = tensor
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
            states[Subject.OPTIMIZER, f"{name}.{MASTER}"] = updated.detach()
        values = held.get(id(updated)) or updater.initial(name)
        for key, value in values.items():
            if value is not None:
                states[_subject(key), f"{name}.{key}"] = torch.as_tensor(value)
    for name, buffer in device.module.named_buffers():
        states[Subject.BUFFERS, name] = own.of_buffer(name, buffer)
    return states


def _subject(name: str) -> Subject:
    return Subject.COUNTER if name.rpartition(".")[2] == COUNTER else Subject.OPTIMIZER
