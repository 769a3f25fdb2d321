"""Measure one steady step: memory by state, its peak by phase, every collective, and what the
rank's sockets sent.

with measure(program) as measurement:
    program.forward_backward(batch)
    program.step(lr)
measurement.estimate()

A module that DistributedDataParallel, FSDP2 or another framework has wrapped takes the program's
place: `measure(module, optimizer=optimizer)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from ptrain.costs import Column, Estimate, Traffic, TrafficKey
from ptrain.interpreter import agreement
from ptrain.interpreter.program import Program
from ptrain.meters.foreign import Foreign, PhaseWatch, one_step, ranks_by_axes, state_of
from ptrain.meters.memory import MemoryMeter
from ptrain.meters.traffic import TrafficMeter
from ptrain.meters.wire import WireMeter
from ptrain.rooms.world import World


class Measurement:
    """What the meters of one rank saw of one step, on a `device` of this type. `ranks_by_axes` are
    the ranks of its groups; `spec` is a program's, None of a model that somebody else wrapped.
    It prints as its figures."""

    def __init__(self, measured: Program | Foreign) -> None:
        guess: dict[str, Any] = {}
        waits = True
        self.policies: tuple[str, ...] = ()  # of a wrapper: what it was told besides
        if isinstance(measured, Program):
            self.rank, self.size = measured.world.rank, measured.world.size
            device, axes_by_group = measured.world.device.type, measured.mesh.axes_by_group()
            waits = measured.world.backend != "fake"
        else:
            self.rank, self.size, device = measured.rank, measured.size, measured.device
            axes_by_group, guess = measured.axes_by_group(), {"guess": state_of}
            self.policies = measured.policies()
        self.device = device
        self.spec = measured.spec if isinstance(measured, Program) else None
        self.ranks_by_axes = ranks_by_axes(axes_by_group)
        self.memory = MemoryMeter(measured, rank=self.rank, device=device, waits=waits)
        self.traffic = TrafficMeter(measured.registry, axes_by_group, device=device, **guess)
        self.wire = WireMeter(axes_by_group, rank=self.rank)

    def __repr__(self) -> str:
        return f"Measurement(rank {self.rank} of {self.size} on {self.device})"

    def __str__(self) -> str:
        return str(self.estimate())

    def estimate(self) -> Estimate:
        """This rank's measured figures."""
        return Estimate(
            column=Column.MEASURED,
            world_size=self.size,
            memory=self.memory.footprints(),
            peak=self.memory.peaks(),
            traffic=self.traffic.rows(),
            wire=self.wire.rows(),
            undefined={"wire": self.wire.absent} if self.wire.absent else {},
        )


def measure(
    model: Program | nn.Module, *, optimizer: object | None = None
) -> AbstractContextManager[Measurement]:
    """Meter what runs inside: exactly one step. A steady step comes after the first two.

    `model` is a program, or any module that somebody else wrapped, with its optimizer; of such a
    one states and phases are found from outside (meters/foreign.py). Without `optimizer=` its
    state is nobody's and counts as `other`. Raises TypeError for anything else, and PtrainError
    when the optimizer begins a second step inside.
    """
    if not isinstance(model, Program | nn.Module):
        raise TypeError(f"measure takes a Program or an nn.Module; got {model!r:.60}")
    return _measure(model, optimizer)


@contextmanager
def _measure(model: Program | nn.Module, optimizer: object | None) -> Iterator[Measurement]:
    if isinstance(model, Program):
        measurement = Measurement(model)
        observers = (measurement.memory, measurement.traffic)
        model.observers.extend(observers)
        watch: AbstractContextManager[object] = nullcontext()
    else:
        measurement = Measurement(Foreign(model, optimizer))
        watch = PhaseWatch(model, (measurement.memory, measurement.traffic))
    try:
        with one_step(optimizer), measurement.wire, measurement.memory, measurement.traffic, watch:
            yield measurement
    finally:
        if isinstance(model, Program):
            for observer in observers:
                model.observers.remove(observer)


def gather_estimates(world: World, estimate: Estimate) -> list[Estimate]:
    """Return every rank's estimate on every rank, in order of rank."""
    if world.size == 1:
        return [estimate]
    return agreement.gather(estimate, world.size, world.device, kind=Estimate)


def join_estimates(estimates: list[Estimate]) -> Estimate:
    """Join the estimates of all ranks: rows of memory and peak are per rank; traffic has one row
    per kind of call, and where ranks differ (one may have no such call at all) a row for each
    account."""
    keys = dict.fromkeys(row.key for estimate in estimates for row in estimate.traffic)
    accounts = _apart(estimates)
    return Estimate(
        column=estimates[0].column,
        world_size=estimates[0].world_size,
        memory=tuple(row for estimate in estimates for row in estimate.memory),
        peak=tuple(row for estimate in estimates for row in estimate.peak),
        traffic=tuple(
            dict.fromkeys(row for key in keys for row in _accounts(key, estimates)),
        ),
        wire=tuple(row for estimate in estimates for row in estimate.wire),
        blocked=tuple(row for estimate in estimates for row in estimate.blocked),
        operations=tuple(row for estimate in estimates for row in estimate.operations),
        accounts=accounts,
        account_of=tuple(range(len(accounts))),
        undefined={name: why for estimate in estimates for name, why in estimate.undefined.items()},
    )


def _apart(estimates: list[Estimate]) -> tuple[tuple[Traffic, ...], ...]:
    """Each rank's traffic, where they differ."""
    accounts = tuple(estimate.traffic for estimate in estimates)
    return accounts if len(set(accounts)) > 1 else ()


def _accounts(key: TrafficKey, estimates: list[Estimate]) -> Iterator[Traffic]:
    """What each rank says of one kind of call."""
    none = Traffic(key=key, calls=0, payload_bytes=0, sent_bytes=0)
    for estimate in estimates:
        yield next((row for row in estimate.traffic if row.key == key), none)
