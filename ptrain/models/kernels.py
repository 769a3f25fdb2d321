"""CPU stand-ins for GPU kernels that allocate as many bytes as the GPU's, for traces and
simulations. They compute sizes, not values.

RMSNorm: a GPU's fused kernel allocates its output and one number per row (fp32 at least), where a
CPU runs operator by operator. The stand-in is a custom operator, so that a recomputation policy can
keep its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ptrain.internals.part import replace_attributes
from ptrain.models.ledger import OperatorMode, is_wrapper
from ptrain.models.numerics import DTYPE_NAMES


@torch.library.custom_op("ptrain::fused_rms_norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor | None, dims: int) -> tuple[Tensor, Tensor]:
    return _sizes(x, weight, dims)


@_norm.register_fake
def _sizes(x: Tensor, weight: Tensor | None, dims: int) -> tuple[Tensor, Tensor]:
    rows = [*x.shape[: x.dim() - dims], *[1] * dims]
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_ones(x.shape), x.new_ones(rows, dtype=wide)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.set_materialize_grads(
        False
    )  # rows are unused, and CUDA's kernel allocates no gradient for them
    ctx.save_for_backward(x, weight, output[1])


def _backward(
    context: Any, gradient: Tensor, _: Tensor
) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, _ = context.saved_tensors
    needs_x, needs_weight, _ = context.needs_input_grad
    of_x = x.new_ones(x.shape) if needs_x else None
    return of_x, weight.new_ones(weight.shape) if needs_weight else None, None


_norm.register_autograd(_backward, setup_context=_keep)


def is_fused(x: Tensor, weight: Tensor | None) -> bool:
    """Return True if a GPU has one RMSNorm kernel for these tensors.

    It has none if input and weight differ in dtype, or if their shapes do not match.
    """
    if weight is None:
        return True
    return weight.dtype == x.dtype and weight.shape == x.shape[x.dim() - weight.dim() :]


def rms_norm(x: Tensor, weight: Tensor | None, *, dims: int) -> Tensor:
    """Return a tensor of ones with the norm's output shape; the norm covers the last `dims`
    dimensions.

    Args:
        x: The input [..., features].
        weight: The scale, or None for a norm without one. Only backward passes use it.
        dims: The number of last dimensions that the norm covers.
    """
    y: Tensor = _norm(x, weight, dims)[0]
    return y


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_LAYER_NORM = torch.ops.aten.native_layer_norm.default
_WIDE_BYTES = 4
_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")  # operators of unfused attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The arguments that decide how a GPU computes attention.

    `is_grouped`: keys have fewer heads than queries.
    """

    dtype: torch.dtype
    head_dim: int
    sequence: int
    drops: bool
    is_grouped: bool


class SavedSizes(Protocol):
    """The interface that answers which tensors a GPU's attention saves for backward."""

    def __call__(self, call: AttentionCall) -> Callable[[int], int] | None:
        """Return a function from the bytes that a CPU kernel saves next to its output to the GPU's.

        None if the GPU's kernel is unknown.
        """

    def goes_by_operators(self, call: AttentionCall) -> bool:
        """Return True if a GPU is known to compute this call operator by operator."""


@dataclass(slots=True)
class UnknownKernels:
    """The attention calls whose GPU kernels are unknown, described in a few words each."""

    attention: dict[str, None] = field(default_factory=dict)


@contextmanager
def kernels_of(*, is_for_cuda: bool, keeping: SavedSizes | None = None) -> Iterator[UnknownKernels]:
    """Temporarily make a CPU allocate as the target device does.

    Enter it after a mode of fake tensors, if there is one.

    Args:
        is_for_cuda: Whether the target is a GPU. If not, nothing is replaced.
        keeping: The saved tensors of attention kernels; None leaves attention unchanged.

    Returns:
        The attention calls that could not be modeled.
    """
    unknown = UnknownKernels()
    if not is_for_cuda:
        yield unknown
        return
    attention = _GPUKernelSizes(keeping, unknown) if keeping else None
    with _replace_functions(attention), attention or nullcontext():
        yield unknown


class _GPUKernelSizes(OperatorMode):
    """The mode that resizes tensors saved by attention and LayerNorm to the sizes on a GPU.

    Fused attention saves one number per row, head and sample for backward; GPU kernels pad the
    rows. Seed and offset of dropout are added to the same storage here. `drops`: the running
    attention has dropout. `goes_by_operators`: it is not a fused kernel. Both are False for tensors
    that a checkpoint kept.
    """

    def __init__(self, keeping: SavedSizes, unknown: UnknownKernels) -> None:
        super().__init__()
        self.keeping, self.unknown = keeping, unknown
        self.drops = self.goes_by_operators = False

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if function is _LAYER_NORM:
            y, *kept = result
            return y, *map(_in_wide_rows, kept)
        if function is not _ATTENTION:
            # A softmax operator within an attention call shows that no fused kernel ran.
            self.goes_by_operators |= function._schema.name in _SOFTMAX
            return result
        y, kept = result
        query, key = args[:2]
        call = _describe_call(query, key, drops=self.drops)
        is_masked = kwargs.get("attn_mask") is not None
        if (kept_by := self.keeping(call)) is None or is_masked:
            words = ("a mask" * is_masked, "fewer key heads" * call.is_grouped)
            what = " and ".join(filter(None, words))
            self._note_unknown(query, what)
            return result
        return y, _in_more(kept, kept_by(kept.nbytes))

    def run_attention(
        self,
        attend: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        *,
        drops: bool,
        is_masked: bool,
    ) -> Tensor:
        """Run an attention call and return its output.

        A call that a CPU computes operator by operator is noted as unknown, because a GPU may have
        a kernel for it. A call that a GPU computes operator by operator is forced to do so here,
        unless it has a mask or dropout, which no GPU measurement has confirmed.
        """
        self.drops, self.goes_by_operators = drops, False
        is_known = not drops and not is_masked and _is_whole(query, key)
        by_operators = is_known and self.keeping.goes_by_operators(
            _describe_call(query, key, drops=False)
        )
        try:
            with sdpa_kernel(SDPBackend.MATH) if by_operators else nullcontext():
                y = attend()
        finally:
            self.drops = False
        if self.goes_by_operators:
            why = "fewer key heads" * (key.shape[1] != query.shape[1])
            self._note_unknown(query, why if by_operators else "operator by operator on the CPU")
        return y

    def _note_unknown(self, query: Tensor, what: str) -> None:
        """Record a call whose GPU kernel is unknown."""
        size = f"head_dim {query.shape[-1]} in {DTYPE_NAMES.get(query.dtype, query.dtype)}"
        self.unknown.attention[f"{size}, {what}" if what else size] = None


def _is_whole(query: Tensor, key: Tensor) -> bool:
    """Return True if query and key are [samples, heads, tokens, features] with equal token
    counts."""
    return query.dim() == key.dim() == 4 and query.shape[-2] == key.shape[-2]


def _describe_call(query: Tensor, key: Tensor, *, drops: bool) -> AttentionCall:
    sequence, head_dim = query.shape[-2:]
    return AttentionCall(
        dtype=query.dtype,
        head_dim=head_dim,
        sequence=sequence,
        drops=drops,
        is_grouped=key.shape[1] != query.shape[1],
    )


def _in_wide_rows(rows: Tensor) -> Tensor:
    """Return LayerNorm's row statistics in at least fp32, as a GPU stores them.

    A CPU stores them in the dtype of the input.
    """
    is_wide = rows.itemsize >= _WIDE_BYTES
    return rows if is_wide else _in_more(rows, rows.numel() * _WIDE_BYTES)


def _in_more(tensor: Tensor, size: int) -> Tensor:
    """Return a copy of the tensor in a storage of `size` bytes."""
    whole = tensor.new_empty(size // tensor.itemsize)
    return whole.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


@contextmanager
def _replace_functions(attention: _GPUKernelSizes | None) -> Iterator[None]:
    """Temporarily replace dropout, attention and RMSNorm by versions that allocate as a GPU does.

    - Dropout saves a mask of one byte per element: `at::dropout` calls native_dropout on a GPU,
      while a CPU multiplies by noise in the input's dtype.
    - Fused attention saves no dropout mask, because backward draws it again from seed and offset.
    - RMSNorm is one kernel.
    """
    # Taken before the replacement, which calls them.
    attend: Any = F.scaled_dot_product_attention
    drop: Any = F.dropout
    normalize: Any = F.rms_norm

    def fused(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **settings: Any,
    ) -> Tensor:
        without = partial(attend, query, key, value, attn_mask, 0.0, *rest, **settings)
        if attention is None:
            y: Tensor = without()
            return y
        is_masked = attn_mask is not None
        return attention.run_attention(
            without, query, key, drops=dropout_p > 0.0, is_masked=is_masked
        )

    def masked(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if inplace or not training or p == 0.0:
            y: Tensor = drop(input, p, training, inplace)
            return y
        return torch.native_dropout(input, p, training)[0]

    def normalized(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        is_of_input = tuple(normalized_shape) == input.shape[-len(normalized_shape) :]
        if is_wrapper(type(input)) or not is_of_input or not is_fused(input, weight):
            y: Tensor = normalize(input, normalized_shape, weight, eps)
            return y
        return rms_norm(input, weight, dims=len(normalized_shape))

    with replace_attributes(
        F, scaled_dot_product_attention=fused, dropout=masked, rms_norm=normalized
    ):
        yield
