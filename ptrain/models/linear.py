"""Linear layers of two kinds: torch's own, and transformers' Conv1D, whose weight is stored inputs
by outputs."""

from __future__ import annotations

from torch import nn


def is_transposed(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D, which only models that have it import."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Return whether it is a linear layer of either kind."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def features(module: nn.Module) -> tuple[int, int]:
    """Return inputs and outputs of a linear layer."""
    first, second = module.get_parameter("weight").shape
    return (first, second) if is_transposed(module) else (second, first)
