"""Specs of models with experts, held against the prediction and one device."""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec
from tests.gloo.matrix import MEASURED, Matrix, Result, product

STEPS = 20
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
        product(spec),
        ", ".join(_details(spec)),
        "fp64" if spec.precision.compute_fp64 else spec.precision.layout.name,
    )


def _details(spec: Spec) -> Iterator[str]:
    """Yield what else the spec says, as it says it."""
    if spec.degree(Axis.PP) > 1:
        stages = spec.pipeline.stages_over(spec.degree(Axis.PP))
        yield f"{spec.pipeline.schedule}, {stages} stages"
    yield f"{spec.batch.accumulate} x {spec.batch.micro}"
    said = spec.resolved
    for key in ("activations", "recompute", "loss", "context", "unit"):
        if key in said:
            yield f"{key}: {said[key]}".replace("'", "").replace("*", "\\*")


MATRIX = Matrix(
    theme="experts",
    title="experts: tokens that a router sends, and one device",
    claim=CLAIM,
    columns=("model", "Θ,Ω,G,A", "besides", "precision"),
    cells=_cells,
    steps=STEPS,
    simulates=True,
)
