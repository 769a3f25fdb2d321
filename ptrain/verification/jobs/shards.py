"""What a rank holds of every parameter, by name: the tensor, and which elements of the whole one
it stands for. DTensors say it themselves, also on meshes of several dimensions and where ranks have
uneven parts; so do FSDP1's flat parameters. A plain tensor that is smaller than the whole is the
chunk that has the same values at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ptrain.errors import PtrainError
from ptrain.internals.fsdp1 import FLAT_NAME, FlatShard, flat_shard
from ptrain.models.ledger import local
from ptrain.verification.parts import canonical_name, held

# Fused projections hold so many matrices on top of each other, each of which is cut (q, k and v).
FUSED = (1, 2, 3)


@dataclass(slots=True)
class ParameterShard:
    """One parameter as this rank has it. `at`: the places of its elements in the whole tensor, all
    in a row (None: it is the whole); `within`: its elements in a flat parameter."""

    name: str
    parameter: Tensor
    shape: torch.Size
    at: Tensor | None = None
    within: slice | Tensor | None = None

    def value(self) -> Tensor:
        """This rank's elements, in a row."""
        return self._of(self.parameter)

    def gradient(self) -> Tensor | None:
        """Return the gradient, if there is one, in the parameter's placements, as the optimizer's
        operators bring it: of a DTensor whose gradient has others this takes a collective of its
        mesh."""
        gradient, own = self.parameter.grad, self.parameter
        if gradient is None:
            return None
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        both = isinstance(gradient, DTensor) and isinstance(own, DTensor)
        if both and gradient.placements != own.placements:
            gradient = gradient.redistribute(placements=own.placements)
        return self._of(gradient)

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of a whole tensor."""
        row = held(whole).flatten()
        return row if self.at is None else row[self.at.to(row.device)]

    @torch.no_grad()
    def write(self, whole: Tensor) -> None:
        """Write this rank's elements of a whole tensor into the parameter."""
        own = local(self.parameter.detach())
        row = own.flatten()
        row[slice(None) if self.within is None else self.within] = self.of(whole).to(row)
        own.copy_(row.view_as(own))

    def like(self, state: Tensor) -> Tensor | None:
        """The same elements of what an optimizer keeps beside the parameter, if it is alike."""
        local = held(state)
        return self._of(state) if local.shape == held(self.parameter).shape else None

    def _of(self, tensor: Tensor) -> Tensor:
        row = held(tensor).flatten()
        return row if self.within is None else row[self.within]


def numbered(shape: torch.Size) -> Tensor:
    """A tensor of this shape whose elements are their places in a row."""
    return torch.arange(shape.numel()).view(shape)


@torch.no_grad()
def values_of(holds: Mapping[str, ParameterShard]) -> dict[str, Tensor]:
    """Return copies of all elements that this rank has, by name, in a row each."""
    return {name: shard.value().clone() for name, shard in holds.items()}


def held_by(
    model: nn.Module,
    wholes: Mapping[str, Tensor],
    part: Callable[[str, Tensor], Tensor] | None = None,
    *,
    tied: Mapping[str, str] | None = None,
    padded: Mapping[str, int] | None = None,
) -> dict[str, ParameterShard]:
    """Return all parameters that both sides have, in the order of `wholes`. `tied`: other names of
    these; `padded`: rows of the loop's whole tensors that have more. Raises PtrainError for one
    whose part of the whole nothing tells."""
    shards: dict[str, ParameterShard] = {}
    unclear: list[tuple[str, Tensor]] = []
    for name, parameter, flat in _renamed(model, tied or {}):
        if name not in wholes or name in shards:
            continue
        shape = wholes[name].shape
        numbers = _padded(numbered(shape), (padded or {}).get(name, 0))
        within = flat.within if flat is not None else None
        if flat is not None:
            row: Tensor | None = flat.at
        elif part is not None and not isinstance(parameter, DTensor):
            row = part(name, numbers)
        else:
            row = part_of(numbers, parameter)
        if row is None:
            unclear.append((name, parameter))
            continue
        row = row.flatten()
        count = int((row >= 0).sum())  # what is padded stands behind the other rows
        within = slice(0, count) if count < row.numel() else within
        at = None if count == shape.numel() else row[row >= 0]
        shards[name] = _checked(ParameterShard(name, parameter, shape, at, within))
    shards.update(_settled(unclear, wholes))
    return {name: shards[name] for name in wholes if name in shards}


def shard_of(name: str, tensor: DTensor, shape: torch.Size) -> ParameterShard:
    """Return which elements of a tensor of this shape a DTensor has on this rank."""
    at = part_of(numbered(shape), tensor)
    if at is None:
        raise _unknown(name, tensor, shape)
    return ParameterShard(name, tensor, shape, None if at.shape == shape else at.flatten())


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter that has several, by its other names."""
    first: dict[Tensor, str] = {}
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(parameter, canonical_name(name))
        names[canonical_name(name)] = known
    return {name: known for name, known in names.items() if name != known}


def parameter_names(model: nn.Module, tied: Mapping[str, str]) -> list[str]:
    """Canonical, also of what FSDP1 has flattened away, and of what is tied in the reference."""
    return [name for name, _, _ in _renamed(model, tied)]


def _renamed(
    model: nn.Module, tied: Mapping[str, str]
) -> Iterator[tuple[str, Tensor, _Flat | None]]:
    """Yield what has another name of a tied parameter under its first name, unless the model has
    another tensor of that name: then it is not tied there."""
    rows = list(_tensors(model))
    known = {name for name, _, _ in rows}
    for name, parameter, flat in rows:
        first = tied.get(name, name)
        yield name if first in known else first, parameter, flat


def _padded(numbers: Tensor, rows: int) -> Tensor:
    """Return it with rows of -1 behind it, so many in all."""
    more = max(rows - len(numbers), 0) if numbers.dim() else 0
    return (
        torch.cat([numbers, numbers.new_full((more, *numbers.shape[1:]), -1)]) if more else numbers
    )


def _checked(one: ParameterShard) -> ParameterShard:
    expected = one.shape.numel() if one.at is None else one.at.numel()
    if one.value().numel() != expected:
        raise _unknown(one.name, one.parameter, one.shape)
    return one


def _unknown(name: str, parameter: Tensor, shape: torch.Size) -> PtrainError:
    return PtrainError(
        f"verify: {name}: this rank has {tuple(held(parameter).shape)} of a tensor of "
        f"{tuple(shape)}, at an unknown offset\n  remedy: Set `Terms(part=...)` to a "
        "function (name, full tensor) -> this rank's shard."
    )


def part_of(whole: Tensor, tensor: Tensor, *, degree: int = 1, place: int = 0) -> Tensor | None:
    """Return the elements of a whole tensor that `tensor` stands for; None if nothing tells which.

    A DTensor shows it by its placements, unless it is a sum that is still partial. A plain tensor
    is whole, or sharded along the dimensions in which it is smaller, as torch.chunk splits over
    `degree` ranks, of which this one is the `place`-th."""
    if tensor.dim() != whole.dim():
        return None
    if isinstance(tensor, DTensor):
        is_sum = any(placement.is_partial() for placement in tensor.placements)
        return None if is_sum or tensor.shape != whole.shape else _cut(whole, tensor)
    for dim, size in enumerate(tensor.shape):
        if size != whole.size(dim):
            whole = _chunks(whole, degree, dim)[place]
    return whole if whole.shape == tensor.shape else None


def _cut(whole: Tensor, tensor: DTensor) -> Tensor:
    """Apply the placements' own rule, one mesh dimension after the other: torch.chunk, and of a
    dimension that is sharded right to left (FSDP2 on top of tp) within each of its earlier
    pieces."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of its tensor's mesh"
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:  # replicated, or a sum that is still partial
            continue
        count, place = tensor.device_mesh.size(axis), coordinate[axis]
        pieces = _chunks(whole, int(getattr(placement, "split_factor", 1)), dim)
        whole = torch.cat([_chunks(piece, count, dim)[place] for piece in pieces], dim)
    return whole


def _chunks(whole: Tensor, count: int, dim: int) -> list[Tensor]:
    """Return torch.chunk's with the empty ones that it leaves out."""
    if whole.size(dim) == 0:
        return [whole] * count
    chunks = list(whole.chunk(count, dim))
    return chunks + [whole.narrow(dim, 0, 0)] * (count - len(chunks))


@dataclass(frozen=True, slots=True)
class _Flat:
    at: Tensor
    within: slice | None


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, _Flat | None]]:
    """Yield names, tensors, and where FSDP1 has flattened them."""
    flats: dict[str, tuple[Tensor, _Flat]] = {}
    for path, module in model.named_modules():
        if (shard := flat_shard(module)) is not None:
            flats.update(_flattened(canonical_name(path), shard))
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        if name.rpartition(".")[2] != FLAT_NAME:
            flat = flats.pop(name, None)
            yield name, parameter, flat[1] if flat else None
    for name, (parameter, segment) in flats.items():  # no parameters of their own
        yield name, parameter, segment


def _flattened(prefix: str, shard: FlatShard) -> Iterator[tuple[str, tuple[Tensor, _Flat]]]:
    """FSDP1's account of its flat parameter: of each original one the range of elements that this
    rank has, and where in its shard these are."""
    if not shard.is_cut:
        if shard.keeps_originals:
            return  # whole tensors under their own names
        raise PtrainError(
            "verify: FSDP1 with NO_SHARD hides the parameters in one flat tensor\n  remedy: "
            "Wrap with `use_orig_params=True`."
        )
    for part in shard.segments():
        at = torch.arange(part.first, part.first + part.size)
        within = None if shard.keeps_originals else slice(part.start, part.start + part.size)
        name = f"{prefix}.{part.name}" if prefix else part.name
        yield name, (shard.flat, _Flat(at, within))


def _settled(
    unclear: list[tuple[str, Tensor]], wholes: Mapping[str, Tensor]
) -> Iterator[tuple[str, ParameterShard]]:
    """Yield plain tensors that are cut along one dimension. Values tell which chunk; where several
    have them (a bias of zeros), it is the place that this rank has in the others."""
    places: dict[int, int] = {}
    open_: list[tuple[str, Tensor, list[tuple[int, int, Tensor]]]] = []
    for name, parameter in unclear:
        whole = held(wholes[name])
        row = held(parameter).to(whole.dtype).flatten()
        candidates = list(_candidates(parameter.shape, whole.shape))
        alike = [
            candidate for candidate in candidates if torch.equal(whole.flatten()[candidate[2]], row)
        ]
        if len(alike) == 1:
            places.setdefault(alike[0][0], alike[0][1])
        if not candidates:
            raise _unknown(name, parameter, whole.shape)
        open_.append((name, parameter, alike or candidates))
    for name, parameter, candidates in open_:
        usual = dist.get_rank() if dist.is_initialized() else 0
        at = next(
            (at for count, place, at in candidates if place == places.get(count, usual % count)),
            candidates[0][2],
        )
        yield name, ParameterShard(name, parameter, wholes[name].shape, at)


def _candidates(part: torch.Size, whole: torch.Size) -> Iterator[tuple[int, int, Tensor]]:
    """(number of chunks, which one, its elements) of every way to cut the whole to this shape."""
    if len(part) != len(whole):
        return
    differing = [dim for dim in range(len(whole)) if part[dim] != whole[dim]]
    if len(differing) != 1:
        return
    (dim,) = differing
    numbers = numbered(whole)
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
