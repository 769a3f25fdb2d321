"""Dropout within a sub-block whose heads or features are cut: a rank's slice has a mask of its own,
while what all ranks have alike, before and behind it, has one mask."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from ptrain.internals.dtensor import RANDOM
from ptrain.models.dropout import drops_out

_SEED_BYTES = 7  # a seed is a positive 64-bit number


class OwnRandomness:
    """Within a module, or from its column layers to its row, a rank draws from a place of its own,
    which follows from where the device's default generator stands, from the module and from the
    rank: nothing is kept between steps. Nothing is done where a module draws nothing."""

    def __init__(self, index: int, device_type: str) -> None:
        self.index = index
        self.device_type = device_type
        self._common: torch.Tensor | None = None
        self._num_modules = 0

    def around(self, module: nn.Module) -> None:
        """While `module` trains."""
        if drops_out(module):
            number = self._next_number()
            module.register_forward_pre_hook(lambda module, _: self._enter(module, number))
            module.register_forward_hook(self._leave, always_call=True)

    def between(self, module: nn.Module, columns: Iterable[nn.Module], row: nn.Module) -> None:
        """From what the first of a module's `columns` gives, which is cut, to what `row` takes:
        behind that every rank has the same again. Backward may stop a module that runs again."""
        if drops_out(module):
            number = self._next_number()
            for column in columns:
                column.register_forward_hook(lambda column, *_: self._enter(column, number))
            row.register_forward_pre_hook(self._leave)
            module.register_forward_hook(self._leave, always_call=True)

    def _next_number(self) -> int:
        self._num_modules += 1
        return self._num_modules - 1

    def _enter(self, module: nn.Module, number: int) -> None:
        if not module.training or self._common is not None:
            return
        default = self._default()
        self._common = default.get_state()
        place = f"{number} {self.index} ".encode() + self._common.numpy().tobytes()
        digest = hashlib.blake2b(place, digest_size=_SEED_BYTES).digest()
        default.manual_seed(int.from_bytes(digest, "big"))

    def _leave(self, *_: object) -> None:
        if self._common is not None:
            self._default().set_state(self._common)
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
    which ranks draw alike. Sets torch's tracker of them."""
    module, tracker = RANDOM
    before = getattr(module, tracker)
    setattr(module, tracker, _AsIs())
    try:
        yield
    finally:
        setattr(module, tracker, before)
