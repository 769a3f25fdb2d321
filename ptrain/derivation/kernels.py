"""Memory of GPU kernels that CPU kernels do not have: the statistics of attention and workspaces;
and the GPUs for which activation figures are claimed.

An attention kernel on a GPU keeps the statistics that a CPU kernel keeps (one fp32 for each row,
batch and head), but pads their rows to a multiple. It also keeps the seed and the offset of its
dropout, used or not. The kernel depends on the compute capability of the GPU, the dtype, head_dim
and the torch version. `traces.attention_kernels` determines it.

Workspaces are allocated inside an operator, in addition to derived and simulated tensors. Sources:

- `CublasHandlePool.cpp`: one workspace per thread and stream. An autograd thread computes backward.
- `flash_api.cpp`: the gradient of the queries is summed in fp32, in full tiles, while it runs.
- `Reduce.cuh`: partial sums of reductions over many rows.
- cuDNN and efficient attention: measured on an H100.

With torch 2.11 on an H100, these are the bytes that the allocator held in addition to live tensors.
No other GPU has confirmed them.

Tables and traces run CPU kernels. Without dropout, GPU kernels save tensors of equal sizes, except
for the statistics of attention, which depend on the compute capability.
With dropout they differ: a mask has the dtype of its input on a CPU and one byte per element on a
GPU, and a CPU's scaled_dot_product_attention keeps scores and probabilities. For GPUs, tables and
traces have the masks of GPUs (`models.kernels.kernels_of`), claimed where an H100 has confirmed
them. Offloaded activations return on separate streams (`activations.run.apply`), so more of them
are on the device at a time than derived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart
from ptrain.facts.model import ModelFacts
from ptrain.installed import counted_torch
from ptrain.spec.block import Bias
from ptrain.spec.dials import Compiled
from ptrain.spec.model import Attention, ExternalModel, ModelShape
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType, Matmul
from ptrain.spec.spec import Spec
from ptrain.units import ceil_div
from ptrain.version import REFERENCE_TORCH

HEAD_DIM_MULTIPLE = 8  # kernels support only multiples of it


class Statistics(NamedTuple):
    """The statistics that an attention kernel keeps for the backward pass.

    Attributes:
        sequence: Tokens of a sample.
        rows: Multiple to which the kernel pads the tokens.
        beside: Additional bytes, for the seed and the offset of dropout.
    """

    sequence: int
    rows: int
    beside: int

    def gpu_bytes(self, size: int) -> int:
        """Return the bytes that replace the `size` bytes of a CPU kernel.

        Args:
            size: Bytes of the CPU kernel's statistics, a multiple of `sequence`.
        """
        # A CPU kernel keeps the statistics of all tokens, so `size` is a multiple of the sequence.
        padded = ceil_div(self.sequence, self.rows) * self.rows
        return size // self.sequence * padded + self.beside


class FusedAttention(NamedTuple):
    """A call of `scaled_dot_product_attention`, with the properties that select its kernel.

    `is_grouped` is True if keys have fewer heads than queries.
    """

    dtype: DType
    head_dim: int
    sequence: int
    drops: bool
    is_grouped: bool = False

    def kernel(self, sm: int | None) -> str | None:
        """Return the kernel that torch selects on GPUs of compute capability `sm`.

        Args:
            sm: The compute capability as an integer, such as 90. None if it is unknown.

        Returns:
            The kernel's name. None if torch selects no kernel, or the table does not have `sm`.
        """
        by_row = _of_torch("choice", counted_torch()).get(str(sm), {})
        rows = by_row.get(row_name(self.dtype, drops=self.drops), [])
        if self.head_dim % HEAD_DIM_MULTIPLE or self.sequence == 1:
            return None
        refused = _of_torch("ungrouped", counted_torch()) if self.is_grouped else ()
        for first, last, kernel in rows:
            is_refused = kernel in refused
            if first <= self.head_dim <= last and not is_refused:
                return str(kernel)
        return None

    def statistics(self, sm: int | None) -> Statistics | None:
        """Return the statistics that the kernel keeps, or None if there is no known kernel.

        Args:
            sm: The compute capability as an integer, such as 90. None if it is unknown.
        """
        if (kernel := self.kernel(sm)) is None:
            return None
        return Statistics(self.sequence, *_read_table("kernels")[kernel])

    def goes_by_operators(self, sm: int | None) -> bool:
        """Return True if torch is known to run separate operators, although a kernel supports
        head_dim.

        The head_dim is then a multiple that kernels accept, so that nothing is padded.

        Args:
            sm: The compute capability as an integer, such as 90. None if it is unknown.
        """
        is_known = sm in capabilities() and self.sequence > 1
        return is_known and self.head_dim % HEAD_DIM_MULTIPLE == 0 and self.kernel(sm) is None

    def has_kernel(self, sm: int | None) -> bool:
        """Return True if torch selects a kernel on GPUs of compute capability `sm`.

        If the table does not have `sm`, return True if any of its capabilities has a kernel.

        Args:
            sm: The compute capability as an integer, such as 90. None if it is unknown.
        """
        of_these = (sm,) if sm in capabilities() else capabilities()
        return any(self.kernel(capability) is not None for capability in of_these)


def capabilities() -> tuple[int, ...]:
    """Return the compute capabilities of the table, ascending."""
    return tuple(map(int, _of_torch("choice", counted_torch())))


def _read_table(name: str) -> dict[str, Any]:
    table: dict[str, Any] = archive.read(TablePart.KERNEL, "attention", name)
    return table


@cache
def _of_torch(name: str, torch: str) -> Any:
    """Return an entry of the table for this torch version.

    `choice` has the kernels by compute capability. `ungrouped` has the kernels that torch does not
    use if keys have fewer heads than queries: it runs separate operators instead (`sdp_utils.cpp`).
    Up to 2.13 this is efficient attention. Versions without an entry have that of the reference
    version.
    """
    # A newer torch than the table probably selects kernels as the reference version does. A wrong
    # choice changes statistics and workspaces only.
    versions = _read_table(name)
    return versions.get(torch, versions[REFERENCE_TORCH])


def row_name(dtype: DType, *, drops: bool) -> str:
    """Return the name of a table row for a dtype, with or without dropout."""
    return f"{dtype}-dropout" if drops else str(dtype)


def attention_of(spec: Spec) -> FusedAttention | None:
    """Return the attention call of a built-in model's blocks on a spec's GPUs.

    Returns:
        The call. None without GPUs, for other models, and for models without fused attention.
    """
    shape = spec.model
    if not spec.is_for_cuda or not isinstance(shape, ModelShape) or not shape.is_fused:
        return None
    return FusedAttention(
        dtype=spec.precision.effective_layout.parameters,
        head_dim=shape.head_dim,
        sequence=spec.batch.sequence,
        drops=shape.dropouts.attention > 0,
        is_grouped=shape.is_grouped,
    )


def capability(spec: Spec) -> int | None:
    """Return the compute capability whose kernels are counted.

    Returns:
        The compute capability of the spec's GPUs. None if it is unknown, if the table does not have
        it, or if activations leave the device. In the last case, the dropout state of attention
        stays on the device in a separate storage, which no table has.
    """
    return None if leaves_device(spec) or spec.sm not in capabilities() else spec.sm


def is_by_operators(spec: Spec) -> bool:
    """Return True if a built-in model's attention is known to run as separate operators on the
    GPUs.

    The scores are then in memory. Attention with dropout is unknown and gives False.
    """
    attention = attention_of(spec)
    if attention is None or attention.drops:
        return False
    return attention.goes_by_operators(capability(spec))


def may_be_fused(spec: Spec) -> bool:
    """Return True if attention may run as one fused kernel.

    Custom models, and classes that can choose between implementations, may use a kernel.
    """
    model = spec.model
    if isinstance(model, ModelShape):
        return model.is_fused
    return isinstance(model, ExternalModel) or model.attention in (None, Attention.SDPA)


def leaves_device(spec: Spec) -> bool:
    """Return True if the activations of any block leave the device."""
    return any(kept.tier is not Tier.DEVICE for kept in spec.activations.modes)


def statistics_of(spec: Spec, tokens: int) -> Statistics | None:
    """Return the statistics that a built-in model's attention of `tokens` tokens keeps on a spec's
    GPUs.

    Args:
        spec: The spec.
        tokens: Tokens of a sample in one call, before the kernel pads them.

    Returns:
        The statistics. None if the size is that of a CPU kernel or unknown.
    """
    if (attention := attention_of(spec)) is None:
        return None
    return attention._replace(sequence=tokens).statistics(capability(spec))


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
_FP8 = "the workspaces of fp8 products have not been measured on a GPU"
_AUTOCAST = "torch.autocast has not been measured on a GPU"
_PROGRAMS = "compiled programs are CPU programs, and a GPU's may fuse other operators"
_H100 = 90  # compute capability


def unclaimed_figures(spec: Spec, facts: ModelFacts) -> dict[str, str]:
    """Return the reasons why activations, peaks and traffic are not claimed, by kind of figure.

    The result is empty if all figures are claimed.
    """
    of_offloaded = dict(_offloaded_reasons(spec)) if spec.is_for_cuda else {}
    shape = spec.model
    drops = shape.has_dropout if isinstance(shape, ModelShape) else facts.draws
    why = _unknown_kernel_reason(spec, facts)
    if not why and drops and spec.may_be_on_cuda and not _is_confirmed(spec):
        why = _NOT_CONFIRMED if spec.is_for_cuda else _WHY
    # Other reasons come after these two, since a search may rank by peaks that only lack
    # measurements of programs (`takes_peak_of`).
    reasons: dict[str, str] = {}
    if spec.is_for_cuda and spec.precision.matmul.is_fp8:
        reasons = {"peak": _FP8}
    if spec.is_for_cuda and spec.precision.matmul is Matmul.AUTOCAST:
        reasons = {"activations": _AUTOCAST, "peak": _AUTOCAST}
    if spec.is_for_cuda and spec.compile is not Compiled.NONE:
        reasons = {"activations": _PROGRAMS, "peak": _PROGRAMS}
    reasons |= of_offloaded
    if not why:
        return reasons
    # If such activations leave a GPU, the sizes of copies differ too.
    moved = ("traffic",) if spec.is_for_cuda and leaves_device(spec) else ()
    return reasons | dict.fromkeys(("activations", "peak", *moved), why)


def takes_peak_of(spec: Spec, facts: ModelFacts) -> bool:
    """Return True if a search may rank by the peak on GPUs.

    The peak must be claimed, or be unclaimed only because attention over cp, fp8 products or
    compiled blocks were not measured on a GPU.
    """
    return unclaimed_figures(spec, facts).get("peak", "") in (
        *("", _OVER_CONTEXT, _FP8, _AUTOCAST, _PROGRAMS),
    )


def _is_confirmed(spec: Spec) -> bool:
    """Return True if a device has confirmed the memory of dropout.

    This is an H100, for unsharded built-in models with fused attention (benchmarks/gpu.sh;
    tests/cuda).
    """
    shape = spec.model
    is_fused = isinstance(shape, ModelShape) and shape.is_fused and shape.tabulated is not None
    is_whole = spec.degree(Axis.PP) == spec.degree(Axis.TP) == 1
    return spec.is_for_cuda and is_fused and is_whole and spec.sm == _H100


def _offloaded_reasons(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield the figures that are not claimed for activations offloaded from GPUs.

    In fp32 the statistics of attention are offloaded too, and a kernel may pad their rows.
    """
    if may_be_fused(spec) and leaves_device(spec):
        yield from ((figure, _LEFT) for figure in ("activations", "peak"))
        # the largest multiple to which any kernel pads its rows
        multiple = max(int(rows) for rows, _ in _read_table("kernels").values())
        is_padded = spec.batch.sequence % multiple != 0
        if spec.precision.effective_layout.parameters is DType.FP32 and is_padded:
            yield "traffic", _LEFT
    if any(kept.tier is Tier.HOST for kept in spec.activations.modes):
        yield "peak", _AHEAD


def _unknown_kernel_reason(spec: Spec, facts: ModelFacts) -> str:
    """Return why attention runs none of the kernels in the tables. Empty if it runs one of them."""
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
    """Yield a warning for each figure that is given but not claimed, with its source.

    Args:
        spec: The spec, for its devices and its attention.
        unclaimed: Reasons by kind of figure, as `unclaimed_figures` returns them.
        undefined: Reasons by kind of figure. A figure in it has no value and needs no warning.
    """
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
# CublasHandlePool.cpp, `parseChosenWorkspaceSize`: `:4096:2:16:8` in KiB by default, `:4096:8` on
# Hopper. Other capabilities are left out until a device has confirmed them.
_CUBLAS = {80: (2 * 4096 + 8 * 16) * _KIB, 90: 8 * 4096 * _KIB}  # by compute capability
_CUBLASLT = {90: _MIB}  # for products with a bias, on the forward thread
_THREADS = 2  # handles are per thread and stream: the forward thread and autograd's
_FP32 = 4
_TILE = 128  # rows of queries
_WIDTH, _WIDEST = 32, 256  # flash: the multiple and the maximum of head_dim
_OF_EFFICIENT = 64  # other widths use a larger workspace of the kernel, which is not modelled
_CUDNN = 256  # constant bytes, in addition to those that grow with the rows
# Reduce.cuh: threads of a block and of a warp; minimum values per thread, and maximum before
# several blocks share a sum; resident threads of a processor.
_BLOCK, _WARP, _FEWEST, _MOST, _RESIDENT = 512, 32, 16, 256, 2048
_PROCESSORS = 132  # of an H100; the number matters only to sums of thousands of columns


class Workspace(NamedTuple):
    """The workspace of a kernel. `device_bytes` is None if the size is unknown."""

    what: str
    device_bytes: int | None


def workspaces(spec: Spec) -> tuple[Workspace, ...]:
    """Return the workspaces of kernels on a rank of a spec's GPUs. Empty for other devices."""
    return tuple(_gpu_workspaces(spec)) if spec.is_for_cuda else ()


def products(spec: Spec) -> tuple[int, ...]:
    """Return the bytes of each workspace that matrix products keep from their first run on, if
    known."""
    with_bias = _bias_workspace(spec)
    return (*_cublas_workspaces(spec), *((with_bias,) if with_bias else ()))


def _cublas_workspaces(spec: Spec) -> tuple[int, ...]:
    """Return the workspaces of cuBLAS, one for each thread. Empty if unknown."""
    # Deterministic products use the workspace of CUBLAS_WORKSPACE_CONFIG instead.
    of_thread = None if spec.deterministic else _CUBLAS.get(spec.sm or 0)
    return (of_thread,) * _THREADS if of_thread else ()


def _bias_workspace(spec: Spec) -> int | None:
    """Return the workspace of products with a bias: None if unknown, 0 without biases."""
    shape = spec.model
    if isinstance(shape, ModelShape) and shape.bias is Bias.NONE and not shape.head_bias:
        return 0
    return _CUBLASLT.get(spec.sm or 0)


def attention_backward(
    kernel: str | None, itemsize: int, *, batch: int, heads: int, sequence: int, head_dim: int
) -> tuple[int, ...]:
    """Return the bytes of each workspace of attention's backward pass, allocated while it runs.

    These are the gradient of the queries in fp32 and one number per row. Efficient attention also
    multiplies output and gradient, and has two numbers per row.

    Args:
        kernel: The kernel's name.
        itemsize: Bytes per element of the operands.
        batch: Samples.
        heads: Heads on the rank.
        sequence: Tokens of a sample.
        head_dim: Elements per head.

    Returns:
        The bytes. Empty if unknown.
    """
    of_rows = _FP32 * batch * heads * sequence
    if kernel == "cudnn":
        return (of_rows * (head_dim + 1) + _CUDNN,)
    if kernel == "efficient" and itemsize == _FP32 and head_dim % _OF_EFFICIENT == 0:
        return (of_rows, of_rows * head_dim, of_rows)
    if kernel != "flash" or head_dim > _WIDEST:
        return ()
    # flash rounds the rows to full tiles (`seqlen_q_rounded`) and the head to a multiple
    # (`head_size_rounded`).
    of_tiles = _FP32 * batch * heads * ceil_div(sequence, _TILE) * _TILE
    return (of_tiles, of_tiles * ceil_div(head_dim, _WIDTH) * _WIDTH)


def sum_of_rows(rows: int, columns: int) -> int:
    """Return the bytes of the workspace of a sum over the rows of a matrix, as in gradients of
    biases.

    If there are so many rows that several thread blocks sum a column, their partial sums are kept
    in fp32. The elements have at most 32 bits.

    Args:
        rows: Rows of the matrix, which are summed.
        columns: Elements of each row.
    """
    # `setReduceConfig` of Reduce.cuh, for the reduction of the slowest dimension: outputs are
    # vectorized by up to 4, blocks are sized to powers of two, and blocks share a sum if each would
    # have too many values.
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


def _gpu_workspaces(spec: Spec) -> Iterator[Workspace]:
    yield Workspace("products (cuBLAS), permanent", sum(_cublas_workspaces(spec)) or None)
    if (with_bias := _bias_workspace(spec)) != 0:
        yield Workspace("products with a bias (cuBLASLt), permanent", with_bias)
    if may_be_fused(spec):
        attention = attention_of(spec)
        kernel = attention.kernel(spec.sm) if attention else None
        name = f" ({kernel})" if kernel else ""
        size = _attention_workspace(spec, kernel)
        yield Workspace(f"backward pass of attention{name}, while it runs", size)
    yield Workspace(
        "sums over tokens (gradients of norms and biases), while they run", _sum_workspace(spec)
    )
    if spec.world_size > 1:
        yield Workspace("collectives (NCCL)", None)


def _attention_workspace(spec: Spec, kernel: str | None) -> int | None:
    """Return the workspace of attention's backward pass, or None if unknown.

    Deterministic sums need one workspace for each processor of the GPU, whose number is not known.
    """
    shape = spec.model
    if not isinstance(shape, ModelShape) or spec.deterministic:
        return None
    taken = attention_backward(
        kernel,
        spec.precision.effective_layout.parameters.itemsize,
        batch=spec.batch.micro,
        heads=ceil_div(shape.heads, spec.degree(Axis.TP)),
        sequence=spec.batch.sequence,
        head_dim=shape.head_dim,
    )
    return sum(taken) or None


def _sum_workspace(spec: Spec) -> int | None:
    """Return the largest workspace of sums over tokens, or None if unknown.

    It assumes all tokens: norms with sequence parallelism have fewer. LayerNorm's kernel needs
    none.
    """
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
