"""The matrix of the expert axis, compared with the prediction and the single-device reference."""

from __future__ import annotations

from tests.gloo.expert_runs import SAID
from tests.gloo.matrix import (
    MEASURED,
    Matrix,
    Result,
    details,
    dtypes_text,
    placement_text,
    split_by_ranks,
)

STEPS = 20
CLAIM = f"""\
Claim: where tokens travel to experts that other ranks have, `exact` and measured differ by 0 in
resident memory (per state and rank) and in traffic (calls, payload and sent per axes, collective,
state and phase), and by at most 2 % in each phase's peak; where experts take all tokens that are
routed to them, which a run decides, this holds with the counts of the measured step, by layer,
micro-batch and rank, in place of even ones. Of the last rank `exact` and simulated differ by 0 in
these and in operations. Where the arithmetic is fp64 the losses of {STEPS} steps are those of one
device to 1e-12 relative, the parameters to 1e-9, and the gradient norms to 1e-11 or to what one
device's own part by where it adds in other orders; else these losses stay within the band of the
layout's rounding.

Measured in step {MEASURED} (from 0), on gloo ranks that share this machine. Memory, traffic and
simulated: figures compared / figures that differ. Peak: largest relative difference over phases and
ranks. `loss` and `parameters`: relative to one device. `besides`: a schedule and its stages,
micro-batches x samples in each, and what else the spec says.
"""


def _cells(result: Result) -> tuple[str, ...]:
    spec = result.spec
    return spec.name, placement_text(spec), ", ".join(details(spec, SAID)), dtypes_text(spec)


MATRIX = Matrix(
    theme="expert-ranks",
    title="experts: ranks that have some of them, and one device",
    claim=CLAIM,
    columns=("model", "Θ,Ω,G,A", "besides", "precision"),
    cells=_cells,
    pages=split_by_ranks,
    steps=STEPS,
    simulates=True,
)
