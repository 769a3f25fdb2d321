"""Temporary changes of a model's modes during an inspection: training, evaluation, dropout, buffers
and random generators.

Generators are torch's and Python's, from which model code on the host draws. Dropout is found by
the modules' attributes, and torch's dropout function can be replaced.
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
from ptrain.internals.part import replace_attributes

_FUNCTIONS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
)  # fmt: skip


def dropout_rates(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield dotted name and probability of each attribute with a dropout probability above 0."""
    for name, child in module.named_modules():
        yield from ((f"{name}.{key}".lstrip("."), value) for key, value in own_dropouts(child))


def own_dropouts(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield name and probability of a module's dropout attributes, without submodules."""
    # Classes choose the name (`attn_dropout`, `drop_prob`), which contains "drop" by convention.
    # torch's modules call it `p`.
    rates = {key: value for key, value in vars(module).items() if "drop" in key}
    if isinstance(module, _DropoutNd):
        rates["p"] = module.p
    yield from (
        (key, float(value))
        for key, value in rates.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    )


def drops_out(module: nn.Module) -> bool:
    """Return True if an attribute of some module sets dropout; a trace finds dropout by
    functions."""
    return any(True for _ in dropout_rates(module))


class DisabledDropout:
    """A replacement of torch's dropout functions that returns its input.

    `drops` is True once a call would have dropped values.
    """

    def __init__(self) -> None:
        self.drops = False

    def __call__(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        self.drops |= training and p > 0.0
        return input


@contextmanager
def switched_off() -> Iterator[DisabledDropout]:
    """Temporarily disable torch's dropout functions; attention dropout stays enabled."""
    off = DisabledDropout()
    with replace_attributes(F, **dict.fromkeys(_FUNCTIONS, off)):
        yield off


@dataclass(frozen=True, slots=True)
class DropoutCall:
    """A call of `torch.nn.functional.dropout` that draws a mask: 0 < `rate` < 1.

    `before` is the function that was replaced.
    """

    input: Tensor
    rate: float
    is_in_place: bool
    original: Callable[..., Tensor]

    def by_before(self) -> Tensor:
        """Return the result of the replaced function."""
        return self.original(self.input, self.rate, True, self.is_in_place)


Drop: TypeAlias = Callable[[DropoutCall], Tensor]


@contextmanager
def dropout_by(drop: Drop) -> Iterator[None]:
    """Temporarily pass every call of F.dropout that draws a mask to `drop`, including nn.Dropout's.

    Within `switched_off` it has no effect.

    Args:
        drop: Receives each call, and returns the output, which has the input's shape.
    """
    before: Any = F.dropout
    if isinstance(before, DisabledDropout):
        yield
        return

    def dropped(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        # Such a call draws no numbers.
        if not training or not 0.0 < p < 1.0 or not input.numel():
            return before(input, p, training, inplace)
        return drop(DropoutCall(input, p, inplace, before))

    with replace_attributes(F, dropout=dropped):
        yield


def drawn_state() -> Any:
    """Return the state of the generators, which changes with each draw.

    Returns None under fake tensors, where nothing is drawn.
    """
    if detect_fake_mode() is not None:
        return None
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


class OutsideDraws:
    """The record of random draws outside of a model's layers during a forward pass, and outside of
    all watched modules."""

    def __init__(self) -> None:
        self._outside = self._between = drawn_state()
        self._depth = 0

    def enter(self) -> bool:
        """Note that a watched module starts; return True if numbers were drawn since the last one
        ended."""
        self._depth += 1
        return self._depth == 1 and drawn_state() != self._between

    def leave(self) -> None:
        """Note that a watched module has ended."""
        self._depth -= 1
        if not self._depth:
            self._between = drawn_state()

    def enter_layer(self) -> bool:
        """Return True if numbers were drawn since the previous layer ended."""
        return bool(drawn_state() != self._outside)

    def leave_layer(self) -> None:
        """Note that a layer has ended."""
        self._outside = drawn_state()


def seed_of_step(seed: int, step: int, index: int) -> int:
    """Return the seed of a step for the ranks that share random stream `index`; steps count from
    0.

    Args:
        seed: The seed of the training.
        step: The step, from 0.
        index: The random stream, from 0.
    """
    # A number with mixed bases: seeds differ for all steps below 1,000,003 and all streams below
    # 65,537.
    return (seed * 1_000_003 + step) * 65_537 + index


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generators of the host and of one device.

    torch.manual_seed seeds every kind of device, and formats a traceback for each that is not
    initialized, which takes 0.4 ms per step.

    Args:
        seed: The seed of both generators.
        device: The device. Only the host's generator is seeded if it is no GPU.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def reseed(seed: int) -> None:
    """Seed the generators of torch and Python."""
    torch.manual_seed(seed)
    random.seed(seed)


@contextmanager
def fork_generators() -> Iterator[None]:
    """Temporarily allow draws that do not advance the generators for later code."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)


@contextmanager
def copied_buffers(module: nn.Module) -> Iterator[None]:
    """Temporarily replace the module's buffers by copies, so that the originals stay unchanged."""
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
    """Temporarily set training or evaluation mode for all modules, then restore each one's mode."""
    modes = [(child, child.training) for child in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Temporarily set all dropout attributes of the modules to 0.

    Dropout that does not depend on such an attribute stays.
    """
    with ExitStack() as restored:
        for name, probability in [*dropout_rates(module)]:
            path, _, attribute = name.rpartition(".")
            owner = module.get_submodule(path)
            restored.callback(setattr, owner, attribute, probability)
            setattr(owner, attribute, 0.0)
        yield
