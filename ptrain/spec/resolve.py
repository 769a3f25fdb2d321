"""Raw grammar -> the resolved `Spec`: presets filled in, degrees and batch solved.

What is checked here is what a single section (or the batch with the mesh) must satisfy to have a
value at all; whether the product is legal is the algebra's question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from ptrain.costs import PLACED, State
from ptrain.errors import Fault, SpecError
from ptrain.spec.axis import EXPERT_AXES, REDUCED_AXES, SAMPLE_AXES, Axis, Factor
from ptrain.spec.batch import padded
from ptrain.spec.dials import (
    GradientSync,
    SyncPolicy,
)
from ptrain.spec.frozen import FrozenSpec
from ptrain.spec.grammar import MAX_DEGREE, MeshRaw, PlacementRaw, SpecRaw
from ptrain.spec.keys import Keys
from ptrain.spec.names import root
from ptrain.spec.placement import Distribution, Mode, Placement, R
from ptrain.spec.resolve_activations import (
    on_tier,
    resolve_activations,
    resolve_attention,
    resolve_loss,
    says_offloaded,
)
from ptrain.spec.resolve_batch import resolve_batch
from ptrain.spec.resolve_functions import resolve_data, resolve_functions, resolve_tensor
from ptrain.spec.resolve_sections import (
    resolve_cluster,
    resolve_model,
    resolve_optimizer,
    resolve_precision,
)
from ptrain.spec.shorthand import mark_of
from ptrain.spec.spec import Spec
from ptrain.spec.text import Route, Tree
from ptrain.spec.tuples import fault_of_experts, route_of, usual_modes
from ptrain.spec.write import to_mapping


@dataclass(slots=True, kw_only=True)
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
            finding = f"the mesh has {axis}: {degree}, and the placement has no tuple for it"
            remedy = f"write placement.{axis}={','.join(usual_modes(axis))}"
            if axis is not Axis.PP:  # stages can be placed in one way only
                remedy += ", four other modes, or a strategy's name"
            if axis in EXPERT_AXES:
                remedy += ": those of all tensors but the experts"
            findings.add("placement" if raw.placement else "mesh." + axis, finding, remedy)
        elif degree > 1:
            factors.append(_factor(raw, axis, degree, findings))
    for axis in Axis:
        if getattr(placement, axis.value) is not None and axis not in degrees:
            finding = f"the placement has a tuple for {axis}, and the mesh has no such axis"
            remedy = f"write mesh: {{{axis}: N}} (1 is a degree too), or remove the tuple"
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


def _is_short(tree: Tree, axis: Axis, state: State) -> bool:
    return tree.at((*route_of(axis), state.value)) == "O"


def _obeys_offload(raw: SpecRaw, factors: Sequence[Factor], findings: Findings) -> None:
    if raw.offload.tier is None or not factors:  # one rank may be any mesh
        return
    short = any(_is_short(findings.tree, f.axis, state) for f in factors for state in PLACED)
    short |= any(findings.tree.at(("frozen", f.axis.value)) == "O" for f in factors)
    if not short and not says_offloaded(findings.tree):
        finding = f"tier {raw.offload.tier} says where O is, and no state is O"
        findings.add("offload.tier", finding, "write O for a state, or remove tier")


def _degrees(mesh: MeshRaw, order: tuple[str, ...], findings: Findings) -> dict[Axis, int] | None:
    """Every axis that the file names, with `auto` solved."""
    written = {Axis(name): getattr(mesh, name) for name in order if name in set(Axis)}
    written = {axis: degree for axis, degree in written.items() if degree is not None}
    unknown = [axis for axis, degree in written.items() if degree == "auto"]
    known = math.prod(degree for degree in written.values() if isinstance(degree, int))
    if len(unknown) > 1:
        finding = f"one degree may be auto; got {' and '.join(unknown)}"
        remedy = "write one of them as a number, or have all of them chosen: ptrain select SPEC"
        findings.add(f"mesh.{unknown[1]}", finding, remedy)
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
        remedy = f"write mesh.{axis}=N, start with torchrun --nproc-per-node N, or have it chosen: "
        remedy += "ptrain select SPEC"
        findings.add(f"mesh.{axis}", "auto needs the number of ranks, and nothing gives it", remedy)
    elif findings.world_size % known:
        finding = f"auto: {findings.world_size} ranks do not divide by the other axes' {known}"
        remedy = f"start a multiple of {known} ranks, or change the other degrees"
        findings.add(f"mesh.{axis}", finding, remedy)
    else:
        return findings.world_size // known
    return None


def _fits_world(degrees: dict[Axis, int], findings: Findings) -> bool:
    ranks = math.prod(degrees.values())
    text = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items()) or "of one rank"
    if ranks > MAX_DEGREE:
        finding = f"mesh {text} has {ranks} ranks; a mesh has 1..{MAX_DEGREE}"
        findings.add("mesh", finding, "lower a degree")
        return False
    if findings.world_size not in (None, ranks):
        finding = f"mesh {text} needs {ranks} ranks; {findings.world_size} were started"
        remedy = f"start {ranks} ranks, or {_nearest_mesh(degrees, findings.world_size or 1)}"
        findings.add("mesh", finding, remedy)
        return False
    return True


def _nearest_mesh(degrees: dict[Axis, int], world_size: int) -> str:
    """The mesh with one degree changed that has as many ranks as were started."""
    for axis in reversed(degrees):
        rest = math.prod(degree for other, degree in degrees.items() if other is not axis)
        if world_size % rest == 0:
            return f"set mesh.{axis}={world_size // rest}"
    return f"give a mesh of {world_size} ranks"
