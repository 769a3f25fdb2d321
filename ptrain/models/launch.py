"""Samples on their way to a device."""

from __future__ import annotations

import torch

from ptrain.internals.fakes import detect_fake_mode


def sent_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on a device. To CUDA it travels from pinned memory, in the stream's order,
    and the host goes on: a copy from other memory waits until the device has nothing left to do.
    torch's allocator keeps the pinned memory until the copy is over."""
    if device.type == "cuda" and tensor.device.type == "cpu" and detect_fake_mode() is None:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
