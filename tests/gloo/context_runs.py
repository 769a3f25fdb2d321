"""The matrix of the context axis, compared with the prediction and the single-device reference."""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.axes.context.attention import attention_of
from ptrain.spec.spec import Spec
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
OWN_KERNELS = ("attention_soft_cap", "window")
CLAIM = f"""\
Claim: with slices of the tokens over cp, alone and with every other axis, `exact` and measured
differ by 0 in resident memory (per state and rank) and in traffic (calls, payload and sent per
axes, collective, state and phase), and by at most 2 % in each phase's peak; of the last rank
`exact` and simulated differ by 0 in these and in operations. Where the arithmetic is fp64 the
losses of {STEPS} steps are those of one device to 1e-12 relative and the parameters to 1e-9; else
these losses stay within the band of the layout's rounding.

Measured in step {MEASURED} (from 0), on gloo ranks that share this machine. Memory, traffic and
simulated: figures compared / figures that differ. Peak: largest relative difference over phases and
ranks. `loss` and `parameters`: relative to one device. `besides`: a schedule and its stages,
micro-batches x samples in each, and what else the spec says.
"""


def _cells(result: Result) -> tuple[str, ...]:
    spec = result.spec
    return (
        spec.name,
        str(attention_of(spec)),
        placement_text(spec),
        ", ".join(_details(spec)),
        dtypes_text(spec),
    )


def _details(spec: Spec) -> Iterator[str]:
    yield from details(spec, ("activations", "recompute", "loss", "attention"))
    shape = spec.resolved["model"]
    assert isinstance(shape, dict)
    yield from (f"{key}: {shape[key]}" for key in OWN_KERNELS if key in shape)


MATRIX = Matrix(
    theme="context",
    title="context: slices of the tokens over cp, and one device",
    claim=CLAIM,
    columns=("model", "attention", "Θ,Ω,G,A", "besides", "precision"),
    cells=_cells,
    pages=split_by_ranks,
    steps=STEPS,
    simulates=True,
)
