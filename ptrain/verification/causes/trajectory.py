"""Why a trajectory fails in which no step was explained: by its checks alone."""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.report.finding import Certainty, Culprit, Subject
from ptrain.report.record import Check

_REFERENCE = "reference: "  # what checks of one device begin with


def of_reference(checks: Sequence[Check], size: int) -> Culprit | None:
    """Explain that one device does not learn: of several it says nothing. None where it does."""
    failed = [check for check in checks if check.name.startswith(_REFERENCE) and not check.holds]
    if not failed:
        return None
    return Culprit(
        state=Subject.LOSS,
        axis="",
        factor="one device does not learn",
        place="reference",
        step=0,
        ranks=tuple(range(size)),
        certainty=Certainty.PROVEN,
        tried="one device was run by itself",
        sentence=f"One device alone fails ({failed[0].name.removeprefix(_REFERENCE)}: "
        f"{failed[0].why}), so there is nothing to compare with: take another optimizer.lr, or "
        "more --steps.",
    )


def of_dtypes(
    checks: Sequence[Check], stopped: int | None, layout: str, size: int
) -> Culprit | None:
    """Explain what holds in fp64 and not in the spec's own dtypes; `stopped` is the step that was
    the last. None where all holds."""
    failed = next((check.name for check in checks if not check.holds), None)
    if failed is None:
        return None
    is_first = failed.startswith("gradient of step 0")
    return Culprit(
        state=Subject.GRADIENTS if "gradient" in failed else Subject.LOSS,
        axis="",
        factor=f"in {layout} alone",
        place="",
        step=0 if is_first else stopped or 0,
        ranks=tuple(range(size)),
        certainty=Certainty.UNEXPLAINED,
        tried="ruled out: every sum, as in fp64 the same steps are one device's",
        sentence="In fp64 the same steps are those of one device, so every sum is right: look for "
        "a state that is kept, reduced or cast in a coarser dtype than precision.layout says, and "
        "for what overflows.",
    )
