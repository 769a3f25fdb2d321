"""Matrix products with fp8 factors and dynamic scales, as in torchao, or in torch.autocast.

y = x·Wᵀ has three products: the output, the gradient of x (g·W) and the gradient of W (gᵀ·x). Each
factor is multiplied by a scale that brings its largest absolute value to the largest fp8 number,
and cast. The product is divided by both scales. With a scale per tensor, x and W are e4m3 and g is
e5m2, which has a larger range. With a scale per row of the left factor and per column of the right
factor, all are e4m3 and scales are rounded down to powers of two, so that scaling is exact.

Backward keeps x and W in their dtype and casts them again (a compiled program may keep the fp8
copies instead): other operators keep x too, a wrapper
frees and gathers W, and scales per row differ between the three products.

CUDA devices multiply by `torch._scaled_mm`. On CPUs the operator `ptrain::scaled_mm` has the same
arguments and result: it sums products of the fp8 values in fp32 (fp64 for an fp64 result), then
scales the sum. torch's own CPU operator depends on the version and the processor: some versions
take one scale per tensor only, none returns fp64, and oneDNN replaces it on processors with AMX.

Autocast: each block and the output head run in a context of their own, whose operators are those of
one context around the model. Parameters, embedding, norms and residual sums stay in fp32; the loss
takes bf16 logits and computes in fp32. Autocast does not cast fp64, so equality tests compute in
fp64. The contexts keep no cache of cast weights. A weight is used once in a micro-batch, and its
copy is saved for backward anyway. With recomputed activations, a cache would keep the copies of all
blocks until the end of forward.

Legend of shape suffixes: M tokens, K inputs and N outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ptrain.errors import input_error
from ptrain.internals.matrix_products import scaled_mm
from ptrain.models.transformer import Transformer
from ptrain.spec.precision import FP8_CAPABILITY, Matmul
from ptrain.steps.step import Quantize

_EPS = 1e-12  # torchao's smallest absolute maximum, below which scales do not grow
_EXPONENT = -(2**23)  # int32 mask of the sign and exponent of an fp32 number
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@torch.library.custom_op("ptrain::scaled_mm", mutates_args=())
def multiply_scaled(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    wide = torch.promote_types(out_dtype, torch.float32)
    product = _widen(left, wide) @ _widen(right, wide)
    return product.mul_(left_scale).mul_(right_scale).to(out_dtype)


@multiply_scaled.register_fake
def _empty(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=out_dtype)


def _widen(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of an fp8 matrix in a wider dtype.

    They are looked up among the 256 values of fp8: torch 2.13 casts fp8 on CPUs one element at a
    time, which takes ten times as long.
    """
    table = torch.arange(2**8, dtype=torch.uint8, device=x.device).view(x.dtype).to(dtype)
    return table.index_select(0, x.view(torch.uint8).flatten().int()).view(x.shape)


class _Factor(NamedTuple):
    """An fp8 copy of a matrix, and the fp32 factors that restore its values."""

    values: Tensor
    inverse: Tensor

    @property
    def transposed(self) -> _Factor:
        return _Factor(self.values.t(), self.inverse.t())


def _quantize_matrix(x: Tensor, dtype: torch.dtype, dim: int | None) -> _Factor:
    """Scale a matrix and cast it to fp8.

    Args:
        x: The matrix.
        dtype: The fp8 dtype.
        dim: The dimension that the product sums over: each index of the other dimension has its
            scale. None: the matrix has one scale.
    """
    # One pass over x, without a copy of its absolute values.
    least, most = torch.aminmax(x, dim=dim, keepdim=dim is not None)
    largest = torch.maximum(-least, most)
    # Divided in fp64 and rounded once, as torchao does, so that scales agree to the bit.
    scale = (torch.finfo(dtype).max / largest.double().clamp(min=_EPS)).float()
    if dim is not None:
        scale = scale.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
    # A factor with dimensions promotes a 16-bit matrix to fp32; a 0-d factor would not.
    factors = scale.view(-1, 1) if dim is None else scale
    return _Factor((x * factors).to(dtype), scale.reciprocal())


def _product(left: _Factor, right: _Factor, dtype: torch.dtype, *, is_fast: bool) -> Tensor:
    """Return the product of two matrices. The kernels need the left one stored by rows and the
    right one stored by columns."""
    by_rows, by_columns = left.values.contiguous(), right.values.t().contiguous().t()
    factors = by_rows, by_columns, left.inverse, right.inverse, dtype
    product: Tensor
    if by_rows.is_cuda and dtype is not torch.float64:
        product = scaled_mm(*factors, is_fast=is_fast)
    else:
        product = multiply_scaled(*factors)
    return product


class _Linear(torch.autograd.Function):
    """x·Wᵀ with fp8 factors.

    The sums of the output are the fast ones of the tensor cores, which keep fewer bits. With a
    scale per row the gradients' are too: CUDA's kernel is slow otherwise.
    """

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, recipe: Matmul) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.recipe = recipe
        along = recipe is Matmul.ROWWISE
        left = _quantize_matrix(x_MK, _E4M3, 1 if along else None)
        right = _quantize_matrix(weight_NK.t(), _E4M3, 0 if along else None)
        return _product(left, right, x_MK.dtype, is_fast=True)

    @staticmethod
    def backward(ctx: Any, gradient_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_MK, weight_NK = ctx.saved_tensors
        along = ctx.recipe is Matmul.ROWWISE
        dtype, columns = (_E4M3, 0) if along else (_E5M2, None)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        of_x = of_weight = None
        left = _quantize_matrix(gradient_MN, dtype, 1 if along else None)
        if needs_x:
            right = _quantize_matrix(weight_NK, _E4M3, columns)
            of_x = _product(left, right, gradient_MN.dtype, is_fast=along)
            # The fp8 copy of the weight is freed before that of the input is made.
            del right
        if needs_weight:
            # Scales per row depend on the dimension that the product sums over. A scale per tensor
            # does not, so its copy serves both products.
            left = _quantize_matrix(gradient_MN, dtype, columns) if along else left
            right = _quantize_matrix(x_MK, _E4M3, columns)
            of_weight = _product(left.transposed, right, gradient_MN.dtype, is_fast=along)
        return of_x, of_weight, None


class Float8Linear(nn.Linear):
    """A linear layer with fp8 products; its parameters keep their dtype."""

    recipe: Matmul

    def forward(self, x: Tensor) -> Tensor:
        y_MN: Tensor = _Linear.apply(x.flatten(0, -2), self.weight, self.recipe)
        y = y_MN.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def require_fp8_device(device: torch.device, dtype: torch.dtype, recipe: Matmul) -> None:
    """Check that a rank's device multiplies fp8 matrices; the emulation runs on every device.

    Args:
        device: The device of the rank.
        dtype: The dtype of the products.
        recipe: The dtypes and scales of the factors.

    Raises:
        SpecError: The GPU has no fp8 products, or none that return `dtype`.
    """
    if device.type != "cuda" or dtype is torch.float64:
        return
    name, remedy = torch.cuda.get_device_name(device), "Use `precision.matmul=none`."
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None:  # AMD's GPUs have other fp8 dtypes
        finding = f"not supported yet: {recipe} products on AMD GPUs, and this is {name}"
        raise input_error("precision.matmul", finding, remedy)
    if 10 * major + minor < FP8_CAPABILITY:
        needed = f"{FP8_CAPABILITY // 10}.{FP8_CAPABILITY % 10}"
        finding = f"need compute capability {needed} or more, and {name} has {major}.{minor}"
        raise input_error("precision.matmul", f"{recipe} products {finding}", remedy)
    if recipe is Matmul.ROWWISE and dtype is not torch.bfloat16:
        given = str(dtype).removeprefix("torch.")
        finding = f"{recipe} products of {name} return bfloat16, and the parameters are {given}"
        remedy = f"Use `precision.parameters=bf16`, or `precision.matmul={Matmul.TENSORWISE}`."
        raise input_error("precision.matmul", finding, remedy)


def use_float8(module: nn.Module, names: Iterable[str], recipe: Matmul) -> None:
    """Give linear layers fp8 products, in place.

    Args:
        module: A model or the part of a pipeline stage.
        names: The paths of linear layers; paths that the module lacks are skipped.
        recipe: The dtypes and scales of the factors.
    """
    known = dict(module.named_modules())
    for name in names:
        if (linear := known.get(name)) is not None:
            # The module stays the same object, as in torch's fully_shard: hooks and names remain.
            linear.__class__ = Float8Linear
            linear.recipe = recipe


def _autocast(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, dtype=torch.bfloat16, cache_enabled=False)


def use_autocast(module: nn.Module, names: Iterable[str]) -> None:
    """Run the forward of submodules in torch.autocast, in place.

    Args:
        module: A model or the part of a pipeline stage.
        names: The paths of blocks and of the head; paths that the module lacks are skipped.
    """
    known = dict(module.named_modules())
    for name in names:
        if (found := known.get(name)) is not None:
            _override(found, "forward")
    if isinstance(module, Transformer) and module.head is None:
        _override(module, "logits")  # of a tied head, which is no module


def _override(module: nn.Module, method: str) -> None:
    """Run a method of a module in torch.autocast."""
    kind = type(module)
    plain = getattr(kind, method)

    def run(self: nn.Module, x: Tensor, *args: Any) -> Any:
        with _autocast(x):
            return plain(self, x, *args)

    # The module stays the same object, as in torch's fully_shard: hooks and names remain.
    module.__class__ = type(f"Autocast{kind.__name__}", (kind,), {method: run})


def change_products(module: nn.Module, step: Quantize) -> None:
    """Change the factors of matrix products, in place.

    Args:
        module: A model or the part of a pipeline stage.
        step: The factors, and the modules that have them.
    """
    if step.recipe is Matmul.AUTOCAST:
        use_autocast(module, step.modules)
    else:
        use_float8(module, step.modules, step.recipe)
