"""What a plan asks of its steps, of all of them and of those that wrap units for the axes along
which gradients are summed; and these wraps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

from ptrain.spec.dials import GatherAfterUpdate, GradientSync, ReduceScatterVia, SyncPolicy
from ptrain.spec.placement import Axis, Tier, without


class PlanStep:
    """What a plan asks of each of its steps. A step that cuts nothing answers as here."""

    __slots__ = ()

    @property
    def drawing_axes(self) -> tuple[Axis, ...]:
        """The axes beside the data axes along which ranks draw random numbers of their own, since
        they have layers of their own, or slices of the tokens whose masks nobody draws whole."""
        return ()

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        """The axes along which ranks run another part of each layer, or run it on other tokens of
        the same samples."""
        return ()

    @property
    def token_axes(self) -> tuple[Axis, ...]:
        """Of these the axes along which they have other tokens in all of the model."""
        return ()

    @property
    def boundary_axes(self) -> tuple[Axis, ...]:
        """Of these the axes along which they have other tokens between the blocks."""
        return self.token_axes

    @property
    def summed_axes(self) -> tuple[Axis, ...]:
        """The axes along which gradients are summed, of which every rank has addends."""
        return ()

    @property
    def loss_axes(self) -> tuple[Axis, ...]:
        """The axes along which all ranks have the same loss of the same samples."""
        return ()


class WrapStep(PlanStep):
    """What a plan asks of the step that wraps units for the data axes."""

    __slots__ = ()

    @property
    def reduced_axes(self) -> tuple[Axis, ...]:
        """The axes along which reduced gradients are shards when they are clipped and checked."""
        return ()

    @property
    def row_axes(self) -> tuple[Axis, ...]:
        """The axes that cut each tensor along a dimension; flat units cut whole units."""
        return ()

    @property
    def works_between_passes(self) -> bool:
        """Whether collectives of a pass in a pipeline, or of the update before it, are under way
        when it is over."""
        return False

    @property
    def policy(self) -> SyncPolicy | None:
        """When gradients are reduced and gathered parameters freed; None where nothing is."""
        return None

    @property
    def is_updated_in_backward(self) -> bool:
        """Whether a unit is updated as soon as its gradients are complete (G is M)."""
        return False

    @property
    def is_filled_as_shards(self) -> bool:
        """Whether a module on meta is wrapped before it gets values, so that no rank ever holds it
        whole."""
        return False

    @property
    def is_filled_by_unit(self) -> bool:
        """Whether such a module gets them unit by unit while it is wrapped."""
        return False

    @property
    def has_masters_for_parameters(self) -> bool:
        """Whether what the wrapped module stores as its parameters are the optimizer's master
        copies (Theta is M)."""
        return False

    @property
    def keeps_gradients_on_device(self) -> bool:
        """Whether reduced gradients are there, on the device, until the update."""
        return True

    @property
    def gathers_parameters(self) -> bool:
        """Whether a unit's parameters are whole on the device for their use only."""
        return False

    @property
    def gathered_by_unit(self) -> tuple[Axis, ...]:
        """The axes over which a unit's parameters are gathered for use."""
        return ()

    @property
    def reduced_by_unit(self) -> tuple[Axis, ...]:
        """The axes over which a unit's gradients are reduced to shards in backward."""
        return ()

    @property
    def treats_equal_blocks_alike(self) -> bool:
        """Whether what becomes of a block is what became of an equal one before it, wherever among
        the blocks it stands. Owners that are chosen by what they own so far are not alike."""
        return True

    def differing_axes(self, *, within_tp: bool) -> tuple[Axis, ...]:
        """The axes along which ranks store different numbers of bytes, or (`within_tp`) other
        pieces of tensors."""
        return ()


class Ran(NamedTuple):
    """A step that was executed: of the whole rank, or (`piece`) of the stage with this number; a
    model that is not cut is piece 0."""

    step: PlanStep
    piece: int | None = None


class Form(Enum):
    """The parts of torch that execute some tuples, and flat units for all others."""

    LOCAL = auto()  # one device, gradients as autograd leaves them
    REPLICATE = auto()  # DistributedDataParallel
    SPREAD_UPDATE = auto()  # DistributedDataParallel and ZeroRedundancyOptimizer
    FULLY_SHARD = auto()  # FSDP2
    MATERIALIZE = auto()  # FSDP2 on master copies that are cast when they are gathered
    FLAT = auto()


REPLICAS = (Form.REPLICATE, Form.SPREAD_UPDATE)  # gradients are summed by DistributedDataParallel
BY_TENSOR = (Form.FULLY_SHARD, Form.MATERIALIZE)  # each tensor's rows are cut by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradients(WrapStep):
    """One device: no data axis, nothing is wrapped."""

    def without(self, axis: Axis) -> LocalGradients:
        """Return itself, which is over no axis."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate(WrapStep):
    """Theta and G are R on every data axis: DistributedDataParallel over `axes`; buckets in the
    order in which gradients arrive, reduced (summed) after the last micro-batch: beside its
    backward pass (`overlaps`), or one by one when it is over.

    Omega is R, or with `zero_redundancy` S by torch's ZeroRedundancyOptimizer: whole tensors are
    spread over the ranks, and each owner broadcasts what it updated.
    """

    axes: tuple[Axis, ...]
    bucket_bytes: int
    overlaps: bool = True
    zero_redundancy: bool = False

    @property
    def summed_axes(self) -> tuple[Axis, ...]:
        return self.axes

    @property
    def policy(self) -> SyncPolicy:
        return SyncPolicy(gradients=GradientSync.LAST)

    def without(self, axis: Axis) -> Replicate | LocalGradients:
        """Return the same over the other axes."""
        axes = without(self.axes, (axis,))
        return replace(self, axes=axes) if axes else LocalGradients()

    @property
    def works_between_passes(self) -> bool:
        return self.overlaps

    @property
    def treats_equal_blocks_alike(self) -> bool:
        return not self.zero_redundancy

    def differing_axes(self, *, within_tp: bool) -> tuple[Axis, ...]:
        return self.axes if self.zero_redundancy else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard(WrapStep):
    """Theta is S*, Omega and G are S on `shard_axes` and all three R on `replicate_axes`: FSDP2's
    `fully_shard` on each unit and then the root (HSDP with a replicate axis).

    `materialized`: Theta is M; the shards are the optimizer's master copies, and a gathered unit
    is a cast of them. `prefetch`: units gathered ahead in both passes, None for torch's own (the
    next in backward). Without `overlaps` nothing is gathered ahead, and a reduction is awaited.
    """

    shard_axes: tuple[Axis, ...]
    replicate_axes: tuple[Axis, ...]
    sync: SyncPolicy
    reduce_scatter: ReduceScatterVia
    materialized: bool = False
    prefetch: int | None = None
    overlaps: bool = True

    @property
    def summed_axes(self) -> tuple[Axis, ...]:
        return (*self.replicate_axes, *self.shard_axes)

    def without(self, axis: Axis) -> FullyShard | LocalGradients:
        """Return the same over the other axes, of which some shards."""
        shards, replicas = without(self.shard_axes, (axis,)), without(self.replicate_axes, (axis,))
        assert shards or not replicas, "replicas alone are flat units (axes.data.form)"
        if not shards:
            return LocalGradients()
        return replace(self, shard_axes=shards, replicate_axes=replicas)

    @property
    def reduced_axes(self) -> tuple[Axis, ...]:
        return self.shard_axes

    # what is cut, gathered and reduced by unit are the same shards
    row_axes = gathered_by_unit = reduced_by_unit = reduced_axes

    def differing_axes(self, *, within_tp: bool) -> tuple[Axis, ...]:
        return self.shard_axes

    @property
    def policy(self) -> SyncPolicy:
        return self.sync

    @property
    def is_filled_as_shards(self) -> bool:
        return True

    @property
    def has_masters_for_parameters(self) -> bool:
        return self.materialized

    @property
    def gathers_parameters(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPlace:
    """Where frozen parameters are, of which there is Theta alone: cut over `axes`, on `tier`."""

    axes: tuple[Axis, ...]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatUnits(WrapStep):
    """Any other tuple: each unit's tensors in one flat padded buffer, a handler per state.

    `axes` are all data axes, outermost first; `parameters`, `optimizer` and `gradients` those
    along which the state is kept as a shard, each on its tier. Theta is brought whole to the
    device by unit for use; `materialized`: it is M and made of Omega's master shards. G is
    reduced to shards over `gradients` in the backward pass; along `gathered_gradients` (S*) it is
    made whole again by unit for the update; `consumed`: it is M, and a unit is reduced and updated
    as soon as its gradients are complete. The update works on shards over `updated` (where Omega
    is S), on `update_tier`; along `optimizer` without `updated` (S*) Omega is gathered for it.
    Neighbouring units are one until they have `bucket_bytes` of gradients (`axes.data.units`).
    Frozen parameters of a unit are in a buffer of their own, in the place that `frozen` gives them;
    None for that of the others.
    """

    axes: tuple[Axis, ...]
    parameters: tuple[Axis, ...]
    optimizer: tuple[Axis, ...]
    gradients: tuple[Axis, ...]
    updated: tuple[Axis, ...]
    sync: SyncPolicy
    reduce_scatter: ReduceScatterVia
    parameters_tier: Tier = Tier.DEVICE
    optimizer_tier: Tier = Tier.DEVICE
    gradients_tier: Tier = Tier.DEVICE
    update_tier: Tier = Tier.DEVICE
    materialized: bool = False
    consumed: bool = False
    gathered_gradients: tuple[Axis, ...] = ()
    overlaps: bool = False
    prefetch: int = 0
    gather_after_update: GatherAfterUpdate = GatherAfterUpdate.BLOCKING
    path: str | None = None
    frozen: FrozenPlace | None = None
    bucket_bytes: int = 0

    @property
    def of_frozen(self) -> FlatUnits:
        """Return how a unit is kept of which all is frozen: Theta is all that there is. Where that
        of others is made of masters, which it has none of, it is where these would be."""
        place = self.frozen or FrozenPlace(axes=self.parameters, tier=self.parameters_tier)
        return replace(
            self,
            parameters=place.axes,
            parameters_tier=place.tier,
            optimizer=(),
            gradients=(),
            updated=(),
            gathered_gradients=(),
            materialized=False,
        )

    @property
    def reads_files(self) -> bool:
        """Whether parameters come out of files for their use."""
        return Tier.FILE in (self.parameters_tier, self.of_frozen.parameters_tier)

    @property
    def summed_axes(self) -> tuple[Axis, ...]:
        return self.axes

    @property
    def gathered_by_unit(self) -> tuple[Axis, ...]:
        return self.parameters

    @property
    def reduced_by_unit(self) -> tuple[Axis, ...]:
        return self.gradients

    def differing_axes(self, *, within_tp: bool) -> tuple[Axis, ...]:
        return (*self.updated, *self.gathered_gradients) if within_tp else ()

    def without(self, axis: Axis) -> FlatUnits:
        """Return the same over the other axes."""
        return replace(
            self,
            axes=without(self.axes, (axis,)),
            parameters=without(self.parameters, (axis,)),
            optimizer=without(self.optimizer, (axis,)),
            gradients=without(self.gradients, (axis,)),
            updated=without(self.updated, (axis,)),
            gathered_gradients=without(self.gathered_gradients, (axis,)),
            frozen=self.frozen and replace(self.frozen, axes=without(self.frozen.axes, (axis,))),
        )

    @property
    def first_differs(self) -> bool:
        """Whether a run's first step is another than those that follow: it learns in which order
        units are used, or no update before it has left anything to it."""
        return self._gathers_late or self.prefetch > 0

    @property
    def _gathers_late(self) -> bool:
        return self.gather_after_update is GatherAfterUpdate.NEXT_FORWARD

    @property
    def works_between_passes(self) -> bool:
        return self.overlaps or self._gathers_late

    @property
    def reduced_axes(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a in (*self.updated, *self.gathered_gradients))

    @property
    def policy(self) -> SyncPolicy:
        return self.sync

    @property
    def is_filled_by_unit(self) -> bool:
        return True

    @property
    def is_updated_in_backward(self) -> bool:
        return self.consumed

    @property
    def keeps_gradients_on_device(self) -> bool:
        return not self.consumed and self.gradients_tier is Tier.DEVICE

    @property
    def gathers_parameters(self) -> bool:
        return any(
            step.parameters or step.materialized or step.parameters_tier is not Tier.DEVICE
            for step in (self, self.of_frozen)
        )


Wrap = LocalGradients | Replicate | FullyShard | FlatUnits
