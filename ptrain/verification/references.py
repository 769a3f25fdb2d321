"""One-device runs for a whole verification, spread over the ranks: each rank takes its share of
them, a step at a time, so that nobody waits longer for the others than one step takes.

What a run gave stays on the rank that had it; losses go to all. With a folder, it is kept there
under a name that is a digest of all that it depends on, for other specs of the same command.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.permuted import Permuted
from ptrain.verification.progress import Progress
from ptrain.verification.reference import ReferenceTraining, Trajectory, distance
from ptrain.verification.variants import on_one_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`steps` of `spec` on one device, whatever its mesh; with a `seed`, sums in the order that it
    draws."""

    spec: Spec
    steps: int
    seed: int | None = None

    @property
    def key(self) -> str:
        """Return a digest of what the run depends on. The mesh is not of it."""
        spec = on_one_device(self.spec)
        parts = (
            spec.model,
            spec.batch,
            spec.optimizer,
            spec.data,
            spec.precision.effective,
            *filter(None, [spec.loss.user_function]),
        )
        plain = [asdict(part) for part in parts]
        fields = [type(spec.model).__name__, *plain, spec.train.seed, self.steps, self.seed]
        return hashlib.sha256(json.dumps(fields, default=str).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solo:
    """What one run gave: `gradients` of step 0 by name, without the loss's scale; `again` is the
    loss of the first batch after the last step."""

    trajectory: Trajectory
    gradients: dict[str, Tensor]
    again: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """What every rank knows of a run; `solo` on the rank that had it alone."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    owner: int
    solo: Solo | None


def references(
    asks: Sequence[Ask], exchange: Exchange, folder: Path | None, progress: Progress
) -> dict[str, ReferenceRun]:
    """Return every run that is asked for, by its key. All ranks call it, with the same asks."""
    rank, size = exchange.world.rank, exchange.world.size
    every = list({ask.key: ask for ask in asks}.values())
    mine = every[rank::size]
    solos = {ask.key: solo for ask in mine if (solo := _read(ask, folder)) is not None}
    to_do = [ask for ask in mine if ask.key not in solos]
    running: _Running | None = None
    count = max(exchange.gather(sum(ask.steps for ask in to_do)))
    for step in range(count):
        if running is None and to_do:
            running = _Running(to_do.pop(0))
        if running is not None and running.step():
            solos[running.ask.key] = solo = running.result()
            _write(running.ask, solo, folder)
            running = None
        exchange.barrier()  # a sign of life
        progress.step("one device's references", step + 1, count)
    figures = {
        key: [run.trajectory.losses, run.trajectory.gradient_norms] for key, run in solos.items()
    }
    everyone = exchange.gather(figures)
    return {
        ask.key: ReferenceRun(
            losses=tuple(everyone[place % size][ask.key][0]),
            norms=tuple(everyone[place % size][ask.key][1]),
            owner=place % size,
            solo=solos.get(ask.key),
        )
        for place, ask in enumerate(every)
    }


class _Running:
    """One run while it lasts."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        spec = on_one_device(ask.spec)
        self.device = ReferenceTraining(spec) if ask.seed is None else Permuted(spec, ask.seed)
        self.initial = {
            name: parameter.clone() for name, parameter in self.device.parameters.items()
        }
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.logits: list[float] = []

    def step(self) -> bool:
        """Run one update; return whether it was the last."""
        step = len(self.losses)
        accumulated = self.device.accumulate(step)
        if step == 0:
            scale = self.device.updater.scale
            self.gradients = {name: gradient / scale for name, gradient in accumulated.sums.items()}
        self.norms.append(self.device.update(step, accumulated.sums))
        self.losses.append(accumulated.loss)
        self.logits.append(accumulated.logits)
        return len(self.losses) == self.ask.steps

    def result(self) -> Solo:
        parameters = self.device.parameters
        trajectory = Trajectory(
            losses=tuple(self.losses),
            gradient_norms=tuple(self.norms),
            parameters=parameters,
            travelled=distance(self.initial, parameters),
            logits=tuple(self.logits),
        )
        again = self.device.accumulate(0).loss
        return Solo(trajectory=trajectory, gradients=self.gradients, again=again)


def _write(ask: Ask, solo: Solo, folder: Path | None) -> None:
    """Whole or not at all: other specs of the command come later, but ranks at once."""
    if folder is None:
        return
    trajectory = solo.trajectory
    plain: dict[str, Any] = {
        "losses": trajectory.losses,
        "gradient_norms": trajectory.gradient_norms,
        "logits": trajectory.logits,
        "travelled": trajectory.travelled,
        "parameters": dict(trajectory.parameters),
        "gradients": solo.gradients,
        "again": solo.again,
    }
    temporary = folder / f".{ask.key}.{os.getpid()}"
    torch.save(plain, temporary)
    temporary.replace(_path(ask, folder))


def _read(ask: Ask, folder: Path | None) -> Solo | None:
    if folder is None or not (path := _path(ask, folder)).exists():
        return None
    plain = torch.load(path, weights_only=True)
    gradients, again = plain.pop("gradients"), plain.pop("again")
    return Solo(trajectory=Trajectory(**plain), gradients=gradients, again=again)


def _path(ask: Ask, folder: Path) -> Path:
    return folder / f"{ask.key}.pt"
