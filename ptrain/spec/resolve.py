"""Resolution of a checked tree into a `Spec`: axis degrees, a placement tuple per axis, the batch
(global, micro and accumulate), activations per block, and all other sections.

Checks here only what a section, or the batch with the mesh, needs in order to have a value; the
algebra decides whether the combination is legal. Activations belong to the rank: M and O of a data
axis's tuple are equivalent to a top-level `activations`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter, itemgetter
from typing import Any

from ptrain.cost import PLACED, State
from ptrain.errors import SpecError
from ptrain.spec.activations import (
    FULL,
    NAMED_POLICIES,
    ActivationMode,
    Operators,
    Policy,
    RecomputeRaw,
    belongs_to_rank,
    blocks_of,
)
from ptrain.spec.batch import (
    AUTO,
    MAX_SAMPLES,
    Batch,
    BatchRaw,
    Rounding,
    WrittenTokens,
    pad_samples,
    rounded_samples,
    written_tokens,
)
from ptrain.spec.dials import GradientSync, SyncPolicy
from ptrain.spec.grammar import MAX_DEGREE, MeshRaw, PlacementRaw, SpecRaw
from ptrain.spec.job import OPTIMIZERS, OptimizerSpec
from ptrain.spec.keys import FrozenSpec, Keys, TensorSpec
from ptrain.spec.placement import (
    DATA_AXES,
    EXPERT_AXES,
    REDUCED_AXES,
    SAMPLE_AXES,
    Axis,
    Distribution,
    Factor,
    Mode,
    Placement,
    R,
    Tier,
)
from ptrain.spec.resolve_sections import (
    resolve_attention,
    resolve_cluster,
    resolve_data,
    resolve_functions,
    resolve_loss,
    resolve_model,
    resolve_optimizer,
    resolve_precision,
)
from ptrain.spec.shorthand import fault_of_experts, route_of, usual_modes
from ptrain.spec.spec import ActivationSpec, LossSpec, Spec
from ptrain.spec.text import Findings, Tree
from ptrain.spec.write import to_mapping

_POLICIES = {"none": None, **NAMED_POLICIES}
_ALL = (0, None)
_Ranges = dict[tuple[int, int | None], Mode]


def resolve(raw: SpecRaw, tree: Tree, name: str, world_size: int | None) -> Spec:
    """Resolve the raw sections into a `Spec`.

    Values that `load.find_unsupported` rejects get a stand-in here; the caller reports their
    faults.

    Args:
        raw: The checked sections.
        tree: The tree that they came from, for positions and for the keys that are written.
        name: The name of a spec that has no key `name`.
        world_size: The number of ranks that were started; None if unknown.

    Raises:
        SpecError: Every fault of every section.
    """
    findings = Findings(tree=tree)
    factors = _resolve_factors(raw, world_size, findings)
    degrees = {factor.axis: factor.degree for factor in factors or ()}
    batch = None
    if factors is not None:
        data_degree = math.prod(degrees.get(axis, 1) for axis in SAMPLE_AXES)
        batch = _resolve_batch(raw.batch, data_degree, findings)
        batch = batch and pad_samples(batch, factors, raw.context)
    model = resolve_model(raw.model, resolve_attention(raw.attention), findings)
    activations = _activation_spec(raw, findings)
    own = resolve_functions(raw, findings)
    loss = own if own.user_function else resolve_loss(raw, degrees, findings)
    tensor = _resolve_tensor(raw, loss, degrees, findings)
    cluster = resolve_cluster(raw.cluster, findings)
    _check_optimizer(raw.optimizer, findings)
    _check_offload(raw, degrees, findings)
    _check_experts(raw, findings)
    data = resolve_data(raw, findings)
    if findings.faults:
        raise SpecError(*findings.faults.values())
    assert factors is not None and batch and model, "no faults: every section is there"
    resolved: dict[str, Any] = {
        **{spot.name: getattr(raw, spot.name) for spot in fields(Keys)},
        "optimizer": resolve_optimizer(raw.optimizer, tree),
        "data": data,
        "tensor": tensor,
        "sync": _resolve_sync(raw, factors, tree),
        "offload": replace(raw.offload, tier=None),  # already part of each mode
        "frozen": _resolve_frozen(raw, tree),
    }
    spec = Spec(
        **resolved,
        name=raw.name or name,
        model=model,
        factors=factors,
        trivial_factors=_trivial_factors(raw, degrees, tree),
        batch=batch,
        precision=resolve_precision(raw.precision),
        cluster=cluster,
        activations=activations,
        loss=loss,
    )
    is_written = tree.has_key("sync", "gradients")
    return replace(spec, resolved=to_mapping(spec, sync_is_written=is_written))


def _resolve_factors(
    raw: SpecRaw, world_size: int | None, findings: Findings
) -> tuple[Factor, ...] | None:
    """Return the axes of degree > 1 in the order of the file, each with its tuple; None on
    faults."""
    if (degrees := _resolve_degrees(raw.mesh, world_size, findings)) is None:
        return None
    placement = raw.placement or PlacementRaw()
    # The order of the file is the order of the mesh: Theorems 6.1 and 7.1 depend on it.
    without = [axis for axis in Axis if getattr(placement, axis.value) is None]
    for axis, degree in degrees.items():
        if degree > 1 and axis in without:
            finding = f"the mesh has {axis}: {degree}, but the placement has no entry for {axis}"
            remedy = f"Add `placement.{axis}={','.join(usual_modes(axis))}`"
            if axis is not Axis.PP:  # stages have one legal placement
                remedy += ", four other modes, or a strategy name"
            remedy += " for all non-expert tensors." if axis in EXPERT_AXES else "."
            findings.add("placement" if raw.placement else "mesh." + axis, finding, remedy)
    for axis in Axis:
        if axis not in without and axis not in degrees:
            findings.add(
                f"placement.{axis}",
                f"the placement has an entry for {axis}, but the mesh has no such axis",
                f"Add `mesh.{axis}=N` (1 is allowed), or remove the entry.",
            )
    if any(route[0] in ("mesh", "placement") for route in findings.faults):
        return None
    large = ((axis, degree) for axis, degree in degrees.items() if degree > 1)
    return tuple(_resolve_factor(raw, axis, degree, findings.tree) for axis, degree in large)


def _trivial_factors(raw: SpecRaw, degrees: Mapping[Axis, int], tree: Tree) -> tuple[Factor, ...]:
    """Return the axes of degree 1 that have a tuple.

    Such axes communicate nothing, but a tuple that is illegal at any degree is still rejected.
    """
    placement = raw.placement or PlacementRaw()
    written = (axis for axis in Axis if getattr(placement, axis.value) is not None)
    return tuple(_resolve_factor(raw, axis, 1, tree) for axis in written if axis not in degrees)


def _resolve_factor(raw: SpecRaw, axis: Axis, degree: int, tree: Tree) -> Factor:
    modes = {}
    for state in PLACED:
        route = (*route_of(axis), state.value)
        modes[str(state)] = on_tier(attrgetter(".".join(route))(raw), tree.value_at(route), raw)
    return Factor(axis=axis, degree=degree, placement=Placement(**modes))


def _check_experts(raw: SpecRaw, findings: Findings) -> None:
    """Report an `ep.experts` tuple other than S,S,S,S, the only one that is legal for experts."""
    if raw.placement and raw.placement.ep:
        experts = raw.placement.ep.experts
        modes = {str(state): getattr(experts, state.value) for state in PLACED}
        if wrong := fault_of_experts(Placement(**modes)):
            findings.add("placement.ep.experts", *wrong)


def _check_optimizer(optimizer: OptimizerSpec, report: Findings) -> None:
    """Report keys that the optimizer does not read, if it or their only reader is Adafactor."""
    keys, unwritten = optimizer.properties.keys, OptimizerSpec()
    for key in sorted({key for row in OPTIMIZERS.values() for key in row.keys} - {*keys}):
        readers = [name for name, row in OPTIMIZERS.items() if key in row.keys]
        is_strict = any(OPTIMIZERS[name].factors for name in (optimizer.name, *readers))
        # a resolved spec is written with the defaults of all keys
        if is_strict and getattr(optimizer, key) != getattr(unwritten, key):
            finding = f"{optimizer.name} does not read {key}, a key of {' and '.join(readers)}"
            remedy = (
                f"Remove it. Keys of {optimizer.name}: {', '.join(('lr', 'weight_decay', *keys))}."
            )
            report.add(f"optimizer.{key}", finding, remedy)
    for number, group in enumerate(optimizer.groups, 1):
        name = group.name or optimizer.name
        wrong = [key for key in ("betas", "eps", "momentum") if getattr(group, key) is not None]
        if OPTIMIZERS[name].factors and wrong:
            finding = f"group {number}: {name} does not read {' and '.join(wrong)}"
            report.add("optimizer.groups", finding, "Use lr, lr_factor and weight_decay.")


def _check_offload(raw: SpecRaw, degrees: Mapping[Axis, int], findings: Findings) -> None:
    """Report an `offload.tier` without effect because no state has mode O.

    A spec without mesh axes is exempt: its tier may be meant for any mesh that is set later.
    """
    if raw.offload.tier is None:
        return
    top = findings.tree.value_at(("activations",))
    texts = [*top.values()] if isinstance(top, dict) else [top]
    for axis in degrees:
        texts += [findings.tree.value_at((*route_of(axis), state.value)) for state in PLACED]
        texts.append(findings.tree.value_at(("frozen", axis.value)))
    if degrees and "O" not in texts:
        findings.add(
            "offload.tier",
            f"tier {raw.offload.tier} has no effect: no state has mode O",
            "Use mode `O` for a state, or remove `offload.tier`.",
        )


def _resolve_degrees(
    mesh: MeshRaw, world_size: int | None, findings: Findings
) -> dict[Axis, int] | None:
    """Return the degree of each axis in the mesh, with `auto` resolved; None on faults."""
    order = findings.tree.value_at(("mesh",))
    names = order if isinstance(order, dict) else ()
    written = {Axis(name): getattr(mesh, name) for name in names if name in set(Axis)}
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
        if (degree := _resolve_auto(unknown[0], known, world_size, findings)) is None:
            return None
        written[unknown[0]] = degree
    degrees = {axis: int(degree) for axis, degree in written.items()}
    return degrees if _fits_world(degrees, world_size, findings) else None


def _resolve_auto(axis: Axis, known: int, world_size: int | None, findings: Findings) -> int | None:
    """Return the degree of an `auto` axis: the number of ranks over the product of the other
    degrees.

    Returns None, with a fault, if the number of ranks is unknown or not divisible.
    """
    if world_size is None:
        remedy = f"Use `mesh.{axis}=N`, start with `torchrun --nproc-per-node N`, or run "
        remedy += "`ptrain select SPEC`."
        findings.add(f"mesh.{axis}", "auto needs the number of ranks, which is unknown", remedy)
    elif world_size % known:
        findings.add(
            f"mesh.{axis}",
            f"auto: {world_size} ranks are not a multiple of {known}, the product of the other "
            "axes",
            f"Start a multiple of {known} ranks, or change the other axes.",
        )
    else:
        return world_size // known
    return None


def _fits_world(degrees: dict[Axis, int], world_size: int | None, findings: Findings) -> bool:
    """Report a mesh with too many ranks, or with another number than was started; return True if
    neither."""
    ranks = math.prod(degrees.values())
    text = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items()) or "of one rank"
    if ranks > MAX_DEGREE:
        findings.add(
            "mesh",
            f"mesh {text} has {ranks} ranks; the limit is {MAX_DEGREE}",
            "Use a smaller mesh.",
        )
        return False
    if world_size not in (None, ranks):
        findings.add(
            "mesh",
            f"mesh {text} needs {ranks} ranks, but {world_size} were started",
            f"Start {ranks} ranks, or {_nearest_mesh(degrees, world_size or 1)}",
        )
        return False
    return True


def _nearest_mesh(degrees: dict[Axis, int], world_size: int) -> str:
    """Return a remedy: the mesh with one degree changed to match the number of started ranks."""
    for axis in reversed(degrees):
        rest = math.prod(degree for other, degree in degrees.items() if other is not axis)
        if world_size % rest == 0:
            return f"use `mesh.{axis}={world_size // rest}`."
    return f"use a mesh with {world_size} ranks."


def _resolve_frozen(raw: SpecRaw, tree: Tree) -> FrozenSpec:
    """Return the frozen section, with each mode O on the tier that `offload.tier` selects."""
    modes: dict[str, Any] = {
        axis.value: on_tier(mode, tree.value_at(("frozen", axis.value)), raw)
        for axis, mode in raw.frozen.modes_by_axis().items()
    }
    return replace(raw.frozen, **modes)


def _resolve_sync(raw: SpecRaw, factors: Sequence[Factor], tree: Tree) -> SyncPolicy:
    """Return the sync policy with defaults filled in from the placement.

    Gradients that are R on every reduced axis are reduced once, after the last micro-batch.
    """
    # A sum that already contains a reduced part would count it once per rank (`dials.SyncPolicy`).
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
    unsaid = {key: value for key, value in follows.items() if not tree.has_key("sync", key)}
    return replace(raw.sync, **unsaid)


def _keeps_gathered(factors: Sequence[Factor]) -> bool:
    """Return True if units stay gathered until the last backward pass of the step by default.

    This is the default for sharded parameters in a pipeline, where resharding would all-gather each
    unit twice per micro-batch.
    """
    is_pipeline = any(factor.axis is Axis.PP for factor in factors)
    return is_pipeline and any(
        factor.axis in REDUCED_AXES and factor.placement.parameters != R for factor in factors
    )


def _resolve_batch(raw: BatchRaw, data_degree: int, findings: Findings) -> Batch | None:
    """Solve global = micro x accumulate x data degree for the keys that are not set.

    An open `micro: auto` counts as 1; it needs a global batch and excludes `accumulate`. Returns
    None on faults.
    """
    micro = raw.micro if isinstance(raw.micro, int) else 1
    if raw.micro == AUTO and raw.samples is None:
        findings.add(
            "batch.micro",
            "auto needs a global batch as its upper bound",
            "Set `batch.global` too: a number of samples, or `4M tokens`.",
        )
        return None
    if raw.micro == AUTO and raw.accumulate is not None:
        findings.add(
            "batch.micro",
            f"auto determines batch.accumulate, which is set to {raw.accumulate}",
            "Remove `batch.accumulate`, or set `batch.micro` to a number.",
        )
        return None
    unit = micro * data_degree
    step = unit * (raw.accumulate or 1)
    written = _written_tokens(raw, findings)
    samples = raw.samples if isinstance(raw.samples, int) else step
    samples = rounded_samples(written, step) if written else samples
    if written and samples > MAX_SAMPLES:
        findings.add(
            "batch.global",
            f"{written.text} are {written.samples} samples; a step needs 1..{MAX_SAMPLES}",
            "Use fewer tokens.",
        )
        return None
    accumulate = raw.accumulate or max(1, samples // unit)
    if samples != unit * accumulate:
        findings.add("batch.global", *_describe_uneven(raw, samples, data_degree, unit, step))
        return None
    return Batch(
        global_samples=samples,
        micro=micro,
        sequence=raw.sequence,
        accumulate=accumulate,
        written=written,
        allows_padding=raw.pad,
        micro_is_open=raw.micro == AUTO,
    )


def _describe_uneven(
    raw: BatchRaw, samples: int, data_degree: int, unit: int, step: int
) -> tuple[str, str]:
    """Return the finding and the remedy for a global batch that is not a multiple of
    micro-batches."""
    below, above = samples // step * step, -(-samples // step) * step
    valid = [step] if raw.accumulate else sorted({max(below, step), above})
    remedy = f"Use `batch.global={'` or `batch.global='.join(map(str, valid))}`"
    if raw.accumulate and samples % unit == 0:
        remedy += f", or `batch.accumulate={samples // unit}`"
    factor = f" x accumulate={raw.accumulate}" if raw.accumulate else ""
    product = f"micro={raw.micro}{factor} x data degree={data_degree}"
    relation = "is not" if raw.accumulate else "is not a multiple of"
    return f"global={samples} {relation} {product} = {step}", f"{remedy}."


def _written_tokens(raw: BatchRaw, findings: Findings) -> WrittenTokens | None:
    """Return the batch size in tokens, or None if it is given in samples, which are never
    rounded."""
    if isinstance(raw.samples, str):
        rounding = Rounding(raw.rounding or Rounding.POWER_OF_TWO)
        return written_tokens(raw.samples, raw.sequence, rounding)
    if raw.rounding is not None:
        findings.add(
            "batch.round",
            f"{raw.rounding} has no effect: batch.global is not given in tokens",
            'Remove it, or use `batch.global="4M tokens"`.',
        )
    return None


def on_tier(mode: Mode, text: object, raw: SpecRaw) -> Mode:
    """Return the mode with a bare `O` moved to `offload.tier`; a mode with a written tier is
    unchanged."""
    if text == "O" and raw.offload.tier:
        return replace(mode, tier=raw.offload.tier)
    return mode


def _activation_spec(raw: SpecRaw, findings: Findings) -> ActivationSpec:
    """Return the activation mode and policy of each block.

    Contradictions between the tuples, `activations` and `recompute` are reported as faults.
    """
    modes = _activation_modes(raw, findings)
    recompute = raw.recompute or RecomputeRaw()
    policy = _resolve_policy(recompute, findings)
    is_open = recompute.budget is not None and recompute.policy is None and recompute.keep is None
    # A budget alone requests recomputation, so blocks have M until the policy is selected.
    if modes is None and is_open:
        modes = {_ALL: Mode(Distribution.MATERIALIZED)}
    ranges: _Ranges = {_ALL: R} if modes is None else modes
    recomputes = any(mode.distribution is Distribution.MATERIALIZED for mode in ranges.values())
    if policy is None and recomputes:
        place = next((place for place, _ in _tuple_modes(raw, findings.tree)), "activations")
        findings.add(
            "recompute",
            "policy none contradicts activations M: activations would be neither saved nor "
            "recomputed",
            f"Use `recompute=full`, `recompute=selective` or `{place}=R`.",
        )
    elif policy is not None and raw.recompute is not None and not recomputes:
        findings.add(
            "recompute",
            f"recompute has no effect: no block has activations M, but {_modes_text(ranges)}",
            'Use `activations=M`, or `activations={"0-1": M}` for some blocks. Or remove '
            "`recompute`.",
        )
    kept = tuple((first, last, _make_kept(mode, policy)) for (first, last), mode in ranges.items())
    is_one = list(ranges) == [_ALL]
    return ActivationSpec(
        default=kept[0][2] if is_one else ActivationMode(),
        by_block=() if is_one else tuple(sorted(kept, key=itemgetter(0))),
        every=recompute.every if recomputes else 1,
        budget=recompute.budget,
        is_open=is_open and recomputes,
    )


def _make_kept(mode: Mode, policy: Policy | None) -> ActivationMode:
    if mode.distribution is Distribution.MATERIALIZED:
        return ActivationMode(policy=policy or FULL, tier=mode.tier)
    return ActivationMode(tier=mode.tier)


def _activation_modes(raw: SpecRaw, findings: Findings) -> _Ranges | None:
    """Return the modes by block range, from top-level `activations` or from a tuple; None if
    neither is set."""
    said = _top_level_modes(raw, findings)
    for place, mode in _tuple_modes(raw, findings.tree):
        if said is not None and said != {_ALL: mode}:
            findings.add(
                "activations",
                f"{_modes_text(said)}, but {place} is {mode}",
                f"Remove `activations`, or use `{place}=R`.",
            )
        return {_ALL: mode}  # the algebra checks that several tuples agree
    return said


def _top_level_modes(raw: SpecRaw, findings: Findings) -> _Ranges | None:
    """Return the modes by block range of top-level `activations`; None if it is not set."""
    if raw.activations is None:
        return None
    text = findings.tree.value_at(("activations",))
    written = raw.activations if isinstance(raw.activations, Mapping) else {"0-": raw.activations}
    ranges: _Ranges = {}
    for blocks, mode in written.items():
        if mode != R and not belongs_to_rank(mode):
            where = f" of blocks {blocks}" if isinstance(text, dict) else ""
            findings.add(
                "activations",
                f"{mode}{where}: activations can only be sharded on a named axis, because "
                "its ranks must hold the same tokens",
                "Use `R`, `M` or `O`"
                + f", or `placement.tp=S,S,S,{mode.distribution}`"
                * bool(findings.tree.value_at(("mesh", "tp")))
                + ".",
            )
            continue
        word = text.get(blocks) if isinstance(text, dict) else text
        ranges[blocks_of(blocks)] = on_tier(_normalize_mode(mode), word, raw)
    return ranges or {_ALL: R}


def _tuple_modes(raw: SpecRaw, tree: Tree) -> list[tuple[str, Mode]]:
    """Return (place, mode) for each data axis whose tuple sets how the rank keeps activations.

    An axis of degree 1 is not part of the resolved mesh, but its activation mode still counts.
    """
    modes = []
    for axis in DATA_AXES:
        given = getattr(raw.placement, axis.value, None)
        mode = getattr(given, State.ACTIVATIONS.value, R)
        if mode != R and belongs_to_rank(mode):
            route = ("placement", axis.value, State.ACTIVATIONS.value)
            modes.append(
                (".".join(route), on_tier(_normalize_mode(mode), tree.value_at(route), raw))
            )
    return modes


def _normalize_mode(mode: Mode) -> Mode:
    """Return O for R off the device: each rank has different activations, so R@host equals
    S@host."""
    is_whole = mode.distribution is Distribution.REPLICATED and mode.tier is not Tier.DEVICE
    return replace(mode, distribution=Distribution.SHARDED) if is_whole else mode


def _modes_text(ranges: _Ranges) -> str:
    if list(ranges) == [_ALL]:
        return str(ranges[_ALL])
    return " and ".join(dict.fromkeys(str(mode) for mode in ranges.values()))


def _resolve_policy(raw: RecomputeRaw, findings: Findings) -> Policy | None:
    """Return the recompute policy; full recomputation if none is set."""
    if raw.keep is None:
        return _POLICIES[raw.policy or "full"]
    if raw.policy is not None:
        findings.add(
            "recompute.keep",
            f"`keep` and policy {raw.policy} both select what is saved",
            "Remove one of the two.",
        )
    return Policy(keep=tuple(operators for operators in Operators if operators in raw.keep))


def _resolve_tensor(
    raw: SpecRaw, loss: LossSpec, degrees: Mapping[Axis, int], findings: Findings
) -> TensorSpec:
    """Return the tensor section, with `loss_parallel` off for a user-defined loss, which needs full
    logits. An explicit `loss_parallel: true` is reported as a fault."""
    if loss.user_function is None or degrees.get(Axis.TP, 1) == 1 or not raw.tensor.loss_parallel:
        return raw.tensor
    if findings.tree.has_key("tensor", "loss_parallel"):
        findings.add(
            "tensor.loss_parallel",
            f"true: {loss.user_function.target} would receive sharded logits",
            "Remove it, or use `false`.",
        )
    return replace(raw.tensor, loss_parallel=False)
