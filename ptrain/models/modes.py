"""Set and restore a model's modes while it is only inspected: training, evaluation, and dropout.

Buffers that a forward pass may write into are restored after an inspection.

The generators that a model's code on the host draws random numbers from are torch's and Python's
own.

A module's attributes show where it drops values, and another dropout can replace torch's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ptrain.internals.fakes import detect_fake_mode
from ptrain.internals.part import replaced

_FUNCTIONS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
)  # fmt: skip


def dropouts(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the dotted name and the probability of each attribute for dropout that is not 0."""
    for name, child in module.named_modules():
        yield from ((f"{name}.{key}".lstrip("."), value) for key, value in own_dropouts(child))


def own_dropouts(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the same of the module itself, by the attribute's name."""
    rates = {key: value for key, value in vars(module).items() if "drop" in key}
    if isinstance(module, _DropoutNd):
        rates["p"] = module.p
    yield from (
        (key, float(value))
        for key, value in rates.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    )


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
    off = SwitchedOff()
    with replaced(F, **dict.fromkeys(_FUNCTIONS, off)):
        yield off


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
    before: Any = F.dropout
    if isinstance(before, SwitchedOff):
        yield
        return

    def dropped(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or not 0.0 < p < 1.0 or not input.numel():
            return before(input, p, training, inplace)
        return drop(DropoutCall(input, p, inplace, before))

    with replaced(F, dropout=dropped):
        yield


def drawn_state() -> Any:
    """Return what is another after a draw. Under fake tensors, which draw nothing, always the
    same."""
    if detect_fake_mode() is not None:
        return None
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


class OutsideDraws:
    """Follows a forward pass: whether anything is drawn outside of its layers, and while no module
    that is watched runs, a layer or another."""

    def __init__(self) -> None:
        self._outside = self._between = drawn_state()
        self._depth = 0

    def enter(self) -> bool:
        """A watched module is about to run. Return whether something was drawn since the last one
        had run."""
        self._depth += 1
        return self._depth == 1 and drawn_state() != self._between

    def leave(self) -> None:
        """A watched module has run."""
        self._depth -= 1
        if not self._depth:
            self._between = drawn_state()

    def enter_layer(self) -> bool:
        """Return whether something was drawn since the layer before had run."""
        return bool(drawn_state() != self._outside)

    def leave_layer(self) -> None:
        """A layer has run."""
        self._outside = drawn_state()


def seed_of_step(seed: int, step: int, index: int) -> int:
    """Return what a step (from 0) seeds with the ranks that draw the `index`-th random numbers."""
    return (seed * 1_000_003 + step) * 65_537 + index


def seed_device(seed: int, device: torch.device) -> None:
    """Seed what code on a device draws from, and on the host. torch.manual_seed seeds every kind of
    device, and writes down where it was called for each that nobody uses: 0.4 ms, in each step."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def reseed(seed: int) -> None:
    """Set both generators to `seed`."""
    torch.manual_seed(seed)
    random.seed(seed)


@contextmanager
def forked() -> Iterator[None]:
    """What is drawn while entered is not drawn for whoever comes after."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)


@contextmanager
def copied_buffers(module: nn.Module) -> Iterator[None]:
    """While entered, `module` has copies of its buffers, so that its own stay as they are."""
    own = [
        (child, name, buffer)
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None
    ]
    copies = {id(buffer): buffer.clone() for _, _, buffer in own}  # one may have several names
    for child, name, buffer in own:
        child._buffers[name] = copies[id(buffer)]
    try:
        yield
    finally:
        for child, name, buffer in own:
            child._buffers[name] = buffer


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """While entered, every module of it is in that mode; each is left in the one it was in."""
    modes = [(child, child.training) for child in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """While entered, the probabilities that its modules say by an attribute are 0: nothing is
    dropped in training mode either, unless the model draws numbers of its own."""
    with ExitStack() as restored:
        for name, probability in [*dropouts(module)]:
            path, _, attribute = name.rpartition(".")
            owner = module.get_submodule(path)
            restored.callback(setattr, owner, attribute, probability)
            setattr(owner, attribute, 0.0)
        yield
