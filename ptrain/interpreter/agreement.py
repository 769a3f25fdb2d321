"""What ranks must have in common before anything is wrapped: names, shapes and dtypes of all
parameters, the layout, and samples of the user's own. Collectives of different sizes would hang or
mix numbers up; here every rank ends with the same message instead."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptrain.codec import decode, encode
from ptrain.errors import Fault, SpecError, refused
from ptrain.models.dataset import dataset_of
from ptrain.rooms.world import World
from ptrain.spec.function import UserFunction
from ptrain.spec.precision import Layout

_REMEDY = "give every rank the same spec, the same model and the same code"
_SAMPLES_REMEDY = (
    "let samples follow from their indices alone: what is drawn, from a generator with a seed of "
    "its own (np.random.default_rng(0)); what is read, from the same files on every rank"
)


def require_equal_models(
    module: nn.Module, layout: Layout, world: World, *, are_given: bool = False
) -> None:
    """Raises SpecError on every rank if any two differ; names the first tensor that does. Costs
    two all-gathers of less than 100 bytes a rank where they agree. `are_given`: the weights are a
    user's, who may have drawn others on each rank; they are read once."""
    if world.size == 1 or world.backend == "fake":
        return
    tensors = [
        [
            name,
            list(parameter.shape),
            str(parameter.dtype).removeprefix("torch."),
            _sum(parameter) if are_given else "",
            parameter.requires_grad,
        ]
        for name, parameter in module.named_parameters()
    ]
    mine = {"layout": encode(layout), "tensors": tensors}
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(gather(digest, world.size, world.device))) == 1:
        return
    everyone = gather(mine, world.size, world.device)
    for rank, other in enumerate(everyone):
        if difference := _difference(everyone[0], other, rank):
            raise SpecError(difference)


def require_equal_samples(function: UserFunction | None, world: World) -> None:
    """Raises SpecError on every rank if the dataset that `function` gives has another size, first
    or last sample on any two. None: the samples are tokens."""
    if function is None or world.size == 1 or world.backend == "fake":
        return
    dataset = dataset_of(function)
    mine = {"size": dataset.size, "digests": [*dataset.digests().items()]}
    first, *others = gather(mine, world.size, world.device)
    for rank, other in enumerate(others, 1):
        if finding := _difference_of_samples(first, other, rank):
            raise refused(function.place, finding, _SAMPLES_REMEDY)


def _difference_of_samples(first: dict[str, Any], other: dict[str, Any], rank: int) -> str:
    if other["size"] != first["size"]:
        return f"it has {other['size']} samples on rank {rank} and {first['size']} on rank 0"
    for (index, digest), (_, its_digest) in zip(first["digests"], other["digests"], strict=True):
        if digest != its_digest:
            return f"sample {index} has other values on rank {rank} than on rank 0"
    return ""


@torch.no_grad()
def _sum(parameter: Tensor) -> str:
    """Return the exact sum in fp64 of a tensor's values, as text."""
    return float(parameter.sum(dtype=torch.float64)).hex()


def gather(
    value: Any,
    size: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    kind: Any = Any,
) -> list[Any]:
    """Return every rank's value of this type, in the order of the `size` ranks. JSON travels."""
    body = json.dumps(encode(value, kind)).encode()
    mine = torch.tensor([len(body)], device=device)
    sizes = [torch.zeros_like(mine) for _ in range(size)]
    dist.all_gather(sizes, mine, group=group)
    lengths = [int(length) for length in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    padded = padded.to(device)
    rows = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(rows, padded, group=group)
    return [
        decode(json.loads(row[:length].cpu().numpy().tobytes()), kind)
        for row, length in zip(rows, lengths, strict=True)
    ]


def _difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> Fault | None:
    """Return how `rank` differs from rank 0, None where it does not."""
    for own, its in zip(first["tensors"], other["tensors"], strict=False):
        name, shape, dtype, total, is_trained = own
        its_name, its_shape, its_dtype, its_total, is_its_trained = its
        if name != its_name:
            return _fault(name, f"rank 0 has {name} where rank {rank} has {its_name}")
        if dtype != its_dtype:
            return _fault(name, f"rank 0 has it in {dtype}, rank {rank} in {its_dtype}")
        if shape != its_shape:
            return _fault(name, f"its shape is {shape} on rank 0, {its_shape} on rank {rank}")
        if is_trained != is_its_trained:
            trains, freezes = (0, rank) if is_trained else (rank, 0)
            return _fault(name, f"rank {trains} trains it, rank {freezes} has it frozen")
        if total != its_total:
            finding = f"rank {rank} has other weights in it than rank 0"
            remedy = (
                "build the model after torch.manual_seed with one number on every rank, or load"
            )
            return Fault(place=name, finding=finding, remedy=f"{remedy} the same weights")
    counts = len(first["tensors"]), len(other["tensors"])
    if counts[0] != counts[1]:
        return _fault("model", f"rank 0 has {counts[0]} tensors, rank {rank} has {counts[1]}")
    for key, value in first["layout"].items():
        if value != other["layout"][key]:
            finding = f"{key} is {value} on rank 0, {other['layout'][key]} on rank {rank}"
            return _fault("precision.layout", finding)
    return None


def _fault(place: str, finding: str) -> Fault:
    return Fault(place=place, finding=finding, remedy=_REMEDY)
