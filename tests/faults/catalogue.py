"""Every fault by its name."""

from __future__ import annotations

from tests.faults import (
    of_attention,
    of_batches,
    of_expert_ranks,
    of_experts,
    of_journeys,
    of_key_gradients,
    of_operators,
    of_reductions,
    of_slices,
    of_states,
    of_updates,
)
from tests.faults.fault import Fault

_MODULES = (
    of_batches,
    of_reductions,
    of_operators,
    of_slices,
    of_attention,
    of_key_gradients,
    of_experts,
    of_expert_ranks,
    of_journeys,
    of_updates,
    of_states,
)
FAULTS: dict[str, Fault] = {fault.name: fault for module in _MODULES for fault in module.FAULTS}
