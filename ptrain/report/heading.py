"""The heading of a spec in one line (model, ranks, placement, precision and batch), and remarks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import assert_never

import yaml

from ptrain.cost import Estimate
from ptrain.report.screen import command_line
from ptrain.spec.dials import Compiled
from ptrain.spec.model import Attention, ExternalModel, HuggingFaceModel, ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.precision import Matmul
from ptrain.spec.spec import Spec
from ptrain.units import format_count


def heading(spec: Spec, num_parameters: int) -> str:
    """Return the heading of a spec: model, parameters, placement, precision and batch.

    Args:
        spec: The resolved spec.
        num_parameters: The number of elements of the model's parameters.

    Example:
        `zero3 · llama 0.92M · dp_shard 2 (S*,S,S,R) · fp32 · batch 16 = 2 micro × …`
    """
    return " · ".join(
        [
            spec.name,
            f"{model_name(spec)} {format_count(num_parameters)}",
            axes_text(spec),
            precision_text(spec),
            batch_text(spec),
        ]
    )


def by_data_lines(exact: Estimate) -> list[str]:
    """Return the reasons why figures are bounds, assume data, or use counts of a run.

    Args:
        exact: The prediction. If no figure depends on data, the result is empty.
    """
    reasons = (*exact.by_data.values(), *exact.assumed.values())
    lines = [f"sizes depend on data: {why}" for why in dict.fromkeys(reasons)]
    kinds = ", ".join(exact.counted)
    return lines + [f"counted: {kinds} {why}" for why in dict.fromkeys(exact.counted.values())]


def model_name(spec: Spec) -> str:
    """Return the name of the model: its preset, class or function; the family of a custom shape.

    Args:
        spec: A resolved spec.

    Returns:
        A short name.
    """
    match spec.model:
        case ModelShape():
            return spec.model.preset or str(spec.model.tabulated or "transformer")
        case ExternalModel():
            return spec.model.target
        case HuggingFaceModel():
            return spec.model.hf
        case _:
            assert_never(spec.model)


def axes_text(spec: Spec) -> str:
    """Return the placement of all axes: `dp_replicate 2 (R,R,R,R) ⊗ dp_shard 2 (S*,S,S,R)`.

    Frozen parameters follow if they are placed differently, and the blocks' activations if the spec
    sets them separately: `A M, selective`, `A {0: M, 2-: O}`.

    Args:
        spec: A resolved spec.

    Returns:
        One line of text.
    """
    tuples = " ⊗ ".join(
        f"{factor.axis} {factor.degree} ({factor.placement})" for factor in spec.factors
    )
    frozen = ", ".join(f"{mode} on {axis}" for axis, mode in spec.frozen.modes_by_axis().items())
    frozen_text = [f"frozen {frozen}"] if frozen else []
    return " · ".join([tuples or "one device", *frozen_text, *_activations_text(spec)])


def _activations_text(spec: Spec) -> Iterator[str]:
    """Yield the placement of the blocks' activations, if the spec sets it separately."""
    activations, how = spec.resolved.get("activations"), spec.resolved.get("recompute", "full")
    if activations:
        policy = f", {_flow_yaml(how)}" if how != "full" else ""
        yield f"A {_flow_yaml(activations)}{policy}"


def _flow_yaml(value: object) -> str:
    """Return a value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False).split("\n")[0]


def precision_text(spec: Spec) -> str:
    """Return the name of the precision layout, with remarks: all dtypes are float64, products have
    fp8 factors.

    Args:
        spec: A resolved spec.

    Returns:
        One line of text.
    """
    own = spec.precision
    products = f", {own.matmul} products" if own.matmul is not Matmul.NONE else ""
    return own.layout.name + (" in fp64" if own.compute_fp64 else "") + products


def batch_text(spec: Spec) -> str:
    """Return the batch as a product: `batch 16 = 2 micro × 4 accumulated × 2 data`.

    Args:
        spec: A resolved spec.

    Returns:
        One line of text.
    """
    samples = spec.batch
    product = f"{samples.micro} micro × {samples.accumulate} accumulated × {spec.data_degree} data"
    return f"batch {samples.global_samples} = {product}"


_ON_CUDA = "device=cuda"


def measuring_command(
    spec: Spec, exact: Estimate, words: Sequence[str], *, allow_import: bool = False
) -> str:
    """Return the shell command that measures the peak if `exact` does not predict it.

    Args:
        spec: The resolved spec.
        exact: The prediction; its `undefined` and `unclaimed` figures decide the flags.
        words: The arguments that load the spec: its name or file, and overrides.
        allow_import: Add `--allow-import`. It is also added if the spec names user functions.
    """
    if spec.compile is not Compiled.NONE:  # it simulates programs that are predicted
        return command_line("train", words, allow_import=allow_import)
    on_gpu = needs_gpu(spec, exact)
    is_on_cuda = spec.device == "cuda" or _ON_CUDA in words
    overrides = [_ON_CUDA] if on_gpu and not is_on_cuda else []
    is_uneven = spec.degree(Axis.PP) > 1 or spec.degree(Axis.TP) > 1
    flags = [
        *(["--allow-import"] if allow_import or spec.user_functions else []),
        *(["--rank", "all-distinct"] if is_uneven else []),
        *(["--rehearse"] if on_gpu or _reads_values(spec, exact) else []),
    ]
    return shlex.join(["ptrain", "simulate", *words, *overrides, *flags])


def _reads_values(spec: Spec, exact: Estimate) -> bool:
    """Return True if only real tensors give the peak of the model.

    The peak of a model that is not built in is undefined if its code does not run on fake tensors.
    """
    return not isinstance(spec.model, ModelShape) and "peak" in exact.undefined


def needs_gpu(spec: Spec, exact: Estimate) -> bool:
    """Return True if only a GPU gives the peak.

    Fake ranks use a CPU's kernels, and flex_attention has no backward pass on a CPU.

    Args:
        spec: The resolved spec, for its attention.
        exact: The prediction; `unclaimed["peak"]` has the reason why its peak does not hold for a
            GPU.
    """
    model = spec.model
    is_flex = not isinstance(model, ExternalModel) and model.attention is Attention.FLEX
    return is_flex or "peak" in exact.unclaimed
