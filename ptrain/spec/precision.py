"""Bytes per element of each state: the layout (Remark 1: 2 + 2 + 12 is one of several)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DType(StrEnum):
    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return {DType.FP64: 8, DType.FP32: 4, DType.BF16: 2, DType.FP16: 2}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The dtypes of one training step.

    `master` is the copy of the parameters that the optimizer updates and owns (it counts as
    optimizer state), None where the optimizer updates the parameters themselves. `moments` is
    the dtype of each of the optimizer's moment tensors; they take the dtype of the tensor that
    is updated. Every `step` counter is one fp32 scalar, 4 bytes, whatever the layout.
    """

    name: str
    parameters: DType
    gradients: DType
    master: DType | None
    moments: DType

    @property
    def updated(self) -> DType:
        """The dtype of the tensor that the optimizer updates."""
        return self.master or self.parameters


FP32 = Layout(
    name="fp32",
    parameters=DType.FP32,
    gradients=DType.FP32,
    master=None,
    moments=DType.FP32,
)
ZERO16 = Layout(
    name="zero16",
    parameters=DType.BF16,
    gradients=DType.BF16,
    master=DType.FP32,
    moments=DType.FP32,
)
EXECUTED_LAYOUTS = {layout.name: layout for layout in (FP32, ZERO16)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A layout, and `compute: fp64`, which makes every dtype of it float64 and keeps its structure
    (master copies, casts): the mode of equality tests."""

    layout: Layout = FP32
    compute_fp64: bool = False

    @property
    def effective(self) -> Layout:
        """The layout with the dtypes that really run."""
        if not self.compute_fp64:
            return self.layout
        return Layout(
            name=self.layout.name,
            parameters=DType.FP64,
            gradients=DType.FP64,
            master=DType.FP64 if self.layout.master else None,
            moments=DType.FP64,
        )
