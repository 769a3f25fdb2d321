"""Every shard mapped to the part of the whole tensor that it stands for (the canonical mapping of
TTrace, arXiv 2506.09280), so that what a rank holds is compared where it is, without a gather; and
where it must be whole, gathered."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ptrain.internals.dtensor import compute_local_shape_and_global_offset
from ptrain.models.ledger import local
from ptrain.train.exchange import Exchange


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A box in a whole tensor: its first element and its size in every dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of `whole` that this part is."""
        for dim, (start, size) in enumerate(zip(self.offset, self.shape, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


def held(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of the tensor, where the reference is: on the CPU."""
    return local(tensor.detach()).cpu()


def part_of(
    tensor: torch.Tensor, whole: torch.Size, *, degree: int = 1, place: int = 0
) -> TensorBox | None:
    """The part of a tensor of shape `whole` that `tensor` is; None where nothing tells.

    A DTensor says so itself, unless it is a sum that is still partial. A plain tensor is the whole,
    or is cut along the dimensions in which it is smaller as torch cuts over `degree` ranks
    (torch.chunk), of which this one is the `place`-th.
    """
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            return None
        if tensor.shape != whole:
            return None
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        bounded = (min(start, size) for start, size in zip(offset, whole, strict=True))
        return TensorBox(tuple(bounded), tuple(shape))
    if tensor.dim() != len(whole):
        return None
    offsets, sizes = [], []
    for size, full in zip(tensor.shape, whole, strict=True):
        start, expected = 0, full
        if size != full:
            expected, start = Shard.local_shard_size_and_offset(full, degree, place)
        if size != expected:
            return None
        offsets.append(start)
        sizes.append(size)
    return TensorBox(tuple(offsets), tuple(sizes))


def norm(tensor: torch.Tensor) -> float:
    """Return the 2-norm, in fp64."""
    return float(torch.linalg.vector_norm(tensor.double()))


def square(tensor: torch.Tensor) -> float:
    """Return the sum of the squares of all elements, in fp64."""
    return float(tensor.detach().double().square().sum())


def difference(actual: torch.Tensor, expected: torch.Tensor, length: float) -> float:
    """The distance is relative to `length`, and infinite for what is not finite."""
    size = norm(actual.double() - expected.to(actual.device).double())
    if size == 0.0:
        return 0.0
    return size / length if length and math.isfinite(size) else math.inf


def relative(actual: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Return the 2-norm of the difference over that of `expected` or `least`, whichever is larger;
    infinite where only `expected` is zero, or anything is not finite."""
    length = max(norm(expected), least)
    return difference(actual, expected, length) if math.isfinite(length) else math.inf


def root_mean_square(tensors: Collection[torch.Tensor]) -> float:
    """Return that of all elements of all tensors; 0 of none."""
    numel = sum(tensor.numel() for tensor in tensors)
    return math.sqrt(sum(map(square, tensors)) / numel) if numel else 0.0


def numbers_apart(right: float, measured: float) -> float:
    """Return how far a number is from one device's (relative); infinite for what is none."""
    distance = abs(measured - right)
    size = distance / abs(right) if distance and right else (math.inf if distance else 0.0)
    return size if math.isfinite(size) else math.inf


def without_masks(own: torch.Tensor, its: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both with zeros where both are -inf, as masks of attention are: infinities that are
    the same have no difference."""
    hidden = (own == -math.inf) & (its == -math.inf)
    return own.masked_fill(hidden, 0), its.masked_fill(hidden, 0)


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
