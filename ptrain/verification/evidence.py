"""What one step of a program and of one device made, kept while it is explained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ptrain.axes.data.run.target import Named
from ptrain.models.batch import StepBatch
from ptrain.verification.outputs import Outputs
from ptrain.verification.states import States
from ptrain.verification.updates.record import UpdateRecord


@dataclass(slots=True, kw_only=True)
class Evidence:
    """`states` are the reference's at the start of the last steps, this one last. `used` are
    parameters as the first micro-batch's modules had them. `gradients` as the program's optimizer
    had them, without what clipping did by the norm that their rank has; `expected_gradients` the
    reference's without the loss's scale and before clipping; `scale` is that of the loss.
    `updates` by the number of a leaf of the program's optimizers, `expected_updates` by
    parameter."""

    step: int
    states: list[States]
    batch: StepBatch
    used: Named
    outputs: Outputs
    expected_outputs: Outputs
    gradients: Named
    expected_gradients: dict[str, torch.Tensor]
    earlier_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    rates: set[float]
    loss: float
    expected_loss: float
    norm: float | None
    expected_norm: float = math.nan
    updates: UpdateRecord = field(default_factory=UpdateRecord)
    expected_updates: UpdateRecord = field(default_factory=UpdateRecord)
    scale: float = 1.0
