"""Two runs of the tests compared: the losses of every step, the gradient norms, and each parameter
at the end; and the run of one device."""

from __future__ import annotations

import math

from ptrain.report.record import Check
from ptrain.spec.spec import Spec
from ptrain.verification.compare import Liveness, Tolerances, at_most, claim, parted, worst_of
from ptrain.verification.reference import OneDeviceRun, ReferenceTraining, Trajectory


def one_device(spec: Spec, steps: int) -> Trajectory:
    """Run `steps` updates from the initial weights."""
    run = OneDeviceRun(ReferenceTraining(spec), steps)
    while not run.step():
        pass
    return run.trajectory()


def compare(reference: Trajectory, run: Trajectory, tolerances: Tolerances) -> tuple[Check, ...]:
    """Return the checks whether both runs are alive, and how far they part. Of the batch of step 0
    no loss is known at the end: another one's of the second half must be lower."""
    both = {"reference": reference, "run": run}
    alive = (
        Liveness.of(name, its, min(its.losses[len(its.losses) // 2 :]))
        for name, its in both.items()
    )
    return (
        *(check for its in alive for check in its.checks()),
        _losses(reference, run, tolerances),
        *parted(reference, run, tolerances),
    )


def _losses(reference: Trajectory, run: Trajectory, tolerances: Tolerances) -> Check:
    if len(reference.losses) != len(run.losses):
        return claim("losses", len(run.losses), False, f"{len(reference.losses)} were expected")
    both = zip(reference.losses, run.losses, strict=True)
    differences = [abs(own - right) / abs(right) if right else math.inf for right, own in both]
    limits = [tolerances.of_loss(step) for step in range(len(differences))]
    worst = worst_of(differences, limits)
    why = f"differs by {differences[worst]:.3g} (relative) at step {worst}"
    return at_most("losses", differences[worst], limits[worst], why)
