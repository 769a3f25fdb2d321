"""Torch's random state around passes that nobody shall notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def cuda_devices(model: nn.Module) -> list[int]:
    """Return the indices of the GPUs that a model's tensors are on."""
    tensors = (*model.parameters(), *model.buffers())
    return sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})


@contextmanager
def seeded(model: nn.Module) -> Iterator[None]:
    """Draw from one seed within, and as before afterwards."""
    with torch.random.fork_rng(devices=cuda_devices(model)):
        torch.manual_seed(0)
        yield
