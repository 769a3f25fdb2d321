"""Specs whose ranks have experts of their own, held against one device, and where routing decides
no size, against the prediction."""

from __future__ import annotations

from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.verification.band import loss_band
from ptrain.verification.compare import FP64, Tolerances, compare
from tests.gloo.expert_runs import SAID
from tests.gloo.matrix import MEASURED, Matrix, Result, arithmetic, details, product, reference
from tests.gloo.runs import train
from tests.gloo.test_exact import failing
from tests.ranks import Ranks

STEPS = 20
CLAIM = f"""\
Claim: where tokens travel to experts that other ranks have, each of which has places for as many,
`exact` and measured differ by 0 in resident memory (per state and rank) and in traffic (calls,
payload and sent per axes, collective, state and phase), and by at most 2 % in each phase's peak; of
the last rank `exact` and simulated differ by 0 in these and in operations. Where the arithmetic is
fp64 the losses of {STEPS} steps are those of one device to 1e-12 relative and the parameters to
1e-9; else these losses stay within the band of the layout's rounding.

Measured in step {MEASURED} (from 0), on gloo ranks that share this machine. Memory, traffic and
simulated: figures compared / figures that differ. Peak: largest relative difference over phases and
ranks. `loss` and `parameters`: relative to one device. `besides`: a schedule and its stages,
micro-batches x samples in each, and what else the spec says.
"""


def _cells(result: Result) -> tuple[str, ...]:
    spec = result.spec
    return spec.name, product(spec), ", ".join(details(spec, SAID)), arithmetic(spec)


MATRIX = Matrix(
    theme="expert-ranks",
    title="experts: ranks that have some of them, and one device",
    claim=CLAIM,
    columns=("model", "Θ,Ω,G,A", "besides", "precision"),
    cells=_cells,
    steps=STEPS,
    simulates=True,
)


def differences(ranks: Ranks, spec: Spec) -> list[str]:
    """Train a spec on its ranks; return what is not as on one device or as predicted."""
    assert isinstance(spec.model, ModelShape)
    if spec.model.capacity_factor is not None:
        return MATRIX.differences(ranks, spec)
    truth = reference(spec, STEPS)
    trajectory = ranks.run(spec.world_size, train, spec, STEPS)[0].trajectory
    assert trajectory is not None
    banded = Tolerances(losses=loss_band(spec, truth))
    exactly = FP64 if spec.precision.compute_fp64 else banded
    return failing(compare(truth, trajectory, exactly))
