"""What a run's own routing makes of the prediction: the formula of where tokens go, with the counts
of the step that was measured. It says nothing before a run, and is kept apart from what does."""

from __future__ import annotations

from dataclasses import replace

from ptrain.costs import Column, Estimate
from ptrain.derivation.estimate import Derivation, derive
from ptrain.spec.routing import Histogram


def by_counts(derivation: Derivation, histogram: Histogram, step: int) -> Estimate | None:
    """Return the exact column with the counts of a run's `step` (from 1) in place of what it
    assumes; None where it assumes nothing of where tokens go."""
    if not derivation.exact.assumed:
        return None
    spec = derivation.spec.but(routing=histogram)
    exact = derive(spec, derivation.facts, is_timed=False).exact
    why = f"by where the run's routers sent tokens in step {step}, counted on every rank"
    return replace(
        exact,
        column=Column.COUNTED,
        assumed={},
        counted=dict.fromkeys(exact.assumed, why),
        step=derivation.exact.step,
        undefined={**derivation.exact.undefined, **exact.undefined},
    )
