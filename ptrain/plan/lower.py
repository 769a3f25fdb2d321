"""Lowering: from a product of placements to the steps that execute it.

The wrapper follows from the modes of the states, the layout and the optimizer alone. Some forms
have a torch part of their own (one device; everything replicated; Theta gathered with Omega and G
on the same shards, replicas outside them; Omega's tensors spread over replicas); every other legal
tuple runs as flat units with one handler per state.
"""

from __future__ import annotations

from ptrain.costs import State
from ptrain.plan.step import (
    Accumulate,
    Clip,
    CreateMesh,
    FlatUnits,
    FullyShard,
    LocalGradients,
    Plan,
    Replicate,
    Units,
    Update,
    Wrap,
)
from ptrain.spec.axis import DATA_AXES, Axis, Factor
from ptrain.spec.batch import Overlap
from ptrain.spec.placement import S_STAR, TIER_DISTANCE, Distribution, M, Mode, R, S, Tier
from ptrain.spec.spec import Spec

MODEL_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
_WHOLE = (R, R, R)
_FULLY_SHARDED = (S_STAR, S, S)
_MATERIALIZED = (M, S, S)
_SPREAD_UPDATE = (R, S, R)
_ELEMENTWISE = ("adamw", "sgd")  # an update of any slice is the slice of the update


def lower(spec: Spec, units: Units) -> Plan:
    """The plan of a legal spec; `units` are the modules that are wrapped together."""
    factors = tuple(factor for factor in spec.factors if factor.degree > 1)
    wrap = _wrap(spec, tuple(factor for factor in factors if factor.axis in DATA_AXES))
    layout = spec.precision.effective
    return Plan(
        name=spec.name,
        mesh=CreateMesh(
            axes=tuple(factor.axis for factor in factors),
            degrees=tuple(factor.degree for factor in factors),
        ),
        wrap=wrap,
        accumulate=Accumulate(micro_batches=spec.batch.accumulate),
        clip=_clip(spec, wrap),
        update=Update(
            optimizer=spec.optimizer.name,
            layout=layout,
            scale_axes=reduced_axes(wrap) if layout.scales_loss else (),
        ),
        units=units,
    )


def modes(factor: Factor) -> tuple[Mode, Mode, Mode]:
    """(Theta, Omega, G) of one factor."""
    placement = factor.placement
    return (placement.parameters, placement.optimizer, placement.gradients)


def reduced_axes(wrap: Wrap) -> tuple[Axis, ...]:
    """The axes along which the reduced gradients are shards when they are clipped and checked."""
    match wrap:
        case LocalGradients() | Replicate():
            return ()
        case FullyShard():
            return wrap.shard_axes
        case FlatUnits():
            return tuple(a for a in wrap.axes if a in (*wrap.updated, *wrap.gathered_gradients))


def _wrap(spec: Spec, data: tuple[Factor, ...]) -> Wrap:
    layout = spec.precision.layout
    axes = tuple(factor.axis for factor in data)
    if layout.is_plain:
        if not data:
            return LocalGradients()
        if all(modes(factor) == _WHOLE for factor in data):
            return _replicate(spec, axes)
        if _has_torch_s_spread_update(spec, data):
            return _replicate(spec, axes, zero_redundancy=True)
    for sharded_modes, fits in (
        (_FULLY_SHARDED, layout.is_plain),
        (_MATERIALIZED, layout.gradients is layout.master and not layout.keeps_both),
    ):
        whole = tuple(factor.axis for factor in data if modes(factor) == _WHOLE)
        sharded = tuple(factor.axis for factor in data if modes(factor) == sharded_modes)
        if fits and sharded and whole + sharded == axes:
            return FullyShard(
                shard_axes=sharded,
                replicate_axes=whole,
                sync=spec.sync,
                reduce_scatter=spec.reduce_scatter,
                materialized=sharded_modes == _MATERIALIZED,
                prefetch=spec.prefetch,
                overlaps=spec.overlap is not Overlap.NONE,
            )
    return _flat(spec, data)


def _replicate(spec: Spec, axes: tuple[Axis, ...], *, zero_redundancy: bool = False) -> Replicate:
    return Replicate(
        axes=axes,
        bucket_bytes=spec.bucket_bytes,
        overlaps=spec.overlap is not Overlap.NONE,
        zero_redundancy=zero_redundancy,
    )


def _has_torch_s_spread_update(spec: Spec, data: tuple[Factor, ...]) -> bool:
    """ZeroRedundancyOptimizer spreads over replicas, and updates the parameters themselves."""
    return (
        [factor.axis for factor in data] == [Axis.DP_REPLICATE]
        and modes(data[0]) == _SPREAD_UPDATE
        and spec.precision.layout.master is None
        and spec.precision.layout.moments is spec.precision.layout.parameters
        and spec.optimizer.name in _ELEMENTWISE
    )


def _flat(spec: Spec, data: tuple[Factor, ...]) -> FlatUnits:
    def cut(state: State, *distributions: Distribution) -> tuple[Axis, ...]:
        return tuple(
            factor.axis for factor in data if factor.placement[state].distribution in distributions
        )

    both = (Distribution.SHARDED, Distribution.GATHERED)
    stored, updated = cut(State.OPTIMIZER, *both), cut(State.OPTIMIZER, Distribution.SHARDED)
    gathered = cut(State.GRADIENTS, Distribution.GATHERED)
    materialized = bool(cut(State.PARAMETERS, Distribution.MATERIALIZED))
    optimizer_tier = _tier(data, State.OPTIMIZER)
    on_host = optimizer_tier is not Tier.DEVICE and spec.offload.update is Tier.HOST
    return FlatUnits(
        axes=tuple(factor.axis for factor in data),
        parameters=stored if materialized else cut(State.PARAMETERS, *both),
        optimizer=stored,
        gradients=cut(State.GRADIENTS, *both),
        updated=updated,
        sync=spec.sync,
        reduce_scatter=spec.reduce_scatter,
        parameters_tier=optimizer_tier if materialized else _tier(data, State.PARAMETERS),
        optimizer_tier=optimizer_tier,
        gradients_tier=_tier(data, State.GRADIENTS),
        update_tier=Tier.HOST if on_host and stored == updated else Tier.DEVICE,
        materialized=materialized,
        consumed=bool(cut(State.GRADIENTS, Distribution.MATERIALIZED)),
        gathered_gradients=tuple(axis for axis in gathered if axis not in updated),
        overlaps=spec.overlap is Overlap.BACKWARD,
        prefetch=spec.prefetch or 0,
        gather_after_update=spec.gather_after_update,
        path=spec.offload.path,
    )


def _tier(data: tuple[Factor, ...], state: State) -> Tier:
    """The tier farthest from the device that any axis asks for."""
    tiers = (factor.placement[state].tier for factor in data)
    return max(tiers, key=TIER_DISTANCE.__getitem__, default=Tier.DEVICE)


def _clip(spec: Spec, wrap: Wrap) -> Clip | None:
    if spec.optimizer.clip is None:
        return None
    return Clip(max_norm=spec.optimizer.clip, axes=reduced_axes(wrap))
