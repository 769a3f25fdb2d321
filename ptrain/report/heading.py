"""The heading of a spec, in one line: model, ranks, placement, layout and batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

import yaml

from ptrain.cost import Estimate
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelShape
from ptrain.spec.spec import Spec
from ptrain.units import format_count


def heading(spec: Spec, num_parameters: int) -> str:
    """Return `zero3 · llama 0.92M · dp_shard 2 (S*,S,S,R) · fp32 · batch 16 = 2 micro × …`."""
    return " · ".join(
        [
            spec.name,
            f"{model_name(spec)} {format_count(num_parameters)}",
            placement(spec),
            precision(spec),
            batch(spec),
        ]
    )


def by_data_lines(exact: Estimate) -> list[str]:
    """Return why figures are bounds, what they assume or are derived from; nothing where data
    decides none."""
    reasons = (*exact.by_data.values(), *exact.assumed.values())
    lines = [f"sizes depend on data: {why}" for why in dict.fromkeys(reasons)]
    kinds = ", ".join(exact.counted)
    return lines + [f"counted: {kinds} {why}" for why in dict.fromkeys(exact.counted.values())]


def model_name(spec: Spec) -> str:
    """The preset, class or function; the family where the shape is the spec's own."""
    match spec.model:
        case ModelShape():
            return spec.model.preset or str(spec.model.tabulated or "transformer")
        case ExternalModel():
            return spec.model.target
        case HuggingFaceModel():
            return spec.model.hf
        case _:
            assert_never(spec.model)


def placement(spec: Spec) -> str:
    """`dp_replicate 2 (R,R,R,R) ⊗ dp_shard 2 (S*,S,S,R)`, where frozen parameters are if that is
    elsewhere, and how the blocks' activations are kept where the spec says it apart: `A M,
    selective`, `A {0: M, 2-: O}`."""
    tuples = " ⊗ ".join(
        f"{factor.axis} {factor.degree} ({factor.placement})" for factor in spec.factors
    )
    frozen = ", ".join(f"{mode} on {axis}" for axis, mode in spec.frozen.written().items())
    apart = [f"frozen {frozen}"] if frozen else []
    return " · ".join([tuples or "one device", *apart, *_kept(spec)])


def _kept(spec: Spec) -> Iterator[str]:
    said, how = spec.resolved.get("activations"), spec.resolved.get("recompute", "full")
    if said:
        policy = f", {_flow(how)}" if how != "full" else ""
        yield f"A {_flow(said)}{policy}"


def _flow(value: object) -> str:
    """As YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False).split("\n")[0]


def precision(spec: Spec) -> str:
    """The layout, and whether every dtype of it is float64."""
    return spec.precision.layout.name + (" in fp64" if spec.precision.compute_fp64 else "")


def batch(spec: Spec) -> str:
    """`batch 16 = 2 micro × 4 accumulated × 2 data`."""
    samples = spec.batch
    product = f"{samples.micro} micro × {samples.accumulate} accumulated × {spec.data_degree} data"
    return f"batch {samples.global_samples} = {product}"
