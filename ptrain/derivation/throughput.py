"""Tokens per second, and model FLOPs utilization (MFU).

A token costs 6N + 12·L·d·s operations in forward and backward. N is the number of parameters
without those that are only looked up (input embedding, positions), and with only the experts that a
token visits. L is the number of layers, d the width of all heads (the mean of queries and values if
they differ), s the sequence length. This counts attention scores in full (`full`); `causal` counts
the half that a causal mask leaves, 6·L·d·s. Recomputation does not count.

specs/step_times.yaml compares predictions with published results. For each family of specs it has
the interval of the collected steps as multiples of their predictions, with the devices that ran
them, and the best MFU of the collected steps by peak FLOP/s of the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import Any, NamedTuple

from ptrain.cost import PLACED, StepTime
from ptrain.facts.model import ModelFacts
from ptrain.facts.parameters import elements_met
from ptrain.spec.cluster import Cluster
from ptrain.spec.model import ModelShape
from ptrain.spec.names import table_of
from ptrain.spec.placement import DATA_AXES, Axis, Tier
from ptrain.spec.precision import DType, Matmul
from ptrain.spec.spec import Spec

_MODEL_AXES = (Axis.TP, Axis.PP)
_ALIKE = 0.02  # relative tolerance of device memory: torch's value varies with the driver
_OF_A_PARAMETER, _FULL, _CAUSAL = 6, 12, 6


class Throughput(NamedTuple):
    """Throughput of the full job. The MFUs are None if the cluster has no `flops`, or for models
    that are not built in."""

    tokens_per_second: float
    mfu_full: float | None = None
    mfu_causal: float | None = None


def throughput(spec: Spec, facts: ModelFacts, step: StepTime) -> Throughput | None:
    """Return the throughput of a step. None if samples are not tokens, or if the step takes no
    time."""
    if (number := step_tokens(spec, facts)) is None or not step.seconds:
        return None
    tokens = number / step.seconds
    flops = spec.cluster.flops * spec.world_size if spec.cluster else 0.0
    if not flops or not isinstance(spec.model, ModelShape):
        return Throughput(tokens_per_second=tokens)
    full = token_operations(spec.model, facts, spec.batch.sequence, is_causal=False)
    causal = full + (_CAUSAL - _FULL) * _scores(spec.model, spec.batch.sequence)
    return Throughput(
        tokens_per_second=tokens,
        mfu_full=tokens * full / flops,
        mfu_causal=tokens * causal / flops,
    )


def step_tokens(spec: Spec, facts: ModelFacts) -> int | None:
    """Return the tokens of a step on all ranks, or None if samples are not tokens."""
    return spec.batch.tokens if facts.sample_bytes is None else None


def token_operations(
    shape: ModelShape, facts: ModelFacts, sequence: int, *, is_causal: bool
) -> int:
    """Return the floating-point operations of one token, forward and backward."""
    elements = sum(
        elements_met(shape, tensor.name, tensor.numel)
        for tensor in facts.tensors
        if not _is_looked_up(shape, tensor.name)
    )
    return _OF_A_PARAMETER * elements + (_CAUSAL if is_causal else _FULL) * _scores(shape, sequence)


def _scores(shape: ModelShape, sequence: int) -> int:
    """Return the sequence length times the width of the heads, summed over all layers."""
    return shape.layers * ((shape.query_width + shape.value_width) // 2) * sequence


def _is_looked_up(shape: ModelShape, name: str) -> bool:
    """Return True if a tensor is only looked up: positions, or an untied embedding."""
    module = name.split(".", maxsplit=1)[0]
    return module == "positions" or (module == "embed" and not shape.tied)


def step_family(spec: Spec) -> str:
    """Return the family of specs whose step times are comparable. Empty if no published step
    belongs to it."""
    has_experts = isinstance(spec.model, ModelShape) and spec.model.experts is not None
    if not spec.is_for_cuda:
        return "" if has_experts else "CPU"
    is_dense = isinstance(spec.model, ModelShape) and not has_experts
    if spec.precision.matmul is not Matmul.NONE:
        return ""
    if not is_dense or spec.precision.effective.parameters is not DType.BF16:
        return ""
    modes = (factor.placement[state] for factor in spec.factors for state in PLACED)
    is_offloaded = any(mode.tier is not Tier.DEVICE for mode in modes)
    axes = {factor.axis for factor in spec.factors if factor.degree > 1}
    has_other_axes = bool(axes - {*DATA_AXES, *_MODEL_AXES})
    if has_other_axes or is_offloaded or spec.activations.tiers != {Tier.DEVICE}:
        return ""
    return "GPU with tp or pp" if axes & {*_MODEL_AXES} else "GPU with data axes"


def published_steps(spec: Spec) -> Mapping[str, Any] | None:
    """Return the interval of the collected steps of a spec's family.

    Returns:
        The interval, with the family's name as `steps`. None if the family has no steps, or if none
        of them ran on devices with the peak FLOP/s and memory of the spec's devices.
    """
    known = _published_rows("intervals").get(step_family(spec))
    if known is None or not spec.is_for_cuda or spec.cluster is None:
        return known
    flops, memory = spec.cluster.flops, spec.cluster.device_memory
    is_known = any(
        flops == row["flops"] and isclose(memory, row["memory"], rel_tol=_ALIKE)
        for row in known["devices"].values()
    )
    return known if is_known else None


def with_interval(spec: Spec, step: StepTime) -> StepTime:
    """Return a step with the interval in seconds that contains nearly all collected steps."""
    known = published_steps(spec)
    interval = (known["low"] * step.seconds, known["high"] * step.seconds) if known else None
    return step._replace(interval=interval)


def best_collected_mfu(cluster: Cluster | None) -> tuple[float, str, str] | None:
    """Return the best MFU of the collected PyTorch steps, the device and the source.

    Only devices with the peak FLOP/s of the cluster's devices count, with full attention scores.
    The result is None if there are none.
    """
    for flops, row in _published_rows("best_mfu").items():
        if cluster is not None and float(flops) == cluster.flops:
            return row["mfu"], row["device"], row["source"]
    return None


def _published_rows(key: str) -> dict[Any, Any]:
    rows: dict[Any, Any] = table_of("step_times.yaml")[key]
    return rows
