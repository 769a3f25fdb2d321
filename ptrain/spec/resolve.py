"""Resolve a checked tree into a `Spec`: presets filled in, degrees solved, the batch completed
(global, micro and accumulate follow from each other), and the user's functions of data, loss and
step named.

Checked here is what a section, or the batch with the mesh, needs to have a value at all; whether
the product is legal is the algebra's question.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from ptrain.cost import PLACED, State
from ptrain.errors import Fault, SpecError
from ptrain.spec.activations import LossRaw
from ptrain.spec.batch import (
    AUTO,
    MAX_SAMPLES,
    Batch,
    BatchRaw,
    Rounding,
    WrittenTokens,
    padded,
    rounded_samples,
    written_tokens,
)
from ptrain.spec.dials import (
    GradientSync,
    SyncPolicy,
)
from ptrain.spec.function import StepRaw, UserFunction
from ptrain.spec.grammar import MAX_DEGREE, MeshRaw, PlacementRaw, SpecRaw
from ptrain.spec.job import DataSpec
from ptrain.spec.keys import FrozenSpec, Keys, TensorSpec
from ptrain.spec.names import root
from ptrain.spec.placement import (
    EXPERT_AXES,
    REDUCED_AXES,
    SAMPLE_AXES,
    Axis,
    Distribution,
    Factor,
    Mode,
    Placement,
    R,
)
from ptrain.spec.resolve_activations import (
    on_tier,
    resolve_activations,
    resolve_attention,
    resolve_loss,
    says_offloaded,
)
from ptrain.spec.resolve_sections import (
    Report,
    resolve_cluster,
    resolve_model,
    resolve_optimizer,
    resolve_precision,
)
from ptrain.spec.shorthand import fault_of_experts, mark_of, route_of, usual_modes
from ptrain.spec.spec import LossSpec, Spec
from ptrain.spec.text import Route, Tree
from ptrain.spec.write import to_mapping

_ONE = "Remove one of the two."
_A = {"path": "a path", "sources": "sources"}


def resolve_data(raw: SpecRaw, tree: Tree, report: Report) -> DataSpec | None:
    """Return the section with one of corpus, path, sources and target; two are a fault."""
    data = raw.data
    if data.target is None:
        return None if _lacks_target("data", data, report) else _of_tokens(data, tree, report)
    for key in ("corpus", "path", "sources"):
        if tree.has("data", key):
            report.add(
                f"data.{key}", f"`data.target` provides the samples, so {key} has no effect", _ONE
            )
            return None
    if _ignores_targets("`data.target` provides samples that are not tokens", data, report):
        return None
    if raw.batch.pad:
        report.add(
            "batch.pad", "`data.target` provides samples that are not tokens", "Remove `batch.pad`."
        )
        return None
    if not tree.has("step") and not tree.has("loss", "target"):
        finding = "samples that are not tokens need a custom loss"
        remedy = (
            "Add `loss: {target: package.module:function}`, a function of the model's output and "
        )
        report.add(
            "data.target",
            finding,
            f"{remedy}the batch, or `step: {{target: package.module:function}}`.",
        )
        return None
    folder = beside(data.folder, report)
    return replace(data, corpus=None, arguments=data.arguments or {}, folder=folder)


def _of_tokens(data: DataSpec, tree: Tree, report: Report) -> DataSpec | None:
    if data.loss_mask is not None and data.path is None:
        finding = "a loss mask needs a token file, and `data.path` is not set"
        remedy = "Add `data.path=FILE`, or use `data.ignored=[ID, …]`."
        if data.sources is not None:
            finding, remedy = (
                "a loss mask belongs to one file, but `data.sources` lists several",
                ("Put `loss_mask` into the entry of its source."),
            )
        report.add("data.loss_mask", finding, remedy)
        return None
    given = [key for key in ("corpus", "path", "sources") if tree.has("data", key)]
    if len(given) > 1:
        report.add(f"data.{given[1]}", f"both a {given[0]} and {_A[given[1]]} are given", _ONE)
        return None
    return replace(data, corpus=None) if data.is_of_files else data


def _ignores_targets(why: str, data: DataSpec, report: Report) -> bool:
    """Report keys that say which targets count; return whether there is any."""
    keys = [key for key in ("ignored", "loss_mask") if getattr(data, key) is not None]
    for key in keys:
        report.add(f"data.{key}", f"{why}; this key selects target tokens", f"Remove `data.{key}`.")
    return bool(keys)


def resolve_functions(raw: SpecRaw, report: Report) -> LossSpec:
    """Return the loss's or the step's function, if the spec names one of them; what contradicts it
    is reported as a fault."""
    loss, step = raw.loss or LossRaw(), raw.step
    kinds = [key for key in ("kind", "chunk", "fused") if getattr(loss, key) is not None]
    if loss.target is None:
        _lacks_target("loss", loss, report)
    elif kinds:
        report.add(
            f"loss.{kinds[0]}", f"`target` computes the loss, so {kinds[0]} has no effect", _ONE
        )
    if step is None:
        return LossSpec(function=_function("loss", loss, report))
    if loss.target is not None or kinds:
        report.add("step", "`step` computes the loss, so `loss` has no effect", _ONE)
    return LossSpec(step=_function("step", step, report))


def _lacks_target(section: str, raw: DataSpec | LossRaw, report: Report) -> bool:
    """Report what belongs to a target; return whether there is any."""
    keys = [key for key in ("arguments", "folder") if getattr(raw, key) is not None]
    for key in keys:
        report.add(
            f"{section}.{key}", f"{key} requires `target`", f"Add `target`, or remove `{key}`."
        )
    return bool(keys)


def _function(section: str, raw: LossRaw | StepRaw, report: Report) -> UserFunction | None:
    if raw.target is None:
        return None
    return UserFunction(
        section=section,
        target=raw.target,
        arguments=raw.arguments or {},
        folder=beside(raw.folder, report),
    )


def beside(written: str | None, report: Report) -> str | None:
    """Return a folder, absolute and without links: the spec's own where none is written."""
    if written is None:
        return None if report.home is None else os.path.realpath(report.home)
    return os.path.realpath((report.home or report.folder) / written)


def resolve_tensor(
    raw: SpecRaw, loss: LossSpec, degrees: Mapping[Axis, int], tree: Tree, report: Report
) -> TensorSpec:
    """Return the section; a function of the user's is given whole logits, unless cut ones are
    asked for, which is a fault."""
    if loss.user_function is None or degrees.get(Axis.TP, 1) == 1 or not raw.tensor.loss_parallel:
        return raw.tensor
    if tree.has("tensor", "loss_parallel"):
        report.add(
            "tensor.loss_parallel",
            f"true: {loss.user_function.target} would receive sharded logits",
            "Remove it, or use `false`.",
        )
    return replace(raw.tensor, loss_parallel=False)


def resolve_batch(raw: BatchRaw, data_degree: int, report: Report) -> Batch | None:
    """global = micro x accumulate x data degree; any one of the first and third may be left out,
    and for a `micro` that is to be chosen there must be a global batch and nothing else."""
    if raw.micro == AUTO:
        return _open(raw, data_degree, report)
    assert isinstance(raw.micro, int), "the other word is auto"
    return _batch(raw, raw.micro, data_degree, report)


def _open(raw: BatchRaw, data_degree: int, report: Report) -> Batch | None:
    """The batch in micro-batches of one sample, which is what a smaller one cannot be."""
    if raw.samples is None:
        report.add(
            "batch.micro",
            "auto needs a global batch as its upper bound",
            "Set `batch.global` too: a number of samples, or `4M tokens`.",
        )
    elif raw.accumulate is not None:
        report.add(
            "batch.micro",
            f"auto determines batch.accumulate, which is set to {raw.accumulate}",
            "Remove `batch.accumulate`, or set `batch.micro` to a number.",
        )
    elif batch := _batch(raw, 1, data_degree, report):
        return replace(batch, micro_is_open=True)
    return None


def _batch(raw: BatchRaw, micro: int, data_degree: int, report: Report) -> Batch | None:
    unit = micro * data_degree
    step = unit * (raw.accumulate or 1)
    written = _written(raw, report)
    samples = _global(raw, written, step, report)
    if samples is None:
        return None
    accumulate = raw.accumulate or max(1, samples // unit)
    if samples == unit * accumulate:
        return Batch(
            global_samples=samples,
            micro=micro,
            sequence=raw.sequence,
            accumulate=accumulate,
            written=written,
            pads=raw.pad,
        )
    below, above = samples // step * step, -(-samples // step) * step
    valid = [step] if raw.accumulate else sorted({max(below, step), above})
    factor = f" x accumulate={raw.accumulate}" if raw.accumulate else ""
    product = f"micro={raw.micro}{factor} x data degree={data_degree}"
    relation = "is not" if raw.accumulate else "is not a multiple of"
    report.add(
        "batch.global",
        f"global={samples} {relation} {product} = {step}",
        f"Use `batch.global={'` or `batch.global='.join(map(str, valid))}`"
        + f"{_other_accumulate(raw, samples, unit)}.",
    )
    return None


def _other_accumulate(raw: BatchRaw, samples: int, unit: int) -> str:
    if raw.accumulate and samples % unit == 0:
        return f", or `batch.accumulate={samples // unit}`"
    return ""


def _written(raw: BatchRaw, report: Report) -> WrittenTokens | None:
    """The tokens that are written; None of samples, which nothing rounds."""
    if isinstance(raw.samples, str):
        rounding = Rounding(raw.rounding or Rounding.POWER_OF_TWO)
        return written_tokens(raw.samples, raw.sequence, rounding)
    if raw.rounding is not None:
        report.add(
            "batch.round",
            f"{raw.rounding} has no effect: batch.global is not given in tokens",
            'Remove it, or use `batch.global="4M tokens"`.',
        )
    return None


def _global(raw: BatchRaw, written: WrittenTokens | None, step: int, report: Report) -> int | None:
    """Samples: as written, or as many as come nearest to the tokens that are written."""
    if written is None:
        return raw.samples if isinstance(raw.samples, int) else step
    samples = rounded_samples(written, step)
    if samples <= MAX_SAMPLES:
        return samples
    report.add(
        "batch.global",
        f"{written.text} are {written.samples} samples; a step needs 1..{MAX_SAMPLES}",
        "Use fewer tokens.",
    )
    return None


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class Findings:
    """Collects faults while sections are resolved. `world_size`: the ranks that were started."""

    tree: Tree
    world_size: int | None
    folder: Path
    faults: dict[Route, Fault]

    @property
    def home(self) -> Path | None:
        """That of the user's own spec file, where links lead to it, as Python has a script's."""
        file = Path(self.tree.source).resolve()
        is_file = bool(self.tree.source) and file.is_file()
        return file.parent if is_file and not file.is_relative_to(root()) else None

    def add(self, place: str, finding: str, remedy: str = "", *, part: str = "") -> None:
        """Add the first fault of a place, or of a part of the value there."""
        route = tuple(place.split("."))
        fault = mark_of(self.tree, route).fault(place, finding, remedy)
        self.faults.setdefault((*route, part) if part else route, fault)


def resolve(raw: SpecRaw, tree: Tree, name: str, world_size: int | None) -> Spec:
    """Raises SpecError with every fault of every section.

    Values that `not_yet` refuses get a stand-in here: the caller holds their faults.
    """
    folder = Path(tree.source).parent if Path(tree.source).suffix else Path()
    findings = Findings(tree=tree, world_size=world_size, folder=folder, faults={})
    order = tree.root.get("mesh") if isinstance(tree.root, dict) else None
    factors = _factors(raw, tuple(order) if isinstance(order, dict) else (), findings)
    batch = None
    if factors is not None:
        data_degree = math.prod(factor.degree for factor in factors if factor.axis in SAMPLE_AXES)
        batch = resolve_batch(raw.batch, data_degree, findings)
        batch = batch and padded(batch, factors, raw.context)
    model = resolve_model(raw.model, resolve_attention(raw.attention), findings)
    activations = resolve_activations(raw, tree, findings)
    degrees = {f.axis: f.degree for f in factors or ()}
    own = resolve_functions(raw, findings)
    loss = own if own.user_function else resolve_loss(raw, degrees, findings)
    tensor = resolve_tensor(raw, loss, degrees, tree, findings)
    cluster = resolve_cluster(raw.cluster, findings)
    _obeys_offload(raw, factors or (), findings)
    _obeys_experts(raw, findings)
    data = resolve_data(raw, tree, findings)
    if findings.faults:
        raise SpecError(*findings.faults.values())
    assert factors is not None and batch and model and data, "no faults: every section is there"
    spec = Spec(
        **{spot.name: getattr(raw, spot.name) for spot in fields(Keys)},
        name=raw.name or name,
        model=model,
        factors=factors,
        trivial_factors=_trivial_factors(raw, factors, findings),
        batch=batch,
        precision=resolve_precision(raw.precision),
        cluster=cluster,
        activations=activations,
        loss=loss,
    )
    spec = replace(
        spec,
        optimizer=resolve_optimizer(raw.optimizer, tree),
        data=data,
        tensor=tensor,
        sync=_sync(raw, factors, tree),
        offload=replace(raw.offload, tier=None),  # every mode has its own by now
        frozen=_frozen(raw, tree),
    )
    resolved = to_mapping(spec, sync_is_written=tree.has("sync", "gradients"))
    return replace(spec, resolved=resolved)


def _frozen(raw: SpecRaw, tree: Tree) -> FrozenSpec:
    """The modes of frozen parameters, each on its tier."""
    modes = {
        axis.value: on_tier(mode, tree.at(("frozen", axis.value)), raw)
        for axis, mode in raw.frozen.written().items()
    }
    return replace(raw.frozen, **modes)


def _sync(raw: SpecRaw, factors: Sequence[Factor], tree: Tree) -> SyncPolicy:
    """Gradients that are R on every data axis are reduced once, after the last micro-batch."""
    whole = all(
        factor.placement[State.GRADIENTS].distribution is Distribution.REPLICATED
        for factor in factors
        if factor.axis in REDUCED_AXES
    )
    reshards = not _keeps_gathered(factors)
    follows: dict[str, Any] = {
        "gradients": GradientSync.LAST if whole else GradientSync.EVERY,
        "reshard_after_forward": reshards,
        "reshard_after_backward": reshards,
    }
    unsaid = {key: value for key, value in follows.items() if not tree.has("sync", key)}
    return replace(raw.sync, **unsaid)


def _keeps_gathered(factors: Sequence[Factor]) -> bool:
    """Whether units that are gathered stay so until the step's last backward if nothing is said: in
    a pipeline, else every micro-batch of a step would gather them twice."""
    is_pipeline = any(factor.axis is Axis.PP for factor in factors)
    return is_pipeline and any(
        factor.axis in REDUCED_AXES and factor.placement.parameters != R for factor in factors
    )


def _factors(raw: SpecRaw, order: tuple[str, ...], findings: Findings) -> tuple[Factor, ...] | None:
    """The axes of degree > 1 in the order of the file, each with its tuple."""
    degrees = _degrees(raw.mesh, order, findings)
    if degrees is None:
        return None
    placement = raw.placement or PlacementRaw()
    factors = []
    for axis, degree in degrees.items():
        tuple_ = getattr(placement, axis.value)
        if degree > 1 and tuple_ is None:
            finding = f"the mesh has {axis}: {degree}, but the placement has no entry for {axis}"
            remedy = f"Add `placement.{axis}={','.join(usual_modes(axis))}`"
            if axis is not Axis.PP:  # stages have one legal placement
                remedy += ", four other modes, or a strategy name"
            remedy += " for all non-expert tensors." if axis in EXPERT_AXES else "."
            findings.add("placement" if raw.placement else "mesh." + axis, finding, remedy)
        elif degree > 1:
            factors.append(_factor(raw, axis, degree, findings))
    for axis in Axis:
        if getattr(placement, axis.value) is not None and axis not in degrees:
            finding = f"the placement has an entry for {axis}, but the mesh has no such axis"
            remedy = f"Add `mesh.{axis}=N` (1 is allowed), or remove the entry."
            findings.add(f"placement.{axis}", finding, remedy)
    sound = not any(route[0] in ("mesh", "placement") for route in findings.faults)
    return tuple(factors) if sound else None


def _trivial_factors(
    raw: SpecRaw, factors: Sequence[Factor], findings: Findings
) -> tuple[Factor, ...]:
    """The axes of degree 1 that have a tuple. Nothing moves on them, and a tuple that no degree
    allows is refused all the same."""
    placement, taken = raw.placement or PlacementRaw(), {factor.axis for factor in factors}
    written = (axis for axis in Axis if getattr(placement, axis.value) is not None)
    return tuple(_factor(raw, axis, 1, findings) for axis in written if axis not in taken)


def _obeys_experts(raw: SpecRaw, findings: Findings) -> None:
    """Of experts there is one tuple, so a spec has no place for another."""
    tuples = raw.placement.ep if raw.placement else None
    if tuples is None:
        return
    modes = {str(state): getattr(tuples.experts, state.value) for state in PLACED}
    wrong = fault_of_experts(Placement(**modes))
    if wrong is not None:
        findings.add("placement.ep.experts", *wrong)


def _factor(raw: SpecRaw, axis: Axis, degree: int, findings: Findings) -> Factor:
    modes = {str(state): _mode(raw, axis, state, findings.tree) for state in PLACED}
    return Factor(axis=axis, degree=degree, placement=Placement(**modes))


def _mode(raw: SpecRaw, axis: Axis, state: State, tree: Tree) -> Mode:
    route = (*route_of(axis), state.value)
    mode: Mode = attrgetter(".".join(route))(raw)
    return on_tier(mode, tree.at(route), raw)


def _obeys_offload(raw: SpecRaw, factors: Sequence[Factor], findings: Findings) -> None:
    if raw.offload.tier is None or not factors:  # one rank may be any mesh
        return
    short = any(
        findings.tree.at((*route_of(f.axis), state.value)) == "O"
        for f in factors
        for state in PLACED
    )
    short |= any(findings.tree.at(("frozen", f.axis.value)) == "O" for f in factors)
    if not short and not says_offloaded(findings.tree):
        findings.add(
            "offload.tier",
            f"tier {raw.offload.tier} has no effect: no state has mode O",
            "Use mode `O` for a state, or remove `offload.tier`.",
        )


def _degrees(mesh: MeshRaw, order: tuple[str, ...], findings: Findings) -> dict[Axis, int] | None:
    """Every axis that the file names, with `auto` solved."""
    written = {Axis(name): getattr(mesh, name) for name in order if name in set(Axis)}
    written = {axis: degree for axis, degree in written.items() if degree is not None}
    unknown = [axis for axis, degree in written.items() if degree == "auto"]
    known = math.prod(degree for degree in written.values() if isinstance(degree, int))
    if len(unknown) > 1:
        findings.add(
            f"mesh.{unknown[1]}",
            f"only one axis size may be auto; got {' and '.join(unknown)}",
            "Set all but one to a number, or let `ptrain select SPEC` find all of them.",
        )
        return None
    if unknown:
        degree = _auto(unknown[0], known, findings)
        if degree is None:
            return None
        written[unknown[0]] = degree
    degrees = {axis: int(degree) for axis, degree in written.items()}
    return degrees if _fits_world(degrees, findings) else None


def _auto(axis: Axis, known: int, findings: Findings) -> int | None:
    if findings.world_size is None:
        remedy = f"Use `mesh.{axis}=N`, start with `torchrun --nproc-per-node N`, or run "
        remedy += "`ptrain select SPEC`."
        findings.add(f"mesh.{axis}", "auto needs the number of ranks, which is unknown", remedy)
    elif findings.world_size % known:
        finding = (
            f"auto: {findings.world_size} ranks are not a multiple of {known}, the "
            "product of the other axes"
        )
        remedy = f"Start a multiple of {known} ranks, or change the other axes."
        findings.add(f"mesh.{axis}", finding, remedy)
    else:
        return findings.world_size // known
    return None


def _fits_world(degrees: dict[Axis, int], findings: Findings) -> bool:
    ranks = math.prod(degrees.values())
    text = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items()) or "of one rank"
    if ranks > MAX_DEGREE:
        findings.add(
            "mesh",
            f"mesh {text} has {ranks} ranks; the limit is {MAX_DEGREE}",
            "Use a smaller mesh.",
        )
        return False
    if findings.world_size not in (None, ranks):
        findings.add(
            "mesh",
            f"mesh {text} needs {ranks} ranks, but {findings.world_size} were started",
            f"Start {ranks} ranks, or {_nearest_mesh(degrees, findings.world_size or 1)}",
        )
        return False
    return True


def _nearest_mesh(degrees: dict[Axis, int], world_size: int) -> str:
    """The mesh with one degree changed that has as many ranks as were started."""
    for axis in reversed(degrees):
        rest = math.prod(degree for other, degree in degrees.items() if other is not axis)
        if world_size % rest == 0:
            return f"use `mesh.{axis}={world_size // rest}`."
    return f"use a mesh with {world_size} ranks."
