"""The comparison of two runs: losses and gradient norms of every step, and final parameters; and
the single-device run."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ptrain.report.record import Check
from ptrain.spec.spec import Spec
from ptrain.verification.compare import (
    FP64_LOSS,
    FP64_NORM,
    FP64_PARAMETERS,
    condition_check,
    learning_checks,
    limit_check,
    norm_checks,
    worst_index,
)
from ptrain.verification.reference import ReferenceTraining, Trajectory, run_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """Relative tolerances: one for all steps or one per step, and one for the final parameters.
    None: not compared."""

    losses: float | tuple[float, ...] = 0.0
    gradient_norms: float | tuple[float, ...] | None = None
    parameters: float | None = None


FP64 = Tolerances(losses=FP64_LOSS, gradient_norms=FP64_NORM, parameters=FP64_PARAMETERS)


def each_step(tolerance: float | tuple[float, ...], steps: int) -> tuple[float, ...]:
    """Return the tolerance of every step."""
    return tolerance if isinstance(tolerance, tuple) else (tolerance,) * steps


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDeviceTrajectory(Trajectory):
    """A single-device trajectory. `logits` holds the root mean square of each step's logits, which
    scales their rounding errors."""

    logits: tuple[float, ...]


def one_device(spec: Spec, steps: int) -> OneDeviceTrajectory:
    """Run `steps` updates from the initial weights."""
    device, squares, logits = ReferenceTraining(spec), list[float](), list[float]()

    def note(_: nn.Module, __: object, output: object) -> None:
        real = (leaf for leaf in tree_iter(output) if isinstance(leaf, Tensor))
        first = next(leaf for leaf in real if leaf.is_floating_point())
        squares.append(first.detach().double().square().mean().item())

    device.module.register_forward_hook(note)
    count, its = spec.batch.accumulate * spec.data_degree, None
    for ran in run_reference(device, steps):
        its = ran
        logits.append(math.sqrt(statistics.fmean(squares[:count])))  # micro-batches are of one size
        squares.clear()  # the last step's has the first batch once more behind it
    assert its is not None, "it ends with what the run did"
    plain = {name: getattr(its, name) for name in Trajectory.__dataclass_fields__}
    return OneDeviceTrajectory(**plain, logits=tuple(logits))


def compare(reference: Trajectory, run: Trajectory, tolerances: Tolerances) -> tuple[Check, ...]:
    """Return the checks that both runs learn, and how far they differ. The loss of step 0's batch
    is unknown at the end, so a loss of the second half must be lower."""
    both = {"reference": reference, "run": run}
    norms = tolerances.gradient_norms
    limits = None if norms is None else each_step(norms, len(run.gradient_norms))
    return (
        *(
            check
            for name, its in both.items()
            for check in learning_checks(
                name, replace(its, repeated_loss=min(its.losses[len(its.losses) // 2 :]))
            )
        ),
        _losses(reference, run, tolerances),
        *norm_checks(reference, run, limits, tolerances.parameters),
    )


def _losses(reference: Trajectory, run: Trajectory, tolerances: Tolerances) -> Check:
    if len(reference.losses) != len(run.losses):
        return condition_check(
            "losses", len(run.losses), False, f"{len(reference.losses)} were expected"
        )
    both = zip(reference.losses, run.losses, strict=True)
    differences = [abs(own - right) / abs(right) if right else math.inf for right, own in both]
    limits = each_step(tolerances.losses, len(differences))
    worst = worst_index(differences, limits)
    why = f"differs by {differences[worst]:.3g} (relative) at step {worst}"
    return limit_check("losses", differences[worst], limits[worst], why)
