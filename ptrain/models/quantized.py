"""Linear layers whose frozen weights are stored in 4 or 8 bits, and LoRA adapters next to them.

As in QLoRA (Dettmers et al. 2023, arXiv:2305.14314), a weight is dequantized for the forward pass
and again for the backward pass. Autograd keeps the codes, not the dequantized weight. Quantized are
the linear layers of the repeated blocks, as bitsandbytes does in transformers; norms, embeddings
and the head keep their dtype.

A quantized weight is one uint8 parameter with a row per output: the fp32 scales of the row, then
its codes. Sharding by rows (FSDP2) therefore cuts no block and all-gathers quantized bytes.

- NF4: 16 values (appendix E of the paper), and blocks of 64 elements that are divided by their
  largest absolute value. This is bitsandbytes' default, without double quantization. A byte has two
  codes, the first one in the high half. The last block of a row is padded with zeros.
- int8: rows that are divided by their largest absolute value, as in bitsandbytes' LLM.int8().

Legend of shape suffixes: N outputs and K inputs of a layer, J blocks of a row, S bytes of a row.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.models.units import blocks_of
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import NF4_BLOCK, Quantization
from ptrain.spec.spec import Spec

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_LARGEST = 127.0  # code of int8


@torch.no_grad()
def quantize_rows(weight_NK: Tensor, kind: Quantization) -> Tensor:
    """Return the bytes of quantized rows, uint8 [N, S]. Elements are rounded to the nearest code.

    Args:
        weight_NK: Full rows of a weight, in any floating-point dtype.
        kind: The storage.
    """
    wide_NK = weight_NK.float()
    if kind is Quantization.INT8:
        scale_N1 = wide_NK.abs().amax(1, keepdim=True) / _LARGEST
        codes = (wide_NK / _nonzero_scale(scale_N1)).round_().to(torch.int8).view(torch.uint8)
        return torch.cat((scale_N1.view(torch.uint8), codes), 1)
    padded_NJB = F.pad(wide_NK, (0, -wide_NK.shape[1] % NF4_BLOCK)).unflatten(1, (-1, NF4_BLOCK))
    scale_NJ = padded_NJB.abs().amax(2)
    bounds = [(low + high) / 2 for low, high in itertools.pairwise(NF4)]
    codes = torch.bucketize(
        padded_NJB / _nonzero_scale(scale_NJ).unsqueeze(2),
        torch.tensor(bounds, device=weight_NK.device),
        out_int32=True,
    ).to(torch.uint8)
    pairs_NP2 = codes.view(len(codes), -1, 2)
    packed = (pairs_NP2[..., 0] << 4) | pairs_NP2[..., 1]
    return torch.cat((scale_NJ.view(torch.uint8), packed), 1)


def _nonzero_scale(scale: Tensor) -> Tensor:
    """Return the scales, with 1 for rows and blocks of zeros."""
    return torch.where(scale > 0, scale, 1.0)


def byte_values() -> Tensor:
    """Return the two NF4 values of each byte, fp32 [256, 2]."""
    return torch.tensor([*itertools.product(NF4, NF4)])


def dequantize_rows(
    stored_NS: Tensor, pairs: Tensor | None, columns: int, dtype: torch.dtype
) -> Tensor:
    """Return the values of quantized rows [N, K].

    Args:
        stored_NS: The bytes, uint8.
        pairs: The two values of each byte of NF4 codes, [256, 2]; None for int8.
        columns: The number of inputs K.
        dtype: The dtype of the values. Products with the fp32 scales are rounded to it once.
    """
    kind = Quantization.INT8 if pairs is None else Quantization.NF4
    split = kind.scale_bytes(columns)
    # Copied, because rows are not aligned to fp32.
    scales = stored_NS[:, :split].contiguous().view(torch.float32)
    if pairs is None:
        return stored_NS[:, split:].view(torch.int8).to(dtype).mul_(scales)
    indices = stored_NS[:, split:].flatten().int()
    values_NJB = pairs.to(dtype).index_select(0, indices).view(*scales.shape, NF4_BLOCK)
    return values_NJB.mul_(scales.unsqueeze(2)).flatten(1)[:, :columns]


class _Product(torch.autograd.Function):
    """x·Wᵀ with a frozen quantized weight, of which only x has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stored_NS: Tensor, pairs: Tensor | None, columns: int
    ) -> Tensor:
        ctx.save_for_backward(stored_NS, pairs)
        ctx.columns = columns
        return F.linear(x, dequantize_rows(stored_NS, pairs, columns, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        stored_NS, pairs = ctx.saved_tensors
        weight_NK = dequantize_rows(stored_NS, pairs, ctx.columns, gradient.dtype)
        return gradient @ weight_NK, None, None, None


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantized weight; a plain one until `quantize_linear`."""

    quantization: Quantization | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.quantization is None:
            return super().forward(x)
        pairs = self.pairs if self.quantization is Quantization.NF4 else None
        y: Tensor = _Product.apply(x, self.weight, pairs, self.in_features)
        return y if self.bias is None else y + self.bias

    def reset_buffers(self) -> None:
        """Fill the table of the two values of each byte."""
        if self.quantization is Quantization.NF4:
            self.pairs.copy_(byte_values())


class LoraLinear(QuantizedLinear):
    """A frozen linear layer with a LoRA adapter: y = x·Wᵀ + (alpha / rank) (x·Aᵀ)·Bᵀ.

    Source: Hu et al. 2021 (arXiv:2106.09685).
    """

    factor: float
    lora_A: nn.Linear
    lora_B: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora_B(self.lora_A(x)) * self.factor


def add_adapters(module: nn.Module, shape: ModelShape) -> None:
    """Freeze a built-in model, and add an adapter to each linear layer of its blocks, in place."""
    assert shape.lora_rank is not None, "the shape has adapters"
    module.requires_grad_(False)
    linears = [child for child in module.modules() if type(child) is nn.Linear]
    for linear in linears:
        if linear is module.head:
            continue
        # The module stays the same object, and its weight keeps its published name.
        linear.__class__ = LoraLinear
        linear.factor = shape.lora_alpha / shape.lora_rank
        linear.lora_A = nn.Linear(linear.in_features, shape.lora_rank, bias=False)
        linear.lora_B = nn.Linear(shape.lora_rank, linear.out_features, bias=False)


@torch.no_grad()
def quantize_linear(linear: nn.Linear, kind: Quantization) -> None:
    """Replace the weight of a linear layer by its quantized bytes, in place. A weight on meta has
    no values, and its bytes neither."""
    weight = linear.weight
    if not isinstance(linear, QuantizedLinear):
        # The module stays the same object: hooks and names remain.
        linear.__class__ = QuantizedLinear
    linear.quantization = kind
    if kind is Quantization.NF4:
        linear.register_buffer("pairs", weight.new_empty(2**8, 2).float(), persistent=False)
        linear.reset_buffers()
    rows = (len(weight), kind.row_bytes(linear.in_features))
    stored = (
        torch.empty(rows, dtype=torch.uint8, device="meta")
        if weight.is_meta
        else quantize_rows(weight, kind)
    )
    linear.weight = nn.Parameter(stored, requires_grad=False)


def quantize_frozen(module: nn.Module, spec: Spec) -> None:
    """Quantize the frozen weights of the linear layers in a model's blocks, in place, if
    `frozen.dtype` is set. Quantized ones stay.

    Args:
        module: The model, in the dtype of its parameters.
        spec: The spec.
    """
    if (kind := spec.frozen.dtype) is None:
        return
    uses = Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))
    for block in blocks_of(module, spec.model.blocks):
        for linear in module.get_submodule(block).modules():
            is_plain = type(linear) is nn.Linear or isinstance(linear, QuantizedLinear)
            if not is_plain or linear.weight.requires_grad or not linear.weight.is_floating_point():
                continue
            if uses[id(linear.weight)] == 1:  # a shared weight has another use
                quantize_linear(linear, kind)


def quantized_linear(module: nn.Module, name: str) -> QuantizedLinear | None:
    """Return the layer whose quantized weight has this name in a module, or None."""
    owner, _, leaf = name.rpartition(".")
    linear = module.get_submodule(owner)
    is_quantized = isinstance(linear, QuantizedLinear) and linear.quantization is not None
    return linear if is_quantized and leaf == "weight" else None
