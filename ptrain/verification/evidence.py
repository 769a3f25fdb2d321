"""What a side shows of a step. Of any, a program, a loop or one device, gradients are explained and
updates repeated by the same; whoever shows more has more explained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ptrain.models.objective import StepBatch
from ptrain.verification.capture import Outputs
from ptrain.verification.preconditions import States
from ptrain.verification.updates.repeat import UpdateRecord


class StepSide(Protocol):
    """`in_use`: the parameters as the first pass has them; `gradients` as the optimizers took them;
    `record`: what these were given and left."""

    @property
    def in_use(self) -> Mapping[str, Tensor]: ...

    @property
    def gradients(self) -> Mapping[str, Tensor]: ...

    @property
    def record(self) -> UpdateRecord: ...


@dataclass(slots=True, kw_only=True)
class ProgramSide:
    """A program, or the one device that it should be, which shows besides what its modules return,
    its loss and the norm of its gradients (None where nobody computes it)."""

    in_use: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    record: UpdateRecord = field(default_factory=UpdateRecord)
    outputs: Outputs
    loss: float
    norm: float | None = None


@dataclass(slots=True, kw_only=True)
class Evidence:
    """One step of a program and of one device, kept while it is explained. `states` are one
    device's at the start of the last steps, this one last. Gradients are without the loss's `scale`
    and what clipping did: `seen`, the program's, by the norm that their rank has, and its record by
    the number of a leaf of its optimizers."""

    step: int
    states: list[States]
    batch: StepBatch
    seen: ProgramSide
    expected: ProgramSide
    earlier_gradients: Mapping[str, Tensor]
    rates: set[float]
    scale: float
