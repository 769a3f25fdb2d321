"""The gradient is a property of the global batch: not of how many micro-batches it is cut into, nor
of the mesh (Theorems 3 and 5). Compared are programs with each other, in fp64, without a
reference in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptrain.data.corpus import corpus
from ptrain.report.record import Check
from ptrain.rooms.world import World
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.capture import Capture, drive_and_add
from ptrain.verification.compare import apart, at_most, gradient_check, worst_of
from ptrain.verification.preconditions import Make
from ptrain.verification.tolerances import FP64_GRADIENT
from ptrain.verification.trajectory import ProgramRun
from ptrain.verification.variants import in_other_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshResult:
    """What a run in fp64 leaves for a comparison with another mesh: the losses, and the `gradients`
    of step 0 by name."""

    name: str
    losses: tuple[float, ...]
    gradients: dict[str, Tensor]


def in_micro_batches(
    spec: Spec, run: ProgramRun, world: World, exchange: Exchange, make: Make
) -> tuple[tuple[Check, ...], str]:
    """The gradient of step 0 (of `spec`, in `run`) with another number of micro-batches; or no
    check, and why."""
    other, why = in_other_batches(spec)
    if other is None:
        return (), f"micro-batches: not checked: {why}"
    program = make(other, world)
    with Capture(program, set()) as capture:
        _, norm = drive_and_add(program, corpus(spec.data), 0, exchange)
    gradients = capture.unclipped(exchange, norm)
    batch = spec.batch
    name = f"{batch.accumulate} x {batch.micro} as {other.batch.accumulate} x {other.batch.micro}"
    return (gradient_check(name, apart(run.gradients, gradients), FP64_GRADIENT),), ""


def write(path: Path, spec: Spec, run: ProgramRun) -> None:
    """One rank writes: `run` is alike on all."""
    plain: dict[str, Any] = {
        "name": spec.name,
        "losses": run.trajectory.losses,
        "gradients": {name: gradient.contiguous() for name, gradient in run.gradients.items()},
    }
    torch.save(plain, path)


def read(path: Path) -> MeshResult:
    return MeshResult(**torch.load(path, weights_only=True))


def against(run: ProgramRun, other: MeshResult, allowed: Sequence[float]) -> tuple[Check, ...]:
    """Compare gradient and losses of two meshes; `allowed` is that of one device's loss in each
    step (absolute). Where each of two is off by as much, by chance, they are sqrt(2) times that
    apart."""
    title = f"against {other.name}"
    most = [math.sqrt(2) * limit for limit in allowed]
    between = apart(other.gradients, run.gradients)
    return (
        gradient_check(f"{title}: gradient of step 0", between, FP64_GRADIENT),
        _losses(f"{title}: loss of every step", run.trajectory.losses, other, most),
    )


def _losses(name: str, losses: Sequence[float], other: MeshResult, most: Sequence[float]) -> Check:
    """The step with the largest difference in units of what is allowed there."""
    pairs = list(zip(losses, other.losses, strict=False))[: len(most)]
    if len(pairs) < len(most):
        why = f"{len(pairs)} of {len(most)} steps can be compared: verify {other.name} alone first"
        return at_most(name, math.inf, most[0], why)
    off = [abs(one - its) for one, its in pairs]
    worst = worst_of(off, most)
    one, its = pairs[worst]
    why = f"step {worst}: the loss is {one:.12g}, and {its:.12g} on the other mesh"
    return at_most(name, off[worst], most[worst], why)
