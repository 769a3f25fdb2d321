"""The record of a rank that ran out of memory, and its comparison with the prediction.

`train/out_of_memory.py` writes the record, in the folder of the run's logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ptrain.cost import TIERS, Phase, State
from ptrain.report.predict import Prediction
from ptrain.report.table import (
    Importance,
    TableColumn,
    largest_bytes,
    memory_text,
    name_column,
    render_table,
)
from ptrain.units import format_memory

_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS, State.ACTIVATIONS)
_PASSES = {
    Phase.FORWARD: "the forward pass",
    Phase.BACKWARD: "the backward pass",
    Phase.UPDATE: "the update",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFailure:
    """The state of a rank when it ran out of memory.

    Attributes:
        rank: The rank.
        error: The first line of the error.
        step: The step, from 1.
        phase: The phase.
        micro_batch: The micro-batch, from 0.
        module: The dotted name of the innermost module whose Python code ran; "" if none did, as
            in most of a backward pass.
        requested_bytes: The bytes that were requested; None if the error does not name them.
        live: The bytes that the rank held on its device, by state, without activations.
        allocated_bytes: All bytes that tensors held; None on CPUs, which do not count them.
        device_memory: The bytes of the device; None on CPUs.
    """

    rank: int
    error: str
    step: int
    phase: Phase
    micro_batch: int
    module: str = ""
    requested_bytes: int | None = None
    live: Mapping[State, int] = field(default_factory=dict)
    allocated_bytes: int | None = None
    device_memory: int | None = None

    @property
    def activation_bytes(self) -> int | None:
        """The live bytes that belong to no other state; None if they were not counted."""
        if self.allocated_bytes is None:
            return None
        return max(0, self.allocated_bytes - sum(self.live.values()))

    def sentence(self) -> str:
        """Describe the place of the failure in one sentence."""
        place = _PASSES.get(self.phase, str(self.phase))
        if self.phase is not Phase.UPDATE:
            place += f" of micro-batch {self.micro_batch + 1}"
        module = f", in {self.module}" if self.module else ""
        size = ""
        if self.requested_bytes is not None:
            size = f", which requested {format_memory(self.requested_bytes)}"
        return f"Rank {self.rank} ran out of memory in {place} of step {self.step}{module}{size}."


def memory_failure_table(failure: MemoryFailure, prediction: Prediction | None) -> str:
    """Return a table of the live bytes next to the predicted ones.

    Args:
        failure: The failure.
        prediction: The prediction of the run's spec. None: it cannot be predicted.

    Returns:
        A row for each state; activations count everything else that was live.
    """
    live = {**failure.live, State.ACTIVATIONS: failure.activation_bytes}
    predicted: dict[State, int | None] = dict.fromkeys(_STATES)
    if prediction is not None:
        most = largest_bytes(prediction.derivation.exact.memory)
        predicted = {state: most.get((state, TIERS[0])) for state in _STATES}
    return render_table(
        [
            name_column("memory of the rank", [str(state) for state in _STATES]),
            TableColumn("live", Importance.RESULT, [memory_text(live.get(s)) for s in _STATES]),
            TableColumn("predicted", cells=[memory_text(predicted[s]) for s in _STATES]),
        ]
    )
