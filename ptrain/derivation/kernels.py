"""Whose kernels the figures of activations are of: tables and traces are a CPU's.

Where nothing is dropped, a GPU's kernels leave tensors of the same sizes for backward, but for what
attention keeps beside its output (`derivation.attention`), which depends on its compute capability.
With dropout they do not: on a CPU its masks are as wide as their input, on a GPU a byte an element,
and a CPU's scaled_dot_product_attention then has scores and probabilities in memory, which a GPU's
never has. Where a spec is for GPUs, tables and traces have a GPU's masks
(`models.kernels.kernels_of`), and are claimed where an H100 has confirmed them. What is offloaded
comes back on streams of its own there (activations/run/offload.py), and more of it is on the device
at a time than is derived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ptrain.derivation.attention import (
    attention_of,
    capabilities,
    capability,
    leaves_device,
    may_be_fused,
    most_rows,
)
from ptrain.derivation.layers import drops_in_parts
from ptrain.facts.model import ModelFacts
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Tier
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec

_WHY = "with dropout, what a CPU's kernels allocate is not what a GPU's do"
_AHEAD = (
    "a GPU brings offloaded activations back a module ahead of their use, a CPU when they are used"
)
_OVER_CONTEXT = "no GPU has shown what attention over cp keeps"
_OTHERWISE = (
    "of {what} a GPU's attention is no kernel that is known: tensors are padded, or it goes "
    "operator by operator"
)
_LEFT = (
    "what attention keeps for its dropout stays on the device where a GPU's activations leave it"
)
_NOT_COUNTED = (
    "{why}: the 16 or 24 bytes that attention keeps for seed and offset in a block, and in fp32 "
    "its statistics' rows up to a multiple of 32, are not counted"
)
_NO_SM = "no cluster.sm says which of CUDA's kernels compute attention (90: H100)"
_OTHER_SM = "which of CUDA's kernels compute attention was not asked for sm {sm}, but for {known}"
_NOT_CONFIRMED = (
    "what dropout keeps is a GPU's by its kernels' signatures, and an H100 (sm 90) alone confirmed "
    "it, of whole built-in models"
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
    why = unclaimed(spec, facts).get("peak", "")
    return why in ("", _OVER_CONTEXT)


def _is_confirmed(spec: Spec) -> bool:
    """Return whether a device has shown what dropout keeps: an H100, of whole built-in models with
    fused attention (benchmarks/gpu.sh; tests/cuda)."""
    shape = spec.model
    is_fused = isinstance(shape, ModelShape) and shape.is_fused and shape.tabulated is not None
    return spec.is_for_cuda and is_fused and not drops_in_parts(spec) and spec.sm == _H100


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
        whose = "a trace on a CPU" if why == _NOT_CONFIRMED else "a CPU's kernels"
        yield (
            f"activations and peaks are those of {whose}: {why}, so that on cuda they are not "
            "claimed"
        )
    if "traffic" in unclaimed and "traffic" not in undefined:
        yield f"what activations copy off the device is not claimed on cuda: {unclaimed['traffic']}"
