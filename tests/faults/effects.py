"""The effect of a planted fault: the same steps with and without it are compared."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ptrain.data.corpus import open_corpus
from ptrain.interpreter.program import Program, interpret
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from ptrain.verification.capture import run_training_step
from tests.faults.catalogue import FAULTS

STEPS = 3


def in_fp64(spec: Spec) -> Spec:
    return replace(spec, precision=replace(spec.precision, compute_fp64=True))


def effect_of(name: str, fp64: bool) -> float:
    """Return the largest difference, relative to the largest element, that a fault makes of any
    tensor of the state within STEPS on this rank. Infinite if it makes a value non-finite or aborts
    a step."""
    fault = FAULTS[name]
    spec = in_fp64(fault.setting.spec()) if fp64 else fault.setting.spec()
    world = World.join(spec.timeout)
    clean = _after_steps(interpret(spec, world=world, allow_import=True))
    program = interpret(spec, world=world, allow_import=True)
    fault.plant(program)
    try:
        faulty = _after_steps(program)
    except RuntimeError:  # of torch's replicas, in the step after one without some gradient
        return math.inf
    return max(_apart(here, there) for here, there in zip(clean, faulty, strict=True))


def _apart(here: torch.Tensor, there: torch.Tensor) -> float:
    if not here.numel() or not here.any():
        return 0.0
    size = here.double().abs().max()
    ratio = float((there.double() - here.double()).abs().max() / size)
    return ratio if math.isfinite(ratio) else math.inf


def _after_steps(program: Program) -> list[torch.Tensor]:
    source = open_corpus(program.spec.data)
    held: list[torch.Tensor] = []
    for step in range(STEPS):
        run_training_step(program, source, step)
        held += [
            tensor.detach().clone()
            for state, tensor in program.storages()
            if state in ("parameters", "optimizer")
        ]
    return held
