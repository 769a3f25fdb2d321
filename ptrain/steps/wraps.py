"""The interface of plan steps, and the steps that wrap units for the axes over which gradients are
summed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

from ptrain.spec.dials import GatherAfterUpdate, GradientSync, ReduceScatterVia, SyncPolicy
from ptrain.spec.placement import Axis, Tier, exclude_axes


class PlanStep:
    """The interface of all steps. The defaults are for a step that shards nothing."""

    __slots__ = ()

    @property
    def drawing_axes(self) -> tuple[Axis, ...]:
        """The axes other than the data axes whose ranks draw different random numbers, because they
        have different layers, or shards of tokens without a common mask."""
        return ()

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        """The axes along which ranks run different parts of each layer, or run it on different
        tokens of the same samples."""
        return ()

    @property
    def token_axes(self) -> tuple[Axis, ...]:
        """The subset of `cutting_axes` along which ranks have different tokens throughout the
        model."""
        return ()

    @property
    def boundary_axes(self) -> tuple[Axis, ...]:
        """The subset of `cutting_axes` along which ranks have different tokens between blocks."""
        return self.token_axes

    @property
    def summed_axes(self) -> tuple[Axis, ...]:
        """The axes over which gradients are summed: each rank has a partial sum."""
        return ()

    @property
    def loss_axes(self) -> tuple[Axis, ...]:
        """The axes along which all ranks have the same loss for the same samples."""
        return ()


class WrapStep(PlanStep):
    """The interface of a step that wraps units for the data axes."""

    __slots__ = ()

    @property
    def reduced_axes(self) -> tuple[Axis, ...]:
        """The axes along which reduced gradients are sharded when they are clipped and checked."""
        return ()

    @property
    def row_axes(self) -> tuple[Axis, ...]:
        """The axes that shard each tensor along a dimension. Flat units shard full units
        instead."""
        return ()

    @property
    def works_between_passes(self) -> bool:
        """True if collectives of a pipeline pass, or of the previous update, may still run when the
        pass ends."""
        return False

    @property
    def policy(self) -> SyncPolicy | None:
        """The policy for gradient reduction and resharding; None if the wrap does neither."""
        return None

    @property
    def is_updated_in_backward(self) -> bool:
        """True if a unit is updated as soon as its gradients are complete (gradients M)."""
        return False

    @property
    def is_filled_as_shards(self) -> bool:
        """True if a module on meta is wrapped before it has values, so that no rank ever stores it
        in full."""
        return False

    @property
    def is_filled_by_unit(self) -> bool:
        """True if a module on meta gets its values unit by unit while it is wrapped."""
        return False

    @property
    def has_masters_for_parameters(self) -> bool:
        """True if the stored parameters of the wrapped module are the optimizer's master copies
        (parameters M)."""
        return False

    @property
    def keeps_gradients_on_device(self) -> bool:
        """True if reduced gradients stay on the device until the update."""
        return True

    @property
    def gathers_parameters(self) -> bool:
        """True if the full parameters of a unit are on the device only while they are used."""
        return False

    @property
    def gathered_by_unit(self) -> tuple[Axis, ...]:
        """The axes over which a unit's parameters are all-gathered for use."""
        return ()

    @property
    def reduced_by_unit(self) -> tuple[Axis, ...]:
        """The axes over which a unit's gradients are reduce-scattered in backward."""
        return ()

    @property
    def treats_equal_blocks_alike(self) -> bool:
        """True if identical blocks are treated identically, whatever their position. False if the
        owner of a tensor depends on the tensors before it."""
        return True

    def differing_axes(self, *, within_tp: bool) -> tuple[Axis, ...]:
        """Return the axes along which ranks differ.

        Args:
            within_tp: True to include axes along which ranks store different pieces of tensors.
                False returns only axes along which the number of bytes differs.
        """
        return ()


class ExecutedStep(NamedTuple):
    """A step that was executed on the full model, or on the stage `piece`. A model without stages
    is piece 0."""

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
BY_TENSOR = (Form.FULLY_SHARD, Form.MATERIALIZE)  # each tensor is sharded by rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradients(WrapStep):
    """No wrap: there is no data axis."""

    def drop_axis(self, axis: Axis) -> LocalGradients:
        """Return the step itself, which uses no axis."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate(WrapStep):
    """DistributedDataParallel over `axes`: parameters and gradients are R on every data axis.

    Gradients are summed in buckets, in the order in which they arrive, in the last micro-batch:
    overlapped with its backward (`overlaps`), or one by one after it. Optimizer state is R, or S
    with `zero_redundancy`: torch's ZeroRedundancyOptimizer assigns full tensors to ranks, and each
    owner broadcasts its updated tensors.
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
        # DDP reduces whole buckets. A bucket that contains an already reduced sum would count it
        # once per rank.
        return SyncPolicy(gradients=GradientSync.LAST)

    def drop_axis(self, axis: Axis) -> Replicate | LocalGradients:
        """Return the wrap over the other axes."""
        axes = exclude_axes(self.axes, (axis,))
        return replace(self, axes=axes) if axes else LocalGradients()

    @property
    def works_between_passes(self) -> bool:
        return self.overlaps

    @property
    def treats_equal_blocks_alike(self) -> bool:
        # ZeroRedundancyOptimizer assigns the largest tensors first, so that an owner depends on all
        # tensors.
        return not self.zero_redundancy

    def differing_axes(self, *, within_tp: bool) -> tuple[Axis, ...]:
        return self.axes if self.zero_redundancy else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard(WrapStep):
    """FSDP2: parameters are S*, optimizer state and gradients S on `shard_axes`, and all R on
    `replicate_axes`.

    `fully_shard` is applied to each unit and then to the root (HSDP with a replicate axis).

    Attributes:
        shard_axes: The axes that shard the units.
        replicate_axes: The axes that replicate them.
        sync: When gradients are reduced and units resharded.
        reduce_scatter: The collective that reduces gradients.
        materialized: Parameters are M: the shards are the optimizer's master copies, and a gathered
            unit is a cast of them.
        prefetch: Units gathered ahead in both passes; None for torch's default, the next one in
            backward.
        overlaps: Without it, nothing is gathered ahead, and each reduction is awaited.
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

    def drop_axis(self, axis: Axis) -> FullyShard | LocalGradients:
        """Return the wrap over the other axes, at least one of which shards."""
        shards, replicas = (
            exclude_axes(self.shard_axes, (axis,)),
            exclude_axes(self.replicate_axes, (axis,)),
        )
        assert shards or not replicas, "replicas alone are flat units (axes.data.form)"
        if not shards:
            return LocalGradients()
        return replace(self, shard_axes=shards, replicate_axes=replicas)

    @property
    def reduced_axes(self) -> tuple[Axis, ...]:
        return self.shard_axes

    # FSDP2 has one mesh per unit: the same axes shard, all-gather and reduce
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
    """The placement of frozen parameters: sharded over `axes`, on `tier`. They have neither
    gradients nor optimizer state."""

    axes: tuple[Axis, ...]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatUnits(WrapStep):
    """The wrap for all other tuples: one flat padded buffer per unit, with a handler per state.

    Attributes:
        axes: All data axes, outermost first.
        parameters: The axes that shard stored parameters. A unit is gathered on the device for use.
        optimizer: The axes that shard stored optimizer state.
        gradients: The axes over which gradients are reduce-scattered in backward.
        updated: The axes that shard the update (optimizer state S). Along other axes of `optimizer`
            (S*), optimizer state is all-gathered for the update.
        sync: When gradients are reduced and units resharded.
        reduce_scatter: The collective that reduces gradients.
        parameters_tier: The tier of stored parameters; the other tiers likewise.
        update_tier: The tier on which the update runs.
        materialized: Parameters are M: they are cast from the master shards of the optimizer state.
        consumed: Gradients are M: a unit is reduced and updated as soon as its gradients are
            complete.
        gathered_gradients: The axes (S*) along which gradients are all-gathered for the update.
        overlaps: Reductions overlap with backward.
        prefetch: Units gathered ahead.
        gather_after_update: When updated parameters are all-gathered.
        path: The folder of the file tier.
        frozen: The placement of frozen parameters, which have a separate buffer; None for the
            placement of the trained ones.
        bucket_bytes: Neighbouring units are merged until they have this many bytes of gradients
            (`axes.data.units`).
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
        """The step for a unit whose parameters are all frozen. If trained parameters are cast from
        master copies, which frozen ones lack, frozen ones are stored in the masters' placement."""
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
        """True if parameters are read from files for use."""
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

    def drop_axis(self, axis: Axis) -> FlatUnits:
        """Return the wrap over the other axes."""
        return replace(
            self,
            axes=exclude_axes(self.axes, (axis,)),
            parameters=exclude_axes(self.parameters, (axis,)),
            optimizer=exclude_axes(self.optimizer, (axis,)),
            gradients=exclude_axes(self.gradients, (axis,)),
            updated=exclude_axes(self.updated, (axis,)),
            gathered_gradients=exclude_axes(self.gathered_gradients, (axis,)),
            frozen=self.frozen
            and replace(self.frozen, axes=exclude_axes(self.frozen.axes, (axis,))),
        )

    @property
    def first_differs(self) -> bool:
        """True if the first step of a run differs from the others: it records the order in which
        units are used, or has no previous update whose gather it completes."""
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
