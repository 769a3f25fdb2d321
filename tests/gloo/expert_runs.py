"""The matrix of models with experts, compared with the prediction and the single-device
reference."""

from __future__ import annotations

from tests.gloo.matrix import MEASURED, Matrix, Result, details, dtypes_text, placement_text

STEPS = 20
SAID = ("activations", "recompute", "loss", "context", "unit", "overlap_shared_experts")
CLAIM = f"""\
Claim: where tokens go to experts, which every rank has, `exact` and measured differ by 0 in
resident memory (per state and rank) and in traffic (calls, payload and sent per axes, collective,
state and phase), and by at most 2 % in each phase's peak; of the last rank `exact` and simulated
differ by 0 in these and in operations. Where the arithmetic is fp64 the losses of {STEPS} steps are
those of one device to 1e-12 relative and the parameters to 1e-9; else these losses stay within the
band of the layout's rounding.

Measured in step {MEASURED} (from 0), on gloo ranks that share this machine. Memory, traffic and
simulated: figures compared / figures that differ. Peak: largest relative difference over phases and
ranks. `loss` and `parameters`: relative to one device. `besides`: a schedule and its stages,
micro-batches x samples in each, and what else the spec says.
"""


def _cells(result: Result) -> tuple[str, ...]:
    spec = result.spec
    return (
        spec.name,
        placement_text(spec),
        ", ".join(details(spec, SAID)),
        dtypes_text(spec),
    )


MATRIX = Matrix(
    theme="experts",
    title="experts: tokens that a router sends, and one device",
    claim=CLAIM,
    columns=("model", "Θ,Ω,G,A", "besides", "precision"),
    cells=_cells,
    steps=STEPS,
    simulates=True,
)
