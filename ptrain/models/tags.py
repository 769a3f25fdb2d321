"""Which storages stand off the device by decision.

On a machine without an accelerator every tensor is on the CPU, so a tag tells what counts as device
memory there.
"""

from __future__ import annotations

import weakref

import torch

from ptrain.spec.placement import Tier

_TAGS: dict[int, tuple[weakref.ref[torch.UntypedStorage], Tier]] = {}


def tag(tensor: torch.Tensor, tier: Tier) -> None:
    """Says on which tier the tensor's storage counts."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    _TAGS[key] = (weakref.ref(storage, lambda _: _TAGS.pop(key, None)), tier)


def tier_of(storage: torch.UntypedStorage, device: str = "cpu") -> Tier:
    """Return the tagged tier; without a tag a CPU storage beside another kind of device is the
    host's, and anything else device memory."""
    if entry := _TAGS.get(storage._cdata):
        return entry[1]
    return Tier.HOST if storage.device.type == "cpu" != device else Tier.DEVICE


def is_tagged(storage: torch.UntypedStorage) -> bool:
    """Return whether somebody decided where this storage counts."""
    return storage._cdata in _TAGS
