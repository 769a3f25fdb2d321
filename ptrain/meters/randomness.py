"""Which ranks must draw the same random numbers, the state of their generators, and digests of
bits.

Ranks draw alike where they compute the same thing: the same samples, in the same layers, on copies
of the activations; and over cp, where each takes its tokens' part of the masks of all. Every other
mesh axis sets them apart but the tensor axis, and that one too where its ranks work on slices of
the tokens.

Digests are fast enough for a whole training state in a running job: the bytes are 64-bit words in
rows of 512, and a digest is the hash of the sums of all rows and all columns, modulo 2^64. A
flipped bit changes one word by a power of two, hence a row's and a column's sum; words that change
places change some sum unless they stay in one row and one column. Words after the last full row are
hashed as they are. Two passes over memory, no copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ptrain.internals.dispatch import without_modes
from ptrain.interpreter.program import Program
from ptrain.models.dropout import drops_out
from ptrain.models.ledger import local
from ptrain.spec.placement import CUTTING_AXES, SAMPLE_AXES, TOKEN_AXES, Axis

_WORD = 8  # bytes
_ROW = 512  # words: sums of 4 KiB and 1/512 of the tensor are all that leaves the device
_DIGEST_BYTES = 8  # two tensors of some 10^9 would have one digest


@torch.no_grad()
def digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the digests of what this rank holds of each tensor, in hexadecimal. Equal bytes in
    equal order have equal digests, wherever they lie; shape and dtype are not in them. There is one
    copy to the host per device."""
    with without_modes():
        sums = [_sums(local(tensor.detach())) for tensor in tensors]
        devices: dict[torch.device, list[int]] = {}
        for index, checksums in enumerate(sums):
            devices.setdefault(checksums.device, []).append(index)
        texts = [""] * len(sums)
        for indices in devices.values():
            joined = torch.cat([sums[index] for index in indices]).cpu()
            sizes = [sums[index].numel() for index in indices]
            for index, part in zip(indices, joined.split(sizes), strict=True):
                texts[index] = of_bytes(part.numpy().tobytes())
    return texts


def of_bytes(data: bytes) -> str:
    """Return the digest of a few bytes on the host, all of which are hashed."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def kind(tensor: torch.Tensor) -> str:
    """Dtype and shape of what this rank holds, `float32[4, 8]`."""
    held = local(tensor)
    return f"{str(held.dtype).removeprefix('torch.')}{list(held.shape)}"


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Of rows, then of columns, then what is left over, as words (1-d int64)."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % _WORD:
        data = data.clone()  # words begin at multiples of their size
    full = data.numel() // (_WORD * _ROW) * _WORD * _ROW
    rest = data[full:]
    if missing := -rest.numel() % _WORD:
        rest = torch.cat([rest, rest.new_zeros(missing)])
    rest = rest.view(torch.int64)
    if not full:
        return rest
    rows = data[:full].view(torch.int64).view(-1, _ROW)
    return torch.cat([rows.sum(1), rows.sum(0), rest])


def drawn(program: Program) -> tuple[str, str] | None:
    """This rank's place among those that draw apart, and a digest of its generator's state. None
    for a model that draws nothing: then no state of a generator is part of the training's."""
    if not drops_out(program.model):
        return None
    mesh = program.mesh
    cutting = [axis for axis in CUTTING_AXES if axis not in SAMPLE_AXES]
    alike = TOKEN_AXES if has_token_slices(program.model) else cutting
    apart = (axis for axis in mesh.axes if axis not in alike)
    place = ",".join(f"{axis}={mesh.coordinate(axis)}" for axis in apart)
    return place, generator_digest(program.world.device)


def generator_digest(device: torch.device) -> str:
    """Return a digest of where the generator of a device stands."""
    is_cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()
    return of_bytes(state.numpy().tobytes())


def has_token_slices(model: nn.Module) -> bool:
    """Return whether the tensor axis cuts the tokens between sub-blocks: some module has nothing
    but whole tensors that are distributed all the same. (A row operator's bias is one beside a cut
    weight.)"""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and all(map(_is_whole, own)):
            return True
    return False


def _is_whole(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == Axis.TP and placement.is_replicate()
        for name, placement in zip(names, parameter.placements, strict=True)
    )
