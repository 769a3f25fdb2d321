"""A model's modes, training and evaluation, while it is only looked at.

Buffers that a forward pass may write into, when a model is only looked at.

The generators that a model's code on the host draws random numbers from: torch's and Python's
own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.dropout import dropouts


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
