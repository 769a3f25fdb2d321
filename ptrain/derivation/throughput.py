"""Tokens per second, and what part of the devices' operations the model's are (MFU).

A token costs 6N + 12·L·d·s operations, forward and backward: N parameters without those that are
only looked up (the input embedding, positions), and of experts those that it goes to; L layers
whose heads are d wide together (the mean of queries and values, where these differ), a sequence of
s. That is attention `full`, whose scores count whole; `causal` counts the half that a mask leaves,
6·L·d·s.
What is recomputed does not count.

Predicted times and MFUs are held against published ones: specs/step_times.yaml has, by family of
specs, the interval in which collected steps lie, as multiples of their predictions, with the
devices that ran them, and the best MFU of the collected steps by the peak of the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ptrain.cost import PLACED, StepTime
from ptrain.facts.model import ModelFacts
from ptrain.facts.parameters import elements_met
from ptrain.spec.cluster import Cluster
from ptrain.spec.model import ModelShape
from ptrain.spec.names import table_of
from ptrain.spec.placement import DATA_AXES, Axis, Tier
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec

_MODEL_AXES = (Axis.TP, Axis.PP)
_OF_A_PARAMETER, _FULL, _CAUSAL = 6, 12, 6


class Throughput(NamedTuple):
    """Tokens per second of the whole job. `mfu_full` and `mfu_causal`: None where the cluster says
    no `flops`, or the model's shape is not known."""

    tokens_per_second: float
    mfu_full: float | None = None
    mfu_causal: float | None = None


def throughput(spec: Spec, facts: ModelFacts, step: StepTime) -> Throughput | None:
    """Return what a step of this time processes; None of samples that are not tokens, and where a
    step takes no time."""
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
    """Return the tokens of a step, of all ranks; None of samples that are not tokens."""
    return spec.batch.tokens if facts.sample_bytes is None else None


def token_operations(
    shape: ModelShape, facts: ModelFacts, sequence: int, *, is_causal: bool
) -> int:
    """Return the operations of one token, forward and backward."""
    elements = sum(
        elements_met(shape, tensor.name, tensor.numel)
        for tensor in facts.tensors
        if not _is_looked_up(shape, tensor.name)
    )
    return _OF_A_PARAMETER * elements + (_CAUSAL if is_causal else _FULL) * _scores(shape, sequence)


def _scores(shape: ModelShape, sequence: int) -> int:
    """Return the products of queries with keys of one token, over all layers and their width."""
    return shape.layers * ((shape.query_width + shape.value_width) // 2) * sequence


def _is_looked_up(shape: ModelShape, name: str) -> bool:
    """Return whether a tensor multiplies nothing: an embedding that is not the head too."""
    module = name.split(".", maxsplit=1)[0]
    return module == "positions" or (module == "embed" and not shape.tied)


def step_family(spec: Spec) -> str:
    """Return the kind of specs whose step times are compared with each other; empty if no
    published steps are of the kind."""
    has_experts = isinstance(spec.model, ModelShape) and spec.model.experts is not None
    if not spec.is_for_cuda:
        return "" if has_experts else "CPU"
    is_dense = isinstance(spec.model, ModelShape) and not has_experts
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
    """Return the interval of the collected steps of a spec's family, with `steps`, their name;
    None if none of them ran on devices with the peak and memory of the spec's."""
    known = _published("intervals").get(step_family(spec))
    if known is None or not spec.is_for_cuda or spec.cluster is None:
        return known
    device = spec.cluster.flops, spec.cluster.device_memory
    is_known = any(device == (row["flops"], row["memory"]) for row in known["devices"].values())
    return known if is_known else None


def with_interval(spec: Spec, step: StepTime) -> StepTime:
    """Return a step with the seconds between which nearly all collected steps of its kind lie."""
    known = published_steps(spec)
    interval = (known["low"] * step.seconds, known["high"] * step.seconds) if known else None
    return step._replace(interval=interval)


def best_collected_mfu(cluster: Cluster | None) -> tuple[float, str, str] | None:
    """Return the best MFU of the collected PyTorch steps on devices with the peak of a cluster's,
    attention counted in full, the device and the source; None if none is known."""
    for flops, row in _published("best_mfu").items():
        if cluster is not None and float(flops) == cluster.flops:
            return row["mfu"], row["device"], row["source"]
    return None


def _published(key: str) -> dict[Any, Any]:
    rows: dict[Any, Any] = table_of("step_times.yaml")[key]
    return rows
