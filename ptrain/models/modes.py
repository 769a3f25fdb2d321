"""A model's modes, training and evaluation, while it is only looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from ptrain.models.dropout import dropouts


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
