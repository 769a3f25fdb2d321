"""What one step of a program and of one device made, kept while it is explained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ptrain.models.batch import StepBatch
from ptrain.verification.side import ProgramSide
from ptrain.verification.states import States


@dataclass(slots=True, kw_only=True)
class Evidence:
    """`states` are one device's at the start of the last steps, this one last. Gradients are
    without the loss's `scale` and what clipping did: `seen`, the program's, by the norm that their
    rank has, and its record by the number of a leaf of its optimizers."""

    step: int
    states: list[States]
    batch: StepBatch
    seen: ProgramSide
    expected: ProgramSide
    earlier_gradients: Mapping[str, Tensor]
    rates: set[float]
    scale: float
