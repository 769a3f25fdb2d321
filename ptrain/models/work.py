"""The computation and communication of operators: kind, dtype and sizes, on which their time
depends."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ptrain.cost import Collective
from ptrain.facts.model import InnerCollective, Operator
from ptrain.internals import process_groups
from ptrain.internals.compiled import ProgramKernel
from ptrain.models.ledger import tensors_of
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.placement import EXPERT_AXES, TOKEN_AXES, axes_named
from ptrain.spec.precision import DType

_KINDS = {
    OperatorKind.ACTIVATION: """
        gelu silu tanh sigmoid exp exp2 expm1 log log2 log1p log_sigmoid_forward softplus erf elu
        mish sin cos hardswish celu selu logaddexp
    """,
    OperatorKind.NORM: """
        native_layer_norm _fused_rms_norm fused_rms_norm native_group_norm native_batch_norm
        _native_batch_norm_legit cudnn_batch_norm mean sum nansum var var_mean std norm
        linalg_vector_norm amax amin aminmax max min argmax argmin prod cumsum cumprod all any
    """,
    OperatorKind.SOFTMAX: """
        _softmax _safe_softmax _log_softmax nll_loss_forward nll_loss2d_forward nll_loss nll_loss2d
        logsumexp logcumsumexp
    """,
    OperatorKind.COPY: """
        clone copy _to_copy to cat stack repeat fill zero zeros ones full arange constant_pad_nd
        roll flip slice_backward select_backward split_with_sizes_copy split_copy new_zeros new_ones
        new_full zeros_like ones_like full_like slice_scatter select_scatter tril triu linspace
        contiguous scalar_tensor eye pixel_shuffle im2col col2im unfold_backward
    """,
    OperatorKind.INDEX: """
        embedding embedding_dense gather index index_select index_put _index_put_impl index_add
        index_copy scatter scatter_add scatter_reduce take masked_select masked_scatter topk sort
        nonzero searchsorted bucketize histc bincount _unique2 unique_dim one_hot
    """,
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def is_free(name: str) -> bool:
    """Return True if an operator of this name moves no bytes: it allocates, or waits.

    Args:
        name: The full name, for example `aten::new_empty`.
    """
    return "empty" in name or name.endswith("::_local_scalar_dense")


def kind_of(name: str) -> OperatorKind:
    """Return the kind of an operator whose time depends on bytes, also for its backward operator.

    Names in no list count as pointwise.

    Args:
        name: The name without namespace and overload, for example `_softmax_backward_data`.
    """
    plain = name.removesuffix("_")
    names = (plain, plain.removesuffix("_data").removesuffix("_backward"))
    return next((_KIND_OF[known] for known in names if known in _KIND_OF), OperatorKind.POINTWISE)


class PassKind(StrEnum):
    """The pass of a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    AGAIN = "again"  # forward operators that run again in backward


@dataclass(frozen=True, slots=True)
class OperatorSizes:
    """An operator that ran.

    Attributes:
        kind: Kind of the operator.
        dtype: Its compute dtype.
        sizes: Dimensions of the kind; for kinds whose time depends on bytes, the bytes of each
            tensor that is read or written.
        dtypes: Dtypes of these tensors; None for integers.
        is_whole: True for fused attention without a mask.
    """

    kind: OperatorKind
    dtype: DType
    sizes: tuple[int, ...]
    dtypes: tuple[DType | None, ...] = ()
    is_whole: bool = False

    @property
    def operator(self) -> Operator:
        """The operator in the form that a clock takes."""
        sizes = (sum(self.sizes),) if self.kind.is_of_bytes else self.sizes
        return Operator(self.kind, self.dtype, sizes, is_whole=self.is_whole)


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """A collective inside a layer, over tp or over the axis in `axis`.

    Attributes:
        collective: Kind of the collective.
        payload: Bytes of the full tensor.
        dtype: Its dtype; None for integers.
        axis: Name of the axis; "" for tp.
        is_hop: True if the full tensor goes to one rank.
        ranks: Size of the group.
        beside: Number of works recorded before it is awaited.
    """

    collective: Collective
    payload: int
    dtype: DType | None
    axis: str = ""
    is_hop: bool = False
    ranks: int = 0
    beside: int = 0

    @property
    def operator(self) -> InnerCollective:
        """The collective in the form that a clock takes."""
        collective = Collective.SEND if self.is_hop else self.collective
        return InnerCollective(collective, self.payload, axis=self.axis, ranks=self.ranks)


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """One computation or collective, with its pass."""

    pass_kind: PassKind
    record: OperatorSizes | RecordedCollective


# Integer operators count as fp32: they move bytes too, but have no measured rates.
_WIDE = DType.FP32
_DTYPES = {
    torch.float64: DType.FP64,
    torch.float32: DType.FP32,
    torch.bfloat16: DType.BF16,
    torch.float16: DType.FP16,
}
SCALED = ("_scaled_mm", "scaled_mm")  # torch's and ours: products of fp8 factors
VIEW = OperatorSizes(OperatorKind.VIEW, _WIDE, ())  # no kernel runs
_Moved = tuple[int, DType | None]  # bytes, and their dtype


def matrix_products(name: str, args: Any, result: Any = None) -> list[tuple[int, int, int, int]]:
    """Return (matrices, rows, inner, columns) of each matrix product of an operator; [] for others.

    In a grouped product each row meets the factor of one group only. A convolution counts as the
    product that computes it without a transform, as in torch's FLOP counter.

    Args:
        name: Name of the operator without namespace and overload.
        args: Its arguments.
        result: Its result, which convolutions need.
    """
    if name.removesuffix("_") in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = args[1:3] if "add" in name else args[:2]
        *matrices, rows, inner = left.shape
        return [(matrices[0] if matrices else 1, rows, inner, right.shape[-1])]
    if name in SCALED:
        return [(1, *args[0].shape, args[1].shape[-1])]
    if name == "_grouped_mm":
        return [_grouped_product(args[0], args[1], args[2] if len(args) > 2 else None)]
    if name == "convolution":
        return [_convolution_product(args[0], args[1], result, args[6], args[8])]
    if name == "convolution_backward":
        return _convolution_backward(*args)
    return []


def _grouped_product(left: Tensor, right: Tensor, ends: Tensor | None) -> tuple[int, int, int, int]:
    """Return the dimensions of a grouped product, as if all groups were equally large."""
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if left.dim() == right.dim() == 3:
        return left.shape[0], rows, inner, columns
    groups = 1 if ends is None else ends.shape[0]
    if left.dim() > right.dim():  # the columns belong to groups
        is_even = columns % groups == 0
        return (groups, rows, inner, columns // groups) if is_even else (1, rows, inner, columns)
    if left.dim() < right.dim():  # the rows do
        is_even = rows % groups == 0
        return (groups, rows // groups, inner, columns) if is_even else (1, rows, inner, columns)
    is_even = inner % groups == 0
    return (groups, rows, inner // groups, columns) if is_even else (1, rows, inner, columns)


def _convolution_product(
    x: Tensor, weight: Tensor, y: Tensor, is_transposed: bool, groups: int
) -> tuple[int, int, int, int]:
    """Return the dimensions of the matrix product of a convolution."""
    places = (x if is_transposed else y).shape
    window = weight.shape[2:].numel()
    own, others = weight.shape[0], weight.shape[1]  # the second counts one group's
    rows = places[0] * places[2:].numel()
    if is_transposed:
        return groups, rows, own // groups, others * window
    return groups, rows, others * window, own // groups


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any
) -> list[tuple[int, int, int, int]]:
    """Return the dimensions of the needed products: gradient of the input, gradient of the
    weight."""
    *_, is_transposed, _, groups, needs = rest
    matrices, rows, inner, columns = _convolution_product(
        x, weight, gradient, is_transposed, groups
    )
    of_input, of_weight = (
        (matrices, rows, columns, inner),
        (matrices, inner, rows, columns),
    )
    return [
        dims for dims, is_needed in zip((of_input, of_weight), needs, strict=False) if is_needed
    ]


_KNOWN = ("aten", "prim", "prims", "profiler", "ptrain")


def is_opaque(function: Any) -> bool:
    """Return True if an operator is custom, so that its name does not reveal its computation.

    Args:
        function: The operator, an `OpOverload`.
    """
    return function.namespace not in _KNOWN and "c10d" not in function.namespace


# C++ of torch/_inductor/codegen/cpp.py: a kernel with an exponential is not limited by memory on a
# CPU, and one with an accumulator reduces rows.
_KERNEL_KINDS = {
    OperatorKind.ACTIVATION: re.compile(r"\b(exp|exp2|expm1|tanh|erf|sigmoid)\("),
    OperatorKind.NORM: re.compile(r"\btmp_acc"),
}


def kernel_sizes(kernel: ProgramKernel) -> OperatorSizes:
    """Return the computation of a fused kernel, which reads and writes each argument once."""
    kinds = (kind for kind, code in _KERNEL_KINDS.items() if code.search(kernel.source))
    tensors = (*kernel.outputs, *kernel.inputs)
    sizes, dtypes = zip(*map(_tensor_bytes, tensors), strict=True)
    dtype = next((dtype for dtype in dtypes if dtype is not None), _WIDE)
    return OperatorSizes(next(kinds, OperatorKind.POINTWISE), dtype, sizes, dtypes)


_ATTENTION = "_scaled_dot_product"
_MASKS = "attn_mask", "attn_bias"


def sizes_of(function: Any, args: Any, kwargs: Any, result: Any) -> list[OperatorSizes]:
    """Return the computation of an operator that ran: usually one entry.

    A convolution's backward has one per product; collectives and waits have none.

    Args:
        function: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        result: Its result.
    """
    name = function._schema.name.split("::")[-1]
    if "c10d" in function.namespace or function.namespace == "prim":
        # Collectives are recorded by `find_collective`, and waiting is no work. `prim::device`
        # reads an attribute, of fake tensors only.
        return []
    if is_free(function._schema.name):
        return [VIEW]
    if of_products := matrix_products(name, args, result):
        dtype = DType.FP8 if name in SCALED else _dtype_of(next(tensors_of(args)))
        return [OperatorSizes(OperatorKind.PRODUCT, dtype, dims) for dims in of_products]
    if name.startswith(_ATTENTION) and "attention" in name:
        return [_attention_sizes(function, name, args, kwargs)]
    if not (moved := [*_moved_bytes(function, name, args, kwargs, result)]):
        return [VIEW]
    is_drawn = torch.Tag.nondeterministic_seeded in function.tags
    kind = OperatorKind.DRAW if is_drawn else kind_of(name)
    tensors = (*tensors_of(result), *tensors_of((args, kwargs)))
    dtype = next((_DTYPES[tensor.dtype] for tensor in tensors if tensor.dtype in _DTYPES), _WIDE)
    sizes, dtypes = zip(*moved, strict=True)
    return [OperatorSizes(kind, dtype, sizes, dtypes)]


def _attention_sizes(function: Any, name: str, args: Any, kwargs: Any) -> OperatorSizes:
    """Return the sizes of fused attention.

    Forward has two products: scores, and probabilities times values. Backward has five: the scores
    again and four gradients.
    """
    is_backward = name.endswith("backward")
    query, key = args[1:3] if is_backward else args[:2]
    samples, heads, tokens, features = query.shape
    kind = OperatorKind.ATTENTION_BACKWARD if is_backward else OperatorKind.ATTENTION
    sizes = samples, heads, tokens, key.shape[2], features
    names = [argument.name for argument in function._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    masks = (given.get(mask) for mask in _MASKS)
    is_masked = given.get("is_causal", False) or any(isinstance(mask, Tensor) for mask in masks)
    return OperatorSizes(kind, _dtype_of(query), sizes, is_whole=not is_masked)


def _dtype_of(tensor: Tensor) -> DType:
    return _DTYPES.get(tensor.dtype, _WIDE)


# Operators that read as many elements of their first tensor as the result (_GATHERS) or the target
# (_NAMED) has.
_GATHERS = {"embedding", "gather", "index_select", "index", "take", "masked_select"}
_JOINS = {"cat", "stack"}
_NAMED = {"nll_loss_forward", "nll_loss2d_forward"}
# Operators that write as many elements of a tensor as they are given.
_SCATTERS = {
    "index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_",
}  # fmt: skip
# In-place operators that do not read the old values.
_OVERWRITES = {"copy_", "zero_", "fill_", "bernoulli_", "uniform_", "normal_", "exponential_"}
_UNREAD = {
    "nll_loss_backward": 1,
    "nll_loss2d_backward": 1,
}  # index of an argument of which only the shape is read


def _moved_bytes(function: Any, name: str, args: Any, kwargs: Any, result: Any) -> Iterator[_Moved]:
    """Yield the bytes that an operator reads of each tensor, then those it writes; nothing for
    views."""
    given = [*tensors_of((args, kwargs))]
    into = _written_arguments(function, args, kwargs)
    results = [tensor for tensor in tensors_of(result) if all(tensor is not own for own in into)]
    # A result in the storage of an argument is a view, and moves nothing.
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    new = [tensor for tensor in results if tensor.untyped_storage()._cdata not in storages]
    if not into and not new:
        return
    if name in _SCATTERS:
        values = given[-1]  # old values are read where new ones are written
        yield from map(_tensor_bytes, (*given[1:], values, values))
        return
    yield from _read_bytes(name, args, given, into, new)
    yield from map(_tensor_bytes, (*into, *new))


def _read_bytes(
    name: str, args: Any, given: list[Tensor], into: list[Tensor], new: list[Tensor]
) -> Iterator[_Moved]:
    """Yield the bytes that an operator reads of each tensor."""
    if name.endswith("_like") or name.startswith("new_"):
        return
    if name in _JOINS:  # as many bytes as the results, however many inputs there are
        yield from map(_tensor_bytes, new)
        return
    for place, tensor in enumerate(given):
        if name in _OVERWRITES and any(tensor is own for own in into):
            continue
        if place == 0 and name in _GATHERS:
            yield from map(_tensor_bytes, new)
        elif place == 0 and name in _NAMED:
            yield given[1].numel() * tensor.itemsize, _DTYPES.get(tensor.dtype)
        elif not (name in _UNREAD and tensor is args[_UNREAD[name]]):
            yield _tensor_bytes(tensor)


def _written_arguments(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operator changes."""
    written: list[Tensor] = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors_of(args[place] if place < len(args) else kwargs.get(argument.name))
    return written


def _tensor_bytes(tensor: Tensor) -> _Moved:
    """Return bytes and dtype of a tensor; elements repeated by stride 0 count once."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    elements = math.prod(length if stride or not length else 1 for length, stride in sides)
    return elements * tensor.itemsize, _DTYPES.get(tensor.dtype)


# Axes that collectives inside a layer record by name; without a name it is tp.
_BY_NAME = (*TOKEN_AXES, *EXPERT_AXES)
_COLLECTIVES = {
    "all_reduce": (Collective.ALL_REDUCE, False),
    "all_gather_into_tensor": (Collective.ALL_GATHER, True),
    "reduce_scatter_tensor": (Collective.REDUCE_SCATTER, False),
    "all_to_all_single": (Collective.ALL_TO_ALL, False),
}


def find_collective(function: Any, args: Any, result: Any) -> RecordedCollective | None:
    """Return the collective that an operator starts, with the bytes of the full tensor; else
    None.

    Args:
        function: The operator.
        args: Its positional arguments.
        result: Its result.
    """
    name = function._schema.name.split("::")[-1]
    if function.namespace != "_c10d_functional" or name not in _COLLECTIVES:
        return None
    collective, is_result = _COLLECTIVES[name]
    whole = result if is_result else args[0]
    size = whole.numel() * whole.itemsize
    axis = process_groups.group_axis(args)
    is_exchange = collective is Collective.ALL_TO_ALL
    is_named = not {*axes_named(axis)}.isdisjoint(_BY_NAME)
    return RecordedCollective(
        collective,
        size,
        _DTYPES.get(whole.dtype),
        axis=axis if is_named else "",
        # A rank of a ring sends all rows to one rank. The template has no send, so it uses an
        # all-to-all.
        is_hop=is_exchange and max(args[2], default=0) == whole.shape[0],
        ranks=process_groups.group_size(args),
    )


def is_wait(function: Any) -> bool:
    """Return True if an operator waits for a collective."""
    name = function._schema.name.split("::")[-1]
    return function.namespace == "_c10d_functional" and name == "wait_tensor"
