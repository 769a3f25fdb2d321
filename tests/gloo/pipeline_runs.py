"""The matrix of the pipeline axis, compared with the prediction and the single-device reference.
Specs with tp and specs on eight ranks have pages of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptrain.spec.dials import Reshard
from ptrain.spec.placement import Axis, Distribution
from ptrain.spec.spec import Spec
from tests.gloo.matrix import MEASURED as MEASURED_STEP
from tests.gloo.matrix import STEPS, Matrix, Result, dtypes_text, placement_text

CLAIM = f"""\
Claim: with a model cut into stages, alone and within any product of data ranks and operators cut
over tp, `exact` and measured differ by 0 in resident memory (per state and rank) and in traffic
(calls, payload and sent per axes, collective, state and phase), and by at most 2 % in each phase's
peak. Where the arithmetic is fp64 the losses of {STEPS} steps are those of one device to 1e-12
relative and the parameters to 1e-9; else these losses stay within the band of the layout's
rounding.

Measured in step {MEASURED_STEP} (from 0), on gloo ranks that share this machine. The mesh is in its
own order, outermost first. Memory and traffic: figures compared / figures that differ. Peak: the
largest relative difference over phases and ranks. `loss` and `parameters`: relative to one device;
strategies by their name alone are metered and not compared with it.
"""


def _pages(results: Sequence[Result], theme: str) -> dict[str, list[Result]]:
    """Split the results by tp (without or with) and by ranks (up to four, or eight)."""
    pages: dict[str, list[Result]] = {}
    for result in results:
        beside = "_tp" if result.spec.degree(Axis.TP) > 1 else ""
        size = "_8_ranks" if result.spec.world_size == 8 else ""
        pages.setdefault(f"{theme}{beside}{size}", []).append(result)
    return pages


def _cells(result: Result) -> tuple[str, ...]:
    spec = result.spec
    return (
        spec.name.removesuffix(f"-{spec.pipeline.schedule}"),
        _schedule(spec),
        placement_text(spec),
        ", ".join(_policy(spec)),
    )


def _schedule(spec: Spec) -> str:
    """Return the schedule as text: `zbv, 4 stages, 4 x 1` (micro-batches x samples per
    micro-batch)."""
    said, ranks = spec.pipeline, spec.degree(Axis.PP)
    split = f" of {'+'.join(map(str, said.split))}" if isinstance(said.split, tuple) else ""
    stages = f"{said.stages_over(ranks)} stages{split}"
    return f"{said.schedule}, {stages}, {spec.batch.accumulate} x {spec.batch.micro}"


def _policy(spec: Spec) -> Iterator[str]:
    yield dtypes_text(spec)
    if spec.optimizer.clip is None:
        yield "no clip"
    if any(
        each.placement.parameters.distribution is Distribution.GATHERED for each in spec.factors
    ):
        passes = {"forward": spec.sync.reshard_after_forward}
        passes["backward"] = spec.sync.reshard_after_backward
        kept = [name for name, reshards in passes.items() if not reshards]
        kept += ["forward (the root)"] if isinstance(passes["forward"], Reshard) else []
        yield f"kept after {' and '.join(kept)}" if kept else "given back after each pass"
    if spec.data_degree > 1:
        yield f"reduced {spec.sync.gradients}"


MATRIX = Matrix(
    theme="pipeline",
    title="pipeline: a model cut into stages, and one device",
    claim=CLAIM,
    columns=("model", "schedule", "Θ,Ω,G,A", "precision, policy"),
    cells=_cells,
    pages=_pages,
)
