"""Buffers that a forward pass may write into, when a model is only looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
