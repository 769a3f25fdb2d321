"""Specs of the context axis, held against the prediction and one device."""

from __future__ import annotations

from ptrain.axes.context.attention import attention_of
from tests.gloo.matrix import MEASURED, STEPS, Matrix, Result, product

CLAIM = f"""\
Claim: with slices of the tokens over cp, alone and with every other axis, `exact` and measured
differ by 0 in resident memory (per state and rank) and in traffic (calls, payload and sent per
axes, collective, state and phase), and by at most 2 % in each phase's peak. Where the arithmetic is
fp64 the losses of {STEPS} steps are those of one device to 1e-12 relative and the parameters to
1e-9; else these losses stay within the band of the layout's rounding.

Measured in step {MEASURED} (from 0), on gloo ranks that share this machine. Memory and traffic:
figures compared / figures that differ. Peak: largest relative difference over phases and ranks.
`loss` and `parameters`: relative to one device.
"""


def _cells(result: Result) -> tuple[str, ...]:
    spec = result.spec
    kept = "" if spec.activations.modes == () else str(spec.resolved.get("activations", ""))
    return (
        spec.name,
        str(attention_of(spec)),
        product(spec),
        kept,
        "fp64" if spec.precision.compute_fp64 else spec.precision.layout.name,
    )


MATRIX = Matrix(
    theme="context",
    title="context: slices of the tokens over cp, and one device",
    claim=CLAIM,
    columns=("model", "attention", "Θ,Ω,G,A", "kept", "precision"),
    cells=_cells,
)
