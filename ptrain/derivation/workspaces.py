"""What GPU kernels allocate inside an operator, beside the derived and simulated tensors; and for
which GPUs the figures of activations are claimed.

Sources: `CublasHandlePool.cpp` has a workspace per thread and stream, and a thread of autograd
computes the backward pass; `flash_api.cpp` sums the gradient of the queries in fp32, in whole
tiles, while that operator runs; `Reduce.cuh` leaves partial sums where many rows are summed.
cuDNN's and efficient attention's are read off an H100. There, with torch 2.11, these are the bytes
that the allocator held beside live tensors; no other GPU has confirmed them.

Tables and traces run a CPU's kernels. Without dropout a GPU's kernels save tensors of the same
sizes, but for what attention keeps beside its output (`derivation.attention`), which depends on the
compute capability. With dropout they do not: a CPU's masks are as wide as their input, a GPU's a
byte an element, and a CPU's scaled_dot_product_attention then holds scores and probabilities. For
GPUs, tables and traces have a GPU's masks (`models.kernels.kernels_of`), claimed where an H100 has
confirmed them. Offloaded activations return on streams of their own there
(`activations.run.apply`), so more of them is on the device at a time than is derived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ptrain.derivation.attention import (
    attention_of,
    capabilities,
    capability,
    leaves_device,
    may_be_fused,
    most_rows,
)
from ptrain.facts.model import ModelFacts
from ptrain.spec.block import Bias
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.units import ceil_div

_WHY = "with dropout, CPU and GPU kernels allocate different tensors"
_AHEAD = "a GPU loads offloaded activations one module before their use, a CPU at their use"
_OVER_CONTEXT = "the saved tensors of attention over cp have not been measured on a GPU"
_OTHERWISE = (
    "for {what} no known GPU attention kernel applies: tensors are padded, or attention runs "
    "operator by operator"
)
_LEFT = "on GPUs, the dropout state of attention stays on the device when activations are offloaded"
_NOT_COUNTED = (
    "{why}: not counted are the 16 or 24 bytes per block for the seed and offset of "
    "attention, and in fp32 the padding of its statistics to a multiple of 32 rows"
)
_NO_SM = "the CUDA attention kernels are unknown, because `cluster.sm` is not set (90: H100)"
_OTHER_SM = "the CUDA attention kernels are known for sm {known}, not for sm {sm}"
_NOT_CONFIRMED = (
    "the saved tensors of dropout follow from kernel signatures and are confirmed only on an "
    "H100 (sm 90), for unsharded built-in models"
)
_H100 = 90  # compute capability


def unclaimed(spec: Spec, facts: ModelFacts) -> dict[str, str]:
    """Why activations, peaks and traffic are not claimed, by kind of figure; empty where they
    are."""
    of_offloaded = dict(_of_offloaded(spec)) if spec.is_for_cuda else {}
    shape = spec.model
    drops = shape.drops if isinstance(shape, ModelShape) else facts.draws
    why = _otherwise(spec, facts)
    if not why and drops and spec.may_be_on_cuda and not _is_confirmed(spec):
        why = _NOT_CONFIRMED if spec.is_for_cuda else _WHY
    if not why:
        return of_offloaded
    # Where they leave a GPU, other sizes are copied, too.
    moved = ("traffic",) if spec.is_for_cuda and leaves_device(spec) else ()
    return of_offloaded | dict.fromkeys(("activations", "peak", *moved), why)


def takes_peak_of(spec: Spec, facts: ModelFacts) -> bool:
    """Return whether a search goes by the peak on GPUs: it is claimed, or what a processor's kernel
    keeps of attention over cp stands for it, as no GPU has shown another."""
    return unclaimed(spec, facts).get("peak", "") in ("", _OVER_CONTEXT)


def _is_confirmed(spec: Spec) -> bool:
    """Return whether a device has shown what dropout keeps: an H100, of whole built-in models with
    fused attention (benchmarks/gpu.sh; tests/cuda)."""
    shape = spec.model
    is_fused = isinstance(shape, ModelShape) and shape.is_fused and shape.tabulated is not None
    is_whole = spec.degree(Axis.PP) == spec.degree(Axis.TP) == 1
    return spec.is_for_cuda and is_fused and is_whole and spec.sm == _H100


def _of_offloaded(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield what is not claimed of activations that leave GPUs. In fp32 attention's statistics
    leave them too, and a kernel's may be more rows than there are tokens."""
    if may_be_fused(spec) and leaves_device(spec):
        yield from ((figure, _LEFT) for figure in ("activations", "peak"))
        is_padded = spec.batch.sequence % most_rows() != 0
        if spec.precision.effective.parameters is DType.FP32 and is_padded:
            yield "traffic", _LEFT
    if any(kept.tier is Tier.HOST for kept in spec.activations.modes):
        yield "peak", _AHEAD


def _otherwise(spec: Spec, facts: ModelFacts) -> str:
    """Say why attention is none of the kernels that torch was asked for; nothing where it is
    one."""
    if spec.is_for_cuda and spec.has_token_slices:
        return _OVER_CONTEXT
    what = facts.unknown_attention if spec.is_for_cuda else ""
    attention = attention_of(spec)
    if attention and not attention.has_kernel(capability(spec)):
        tokens = f"{attention.sequence} token{'s' * (attention.sequence > 1)}"
        what = f"head_dim {attention.head_dim} in {attention.dtype}, {tokens},"
    return _OTHERWISE.format(what=what) if what else ""


def kernel_warnings(
    spec: Spec, unclaimed: Mapping[str, str], undefined: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line that says whose the figures are that stand there all the same."""
    sm = spec.sm
    is_peak_known = "peak" not in undefined
    if spec.is_for_cuda and may_be_fused(spec) and sm not in capabilities() and is_peak_known:
        known = ", ".join(map(str, capabilities()))
        yield _NOT_COUNTED.format(why=_OTHER_SM.format(sm=sm, known=known) if sm else _NO_SM)
    if "peak" in unclaimed and is_peak_known:
        why = unclaimed["peak"]
        whose = "a CPU trace" if why == _NOT_CONFIRMED else "CPU kernels"
        yield (f"activations and peaks are those of {whose} and not claimed on CUDA: {why}")
    if "traffic" in unclaimed and "traffic" not in undefined:
        yield (
            f"the traffic of offloaded activations is not claimed on CUDA: {unclaimed['traffic']}"
        )


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


class Workspace(NamedTuple):
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
    across, down = (
        min(1 << max(n, 1).bit_length() - 1, threads) for n in (columns // vector, rows)
    )
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


def _of_gpus(spec: Spec) -> Iterator[Workspace]:
    yield Workspace("products (cuBLAS), permanent", sum(_without_bias(spec)) or None)
    if (with_bias := _with_bias(spec)) != 0:
        yield Workspace("products with a bias (cuBLASLt), permanent", with_bias)
    if may_be_fused(spec):
        attention = attention_of(spec)
        kernel = attention.kernel(spec.sm) if attention else None
        name = f" ({kernel})" if kernel else ""
        size = _of_attention(spec, kernel)
        yield Workspace(f"backward pass of attention{name}, while it runs", size)
    yield Workspace(
        "sums over tokens (gradients of norms and biases), while they run", _of_sums(spec)
    )
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
        widths.append(ceil_div(shape.vocab_rows, degree))
    return sum_of_rows(spec.batch.micro * spec.batch.sequence, max(widths, default=shape.hidden))
