"""Find which elements of each full parameter this rank holds.

DTensors show their elements by placements, also on multi-dimensional meshes and with uneven shards.
FSDP1's flat parameters show them by metadata. A plain tensor that is smaller than the full one is
the chunk with the same initial values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ptrain.errors import PtrainError
from ptrain.internals.fsdp1 import FLAT_NAME, FlatShard, flat_shard
from ptrain.models.ledger import local_tensor
from ptrain.verification.parts import canonical_name, local_cpu

# Numbers of matrices in a fused projection (2: gate and up, 3: q, k and v): each is sharded alone.
FUSED = (1, 2, 3)


@dataclass(slots=True)
class ParameterShard:
    """The elements of one parameter that this rank holds.

    Attributes:
        name: Canonical name of the parameter.
        parameter: The tensor that holds the elements.
        shape: Shape of the full parameter.
        indices: Flat indices of the elements in the full parameter. None if it is replicated.
        flat_index: Position of the elements in the flattened `parameter`, if that holds more: a
            flat parameter of FSDP1, or padding. None if all count.
    """

    name: str
    parameter: Tensor
    shape: torch.Size
    indices: Tensor | None = None
    flat_index: slice | Tensor | None = None

    def value(self) -> Tensor:
        """Return this rank's elements, flattened. They may share memory with the parameter."""
        return self._select(self.parameter)

    def gradient(self) -> Tensor | None:
        """Return the gradient of this rank's elements, flattened, or None.

        A DTensor gradient with other placements than the parameter's is redistributed, as
        optimizers' operators do. This runs a collective on its mesh.
        """
        gradient, own = self.parameter.grad, self.parameter
        if gradient is None:
            return None
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        both = isinstance(gradient, DTensor) and isinstance(own, DTensor)
        if both and gradient.placements != own.placements:
            gradient = gradient.redistribute(placements=own.placements)
        return self._select(gradient)

    def select(self, whole: Tensor) -> Tensor:
        """Return the same elements of a full tensor, flattened."""
        row = local_cpu(whole).flatten()
        return row if self.indices is None else row[self.indices.to(row.device)]

    @torch.no_grad()
    def write(self, whole: Tensor) -> None:
        """Write this rank's elements of a full tensor to the parameter."""
        own = local_tensor(self.parameter.detach())
        row = own.flatten()
        row[slice(None) if self.flat_index is None else self.flat_index] = self.select(whole).to(
            row
        )
        own.copy_(row.view_as(own))

    def select_state(self, state: Tensor) -> Tensor | None:
        """Return the same elements of an optimizer's state tensor, or None if its shape differs."""
        local = local_cpu(state)
        return self._select(state) if local.shape == local_cpu(self.parameter).shape else None

    def _select(self, tensor: Tensor) -> Tensor:
        row = local_cpu(tensor).flatten()
        return row if self.flat_index is None else row[self.flat_index]


def index_tensor(shape: torch.Size) -> Tensor:
    """Return a tensor of this shape that contains its flat indices."""
    return torch.arange(shape.numel()).view(shape)


@torch.no_grad()
def copy_values(holds: Mapping[str, ParameterShard]) -> dict[str, Tensor]:
    """Return copies of this rank's elements of all parameters, flattened, by name."""
    return {name: shard.value().clone() for name, shard in holds.items()}


def find_shards(
    model: nn.Module,
    wholes: Mapping[str, Tensor],
    part: Callable[[str, Tensor], Tensor] | None = None,
    *,
    tied: Mapping[str, str] | None = None,
    padded: Mapping[str, int] | None = None,
) -> dict[str, ParameterShard]:
    """Return this rank's shards of the parameters that both sides have, in the order of `wholes`.

    Args:
        model: The loop's model.
        wholes: The reference's full parameters, by name.
        part: Returns this rank's shard of a full tensor, given its name.
        tied: First name of each tied parameter, by its other names.
        padded: Number of rows of the loop's full tensors, by name, if they are padded.

    Raises:
        PtrainError: The offset of a shard is unknown.
    """
    shards: dict[str, ParameterShard] = {}
    unclear: list[tuple[str, Tensor]] = []
    for name, parameter, flat in _rename_tied(model, tied or {}):
        if name not in wholes or name in shards:
            continue
        shape = wholes[name].shape
        numbers = _pad_indices(index_tensor(shape), (padded or {}).get(name, 0))
        within = flat.flat_index if flat is not None else None
        if flat is not None:
            row: Tensor | None = flat.indices
        elif part is not None and not isinstance(parameter, DTensor):
            row = part(name, numbers)
        else:
            row = local_part(numbers, parameter)
        if row is None:
            unclear.append((name, parameter))
            continue
        row = row.flatten()
        count = int((row >= 0).sum())  # padding rows follow the others
        within = slice(0, count) if count < row.numel() else within
        # None for a full tensor saves an index of its size in each selection.
        at = None if count == shape.numel() else row[row >= 0]
        shards[name] = _require_count(ParameterShard(name, parameter, shape, at, within))
    shards.update(_find_sharded(unclear, wholes))
    return {name: shards[name] for name in wholes if name in shards}


def dtensor_shard(name: str, tensor: DTensor, shape: torch.Size) -> ParameterShard:
    """Return the elements of a full tensor that a DTensor holds on this rank.

    Args:
        name: The parameter's canonical name.
        tensor: The DTensor.
        shape: The shape of the full tensor.

    Raises:
        PtrainError: The DTensor is a partial sum, or its global shape is not `shape`.
    """
    at = local_part(index_tensor(shape), tensor)
    if at is None:
        raise _unknown_offset_error(name, tensor, shape)
    return ParameterShard(name, tensor, shape, None if at.shape == shape else at.flatten())


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter with several names, by its other names."""
    first: dict[Tensor, str] = {}
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(parameter, canonical_name(name))
        names[canonical_name(name)] = known
    return {name: known for name, known in names.items() if name != known}


def parameter_names(model: nn.Module, tied: Mapping[str, str]) -> list[str]:
    """Return the canonical parameter names, with FSDP1's original names and tied ones resolved."""
    return [name for name, _, _ in _rename_tied(model, tied)]


def _rename_tied(
    model: nn.Module, tied: Mapping[str, str]
) -> Iterator[tuple[str, Tensor, _Flat | None]]:
    """Yield tied parameters under their first name.

    A model that has another tensor under the first name does not tie them: the name stays.
    """
    rows = list(_named_tensors(model))
    known = {name for name, _, _ in rows}
    for name, parameter, flat in rows:
        first = tied.get(name, name)
        yield name if first in known else first, parameter, flat


def _pad_indices(numbers: Tensor, rows: int) -> Tensor:
    """Return the indices with rows of -1 appended, up to `rows` in total."""
    more = max(rows - len(numbers), 0) if numbers.dim() else 0
    return (
        torch.cat([numbers, numbers.new_full((more, *numbers.shape[1:]), -1)]) if more else numbers
    )


def _require_count(one: ParameterShard) -> ParameterShard:
    """Return the shard; raise PtrainError if its element count is not the expected one."""
    expected = one.shape.numel() if one.indices is None else one.indices.numel()
    if one.value().numel() != expected:
        raise _unknown_offset_error(one.name, one.parameter, one.shape)
    return one


def _unknown_offset_error(name: str, parameter: Tensor, shape: torch.Size) -> PtrainError:
    """Return the error for a shard at an unknown offset."""
    return PtrainError(
        f"verify: {name}: this rank has {tuple(local_cpu(parameter).shape)} of a tensor of "
        f"{tuple(shape)}, at an unknown offset\n  remedy: Set `Terms(part=...)` to a "
        "function (name, full tensor) -> this rank's shard."
    )


def local_part(whole: Tensor, tensor: Tensor, *, degree: int = 1, place: int = 0) -> Tensor | None:
    """Return the elements of a full tensor that `tensor` holds, or None if they are unknown.

    A DTensor shows them by its placements, unless it is a partial sum. A plain tensor is
    replicated, or sharded along the dimensions in which it is smaller, as torch.chunk splits over
    `degree` ranks; `place` is this rank's index.

    Args:
        whole: The full tensor.
        tensor: This rank's tensor.
        degree: The number of ranks that shard a plain tensor.
        place: The index of this rank among them.
    """
    if tensor.dim() != whole.dim():
        return None
    if isinstance(tensor, DTensor):
        is_sum = any(placement.is_partial() for placement in tensor.placements)
        return (
            None if is_sum or tensor.shape != whole.shape else _shard_by_placements(whole, tensor)
        )
    for dim, size in enumerate(tensor.shape):
        if size != whole.size(dim):
            whole = _chunks(whole, degree, dim)[place]
    return whole if whole.shape == tensor.shape else None


def _shard_by_placements(whole: Tensor, tensor: DTensor) -> Tensor:
    """Return this rank's shard of a full tensor, by the placements of a DTensor.

    Mesh dimensions apply in order, each by torch.chunk. FSDP2 on top of tensor parallelism shards
    right to left (`_StridedShard`, with a `split_factor`): each earlier piece is chunked
    separately.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of its tensor's mesh"
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:  # replicated, or a partial sum
            continue
        count, place = tensor.device_mesh.size(axis), coordinate[axis]
        # `_StridedShard` in torch/distributed/tensor/placement_types.py (torch 2.13).
        pieces = _chunks(whole, int(getattr(placement, "split_factor", 1)), dim)
        whole = torch.cat([_chunks(piece, count, dim)[place] for piece in pieces], dim)
    return whole


def _chunks(whole: Tensor, count: int, dim: int) -> list[Tensor]:
    """Return `count` chunks. Unlike torch.chunk, it appends empty chunks to reach that number."""
    if whole.size(dim) == 0:
        return [whole] * count
    chunks = list(whole.chunk(count, dim))
    return chunks + [whole.narrow(dim, 0, 0)] * (count - len(chunks))


@dataclass(frozen=True, slots=True)
class _Flat:
    """The elements of a parameter in FSDP1's flat parameter.

    `indices` are flat indices in the original parameter. `flat_index` is their range in this rank's
    shard of the flat parameter, or None if FSDP1 keeps the original parameters.
    """

    indices: Tensor
    flat_index: slice | None


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, _Flat | None]]:
    """Yield canonical names, tensors, and the positions of parameters that FSDP1 has flattened."""
    flats: dict[str, tuple[Tensor, _Flat]] = {}
    for path, module in model.named_modules():
        if (shard := flat_shard(module)) is not None:
            flats.update(_flat_parameters(canonical_name(path), shard))
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        if name.rpartition(".")[2] != FLAT_NAME:
            flat = flats.pop(name, None)
            yield name, parameter, flat[1] if flat else None
    for name, (parameter, segment) in flats.items():  # flattened: not in named_parameters
        yield name, parameter, segment


def _flat_parameters(prefix: str, shard: FlatShard) -> Iterator[tuple[str, tuple[Tensor, _Flat]]]:
    """Yield the original parameters of a flat parameter, with the elements that this rank has."""
    if not shard.is_cut:
        if shard.keeps_originals:
            return  # full tensors under their original names
        raise PtrainError(
            "verify: FSDP1 with NO_SHARD hides the parameters in one flat tensor\n  remedy: "
            "Wrap with `use_orig_params=True`."
        )
    for part in shard.segments():
        at = torch.arange(part.first, part.first + part.size)
        within = None if shard.keeps_originals else slice(part.start, part.start + part.size)
        name = f"{prefix}.{part.name}" if prefix else part.name
        yield name, (shard.flat, _Flat(at, within))


def _find_sharded(
    unclear: list[tuple[str, Tensor]], wholes: Mapping[str, Tensor]
) -> Iterator[tuple[str, ParameterShard]]:
    """Yield the shards of plain tensors that are sharded along one dimension.

    The initial values identify the chunk. If several chunks have equal values, as a bias of zeros
    has, the chunk index of this rank's other parameters decides, or else its rank.
    """
    places: dict[int, int] = {}
    open_: list[tuple[str, Tensor, list[tuple[int, int, Tensor]]]] = []
    for name, parameter in unclear:
        whole = local_cpu(wholes[name])
        row = local_cpu(parameter).to(whole.dtype).flatten()
        candidates = list(_candidate_shards(parameter.shape, whole.shape))
        alike = [
            candidate for candidate in candidates if torch.equal(whole.flatten()[candidate[2]], row)
        ]
        if len(alike) == 1:
            places.setdefault(alike[0][0], alike[0][1])
        if not candidates:
            raise _unknown_offset_error(name, parameter, whole.shape)
        open_.append((name, parameter, alike or candidates))
    for name, parameter, candidates in open_:
        usual = dist.get_rank() if dist.is_initialized() else 0
        at = next(
            (at for count, place, at in candidates if place == places.get(count, usual % count)),
            candidates[0][2],
        )
        yield name, ParameterShard(name, parameter, wholes[name].shape, at)


def _candidate_shards(part: torch.Size, whole: torch.Size) -> Iterator[tuple[int, int, Tensor]]:
    """Yield all shards of this shape as (number of chunks, chunk index, flat element indices)."""
    if len(part) != len(whole):
        return
    differing = [dim for dim in range(len(whole)) if part[dim] != whole[dim]]
    if len(differing) != 1:
        return
    (dim,) = differing
    numbers = index_tensor(whole)
    most = dist.get_world_size() if dist.is_initialized() else 1
    for fused in FUSED:
        for count in range(2, most + 1):
            if fused > 1 and whole[dim] % (fused * count):
                continue
            pieces = [_chunks(piece, count, dim) for piece in _chunks(numbers, fused, dim)]
            for place in range(count):
                cut = torch.cat([piece[place] for piece in pieces], dim)
                if cut.shape == part:
                    yield count, place, cut.flatten()
