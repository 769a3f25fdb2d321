"""What an optimizer keeps of what it updates, and how many elements a rank stores."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.axes.data.rules import keeps_state
from ptrain.spec.precision import Layout
from ptrain.spec.spec import OptimizerSpec

_STEP_BYTES = 4  # AdamW counts its steps in one fp32 scalar per tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """What one rank stores: parameter and gradient elements, elements that the optimizer updates
    (padding that no parameter has is not among them), and in how many tensors."""

    parameters: int
    gradients: int
    updated: int
    tensors: int


def optimizer_bytes(optimizer: OptimizerSpec, layout: Layout, numel: int, tensors: int) -> int:
    """Master copies, moments and step counters of `numel` updated elements in `tensors`."""
    counters = _STEP_BYTES * tensors if optimizer.name == "adamw" else 0
    return numel * optimizer_itemsize(optimizer, layout) + counters


def optimizer_itemsize(optimizer: OptimizerSpec, layout: Layout) -> int:
    """Bytes of optimizer state per updated element: 12 for AdamW with a master copy in fp32."""
    moments = (1 if optimizer.name == "sgd" else 2) if keeps_state(optimizer) else 0
    master = layout.master.itemsize if layout.master else 0
    return master + moments * layout.moments.itemsize
