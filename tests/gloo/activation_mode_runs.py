"""The matrix of activation modes, compared with the prediction and the single-device reference."""

from __future__ import annotations

from ptrain.spec.spec import Spec
from tests.gloo.matrix import MEASURED, STEPS, Matrix, Result, placement_text
from tests.gloo.recording import checks_of_kind

CLAIM = f"""\
Claim: however blocks keep their activations, on every mesh, `exact` and measured differ by 0 in
resident memory (per state, rank and tier) and in traffic (calls, payload and sent per axes,
collective, state and phase; copies between tiers too), and by at most 2 % in each phase's peak. In
fp64 the losses of {STEPS} steps are those of one device that keeps all to 1e-12 relative, and
the parameters to 1e-9.

Measured in step {MEASURED} (from 0), on gloo ranks that share this machine. Memory and traffic:
figures compared / figures that differ. Peak: largest relative difference over phases and ranks.
`loss` and `parameters`: relative to one device. `saved`: bytes of activations on the device, of the
rank with most, predicted and measured alike where no figure differs.
"""


def _cells(result: Result) -> tuple[str, ...]:
    spec = result.spec
    saved = [check.measured or 0 for check in checks_of_kind(result.checks, "memory activations")]
    return (
        spec.name.partition(".")[0],
        str(spec.resolved.get("attention", "sdpa")),
        placement_text(spec) or "one device",
        _activation_keys(spec),
        f"{max(saved)} B",
    )


def _activation_keys(spec: Spec) -> str:
    """Return the activation keys of the spec as text."""
    said = spec.resolved
    written = [f"{key}: {said[key]}" for key in ("activations", "recompute") if key in said]
    return ", ".join(written).replace("'", "").replace("*", "\\*")


MATRIX = Matrix(
    theme="activation_modes",
    title="activations: in every mode on every mesh, and one device",
    claim=CLAIM,
    columns=("model", "attention", "Θ,Ω,G,A", "activations", "saved"),
    cells=_cells,
)
