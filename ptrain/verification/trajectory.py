"""The losses of many steps against one device's, step by step, and the gradient of the first.

Theorem 5 says that they are the same; how near is a question of dtypes. In fp64 the same addends in
another order differ by 1e-15. In fp32 a loss may be off by 1e-4 and the gradient by 1e-5. In 16
bits, and where the update computes in them, both may be off by what permuted references are
(`permuted`). The first step that is off, or not finite, is the last that runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ptrain.data.corpus import corpus
from ptrain.interpreter.program import Program
from ptrain.report.record import Check
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.capture import Capture
from ptrain.verification.compare import FP64, alive, compare
from ptrain.verification.drive import drive_and_add, local_batch
from ptrain.verification.permuted import LAMBDA, RUNS, band, far
from ptrain.verification.reference import Trajectory, distance
from ptrain.verification.references import Ask, Solo, Told
from ptrain.verification.variants import is_banded
from ptrain.verification.whole import whole

FP64_GRADIENT = 1e-12  # the 2-norm of the difference over the reference's
FP32_LOSS, FP32_GRADIENT = 1e-4, 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Corridor:
    """Where the loss of each step should be, and how far off it may be (absolute)."""

    center: tuple[float, ...]
    allowed: tuple[float, ...]

    def contains(self, step: int, loss: float) -> bool:
        """False of what is not a number."""
        return abs(loss - self.center[step]) <= self.allowed[step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A program's steps, alike on all ranks: its trajectory, the `gradients` of step 0 as its
    optimizer was given them, without clipping, and the step at which it was `stopped`."""

    trajectory: Trajectory
    gradients: dict[str, Tensor]
    again: float
    stopped: int | None


def asks_of(spec: Spec, steps: int) -> tuple[Ask, ...]:
    """The references of `spec` in the dtypes that it has: one, or with RUNS permuted ones."""
    seeds = range(RUNS) if is_banded(spec) else ()
    return (Ask(spec=spec, steps=steps), *(Ask(spec=spec, steps=steps, seed=s) for s in seeds))


def corridor(spec: Spec, told: Sequence[Told]) -> Corridor:
    """From the references that `asks_of` asks for."""
    losses = told[0].losses
    if len(told) > 1:
        num_addends = spec.batch.accumulate * spec.data_degree
        found = band([each.losses for each in told], num_addends)
        return Corridor(center=found.center, allowed=found.allowed)
    if spec.precision.compute_fp64:
        allowed = tuple(FP64.of_loss(step) * abs(loss) for step, loss in enumerate(losses))
        return Corridor(center=losses, allowed=allowed)
    return Corridor(center=losses, allowed=(FP32_LOSS,) * len(losses))


def anywhere(steps: int) -> Corridor:
    """Of a run that is compared later, with another."""
    return Corridor(center=(0.0,) * steps, allowed=(math.inf,) * steps)


def follow(program: Program, exchange: Exchange, within: Corridor) -> Run:
    """As many steps as the corridor has, or up to the first outside of it. All ranks call it."""
    source = corpus(program.spec.data)
    initial = whole(program.state_dict()["model"], exchange)
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    stopped = None
    for step in range(len(within.center)):
        if step == 0:
            with Capture(program, set()) as capture:
                loss, norm = drive_and_add(program, source, step, exchange)
            gradients = unclipped(whole(capture.gradients(exchange), exchange), program, norm)
        else:
            loss, norm = drive_and_add(program, source, step, exchange)
        losses.append(loss)
        norms += [] if norm is None else [norm]
        if not within.contains(step, loss):
            stopped = step
            break
    parameters = whole(program.state_dict()["model"], exchange)
    share = program.evaluate(local_batch(program, source, 0))
    return Run(
        trajectory=Trajectory(
            losses=tuple(losses),
            gradient_norms=tuple(norms),
            parameters=parameters,
            travelled=distance(initial, parameters),
        ),
        gradients=gradients,
        again=exchange.add([float(share)])[0],
        stopped=stopped,
    )


def unclipped(
    gradients: dict[str, Tensor], program: Program, norm: float | None
) -> dict[str, Tensor]:
    """What the optimizer would have been given without clipping; `norm` is the one before it."""
    clip = program.spec.optimizer.clip
    if norm is None or clip is None or not math.isfinite(norm):
        return gradients
    factor = min(1.0, clip / (norm + 1e-6))  # torch's clip_grad_norm_
    return {name: gradient.double() / factor for name, gradient in gradients.items()}


def checks(
    spec: Spec, told: Sequence[Told], run: Run, within: Corridor, exchange: Exchange
) -> tuple[Check, ...]:
    """All checks of a run, made on the rank that has the reference; equal on all."""
    own: list[Check] | None = None
    solo = told[0].solo
    if solo is not None:
        own = [_in_corridor(run, within), *_learns(solo, run)]
        if run.stopped is None:
            own += _of_trajectories(spec, solo, run)
    made = exchange.gather([_plain(each) for each in own] if own is not None else None)
    distances = _distances(told, exchange)
    allowed = (
        far(distances)
        if distances
        else FP64_GRADIENT
        if spec.precision.compute_fp64
        else FP32_GRADIENT
    )
    measured = exchange.gather(apart(solo.gradients, run.gradients) if solo is not None else None)
    owner = told[0].owner
    return (
        _gradient(measured[owner], allowed),
        *(Check(**each) for each in made[owner]),
    )


def _distances(told: Sequence[Told], exchange: Exchange) -> list[float]:
    """How far each permuted reference's gradient of step 0 is from the reference's, by the 2-norm.
    Each rank knows of its own runs; the reference's gradient comes from the rank that has it."""
    if len(told) == 1:
        return []
    first = whole(told[0].solo.gradients if told[0].solo else {}, exchange)
    own = [apart(first, each.solo.gradients) for each in told[1:] if each.solo is not None]
    return [distance for its in exchange.gather(own) for distance in its]


def apart(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """The 2-norm of the difference over that of `expected`, all tensors taken as one vector; a
    tensor that one side lacks is zero there. Infinite where nothing can be said."""
    difference = length = 0.0
    for name in {**expected, **found}:
        one, other = expected.get(name), found.get(name)
        if one is not None and other is not None and one.shape != other.shape:
            return math.inf
        one = torch.zeros(()) if one is None else one.double()
        other = torch.zeros(()) if other is None else other.double()
        difference += float((other - one).square().sum())
        length += float(one.square().sum())
    ratio = math.sqrt(difference / length) if length > 0 else math.inf
    return ratio if math.isfinite(ratio) else math.inf


def _gradient(measured: float, allowed: float) -> Check:
    holds = measured <= allowed
    return Check(
        name="gradient of step 0",
        predicted=0.0,
        measured=measured,
        tolerance=allowed,
        holds=holds,
        why="" if holds else f"the gradient vector differs by {measured:.3g} of its length",
    )


def _in_corridor(run: Run, within: Corridor) -> Check:
    """The largest excess over all steps, and where that is."""
    losses = run.trajectory.losses
    off = [abs(loss - center) for loss, center in zip(losses, within.center, strict=False)]
    excess = [
        difference / allowed if math.isfinite(difference) else math.inf
        for difference, allowed in zip(off, within.allowed, strict=False)
    ]
    worst = max(range(len(excess)), key=excess.__getitem__)
    holds = run.stopped is None
    why = ""
    if run.stopped is not None:
        step = worst = run.stopped
        is_finite = math.isfinite(losses[step])
        why = (
            f"step {step}: the loss is {losses[step]:.12g}, one device has "
            f"{within.center[step]:.12g}"
            if is_finite
            else f"step {step}: the loss is {losses[step]}"
        )
    return Check(
        name="loss of every step",
        predicted=0.0,
        measured=off[worst],
        tolerance=within.allowed[worst],
        holds=holds,
        why=why,
    )


def _learns(solo: Solo, run: Run) -> Iterator[Check]:
    """On the very batch that the first step saw, so that no batch's luck is in it."""
    yield _falls("reference", solo.trajectory.losses[0], solo.again)
    if run.stopped is None:
        yield _falls("run", run.trajectory.losses[0], run.again)


def _falls(name: str, before: float, after: float) -> Check:
    fall = before - after
    holds = fall > 0.0  # false of what is not a number
    return Check(
        name=f"{name}: learns its first batch",
        predicted=None,
        measured=fall,
        tolerance=0.0,
        holds=holds,
        why="" if holds else f"its loss was {before:.6g} and is {after:.6g} after the last step",
    )


def _of_trajectories(spec: Spec, solo: Solo, run: Run) -> Iterator[Check]:
    """In fp64 also norms and final parameters; else whether both are alive."""
    if spec.precision.compute_fp64:
        found = compare(solo.trajectory, run.trajectory, FP64)
        yield from (each for each in found if each.name != "losses")
        return
    yield from alive("reference", solo.trajectory)
    yield from alive("run", run.trajectory)


def _plain(check: Check) -> dict[str, object]:
    return {name: getattr(check, name) for name in Check.__dataclass_fields__}


def told_of_band(told: Sequence[Told]) -> str:
    """Where the tolerances come from, in words; "" where they are fixed."""
    if len(told) == 1:
        return ""
    return (
        f"own dtypes: the band is {LAMBDA:.1f} times the deviation of {len(told)} references, "
        f"{RUNS} of them with permuted sums"
    )
