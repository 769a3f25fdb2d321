"""The gradient is a property of the global batch: not of how many micro-batches it is cut into, nor
of the mesh (Theorems 3 and 5). Compared are programs with each other, in fp64, without a
reference in between."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptrain.data.corpus import corpus
from ptrain.interpreter.world import World
from ptrain.report.record import Check
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.capture import Capture
from ptrain.verification.compare import FP64, apart
from ptrain.verification.drive import drive_and_add
from ptrain.verification.preconditions import Make
from ptrain.verification.tolerances import FP64_GRADIENT
from ptrain.verification.trajectory import Run, unclipped
from ptrain.verification.variants import in_other_batches
from ptrain.verification.whole import whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a run in fp64 leaves for a comparison with another mesh: the losses, and the `gradients`
    of step 0 by name."""

    name: str
    losses: tuple[float, ...]
    gradients: dict[str, Tensor]


def in_micro_batches(
    spec: Spec, run: Run, world: World, exchange: Exchange, make: Make
) -> tuple[tuple[Check, ...], str]:
    """The gradient of step 0 (of `spec`, in `run`) with another number of micro-batches; or no
    check, and why."""
    other, why = in_other_batches(spec)
    if other is None:
        return (), f"micro-batches: not checked: {why}"
    program = make(other, world)
    with Capture(program, set()) as capture:
        _, norm = drive_and_add(program, corpus(spec.data), 0, exchange)
    gradients = unclipped(whole(capture.gradients(exchange), exchange), program, norm)
    batch = spec.batch
    name = f"{batch.accumulate} x {batch.micro} as {other.batch.accumulate} x {other.batch.micro}"
    difference = apart(run.gradients, gradients)
    return (_check(name, difference, FP64_GRADIENT, "the gradient of step 0"),), ""


def write(path: Path, spec: Spec, run: Run) -> None:
    """By one rank: `run` is alike on all."""
    plain: dict[str, Any] = {
        "name": spec.name,
        "losses": run.trajectory.losses,
        "gradients": {name: each.contiguous() for name, each in run.gradients.items()},
    }
    torch.save(plain, path)


def read(path: Path) -> Account:
    return Account(**torch.load(path, weights_only=True))


def against(run: Run, other: Account) -> tuple[Check, ...]:
    """Losses and gradient of two meshes."""
    steps = min(len(run.trajectory.losses), len(other.losses))
    pairs = zip(run.trajectory.losses[:steps], other.losses[:steps], strict=True)
    off = [abs(one - its) / abs(its) for one, its in pairs]
    worst = max(off) if all(each == each for each in off) else float("nan")
    gradient = apart(other.gradients, run.gradients)
    title = f"against {other.name}"
    return (
        _check(f"{title}: gradient of step 0", gradient, FP64_GRADIENT, "the gradient of step 0"),
        _check(f"{title}: loss of every step", worst, FP64.of_loss(0), "the losses' maximum"),
    )


def _check(name: str, measured: float, tolerance: float, what: str) -> Check:
    holds = measured <= tolerance
    return Check(
        name=name,
        predicted=0.0,
        measured=measured,
        tolerance=tolerance,
        holds=holds,
        why="" if holds else f"{what} differs by {measured:.3g} (relative)",
    )
