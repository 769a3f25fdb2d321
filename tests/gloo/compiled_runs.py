"""What a rank does in the tests of compiled blocks: train the same spec eager and compiled, and
report gradients, programs, traffic and peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from ptrain.cost import Estimate
from ptrain.data.corpus import open_corpus
from ptrain.interpreter.program import Program, interpret
from ptrain.meters.measure import measure
from ptrain.models import compiled
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from ptrain.train.loop import local_batch, seed_dropout

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Some steps of one program. `gradients`: of every step, by trained tensor, None where one has
    none. `programs`: how many torch had made after the first step, and in the end. `measured` is
    what the meters saw in the last step."""

    losses: Sequence[float]
    gradients: Sequence[Sequence[torch.Tensor | None]]
    programs: tuple[int, int]
    breaks: int
    measured: Estimate


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One rank's account of a spec: eager, and compiled."""

    eager: Steps
    compiled: Steps

    @property
    def difference(self) -> float:
        """Return the largest distance of two gradients, relative to the norm of the eager one."""
        return max(
            float((own - plain).norm() / plain.norm().clamp_min(1e-300))
            for owns, plains in zip(self.compiled.gradients, self.eager.gradients, strict=True)
            for own, plain in zip(owns, plains, strict=True)
            if own is not None and plain is not None
        )

    @property
    def without_gradient(self) -> int:
        """Return how many tensors have a gradient in eager steps, and none in compiled ones.

        With Muon, a rank has the gradients of the matrices that it updates.
        """
        steps = zip(self.compiled.gradients, self.eager.gradients, strict=True)
        pairs = (pair for owns, plains in steps for pair in zip(owns, plains, strict=True))
        return sum(own is None and plain is not None for own, plain in pairs)


def run_pair(eager: Spec, compiled_spec: Spec, backend: str) -> Pair:
    """Train both specs on this rank of the pool, and evaluate in between."""
    world = World.join(eager.timeout)
    plain = _run_program(eager, world)
    torch._dynamo.reset()
    options = torch._inductor.config.patch(compile_threads=1)
    with mock.patch.object(compiled, "BACKEND", backend), options:
        return Pair(eager=plain, compiled=_run_program(compiled_spec, world))


def run_steps(spec: Spec) -> Steps:
    """Train a spec on this rank of the pool."""
    return _run_program(spec, World.join(spec.timeout))


def run_compiled(spec: Spec) -> Steps:
    """Train a compiled spec on this rank of the pool."""
    with torch._inductor.config.patch(compile_threads=1):
        return run_steps(spec)


def _run_program(spec: Spec, world: World) -> Steps:
    counters.clear()
    program = interpret(spec, world=world)
    source = open_corpus(spec.data)
    losses: list[float] = []
    gradients: list[list[torch.Tensor | None]] = []
    first = 0
    for step in range(STEPS):
        local = local_batch(program, source, step)
        seed_dropout(program, step)
        if step < STEPS - 1:
            losses.append(_step(program, local, gradients))
            program.evaluate(local)
        else:
            with measure(program) as measurement:
                losses.append(_step(program, local))
        first = first or counters["stats"]["unique_graphs"]
        del local
    return Steps(
        losses=losses,
        gradients=gradients,
        programs=(first, counters["stats"]["unique_graphs"]),
        breaks=len(counters["graph_break"]),
        measured=measurement.estimate(),
    )


def _step(
    program: Program, local: Any, gradients: list[list[torch.Tensor | None]] | None = None
) -> float:
    """Return this rank's share of the loss. A step that is measured keeps no copy of gradients."""
    share = float(program.forward_backward(local, 1e-3))
    program.reduce()
    if gradients is not None:
        gradients.append([_own(target.gradient) for target, _ in program.update.tensors()])
    program.apply(1e-3)
    return share


def _own(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.detach().clone()
