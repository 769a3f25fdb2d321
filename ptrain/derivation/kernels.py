"""Whose kernels the figures of activations are of: tables and traces are a CPU's.

Where nothing is dropped, a GPU's kernels leave tensors of the same sizes for backward. With dropout
they do not: on a CPU its masks are as wide as their input, on a GPU a byte an element, and a CPU's
scaled_dot_product_attention then has scores and probabilities in memory, which a GPU's never has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ptrain.facts.model import ModelFacts
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

_WHY = "with dropout, what a CPU's kernels allocate is not what a GPU's do"


def unclaimed(spec: Spec, facts: ModelFacts) -> dict[str, str]:
    """Why activations and peaks are not claimed, by kind of figure; empty where they are."""
    shape = spec.model
    drops = shape.dropout > 0 if isinstance(shape, ModelShape) else facts.draws
    return dict.fromkeys(("activations", "peak"), _WHY) if drops and spec.may_be_on_cuda else {}


def kernel_warnings(unclaimed: Mapping[str, str], undefined: Mapping[str, str]) -> Iterator[str]:
    """That the figures which stand there all the same are a CPU's."""
    if "peak" in unclaimed and "peak" not in undefined:
        yield (
            f"activations and peaks are those of a CPU's kernels: {unclaimed['peak']}, so that on "
            "cuda they are not claimed"
        )
