"""Lowering: from a product of placements to the steps that execute it.

The wrapper follows from the modes of the states alone. Three forms have a torch part of their own
(one device, everything replicated, Theta gathered with Omega and G on the same shards, replicas
outside them); every other legal tuple runs as flat units with one handler per state.
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
    Update,
    Wrap,
)
from ptrain.spec.axis import DATA_AXES, Axis, Factor
from ptrain.spec.placement import S_STAR, Mode, R, S
from ptrain.spec.spec import Spec

MODEL_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
_WHOLE = (R, R, R)
_FULLY_SHARDED = (S_STAR, S, S)


def lower(spec: Spec, units: tuple[str, ...]) -> Plan:
    """The plan of a legal spec; `units` are the names of the modules that are wrapped."""
    factors = tuple(factor for factor in spec.factors if factor.degree > 1)
    return Plan(
        name=spec.name,
        mesh=CreateMesh(
            axes=tuple(factor.axis for factor in factors),
            degrees=tuple(factor.degree for factor in factors),
        ),
        wrap=_wrap(spec, tuple(factor for factor in factors if factor.axis in DATA_AXES)),
        accumulate=Accumulate(micro_batches=spec.batch.accumulate),
        clip=_clip(spec, factors),
        update=Update(optimizer=spec.optimizer.name, layout=spec.precision.effective),
        units=units,
    )


def modes(factor: Factor) -> tuple[Mode, Mode, Mode]:
    """(Theta, Omega, G) of one factor."""
    placement = factor.placement
    return (placement.parameters, placement.optimizer, placement.gradients)


def _wrap(spec: Spec, data: tuple[Factor, ...]) -> Wrap:
    if not data:
        return LocalGradients()
    whole = tuple(factor.axis for factor in data if modes(factor) == _WHOLE)
    sharded = tuple(factor.axis for factor in data if modes(factor) == _FULLY_SHARDED)
    if len(whole) == len(data):
        return Replicate(axes=whole, bucket_bytes=spec.bucket_bytes)
    if sharded and whole + sharded == tuple(factor.axis for factor in data):
        return FullyShard(
            shard_axes=sharded,
            replicate_axes=whole,
            sync=spec.sync,
            reduce_scatter=spec.reduce_scatter,
        )
    return FlatUnits(
        axes=tuple(factor.axis for factor in data),
        parameters=_not_replicated(data, State.PARAMETERS),
        optimizer=_not_replicated(data, State.OPTIMIZER),
        gradients=_not_replicated(data, State.GRADIENTS),
        sync=spec.sync,
        reduce_scatter=spec.reduce_scatter,
    )


def _not_replicated(factors: tuple[Factor, ...], state: State) -> tuple[Axis, ...]:
    return tuple(factor.axis for factor in factors if factor.placement[state] != R)


def _clip(spec: Spec, factors: tuple[Factor, ...]) -> Clip | None:
    if spec.optimizer.clip is None:
        return None
    return Clip(max_norm=spec.optimizer.clip, axes=_not_replicated(factors, State.OPTIMIZER))
