"""A shard that is kept on a tier and made whole for the update: optimizer state, and the master
copy that Theta is materialized from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ptrain.axes.data.run.layout import FlatLayout, same_memory
from ptrain.costs import State
from ptrain.rooms.tiers import Tiers, alike
from ptrain.spec.axis import Axis
from ptrain.spec.placement import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Between what is kept over the axes `kept` on `tier` and what the update works on, over the
    axes `updated` of them on `update_tier`. Where they differ by axes, the update is on the device:
    collectives are."""

    layout: FlatLayout
    tiers: Tiers
    kept: tuple[Axis, ...]
    updated: tuple[Axis, ...]
    tier: Tier
    update_tier: Tier
    state: State = State.OPTIMIZER

    @property
    def missing(self) -> tuple[Axis, ...]:
        """The axes along which the update needs what other ranks keep."""
        return tuple(axis for axis in self.kept if axis not in self.updated)

    def fetch(self, stored: torch.Tensor) -> torch.Tensor:
        """What the update works on: `stored` itself where it is that."""
        held, tier = stored, self.tier
        if tier is Tier.FILE:
            held, tier = self.tiers.move(held, Tier.HOST, self.state), Tier.HOST
        if tier is Tier.HOST and self.update_tier is Tier.DEVICE:
            held = self.tiers.move(held, Tier.DEVICE, self.state)
        if self.missing and held.dim():
            held = self.layout.gather(held, self.kept, self.missing, self.state)
        return held

    def put(self, stored: torch.Tensor, working: torch.Tensor) -> None:
        """The inverse: keep this rank's part of what was worked on."""
        part = working
        if self.missing and working.dim():
            part = self.layout.take(working, self.updated, self.kept)
        if same_memory(part, stored):
            return
        if self.tier is Tier.FILE and self.update_tier is Tier.DEVICE:
            part = self.tiers.move(part, Tier.HOST, self.state)
        stored.copy_(part)


class RoutedSlot:
    """One tensor of optimizer state at the end of a route."""

    def __init__(self, route: Route, initial: torch.Tensor) -> None:
        self.route = route
        part = initial
        if route.missing and initial.dim():
            part = route.layout.take(initial, route.updated, route.kept)
        numel = part.numel() if part.dim() else None
        self.stored = route.tiers.empty(numel, initial.dtype, route.tier, route.state)
        self.stored.copy_(part)

    def fetch(self) -> torch.Tensor:
        return self.route.fetch(self.stored)

    def put(self, working: torch.Tensor) -> None:
        self.route.put(self.stored, working)


class TensorSlot:
    """The same for one whole tensor of a unit: its elements as a flat padded shard. A counter is
    kept as it is."""

    def __init__(self, route: Route, initial: torch.Tensor) -> None:
        self.route = route
        self.shape = initial.shape
        part = initial
        if initial.dim():
            part = route.layout.take(self._padded(initial), (), route.kept)
        numel = part.numel() if part.dim() else None
        self.stored = route.tiers.empty(numel, initial.dtype, route.tier, route.state)
        self.stored.copy_(part)

    def fetch(self) -> torch.Tensor:
        whole = self.route.fetch(self.stored)
        return whole[: self.shape.numel()].view(self.shape) if whole.dim() else whole

    def put(self, working: torch.Tensor) -> None:
        if not same_memory(working, self.stored):
            self.route.put(self.stored, self._padded(working) if working.dim() else working)

    def _padded(self, whole: torch.Tensor) -> torch.Tensor:
        """One-dimensional, with room for a share of every rank; a copy only if that is longer."""
        flat = whole.reshape(-1)
        room = self.route.layout.padded
        if flat.numel() == room:
            return flat
        padded = alike(flat.new_zeros(room), flat)
        padded[: flat.numel()].copy_(flat)
        return padded
