"""What the modules of a model return in one step, and the gradients of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

from ptrain.models.arguments import first_real

Key: TypeAlias = tuple[str, int]  # a module's path and a micro-batch


@dataclass(slots=True)
class Outputs:
    """Of modules by path and micro-batch, in the order in which they came. What a module returns
    beside its first floating tensor is not kept."""

    forward: dict[Key, torch.Tensor] = field(default_factory=dict)
    backward: dict[Key, torch.Tensor] = field(default_factory=dict)

    def keep(self, path: str, micro_batch: int, output: Any) -> None:
        """Keep the first output that came: a block that is computed again comes a second time."""
        key = path, micro_batch
        first = first_real(output)
        if first is None or key in self.forward:
            return
        self.forward[key] = first.detach().clone()
        if first.requires_grad:
            first.register_hook(partial(self._keep_gradient, key))

    def _keep_gradient(self, key: Key, gradient: torch.Tensor) -> None:
        self.backward[key] = gradient.detach().clone()
