"""The linear layers of a built-in model whose matrix products take fp8 factors, and the layers that
are left out.

torch multiplies fp8 matrices whose rows and columns are multiples of 16 bytes. As in torchao and
torchtitan, the head stays in the dtype of the parameters, because its logits need the precision.
Experts are stacked tensors, whose grouped products do not take fp8 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ptrain.facts.parameters import EXPERTS, facts
from ptrain.spec.model import ModelShape

MULTIPLE = 16  # bytes, and so elements of fp8: the alignment that torch._scaled_mm needs
_MATRIX = 2  # dimensions


class Products(NamedTuple):
    """The layers of a model, by the factors of their matrix products.

    Attributes:
        scaled: Names of the linear layers with fp8 factors.
        left_out: Names of the other layers with matrices, by the reason.
    """

    scaled: tuple[str, ...]
    left_out: Mapping[str, tuple[str, ...]]


def products_of(shape: ModelShape) -> Products:
    """Return the layers of a built-in model with fp8 products, and those without."""
    scaled: list[str] = []
    left_out: dict[str, list[str]] = {}
    for tensor in facts(shape, 1).tensors:
        name, _, kind = tensor.name.rpartition(".")
        if kind != "weight" or len(tensor.shape) < _MATRIX:
            continue
        if reason := _why_left_out(name, tensor.shape):
            left_out.setdefault(reason, []).append(name)
        else:
            scaled.append(name)
    return Products(tuple(scaled), {reason: tuple(names) for reason, names in left_out.items()})


def _why_left_out(name: str, dims: tuple[int, ...]) -> str:
    """Return the reason why a layer's products do not take fp8 factors; empty if they do."""
    parts = name.split(".")
    if parts[0] != "blocks":
        return "the head" if parts[0] == "head" else "embeddings"
    if parts[-1] == "router":
        return "routers"
    if EXPERTS in parts:
        return "experts"
    if any(size % MULTIPLE for size in dims):
        return f"a dimension is not a multiple of {MULTIPLE}"
    return ""
