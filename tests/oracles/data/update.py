"""The update of one flat unit in closed form: the device's bytes at its fullest moments.

The unit's gradient, its optimizer state (a master copy or Theta's own part first, then moments and
counters) and its value are brought to where the update works, in the dtype it works in; all of the
unit's are there at once. Then they go back one after the other: state through a contiguous copy of
the rank's part where that is none, the value in the dtype it is stored in, gathered where Theta is
wider than the update. What comes from another tier is a copy that its gather replaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ptrain.spec.dials import GatherAfterUpdate
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.placement import Tier, exclude_axes
from ptrain.spec.precision import DType, Layout
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import FlatUnits
from tests.oracles.data.buffer import Axes, Buffer
from tests.oracles.data.chain import ChainUnit
from tests.oracles.data.gradients import GradientsForm
from tests.oracles.data.optimizer import (
    COUNTER_BYTES,
    has_counter,
    is_by_tensor,
    num_moments,
    orthogonalization,
    scalars,
)
from tests.oracles.data.parameters import ParametersForm


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensorForm:
    """A tensor of a target's state in a buffer sharded along the optimizer state's axes. `works` is
    the number of elements of its copy in the dtype of the update (0: none); `is_scalar` marks a
    counter, which is not sharded."""

    step: FlatUnits
    buffer: Buffer
    dtype: DType
    numel: int
    works: int = 0
    is_scalar: bool = False

    @property
    def missing(self) -> Axes:
        """Return the axes along which it is gathered for the update."""
        return () if self.is_scalar else exclude_axes(self.step.optimizer, self.step.updated)

    @property
    def part(self) -> int:
        """Return the bytes of a rank's shard."""
        if self.is_scalar:
            return COUNTER_BYTES
        return self.buffer.shard(self.step.optimizer) * self.dtype.itemsize

    @property
    def gathered(self) -> int:
        """Return its bytes over the update's axes."""
        return self.buffer.shard(self.step.updated) * self.dtype.itemsize

    @property
    def comes(self) -> bool:
        """Return True if the shard is copied to the device."""
        step = self.step
        return step.optimizer_tier is not Tier.DEVICE and step.update_tier is Tier.DEVICE

    @property
    def fetched(self) -> int:
        """Return the device bytes that the update has of it."""
        return self.gathered if self.missing else self.part * self.comes

    @property
    def fetching(self) -> int:
        """Return the device bytes while it is fetched."""
        if not self.missing:
            return self.fetched
        received = self.buffer.permuted(self.step.updated, self.missing) * self.dtype.itemsize
        return self.part * self.comes + self.gathered + received

    @property
    def putting(self) -> int:
        """Return the device bytes, in addition to the fetched ones, while the rank's shard is
        stored: the padded full tensor if it lacks its padding, and a copy of the shard if it is no
        contiguous piece."""
        step = self.step
        if self.is_scalar or step.update_tier is not Tier.DEVICE or not self.fetched:
            return 0
        padded = self.buffer.padded if self.numel < self.buffer.shard(step.updated) else 0
        copied = self.buffer.copied(step.updated, step.optimizer) if self.missing else 0
        return (padded + copied) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTarget:
    """The target of one optimizer call: a unit's shard, or (Muon) one tensor. `master` is its
    master copy if that is not the parameter."""

    numel: int
    master: StateTensorForm | None
    state: tuple[StateTensorForm, ...]
    orthogonalizing: int = 0


@dataclass(frozen=True)
class UnitUpdate:
    """The update of one unit, whose parameters, gradients and optimizer state have the same
    buffer."""

    spec: Spec
    unit: ChainUnit
    parameters: ParametersForm
    gradients: GradientsForm

    @property
    def step(self) -> FlatUnits:
        return self.parameters.step

    @property
    def layout(self) -> Layout:
        return self.parameters.layout

    @property
    def optimizer(self) -> OptimizerSpec:
        return self.spec.optimizer

    @property
    def is_on_device(self) -> bool:
        return self.step.update_tier is Tier.DEVICE

    @property
    def has_master(self) -> bool:
        return self.layout.master is not None and not self.step.materialized

    @cached_property
    def targets(self) -> tuple[UpdateTarget, ...]:
        """Return the targets in the order of the unit's tensors."""
        buffer, step = self.parameters.buffer, self.step
        if not is_by_tensor(self.optimizer):
            return (self._target(buffer, buffer.shard(step.updated), is_hidden=False),)
        return tuple(
            self._target(
                Buffer.of(self.spec, step, numel, step.optimizer),
                numel,
                is_hidden=self.unit.is_hidden(shape),
                matrix=shape,
            )
            for shape, numel in zip(self.unit.shapes, self.unit.numels, strict=True)
        )

    def _target(
        self, buffer: Buffer, numel: int, *, is_hidden: bool, matrix: tuple[int, ...] = ()
    ) -> UpdateTarget:
        layout = self.layout

        def tensor(dtype: DType, *, works: int = 0, is_scalar: bool = False) -> StateTensorForm:
            return StateTensorForm(
                step=self.step,
                buffer=buffer,
                dtype=dtype,
                numel=numel,
                works=works,
                is_scalar=is_scalar,
            )

        is_cast = layout.moments is not layout.update_dtype
        moment = tensor(layout.moments, works=numel if is_cast and self.is_on_device else 0)
        moments = num_moments(self.optimizer, is_hidden=is_hidden)
        counters = has_counter(self.optimizer, is_hidden=is_hidden)
        scaled = orthogonalization(matrix, layout) if is_hidden and self.is_on_device else 0
        return UpdateTarget(
            numel=numel,
            master=tensor(layout.update_dtype) if self.has_master else None,
            state=(moment,) * moments + (tensor(DType.FP32, is_scalar=True),) * counters,
            orthogonalizing=scaled,
        )

    @property
    def value(self) -> StateTensorForm:
        """Return the parameters as a state tensor if they are cast from master copies."""
        buffer = self.parameters.buffer
        return StateTensorForm(
            step=self.step, buffer=buffer, dtype=self.parameters.dtype, numel=buffer.padded
        )

    # ---- the gradient

    @property
    def _ready(self) -> Axes:
        return self.gradients.preparation().final

    @property
    def _used(self) -> Axes:
        return exclude_axes(self._ready, self.step.gathered_gradients)

    @property
    def _gradient_comes(self) -> bool:
        """Return True if the gradients are copied to the device for the update: from another tier,
        or for a gather."""
        needs_device = bool(self.step.gathered_gradients) or self.is_on_device
        return needs_device and not self.gradients.is_on_device

    @property
    def gradient(self) -> int:
        """Return the device bytes of the update's gradient, in addition to the stored one."""
        buffer, itemsize = self.gradients.buffer, self.layout.gradients.itemsize
        is_new = bool(self.step.gathered_gradients) or self._gradient_comes
        return buffer.shard(self._used) * itemsize * (is_new and self.is_on_device)

    @property
    def bringing(self) -> int:
        """Return the device bytes while that gradient is copied."""
        buffer, itemsize = self.gradients.buffer, self.layout.gradients.itemsize
        came = buffer.shard(self._ready) * itemsize * self._gradient_comes
        if not self.step.gathered_gradients:
            return came
        copy = buffer.permuted(self._used, self.step.gathered_gradients) * itemsize
        return came + buffer.shard(self._used) * itemsize + copy

    @property
    def is_cast(self) -> bool:
        """Return True if the gradient is cast for the update on the device."""
        return self.is_on_device and self.layout.gradients is not self.layout.update_dtype

    # ---- the value, where no master copy is updated

    @property
    def _value_missing(self) -> Axes:
        return exclude_axes(self.step.parameters, self.step.updated)

    @property
    def _value_moments(self) -> tuple[int, int]:
        """Return the device bytes at the peak and afterwards of the parameter shard over the
        update's axes."""
        if self.step.materialized:
            return self.value.fetching, self.value.fetched
        step, buffer, itemsize = self.step, self.parameters.buffer, self.parameters.dtype.itemsize
        missing, had = self._value_missing, exclude_axes(step.parameters, self._value_missing)
        is_away = step.parameters_tier is not Tier.DEVICE
        came = self.parameters.stored * (is_away and bool(missing))
        gathered = buffer.shard(had) * itemsize * bool(missing)
        received = buffer.permuted(had, missing) * itemsize if missing else 0
        copied = buffer.copied(had, step.updated) * itemsize
        part = buffer.shard(step.updated) * itemsize
        if is_away and not missing:  # its part is taken there, and comes by itself
            return (part, part) if self.is_on_device else (0, 0)
        most = max(came + gathered + received, gathered + copied)
        return most, (copied or gathered) * self.is_on_device

    # ---- all of it

    @property
    def peak(self) -> int:
        """Return the device bytes at the peak, in addition to the stored gradient."""
        return max(self.bringing, *self._fetching(), *self._putting())

    def _cast(self, target: UpdateTarget) -> int:
        return target.numel * self.layout.update_dtype.itemsize * self.is_cast

    def _fetching(self) -> Iterator[int]:
        """Return the device bytes while states are fetched, target by target; the gradient is freed
        after the last target has cast it."""
        fetched, value_at_most, value_stays = 0, 0, 0
        last = len(self.targets) - 1
        casts = [*accumulate(self._cast(target) for target in self.targets)]
        for place, target in enumerate(self.targets):
            yield self.gradient + casts[place] + fetched
            gradient = casts[place] + self.gradient * (place < last or not self.is_cast)
            if target.master is None and place == 0:
                value_at_most, value_stays = self._value_moments
                yield gradient + value_at_most
                fetched += value_stays
            state = (*((target.master,) if target.master else ()), *target.state)
            works = [tensor.works * self.layout.update_dtype.itemsize for tensor in state]
            there = [*accumulate(t.fetched + w for t, w in zip(state, works, strict=True))]
            for before, tensor in zip([0, *there], state, strict=False):
                yield gradient + fetched + before + tensor.fetching
            fetched += there[-1] if there else 0
            yield gradient + fetched
        gradient = casts[-1] + self.gradient * (not self.is_cast)
        orthogonalizing = max(target.orthogonalizing for target in self.targets)
        beside = scalars(self.spec, self.layout) if self.is_on_device else 0
        yield gradient + fetched + max(orthogonalizing, beside)

    def _left(self, target: UpdateTarget) -> int:
        """Return the device bytes of a target's fetched state."""
        itemsize = self.layout.update_dtype.itemsize
        works = sum(tensor.works for tensor in target.state) * itemsize
        master = target.master.fetched if target.master else 0
        return master + works + sum(tensor.fetched for tensor in target.state)

    def _putting(self) -> Iterator[int]:
        """Return the device bytes while states are stored, target by target, the last one's
        gradient first; then the unit's value."""
        value = 0 if self.has_master else self._value_moments[1]
        for place, target in enumerate(self.targets):
            others = self.targets[place + 1 :]
            casts = sum(self._cast(other) for other in others)
            kept = self.gradient * bool(others) * (not self.is_cast)
            beside = value + casts + kept + sum(self._left(other) for other in others)
            leaf = target.master.fetched if target.master else 0
            for at, tensor in enumerate(target.state):
                after = sum(
                    t.fetched + t.works * self.layout.update_dtype.itemsize
                    for t in target.state[at + 1 :]
                )
                yield beside + leaf + after + tensor.fetched + tensor.putting
            if target.master is not None:
                yield beside + leaf + target.master.putting
                if is_by_tensor(self.optimizer):
                    value = self._output_buffer
                    beside += self._output_buffer if place == 0 else 0
            yield beside + leaf
            if not others:
                yield beside + leaf + self._storing[0]

    @property
    def _output_buffer(self) -> int:
        """Return the device bytes of a buffer for the updated tensors: 0 if they are the
        parameters."""
        step, theta = self.step, self.parameters
        if not self.is_on_device:
            return 0
        if not step.parameters and step.parameters_tier is Tier.DEVICE:
            return 0
        return theta.buffer.padded * theta.dtype.itemsize

    @property
    def _updated_value(self) -> int:
        """Return the device bytes of the storage of the updated value."""
        if not self.has_master:
            return self._value_moments[1]
        if is_by_tensor(self.optimizer):
            return self._output_buffer
        master = self.targets[0].master
        assert master is not None
        return master.fetched

    @property
    def stays(self) -> int:
        """Return the device bytes in transfer until all units are updated."""
        return self._storing[1]

    @property
    def _storing(self) -> tuple[int, int]:
        """Return the device bytes in addition to the value, and the bytes in transfer afterwards,
        while it is stored in the parameters: cast, sharded further or gathered."""
        step, theta = self.step, self.parameters
        itemsize = theta.dtype.itemsize
        gathers_targets = self.has_master and is_by_tensor(self.optimizer)
        is_cast = self.layout.update_dtype is not theta.dtype and not gathers_targets
        cast = theta.buffer.shard(step.updated) * itemsize * (is_cast and self.is_on_device)
        if step.materialized:
            return cast + self.value.putting, 0
        missing, extra = (
            exclude_axes(step.updated, step.parameters),
            exclude_axes(step.parameters, step.updated),
        )
        taken = theta.buffer.copied(step.updated, extra) * itemsize if extra else 0
        taken *= self.is_on_device
        if not missing:
            return cast + taken, 0
        permuted = theta.buffer.permuted(step.parameters, missing)
        if step.parameters_tier is Tier.DEVICE and not permuted:
            # cast or brought to where it belongs, and gathered there
            return (cast if extra else 0) + taken, 0
        cut = (*step.updated, *extra)
        moved = 0 if self.is_on_device else theta.buffer.shard(cut) * itemsize
        if step.gather_after_update is GatherAfterUpdate.NEXT_FORWARD:
            return cast + taken + moved, 0
        is_away = step.parameters_tier is not Tier.DEVICE
        result = theta.stored * is_away + permuted * itemsize
        at_once = cast + taken + moved + result
        if step.gather_after_update is GatherAfterUpdate.BLOCKING:
            return at_once, 0
        return at_once, result + (taken or moved or cast or self._updated_value)
