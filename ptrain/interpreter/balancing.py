"""Routers' biases, moved after the update: by the choices of the step's tokens, of all ranks.

Legend of shape suffixes: L layers of this rank that have routers, E experts.

Note: counts and biases of all layers lie in a tensor each, of which a router has a row, so that a
step has one all-reduce. Nothing is allocated: counts become, where they stand, their sums over the
ranks, and then the signs of how far they are from the mean, in whole numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptrain.costs import State
from ptrain.models.moe import Gate
from ptrain.rooms.mesh import Mesh
from ptrain.steps.step import BalanceExperts


class Balancing:
    """Of one rank's `parts`, whose modules have the model's names."""

    def __init__(self, step: BalanceExperts, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        self.step = step
        # made where no part has a router too: groups are made together
        self._group = mesh.group(step.axes) if step.axes else None
        self._gates = {
            name: gate
            for part in parts
            for name, gate in part.named_modules()
            if isinstance(gate, Gate)
        }
        self._load_LE = self._joined("load_E")
        self._bias_LE = self._joined("bias_E")
        if self._load_LE is not None:
            mesh.registry.tag(self._load_LE, State.OTHER)

    def _joined(self, name: str) -> Tensor | None:
        """Return a tensor of all routers' buffers of this name, which from now on are its rows."""
        if not self._gates:
            return None
        joined_LE = torch.stack([gate.get_buffer(name) for gate in self._gates.values()])
        for row_E, gate in zip(joined_LE.unbind(), self._gates.values(), strict=True):
            setattr(gate, name, row_E)
        return joined_LE

    def begin(self) -> None:
        """A step begins: what was chosen in one that was given up does not count."""
        if self._load_LE is not None:
            self._load_LE.zero_()

    def update(self, halted: Tensor | None = None) -> None:
        """Move the biases by what was chosen since `begin`; not where `halted` is 1."""
        if self._load_LE is None or self._bias_LE is None:
            return
        if self._group is not None:
            dist.all_reduce(self._load_LE, group=self._group)
        # E times the mean is the number of choices, which every layer has alike
        below_LE = self._load_LE.mul_(-self._load_LE.shape[1]).add_(self.step.choices).sign_()
        if halted is not None:
            below_LE.masked_fill_(halted != 0, 0)
        self._bias_LE.add_(below_LE, alpha=self.step.rate)
        self._load_LE.zero_()

    def state(self) -> Mapping[str, Tensor]:
        """Return the biases by their names in the model: what a checkpoint has to have."""
        return {f"{name}.bias_E": gate.get_buffer("bias_E") for name, gate in self._gates.items()}
