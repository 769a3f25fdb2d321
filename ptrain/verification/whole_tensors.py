"""Tensors that ranks have parts of, or of which a stage has some, whole and on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ptrain.train.exchange import Exchange


def whole(named: Mapping[str, Tensor], exchange: Exchange) -> dict[str, Tensor]:
    """Full tensors, by name, as copies on the host; what only some ranks have, from the first of
    them. All ranks call it, those of one mesh with the same names in the same order."""
    own = {name: _full(tensor) for name, tensor in named.items()}
    described = {
        name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in own.items()
    }
    everyone = exchange.gather(described)
    sources = {name: rank for rank in range(len(everyone) - 1, -1, -1) for name in everyone[rank]}
    for name in sorted(sources):
        if all(name in its for its in everyone):
            continue
        shape, dtype = everyone[sources[name]][name]
        if name not in own:
            own[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(own[name], src=sources[name], group=exchange.group)
    return own


def _full(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True).contiguous()
