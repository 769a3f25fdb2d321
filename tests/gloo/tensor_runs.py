"""The matrix of the tensor axis, compared with the prediction and the single-device reference."""

from __future__ import annotations

from ptrain.spec.placement import Axis
from tests.gloo.matrix import MEASURED, STEPS, Matrix, Result, dtypes_text, placement_text

CLAIM = f"""\
Claim: with operators cut over tp, alone and within data ranks, `exact` and measured differ by 0 in
resident memory (per state and rank) and in traffic (calls, payload and sent per axes, collective,
state and phase), and by at most 2 % in each phase's peak. Where the arithmetic is fp64 the losses
of {STEPS} steps are those of one device to 1e-12 relative and the parameters to 1e-9; else these
losses stay within the band of the layout's rounding.

Measured in step {MEASURED} (from 0), on gloo ranks that share this machine. Memory and traffic:
figures compared / figures that differ. Peak: largest relative difference over phases and ranks.
`loss` and `parameters`: relative to one device.
"""


def _cells(result: Result) -> tuple[str, ...]:
    spec = result.spec
    is_cut = any(factor.axis is Axis.TP for factor in spec.factors)
    plan = ("naive" if spec.tensor.is_naive else "paired") if is_cut else ""
    return (
        spec.name,
        placement_text(spec),
        plan if spec.tensor.loss_parallel else f"{plan}, logits gathered",
        dtypes_text(spec),
    )


MATRIX = Matrix(
    theme="tensor",
    title="tensor: operators cut over tp, and one device",
    claim=CLAIM,
    columns=("model", "Θ,Ω,G,A", "plan", "precision"),
    cells=_cells,
)
