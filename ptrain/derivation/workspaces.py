"""What kernels of GPUs take within themselves, which no operator speaks of: beside what is derived
and simulated, and part of what is reserved.

Sources: `CublasHandlePool.cpp` has a workspace for each thread and stream, and a thread of autograd
computes the backward pass; `flash_api.cpp` sums the gradient of the queries in fp32, in whole
tiles, while that operator runs; `Reduce.cuh` leaves sums of parts where many rows are summed.
cuDNN's and efficient attention's are read off an H100. On that GPU, with torch 2.11, these are the
bytes that its allocator held beside what lives; no other GPU has confirmed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ptrain.derivation.attention import attention_of, may_be_fused
from ptrain.spec.block import Bias
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.units import ceil_div

_KIB = 1024
_MIB = 1024 * _KIB
_CUBLAS = {80: (2 * 4096 + 8 * 16) * _KIB, 90: 8 * 4096 * _KIB}  # by compute capability
_CUBLASLT = {90: _MIB}  # for products with a bias, of the thread that computes forward
_THREADS = 2  # the one that computes forward, and autograd's
_FP32 = 4
_TILE = 128  # rows of queries
_WIDTH, _WIDEST = 32, 256  # flash: the multiple of head_dim, and the widest that it takes
_OF_EFFICIENT = 64  # of other widths its own workspace is the larger one
_CUDNN = 256  # beside what grows with the rows
# Reduce.cuh: threads of a block and of a warp, the values that a thread sums at least and at most
# before a block more sums with it, and the threads that a processor has at a time.
_BLOCK, _WARP, _FEWEST, _MOST, _RESIDENT = 512, 32, 16, 256, 2048
_PROCESSORS = 132  # of an H100; other numbers matter to sums of thousands of columns alone


@dataclass(frozen=True, slots=True)
class Workspace:
    """`device_bytes` is None where nobody knows them."""

    what: str
    device_bytes: int | None


def workspaces(spec: Spec) -> tuple[Workspace, ...]:
    """Return what kernels of a spec's GPUs take within themselves, in bytes of one rank; nothing of
    other devices."""
    return tuple(_of_gpus(spec)) if spec.is_for_cuda else ()


def products(spec: Spec) -> tuple[int, ...]:
    """Return the bytes that products of matrices keep, one by one, from the first on, as far as
    they are known."""
    with_bias = _with_bias(spec)
    return (*_without_bias(spec), *((with_bias,) if with_bias else ()))


def _without_bias(spec: Spec) -> tuple[int, ...]:
    # Deterministic products need a workspace that CUBLAS_WORKSPACE_CONFIG names.
    of_thread = None if spec.deterministic else _CUBLAS.get(spec.sm or 0)
    return (of_thread,) * _THREADS if of_thread else ()


def _with_bias(spec: Spec) -> int | None:
    """None where nobody knows it, 0 where a model has no biases."""
    shape = spec.model
    if isinstance(shape, ModelShape) and shape.bias is Bias.NONE and not shape.head_bias:
        return 0
    return _CUBLASLT.get(spec.sm or 0)


def attention_backward(
    kernel: str | None, itemsize: int, *, batch: int, heads: int, sequence: int, head_dim: int
) -> tuple[int, ...]:
    """Return the bytes that attention's backward pass takes while it runs, one by one, of operands
    of so many bytes an element: the gradient of the queries in fp32 and a number a row. Nothing
    where nobody knows them. Efficient attention multiplies output and gradient, and has two numbers
    a row."""
    of_rows = _FP32 * batch * heads * sequence
    if kernel == "cudnn":
        return (of_rows * (head_dim + 1) + _CUDNN,)
    if kernel == "efficient" and itemsize == _FP32 and head_dim % _OF_EFFICIENT == 0:
        return (of_rows, of_rows * head_dim, of_rows)
    if kernel != "flash" or head_dim > _WIDEST:
        return ()
    of_tiles = _FP32 * batch * heads * ceil_div(sequence, _TILE) * _TILE
    return (of_tiles, of_tiles * ceil_div(head_dim, _WIDTH) * _WIDTH)


def sum_of_rows(rows: int, columns: int) -> int:
    """Return the bytes that the sum over `rows` of a matrix of at most 32 bits takes while it runs,
    as the gradients of biases and of norms' weights are: the sums of parts, in fp32, where there
    are so many rows that several blocks of threads sum a column."""
    vector = next(width for width in (4, 2, 1) if columns % width == 0)
    threads = _BLOCK // vector
    across, down = (min(_power_below(n), threads) for n in (columns // vector, rows))
    wide = min(across, _WARP)
    high = min(down, threads // wide)
    wide = min(across, threads // high)
    values = rows
    is_over_warps = values >= min(high * _FEWEST, _MOST)
    if is_over_warps:
        values = ceil_div(values, high)
    grid = ceil_div(columns // vector, wide if is_over_warps else wide * high)
    target = _PROCESSORS * (_RESIDENT // (wide * high))
    if not is_over_warps or values < _MOST or grid > target:
        return 0
    enough = min(ceil_div(target, grid), ceil_div(values, _FEWEST))
    blocks = max(enough, ceil_div(values, _MOST))
    return _FP32 * columns * blocks * wide * vector if blocks > 1 else 0


def _power_below(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def _of_gpus(spec: Spec) -> Iterator[Workspace]:
    yield Workspace("products (cuBLAS), all the time", sum(_without_bias(spec)) or None)
    if (with_bias := _with_bias(spec)) != 0:
        yield Workspace("products with a bias (cuBLASLt), all the time", with_bias)
    if may_be_fused(spec):
        attention = attention_of(spec)
        kernel = attention.kernel(spec.sm) if attention else None
        name = f" ({kernel})" if kernel else ""
        size = _of_attention(spec, kernel)
        yield Workspace(f"attention's backward pass{name}, while it runs", size)
    yield Workspace("sums over tokens (gradients of norms, biases), while one runs", _of_sums(spec))
    if spec.world_size > 1:
        yield Workspace("collectives (NCCL)", None)


def _of_attention(spec: Spec, kernel: str | None) -> int | None:
    """Where sums are deterministic there are as many of them as the GPU has processors for, which
    nobody says."""
    shape = spec.model
    if not isinstance(shape, ModelShape) or spec.deterministic:
        return None
    taken = attention_backward(
        kernel,
        spec.precision.effective.parameters.itemsize,
        batch=spec.batch.micro,
        heads=ceil_div(shape.heads, spec.degree(Axis.TP)),
        sequence=spec.batch.sequence,
        head_dim=shape.head_dim,
    )
    return sum(taken) or None


def _of_sums(spec: Spec) -> int | None:
    """Of whole tokens: sequence-parallel norms have fewer. LayerNorm's own kernel needs none."""
    shape = spec.model
    if not isinstance(shape, ModelShape):
        return None
    degree = spec.degree(Axis.TP)
    widths = [shape.hidden] * (shape.norm.is_rms or shape.bias is Bias.ALL)
    if shape.bias is not Bias.NONE:
        widths.append(shape.query_width // degree)
    if shape.bias is Bias.ALL:
        widths.append(shape.ffn // degree)
    if shape.head_bias:
        widths.append(ceil_div(shape.vocab, degree))
    return sum_of_rows(spec.batch.micro * spec.batch.sequence, max(widths, default=shape.hidden))
