"""All patches of torch for fake ranks with fake tensors.

Each patch has a test that fails when torch no longer needs it. The tests of `internals` check that
torch has the attribute that a patch replaces. No other torch version is simulated, because a patch
that misses its target would give wrong figures that look right.
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
    matrix_products,
    modules,
)
from ptrain.internals.compiled import is_compiling, is_tracing
from ptrain.internals.dispatch import disable_modes
from ptrain.internals.dtensor import TRACERS, ShardingPropagator, clear_shape_caches
from ptrain.internals.fakes import FakeTensor
from ptrain.internals.part import replace_attributes
from ptrain.models.pretrained import PACKED, masks_module, never_packed
from ptrain.spec.model import HuggingFaceModel, ModelSpec
from ptrain.version import REFERENCE_TORCH, TESTED_TORCH, is_tested

Replacement = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """An attribute of torch and its replacement.

    Attributes:
        name: A short description of the patch.
        owner: The module or class with the attribute.
        attribute: Name of the attribute.
        replacement: Returns the replacement, given the original.
    """

    name: str
    owner: Any
    attribute: str
    replacement: Replacement


def require_supported() -> None:
    """Require a torch version that the patches were written for.

    Raises:
        PtrainError: Another version is installed.
    """
    if not is_tested(torch.__version__):
        raise PtrainError(
            f"torch {torch.__version__} is installed, but fake ranks and fake tensors work "
            f"with {TESTED_TORCH[0]} to {TESTED_TORCH[-1]}\n  remedy: Run `pip install "
            f"'torch=={REFERENCE_TORCH}.*'`, or use `ptrain predict`, which does not need "
            "torch."
        )


@contextmanager
def patch_torch(model: ModelSpec) -> Iterator[None]:
    """Temporarily patch torch to run `model` on fake ranks."""
    require_supported()
    # Shapes that were cached without the patches would bypass them.
    clear_shape_caches()
    with ExitStack() as stack:
        # shapes cached under the patches must not be used outside, nor the other way round
        stack.callback(clear_shape_caches)
        for patch in (*PATCHES, *_transformers_patches(model)):
            original = getattr(patch.owner, patch.attribute)
            stand_in = {patch.attribute: patch.replacement(original)}
            stack.enter_context(replace_attributes(patch.owner, **stand_in))
        yield


def _propagate_outside_modes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run DTensor's shape propagation outside all modes.

    DTensor finds the shape of a result by running the operator on fake tensors of the global shape,
    in the active fake mode if there is one. Under our mode, all meters would count these tensors.
    """

    def propagate(self: ShardingPropagator, op_schema: object) -> Any:
        with disable_modes():
            return original(self, op_schema)

    return propagate


class Chunks(Sequence[torch.Tensor]):
    """The parts of `torch.chunk`, padded with empty ones to `number` parts, created on access."""

    def __init__(self, tensor: torch.Tensor, number: int, dim: int) -> None:
        self.tensor, self.number, self.dim = tensor, number, dim

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        """Return a chunk, or a list of chunks for a slice."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self.number))]
        rows = self.tensor.shape[self.dim]
        # torch.chunk rounds the size of a part up, so the last parts may be short or missing.
        height = -(-rows // self.number)
        first = (index if index >= 0 else index + self.number) * height
        if not -self.number <= index < self.number:
            raise IndexError(index)
        # `_chunk_with_empty` pads the list with empty 1-d tensors (_fsdp_common.py, 2.13).
        if first >= rows:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, first, min(height, rows - first))


def _chunk_lazily(original: Callable[..., Any]) -> Callable[..., Any]:
    """Create chunks lazily in FSDP2's sharding.

    FSDP2 creates a view for every rank of the group and uses two of them. With thousands of ranks
    this takes most of the time of wrapping.
    """

    def chunk_with_empty(tensor: torch.Tensor, num_chunks: int, dim: int) -> Chunks:
        return Chunks(tensor, num_chunks, dim)

    return chunk_with_empty


def _report_not_tracing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Report that torch is tracing only while it compiles.

    With fake tensors torch assumes that it compiles: DTensor then resolves each operator again, and
    waits for each functional collective at once.
    """

    def are_we_tracing() -> bool:
        return is_compiling() or is_tracing()

    return are_we_tracing


def _skip_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the result of a functional collective without a wrapper.

    torch wraps it until it is waited for. On fake tensors the wrapper would be another tensor, and
    no wait is needed. A compiled program keeps its waits, because its buffers depend on them.
    """

    def wrap_tensor(result: torch.Tensor) -> torch.Tensor:
        wrapped: torch.Tensor = original(result) if is_compiling() or is_tracing() else result
        return wrapped

    return wrap_tensor


def _deepcopy_by_clone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a fake tensor deeply by `clone`.

    torch's deepcopy of a fake tensor (such as a stage's buffer) creates a storage that its views do
    not share.
    """

    def deepcopy(self: FakeTensor, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            # The memo keeps ties: a tensor with two names is copied once.
            memo[id(self)] = self.clone()
        return memo[id(self)]

    return deepcopy


def _transformers_patches(model: ModelSpec) -> Iterator[Patch]:
    """Yield the patches of transformers, for a model of that library."""
    if isinstance(model, HuggingFaceModel) and hasattr(masks_module(), PACKED):
        yield Patch(
            name="packed samples",
            owner=masks_module(),
            attribute=PACKED,
            replacement=_report_not_packed,
        )


def _report_not_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Report that no row contains several samples.

    transformers infers from the positions whether a row has several samples, and builds a mask if
    it cannot. Rows here have one sample, and causal attention needs no mask.
    """
    return never_packed


def _accept_any_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    """Accept any dtype in the shape function of a grouped matrix product.

    torch's accepts bf16 only, like its first kernel. fp32 and fp16 run, and have the same shapes.
    """

    def shapes(first: torch.Tensor, second: torch.Tensor, **others: Any) -> Any:
        # Scaled products and bf16 are what torch's function supports.
        if others["scale_a"] is not None or first.dtype is torch.bfloat16:
            return original(first, second, **others)
        return matrix_products.empty_product(first, second, others)

    return shapes


def _skip_unchanged_moves(original: Callable[..., Any]) -> Callable[..., Any]:
    """Skip `Module.to` for fake parameters that it would not change.

    torch swaps the parameters for the results of `to`. The swap fails if a parameter has weak
    references, such as a mode's. Libraries call `to` without effect, for example to put an adapter
    on the device of its layer.
    """

    def applied(
        self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> Any:
        own = [*self.parameters(recurse), *self.buffers(recurse)]
        with torch.no_grad():
            is_alike = any(isinstance(t, FakeTensor) for t in own) and all(fn(t) is t for t in own)
        return self if is_alike else original(self, fn, recurse)

    return applied


def _patch_at(name: str, place: tuple[Any, str], replacement: Replacement) -> Patch:
    """Return a patch of the attribute at `place` (owner and attribute name)."""
    owner, attribute = place
    return Patch(name=name, owner=owner, attribute=attribute, replacement=replacement)


PATCHES = (
    *(_patch_at("tracing", (module, "_are_we_tracing"), _report_not_tracing) for module in TRACERS),
    _patch_at("results of functional collectives", functional_collectives.RESULTS, _skip_wrapper),
    _patch_at("shapes of DTensor's results", dtensor.SHAPES, _propagate_outside_modes),
    _patch_at("copies of fake tensors", fakes.COPIES, _deepcopy_by_clone),
    _patch_at("chunks of FSDP2", fsdp2.CHUNKS, _chunk_lazily),
    _patch_at("modules that are moved to where they are", modules.MOVES, _skip_unchanged_moves),
    _patch_at("dtypes of grouped products", matrix_products.SHAPES, _accept_any_dtype),
)
