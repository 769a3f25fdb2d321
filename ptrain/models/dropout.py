"""Where a module drops out something, by what its modules say; and another dropout in the place of
torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

_FUNCTIONS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
)  # fmt: skip


def dropouts(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the dotted name and the probability of each attribute for dropout that is not 0."""
    for name, child in module.named_modules():
        for key, value in own_dropouts(child):
            yield f"{name}.{key}".lstrip("."), value


def own_dropouts(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the same of the module itself, by the attribute's name."""
    rates = {key: value for key, value in vars(module).items() if "drop" in key}
    if isinstance(module, _DropoutNd):
        rates["p"] = module.p
    for key, value in rates.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            yield key, float(value)


def drops_out(module: nn.Module) -> bool:
    """Return whether some module says that it drops out; what a function drops a trace tells."""
    return any(True for _ in dropouts(module))


class SwitchedOff:
    """Stands where a function of torch's drops out, and gives what it is given. `drops`: something
    would have been dropped."""

    def __init__(self) -> None:
        self.drops = False

    def __call__(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        self.drops |= training and p > 0.0
        return input


@contextmanager
def switched_off() -> Iterator[SwitchedOff]:
    """Within it nothing is dropped by torch's functions, outside of attention."""
    functional: Any = F
    before = {name: getattr(functional, name) for name in _FUNCTIONS}
    off = SwitchedOff()
    try:
        for name in _FUNCTIONS:
            setattr(functional, name, off)
        yield off
    finally:
        for name, function in before.items():
            setattr(functional, name, function)


@dataclass(frozen=True, slots=True)
class DropoutCall:
    """A call of `torch.nn.functional.dropout` that draws: 0 < `rate` < 1. `before` is what the name
    stood for."""

    input: Tensor
    rate: float
    is_in_place: bool
    before: Callable[..., Tensor]

    def by_before(self) -> Tensor:
        """Return what it gives."""
        return self.before(self.input, self.rate, True, self.is_in_place)


Drop: TypeAlias = Callable[[DropoutCall], Tensor]


@contextmanager
def dropout_by(drop: Drop) -> Iterator[None]:
    """Within it `drop` is given every call by this name that draws; nn.Dropout calls it so. Where
    dropout is switched off it is that."""
    functional: Any = F
    if isinstance(functional.dropout, SwitchedOff):
        yield
        return
    before: Callable[..., Tensor] = functional.dropout

    def dropped(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or not 0.0 < p < 1.0 or not input.numel():
            return before(input, p, training, inplace)
        return drop(DropoutCall(input, p, inplace, before))

    functional.dropout = dropped
    try:
        yield
    finally:
        functional.dropout = before
