"""One-device runs for a whole verification, spread over the ranks by what they take: each rank has
its share of them, and tells the others every few seconds that it lives.

What a run gave stays on the rank that had it; losses go to all. With a folder, it is kept there
under a name that is a digest of all that it depends on, for other specs of the same command.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.permuted import Permuted
from ptrain.verification.progress import Progress
from ptrain.verification.reference import OneDeviceRun, ReferenceTraining, Trajectory
from ptrain.verification.variants import on_one_device

_SECONDS = 2.0  # that a rank works before it tells the others
_PERMUTED = 2.3  # times what a run takes with its sums in the usual order, on a CPU in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`steps` of `spec` on one device, whatever its mesh; with a `seed`, sums in the order that it
    draws."""

    spec: Spec
    steps: int
    seed: int | None = None

    @property
    def cost(self) -> float:
        """Return about how long it takes beside others: fp64 is half as fast, permuted sums are
        made piece by piece."""
        return self.steps * (2.0 if self.spec.precision.compute_fp64 else 1.0) * (
            1.0 if self.seed is None else _PERMUTED
        )  # fmt: skip

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
    every = {ask.key: ask for ask in asks}
    owners = _owners(list(every.values()), exchange.world.size)
    mine = [every[key] for key, owner in owners.items() if owner == exchange.world.rank]
    solos = {ask.key: solo for ask in mine if (solo := _read(ask, folder)) is not None}
    to_do = [ask for ask in mine if ask.key not in solos]
    count = sum(exchange.gather(sum(ask.steps for ask in to_do)))
    running: tuple[Ask, OneDeviceRun] | None = None
    done = 0
    while (everyones := sum(exchange.gather(done))) < count:  # a sign of life
        progress.step("one device's references", everyones, count)
        until = time.monotonic() + _SECONDS
        while (running or to_do) and time.monotonic() < until:
            running = running or _begun(to_do.pop(0))
            done += 1
            if running[1].step():
                _end(*running, solos, folder)
                running = None  # before the next begins: no two models stand at once
    figures = {
        key: [its.trajectory.losses, its.trajectory.gradient_norms] for key, its in solos.items()
    }
    everyone = exchange.gather(figures)
    return {
        key: ReferenceRun(
            losses=tuple(everyone[owner][key][0]),
            norms=tuple(everyone[owner][key][1]),
            owner=owner,
            solo=solos.get(key),
        )
        for key, owner in owners.items()
    }


def _owners(asks: Sequence[Ask], size: int) -> dict[str, int]:
    """Return the rank that has each run, the longest first, each given to the rank that has least
    to do; on all ranks the same."""
    loads, owners = [0.0] * size, {}
    for ask in sorted(asks, key=lambda ask: -ask.cost):
        owner = min(range(size), key=loads.__getitem__)
        owners[ask.key] = owner
        loads[owner] += ask.cost
    return owners


def _begun(ask: Ask) -> tuple[Ask, OneDeviceRun]:
    spec = on_one_device(ask.spec)
    device = ReferenceTraining(spec) if ask.seed is None else Permuted(spec, ask.seed)
    return ask, OneDeviceRun(device, ask.steps)


def _end(ask: Ask, run: OneDeviceRun, solos: dict[str, Solo], folder: Path | None) -> None:
    again = run.device.accumulate(0).loss
    solo = Solo(trajectory=run.trajectory(), gradients=run.gradients, again=again)
    solos[ask.key] = solo
    _write(ask, solo, folder)


def _write(ask: Ask, solo: Solo, folder: Path | None) -> None:
    """Whole or not at all: other specs of the command come later, but ranks at once."""
    if folder is None:
        return
    plain = {name: getattr(solo.trajectory, name) for name in Trajectory.__dataclass_fields__}
    plain |= {"gradients": solo.gradients, "again": solo.again}
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
