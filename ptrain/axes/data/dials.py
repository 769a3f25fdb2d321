"""The options that have an effect with a placement.

An option without effect is rejected, not ignored.

On a single device all options are allowed: it is the degenerate case of every spec, and nothing
moves there. With several ranks but no data axis, the options of data axes have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from ptrain.axes.data.form import (
    comes_by_unit,
    data_factors,
    form_of,
    frozen_factors,
    has_distribution,
    joins_units,
    tier_of,
    whole_axes,
)
from ptrain.axes.rule import SpecRule
from ptrain.cost import PLACED, State
from ptrain.errors import Fault
from ptrain.spec.dials import (
    STOCK_BUCKET_BYTES,
    GatherAfterUpdate,
    Overlap,
    ReduceScatterVia,
    Reshard,
    UnitKind,
    UnitSize,
)
from ptrain.spec.keys import Offload, data_axis_dials
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import CUT, Axis, Distribution, Tier
from ptrain.spec.shorthand import two_ranks
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import BY_TENSOR, REPLICAS, Form

REASON = "every key has an effect"


def _without_data_axis(spec: Spec) -> Iterator[Fault]:
    """Reject options of data axes without a data axis of two or more ranks."""
    if data_factors(spec) or spec.world_size == 1:
        return
    for place, is_written in _options_set(spec):
        if is_written:
            yield Fault(
                place=place,
                finding="has no effect: no data axis has two or more ranks",
                remedy=f"Remove `{place}`, or {two_ranks(Axis.DP_SHARD)}",
            )


def _tuple_place(spec: Spec) -> str:
    """Return the place of the innermost data axis's tuple."""
    return f"placement.{data_factors(spec)[-1].axis}"


def _options_set(spec: Spec) -> Iterator[tuple[str, bool]]:
    """Yield the place of each option of the data axes, and whether it differs from its default.

    `sync.gradients` has no default that a resolved spec shows, so it counts if it was written.
    """
    written = spec.resolved.get("sync")
    yield "sync.gradients", isinstance(written, dict) and "gradients" in written
    for dial in data_axis_dials():
        # `unit=block` and `gather_after_update=blocking` count as defaults: a block is the unit in
        # any case, and resolved specs wrote `blocking` before that option had no default
        said = dial.default, UnitSize(), GatherAfterUpdate.BLOCKING
        yield dial.place, dial.read_value(spec) not in said
    # activations on file belong to a rank, with any axes
    on_file = Tier.FILE in spec.activations.tiers
    yield "offload.path", spec.offload.path is not None and not on_file
    yield "offload.update", spec.offload.update is not Offload().update


def _prefetch_faults(spec: Spec) -> Iterator[Fault]:
    """Reject `prefetch` without all-gathers or without overlap."""
    if not data_factors(spec) or not spec.prefetch:
        return
    if not comes_by_unit(spec):
        yield Fault(
            place="prefetch",
            finding="has no effect: parameters are R on the device and are never all-gathered",
            remedy=f"Remove `prefetch`, or use `{_tuple_place(spec)}.parameters=S*`.",
        )
    elif form_of(spec) in BY_TENSOR and spec.overlap is Overlap.NONE:
        yield Fault(
            place="prefetch",
            finding="prefetch needs overlap, but overlap is none",
            remedy="Remove one of the two.",
        )


def _gather_after_update(spec: Spec) -> Iterator[Fault]:
    """Reject `gather_after_update` if nothing is gathered after the update."""
    factors, when = data_factors(spec), spec.gather_after_update
    if not factors or when in (None, GatherAfterUpdate.BLOCKING):
        return
    if form_of(spec) is Form.SPREAD_UPDATE:
        yield Fault(
            place="gather_after_update",
            finding=(
                f"{when} has no effect: torch's ZeroRedundancyOptimizer broadcasts "
                "updated parameters and waits for them"
            ),
            remedy="Remove `gather_after_update`, or move the placement to dp_shard.",
        )
    elif not _shards_update_of_replicas(spec):
        yield Fault(
            place="gather_after_update",
            finding=(
                f"{when} has no effect: nothing is gathered after the update unless "
                "optimizer is S (or O) and parameters are R on the same axis"
            ),
            remedy="Remove `gather_after_update`.",
        )
    elif (
        when is GatherAfterUpdate.NEXT_FORWARD
        and tier_of(factors, State.PARAMETERS) is not Tier.DEVICE
    ):
        yield Fault(
            place="gather_after_update",
            finding=(
                "next-forward does not support parameters on the "
                f"{tier_of(factors, State.PARAMETERS)}, which are loaded in full"
            ),
            remedy=(
                "Use `gather_after_update=blocking` or "
                "`gather_after_update=during-update`, or place parameters on the device."
            ),
        )


def _shards_update_of_replicas(spec: Spec) -> bool:
    """Return True if some axis shards the update of parameters that it replicates."""
    factors = data_factors(spec)
    return not has_distribution(factors, State.PARAMETERS, Distribution.MATERIALIZED) and any(
        factor.placement.optimizer.distribution is Distribution.SHARDED
        and factor.placement.parameters.distribution is Distribution.REPLICATED
        for factor in factors
    )


def _overlap_faults(spec: Spec) -> Iterator[Fault]:
    """Reject `overlap=backward` if no reduction can run in backward."""
    factors = data_factors(spec)
    if spec.overlap is not Overlap.BACKWARD or not factors:
        return
    if has_distribution(factors, State.GRADIENTS, Distribution.MATERIALIZED):
        yield Fault(
            place="overlap",
            finding=(
                "overlap=backward does not support gradients M: the update of each unit "
                "waits for its reduction within backward"
            ),
            remedy=f"Use `overlap=none`, or `{_tuple_place(spec)}.gradients=S`.",
        )
        return
    tier = tier_of(factors, State.GRADIENTS)
    if tier is not Tier.DEVICE and not has_distribution(factors, State.GRADIENTS, *CUT):
        yield Fault(
            place="overlap",
            finding=(
                "overlap=backward has no effect: full gradients are accumulated on the "
                f"{tier} and reduced at the update"
            ),
            remedy=f"Use `overlap=none`, or `{_tuple_place(spec)}.gradients=O`.",
        )


def _reduce_scatter(spec: Spec) -> Iterator[Fault]:
    """Reject another `reduce_scatter` if nothing is reduce-scattered."""
    factors = data_factors(spec)
    if spec.reduce_scatter is ReduceScatterVia.NATIVE or not factors:
        return
    if has_distribution(factors, State.ACTIVATIONS, Distribution.GATHERED):
        return  # gradients of all-gathered keys and values are reduce-scattered
    is_cut = has_distribution(factors, State.GRADIENTS, *CUT) or (
        has_distribution(factors, State.OPTIMIZER, Distribution.SHARDED)
        and form_of(spec) is not Form.SPREAD_UPDATE
    )
    if not is_cut:
        yield Fault(
            place="reduce_scatter",
            finding=(
                f"{spec.reduce_scatter} has no effect: full gradients are all-reduced, "
                "not reduce-scattered"
            ),
            remedy=f"Remove `reduce_scatter`, or use `{_tuple_place(spec)}.gradients=S`.",
        )


def _bucket_faults(spec: Spec) -> Iterator[Fault]:
    """Reject `bucket` if gradients are reduced by unit."""
    if not data_factors(spec) or spec.bucket_bytes == STOCK_BUCKET_BYTES:
        return
    form = form_of(spec)
    if form not in REPLICAS and not joins_units(spec, form):
        yield Fault(
            place="bucket",
            finding=(
                "has no effect: gradients are reduced by unit. Buckets exist with "
                "DistributedDataParallel, and for built-in models with parameters R and "
                "states R or S on the device, an elementwise optimizer, and no `unit`, "
                "`frozen` or ep"
            ),
            remedy="Remove `bucket`. To change the unit size, set `unit`.",
        )


def _unit_faults(spec: Spec) -> Iterator[Fault]:
    """Reject `unit` if gradients are reduced by bucket, and units larger than the model."""
    if not data_factors(spec) or spec.unit_size == UnitSize():
        return
    if form_of(spec) in REPLICAS:
        yield Fault(
            place="unit",
            finding=f"{spec.unit} has no effect: DistributedDataParallel reduces by bucket",
            remedy="Remove `unit`. To change the size of reductions, set `bucket`.",
        )
    elif not isinstance(spec.model, ModelShape):
        return
    elif spec.unit_size.kind is UnitKind.ENDS and spec.model.tied:
        yield Fault(
            place="unit",
            finding="ends needs separate units of embedding and head, but the model ties them",
            remedy="Use `unit=block` or `model.tied=false`.",
        )
    elif spec.unit_size.count > spec.model.layers:
        layers = spec.model.layers
        fewer = f"at most {layers} blocks" if layers > 1 else "block"
        yield Fault(
            place="unit",
            finding=f"{spec.unit_size}, but the model has only {layers}",
            remedy=f"Use `unit=model`, or {fewer}.",
        )


def _freeing_faults(spec: Spec) -> Iterator[Fault]:
    """Reject options for freeing units that are never all-gathered."""
    if not data_factors(spec) or comes_by_unit(spec):
        return
    kept = {
        "sync.reshard_after_forward": spec.sync.reshard_after_forward,
        "sync.reshard_after_backward": spec.sync.reshard_after_backward,
    }
    for place, value in kept.items():
        if value is not True:
            yield Fault(
                place=place,
                finding=(
                    f"{str(value).lower()} has no effect: parameters are R on the "
                    "device, so no gathered parameters can be freed"
                ),
                remedy=f"Remove it, or use `{_tuple_place(spec)}.parameters=S*`.",
            )


def _reshard_faults(spec: Spec) -> Iterator[Fault]:
    """Reject smaller shards without fully_shard, or of a size that does not divide the ranks."""
    shards, factors = spec.sync.reshard_after_forward, data_factors(spec)
    if isinstance(shards, bool | Reshard) or not factors or not comes_by_unit(spec):
        return
    place = "sync.reshard_after_forward"
    if form_of(spec) not in BY_TENSOR:
        yield Fault(
            place=place,
            finding=(
                f"{shards} shards between forward and backward need fully_shard: "
                "parameters S* (or M, with gradients in the dtype of the master "
                "weights), optimizer S and gradients S"
            ),
            remedy="Use true, false or non-root.",
        )
        return
    whole = whole_axes(factors)
    degree = prod(factor.degree for factor in factors if factor.axis not in whole)
    if shards == 1 or degree % shards:
        divisors = ", ".join(str(n) for n in range(2, degree + 1) if degree % n == 0)
        yield Fault(
            place=place,
            finding=(
                f"{shards} shards between forward and backward do not divide the "
                f"{degree} ranks that shard parameters"
            ),
            remedy=f"Use one of {divisors} ({degree} equals true), or false.",
        )


def _offload_faults(spec: Spec) -> Iterator[Fault]:
    """Reject `offload` if no state is off the device."""
    factors = data_factors(spec)
    if spec.offload == Offload() or not factors:
        return
    tiers = {state: tier_of(factors, state) for state in PLACED}
    used = {*tiers.values(), tier_of(frozen_factors(spec), State.PARAMETERS)}
    used |= spec.activations.tiers
    if used == {Tier.DEVICE}:
        yield Fault(
            place="offload.update" if spec.offload.path is None else "offload.path",
            finding="has no effect: every state is on the device",
            remedy="Remove `offload`, or use mode `O` for a state.",
        )
        return
    if spec.offload.path is not None and Tier.FILE not in used:
        yield Fault(
            place="offload.path",
            finding=f"{spec.offload.path} has no effect: no state is in files",
            remedy="Remove `offload.path`, or use `offload.tier=file`.",
        )
    if spec.offload.update is Tier.DEVICE and tiers[State.OPTIMIZER] is Tier.DEVICE:
        yield Fault(
            place="offload.update",
            finding="device has no effect: optimizer state is on the device",
            remedy=f"Remove `offload.update`, or use `{_tuple_place(spec)}.optimizer=O`.",
        )


def _option_rule(name: str, faults: Callable[[Spec], Iterator[Fault]]) -> SpecRule:
    """Return a rule about an option."""
    return SpecRule(name=name, theorem=REASON, faults=faults)


DIALS = (
    _option_rule("options of data axes need a data axis", _without_data_axis),
    _option_rule("prefetched units are gathered", _prefetch_faults),
    _option_rule(
        "parameters gathered after the update were updated in shards", _gather_after_update
    ),
    _option_rule("overlapped reductions run in backward", _overlap_faults),
    _option_rule("reduce-scattered gradients are sharded", _reduce_scatter),
    _option_rule("buckets need a wrapper that reduces by bucket", _bucket_faults),
    _option_rule("units need gathers or reductions", _unit_faults),
    _option_rule("freed units were gathered", _freeing_faults),
    _option_rule("smaller shards divide the group", _reshard_faults),
    _option_rule("a state is offloaded", _offload_faults),
)
