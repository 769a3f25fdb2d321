"""Dropout within a sub-block whose heads or features are cut: a rank's slice has a mask of its own,
while what all ranks have alike, before and behind it, has one mask."""

from __future__ import annotations

import torch
from torch import nn

_STRIDE = 0x9E3779B97F4A7C15  # odd, so that no two ranks' seeds meet (2^64 over the golden ratio)


class OwnRandomness:
    """A generator of the rank's own, beside torch's default one and seeded by its seed."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._seed: int | None = None
        self._own: torch.Tensor | None = None
        self._common: torch.Tensor | None = None

    def around(self, module: nn.Module) -> None:
        """Use it while `module` trains; nothing is done where it draws nothing."""
        if any(getattr(child, "dropout", 0) for child in module.modules()):
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, _: object) -> None:
        if not module.training:
            return
        self._common = torch.get_rng_state()
        seed = torch.initial_seed()
        if seed != self._seed or self._own is None:
            self._seed = seed
            mixed = (seed + (self.index + 1) * _STRIDE) % 2**63
            self._own = torch.Generator().manual_seed(mixed).get_state()
        torch.set_rng_state(self._own)

    def _leave(self, *_: object) -> None:
        if self._common is not None:
            self._own = torch.get_rng_state()
            torch.set_rng_state(self._common)
        self._common = None
