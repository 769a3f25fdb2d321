"""Which steps `profile: [steps]` traces: none that is metered, whose trace would show the meters.
Steps count from 1. Torch-free."""

from __future__ import annotations

from ptrain.errors import Fault, SpecError
from ptrain.spec.spec import Spec


def require_reachable(spec: Spec) -> None:
    """Raises SpecError for a step that the training does not have."""
    steps = spec.train.steps
    if beyond := [step for step in spec.profile if not 1 <= step <= steps]:
        fault = Fault(
            place="profile",
            finding=f"there is no step {beyond[0]}",
            remedy=f"choose from 1 to {steps}, or raise train.steps",
        )
        raise SpecError(fault)


def moved(spec: Spec, metered: tuple[int, ...]) -> dict[int, int]:
    """The steps asked for that are metered -> the step that is traced instead."""
    return {step: max(metered) + 1 for step in spec.profile if step in metered}


def announcement(spec: Spec, metered: tuple[int, ...]) -> str:
    """Return one line on what is moved, "" where nothing is."""
    if not (moves := moved(spec, metered)):
        return ""
    steps, instead = " and ".join(map(str, moves)), max(metered) + 1
    end = "is traced instead" if instead <= spec.train.steps else "would be traced instead"
    return f"profile  step {steps} is metered; step {instead} of {spec.train.steps} {end}"
