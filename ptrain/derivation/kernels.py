"""Whose kernels the figures of activations are of: tables and traces are a CPU's.

Where nothing is dropped, a GPU's kernels leave tensors of the same sizes for backward, but for what
attention keeps beside its output (`derivation.attention`), which depends on its compute capability.
With dropout they do not: on a CPU its masks are as wide as their input, on a GPU a byte an element,
and a CPU's scaled_dot_product_attention then has scores and probabilities in memory, which a GPU's
never has. Where a spec is for GPUs, tables and traces have a GPU's masks
(`models.kernels.kernels_of`), which no GPU has confirmed. What is offloaded to the host comes back
on streams of its own there (activations/run/offload.py), and more of it is on the device at a time
than is derived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ptrain.derivation.attention import statistics_of
from ptrain.facts.model import ModelFacts
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec

_WHY = "with dropout, what a CPU's kernels allocate is not what a GPU's do"
_AHEAD = (
    "a GPU brings offloaded activations back a module ahead of their use, a CPU when they are used"
)
_OTHERWISE = (
    "of {what} a GPU's attention is no kernel that is known: tensors are padded, or it goes "
    "operator by operator"
)
_NO_SM = (
    "no cluster.sm says which of CUDA's kernels compute attention (90: H100): the 16 or 24 bytes "
    "that it keeps for seed and offset in a block are not counted"
)
_NOT_CONFIRMED = "what dropout keeps is a GPU's by its kernels' signatures, and no GPU confirmed it"


def unclaimed(spec: Spec, facts: ModelFacts) -> dict[str, str]:
    """Why activations and peaks are not claimed, by kind of figure; empty where they are."""
    if why := _otherwise(spec, facts):
        return dict.fromkeys(("activations", "peak"), why)
    shape = spec.model
    drops = shape.dropout > 0 if isinstance(shape, ModelShape) else facts.draws
    if not drops or not spec.may_be_on_cuda:
        is_offloaded = any(kept.tier is Tier.HOST for kept in spec.activations.modes)
        return {"peak": _AHEAD} if is_offloaded and spec.is_for_cuda else {}
    return dict.fromkeys(("activations", "peak"), _NOT_CONFIRMED if spec.is_for_cuda else _WHY)


def _otherwise(spec: Spec, facts: ModelFacts) -> str:
    """Say why attention is none of the kernels that torch was asked for; nothing where it is
    one."""
    shape = spec.model
    if not spec.is_for_cuda:
        return ""
    if not isinstance(shape, ModelShape):
        what = facts.unknown_attention
        return _OTHERWISE.format(what=what) if what else ""
    if shape.attention is not Attention.SDPA or statistics_of(spec) is not None:
        return ""
    if spec.cluster is None or spec.cluster.sm is None:
        return ""
    dtype = spec.precision.effective.parameters
    what = f"head_dim {shape.head_dim} in {dtype}, {spec.batch.sequence} tokens,"
    return _OTHERWISE.format(what=what)


def kernel_warnings(
    spec: Spec, unclaimed: Mapping[str, str], undefined: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line that says whose the figures are that stand there all the same."""
    has_sm = spec.cluster is not None and spec.cluster.sm is not None
    is_fused = not isinstance(spec.model, ModelShape) or spec.model.attention is Attention.SDPA
    if spec.is_for_cuda and is_fused and not has_sm and "peak" not in undefined:
        yield _NO_SM
    if "peak" in unclaimed and "peak" not in undefined:
        why = unclaimed["peak"]
        whose = "a trace on a CPU" if why == _NOT_CONFIRMED else "a CPU's kernels"
        yield (
            f"activations and peaks are those of {whose}: {why}, so that on cuda they are not "
            "claimed"
        )
