"""Dropout within a sub-block whose heads or features are cut: a rank's slice has a mask of its own,
while what all ranks have alike, before and behind it, has one mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed.tensor._random as dtensor_random
from torch import nn

_STRIDE = 0x9E3779B97F4A7C15  # odd, so that no two ranks' seeds meet (2^64 over the golden ratio)


class OwnRandomness:
    """A generator of the rank's own, beside the device's default one and seeded by its seed."""

    def __init__(self, index: int, device_type: str) -> None:
        self.index = index
        self.device_type = device_type
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
        default = self._default()
        self._common = default.get_state()
        seed = default.initial_seed()
        if seed != self._seed or self._own is None:
            self._seed = seed
            mixed = (seed + (self.index + 1) * _STRIDE) % 2**63
            self._own = torch.Generator(default.device).manual_seed(mixed).get_state()
        default.set_state(self._own)

    def _leave(self, *_: object) -> None:
        if self._common is not None:
            default = self._default()
            self._own = default.get_state()
            default.set_state(self._common)
        self._common = None

    def _default(self) -> torch.Generator:
        if self.device_type == "cuda":
            return torch.cuda.default_generators[torch.cuda.current_device()]
        return torch.default_generator


class _AsIs:
    """Stands where torch keeps its tracker of DTensors' random numbers, and does nothing: torch's
    own is the same for all ranks, takes a broadcast to begin with and warns on CPUs."""

    distribute_region_enabled = False

    def _distribute_region(self, *_: object, **__: object) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def drawn_by_rank() -> Iterator[None]:
    """Within it a DTensor's random numbers are those of the rank's own generator, whose seed says
    which ranks draw alike. Sets torch.distributed.tensor._random._rng_tracker."""
    module: Any = dtensor_random
    before = module._rng_tracker
    module._rng_tracker = _AsIs()
    try:
        yield
    finally:
        module._rng_tracker = before
