"""What of torch has to be another thing on fake ranks with fake tensors: all of it stands here.

Each patch has a test that fails when torch no longer needs it; that torch has what it replaces,
the tests of `internals` say. On any other version nothing is simulated:
a patch that misses would give figures that look right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ptrain.errors import PtrainError
from ptrain.internals import (
    dtensor,
    fakes,
    fsdp2,
    functional_collectives,
    grouped_products,
    modules,
)
from ptrain.internals.dispatch import without_modes
from ptrain.internals.dtensor import TRACERS, ShardingPropagator, forget_shapes
from ptrain.internals.fakes import FakeTensor
from ptrain.internals.part import replaced
from ptrain.models.pretrained import PACKED, masks, never_packed
from ptrain.spec.model import HuggingFaceModel, ModelSpec
from ptrain.version import REFERENCE_TORCH, TESTED_TORCH, is_tested

Replacement = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One attribute of torch and what stands in for it."""

    name: str
    owner: Any
    attribute: str
    replacement: Replacement


def require_supported() -> None:
    """Raises PtrainError for a torch that the patches were not written for."""
    if not is_tested(torch.__version__):
        raise PtrainError(
            f"torch {torch.__version__} is installed, but fake ranks and fake tensors work "
            f"with {TESTED_TORCH[0]} to {TESTED_TORCH[-1]}\n  remedy: Run `pip install "
            f"'torch=={REFERENCE_TORCH}.*'`, or use `ptrain predict`, which does not need "
            "torch."
        )


@contextmanager
def patched(model: ModelSpec) -> Iterator[None]:
    """Within it torch runs `model` on fake ranks."""
    require_supported()
    forget_shapes()
    with ExitStack() as stack:
        stack.callback(forget_shapes)
        for patch in (*PATCHES, *_of_transformers(model)):
            original = getattr(patch.owner, patch.attribute)
            stand_in = {patch.attribute: patch.replacement(original)}
            stack.enter_context(replaced(patch.owner, **stand_in))
        yield


def _alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """DTensor finds the shape of a result by running the operator on fake tensors of the global
    shape, under whatever fake mode is active: ours, where every meter would count them."""

    def propagate(self: ShardingPropagator, op_schema: object) -> Any:
        with without_modes():
            return original(self, op_schema)

    return propagate


class Chunks(Sequence[torch.Tensor]):
    """The parts of `torch.chunk`, empty ones behind them, each made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, number: int, dim: int) -> None:
        self.tensor, self.number, self.dim = tensor, number, dim

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        """Return a chunk as a list does: a slice gives a list."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self.number))]
        rows = self.tensor.shape[self.dim]
        height = -(-rows // self.number)
        first = (index if index >= 0 else index + self.number) * height
        if not -self.number <= index < self.number:
            raise IndexError(index)
        if first >= rows:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, first, min(height, rows - first))


def _lazily(original: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2 makes a view for every rank of the group, of which it takes two: with thousands of
    ranks that is all that wrapping does."""

    def chunk_with_empty(tensor: torch.Tensor, num_chunks: int, dim: int) -> Chunks:
        return Chunks(tensor, num_chunks, dim)

    return chunk_with_empty


def _running(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where fake tensors are, torch believes that it compiles: DTensor looks each operator up anew,
    and waits for each functional collective at once. This runs."""

    def are_we_tracing() -> bool:
        return False

    return are_we_tracing


def _unwrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    """The result of a functional collective is wrapped until it is awaited. On fake tensors the
    wrapping is a tensor of its own, and nothing has to be awaited."""

    def wrap_tensor(result: torch.Tensor) -> torch.Tensor:
        return result

    return wrap_tensor


def _cloned(original: Callable[..., Any]) -> Callable[..., Any]:
    """A fake tensor that is copied deeply (a stage's buffers) gets a storage that its views do not
    share."""

    def deepcopy(self: FakeTensor, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]

    return deepcopy


def _of_transformers(model: ModelSpec) -> Iterator[Patch]:
    if isinstance(model, HuggingFaceModel) and hasattr(masks(), PACKED):
        yield Patch(
            name="packed samples", owner=masks(), attribute=PACKED, replacement=_never_packed
        )


def _never_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers reads off the positions whether several samples stand in one row, and where it
    cannot, it makes a mask. Here none do, and attention is causal without a mask."""
    return never_packed


def _of_any_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's shape function of a grouped product takes bf16 alone, as its first kernel did; fp32
    and fp16 run, and give the same shapes."""

    def shapes(first: torch.Tensor, second: torch.Tensor, **others: Any) -> Any:
        if others["scale_a"] is not None or first.dtype is torch.bfloat16:
            return original(first, second, **others)
        return grouped_products.empty_product(first, second, others)

    return shapes


def _unless_alike(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a module's `to` gives of fake parameters takes their places by a swap, which torch
    refuses where anything refers to them weakly, as a mode does. Nothing is to be swapped where
    `to` changes nothing, as in a library that puts an adapter beside the layer that it is for."""

    def applied(
        self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> Any:
        own = [*self.parameters(recurse), *self.buffers(recurse)]
        with torch.no_grad():
            is_alike = any(isinstance(t, FakeTensor) for t in own) and all(fn(t) is t for t in own)
        return self if is_alike else original(self, fn, recurse)

    return applied


def _standing(name: str, place: tuple[Any, str], replacement: Replacement) -> Patch:
    owner, attribute = place
    return Patch(name=name, owner=owner, attribute=attribute, replacement=replacement)


PATCHES = (
    *(_standing("tracing", (module, "_are_we_tracing"), _running) for module in TRACERS),
    _standing("results of functional collectives", functional_collectives.RESULTS, _unwrapped),
    _standing("shapes of DTensor's results", dtensor.SHAPES, _alone),
    _standing("copies of fake tensors", fakes.COPIES, _cloned),
    _standing("chunks of FSDP2", fsdp2.CHUNKS, _lazily),
    _standing("modules that are moved to where they are", modules.MOVES, _unless_alike),
    _standing("dtypes of grouped products", grouped_products.SHAPES, _of_any_dtype),
)
