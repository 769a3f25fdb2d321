"""The update: apply the optimizer's rules to the targets, unit by unit.

Gradients are cast to the dtype of the update. Moments, counters and master copies are kept in slots
(as shards, on any tier) and are brought to the tensors that are updated. Groups are updated one
after the other, so that only the slots of a unit are live while the next unit is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ptrain.cost import State
from ptrain.facts.model import ModelFacts
from ptrain.optimizers.groups import (
    Rule,
    RuleRange,
    TargetRules,
    rules_of_unit,
    split_by_rule,
    uniform_rule,
)
from ptrain.runtime.interface import (
    Optimizer,
    OptimizerFactory,
    OptimizerLeaf,
    Shape,
    T,
    TensorRuntime,
)
from ptrain.spec.job import OPTIMIZERS, OptimizerSpec
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType, Layout
from ptrain.spec.spec import Spec

MASTER, COUNTER = "master", "step"


class Slot(Protocol[T]):
    """The place where one tensor of optimizer state is kept between steps.

    It may be a shard, on any tier.
    """

    @property
    def stored(self) -> T:
        """The local part that this rank stores."""
        ...

    @property
    def is_resident(self) -> bool:
        """True if the state is stored in the form and place in which it is used."""
        ...

    def fetch(self) -> T:
        """Return the state of all elements that the target updates, on the device of the update.

        It has the stored dtype. It is the stored tensor itself if the slot is resident.
        """
        ...

    def put(self, working: T) -> None:
        """Store this rank's part of the tensor that `fetch` returned, after its update.

        Args:
            working: The tensor that `fetch` returned, with the updated state of all elements.
        """


class ResidentSlot(Generic[T]):
    """A slot whose state is stored as it is used."""

    is_resident = True

    def __init__(self, stored: T) -> None:
        self.stored = stored

    def fetch(self) -> T:
        return self.stored

    def put(self, working: T) -> None:
        """Do nothing: the update has changed the stored tensor."""


class Target(Protocol[T]):
    """A local tensor that the optimizer updates."""

    @property
    def owns_master(self) -> bool:
        """True if `value` is the master copy, so that no other is kept (Θ = M)."""
        ...

    @property
    def is_frozen(self) -> bool:
        """True if it is never updated: it has neither a gradient nor optimizer state."""
        ...

    @property
    def is_in_place(self) -> bool:
        """True if value, gradient and state are updated in the tensors in which they are stored."""
        ...

    def persistent_parameter(self) -> T | None:
        """Return the tensor that an optimizer can keep as its parameter for the full training.

        It is the target's value, and its `.grad` is the gradient whenever there is one. Returns
        None if value or gradient have to be brought for each update.
        """
        ...

    def working_gradient(self) -> T | None:
        """Return the gradient of all elements that are updated, or None if there is none.

        It is on the device of the update, in the gradients' dtype.
        """
        ...

    def value(self) -> T:
        """Return the tensor that the optimizer updates, on the device of the update.

        It has the parameters' dtype, or is the master copy (`owns_master`). It is valid until
        `store`.
        """
        ...

    def store(self, value: T) -> T | None:
        """Write the updated value back, from any dtype, and update the replicas where required.

        Returns:
            The tensor to which the value is still to be copied, together with the values of other
            targets, or None if it is written.
        """

    def local_numels(self) -> Sequence[int]:
        """Return the elements of each tensor in `value`, in order; of one tensor, if it is one."""
        ...

    def create_slot(self, initial: T) -> Slot[T]:
        """Create the slot of a state tensor, in the dtype of `initial`.

        Args:
            initial: Its first value: 0-d or shaped like `value`, on the tier of the update.
        """
        ...


X = TypeVar("X", bound="Target[Any]")  # a runtime's type of targets


class Scale(Protocol[T]):
    """The scale of a loss, if it has one, and the skip flag of an update.

    The flag is 1 if a gradient overflowed or the training stops.
    """

    def scalars_for(self, tensor: T) -> tuple[T | None, T]:
        """Return scale and skip flag on the device of `tensor`.

        Args:
            tensor: The tensor that is updated.

        Returns:
            The loss scale (0-d), None if the loss is unscaled, and the skip flag (0-d): 1 or 0.
        """
        ...


class TargetsUpdate(Generic[T, X]):
    """The update of all targets, in groups of one unit each."""

    def __init__(
        self,
        groups: Sequence[Sequence[X]],
        spec: OptimizerSpec,
        layout: Layout,
        room: TensorRuntime[T],
        rules: OptimizerFactory[T],
        target_rules: Sequence[TargetRules] | None = None,
    ) -> None:
        """Create the optimizer state and the optimizers.

        Args:
            groups: The targets of each unit.
            spec: The optimizer and its hyperparameters.
            layout: Dtypes of parameters, gradients, moments, master copies and the update.
            room: The runtime that stores and moves tensors.
            rules: The factory of optimizers.
            target_rules: The update rules of the tensors of each target that is not frozen, in
                order. None: all have the same rule.
        """
        trained = [[target for target in group if not target.is_frozen] for group in groups]
        members = [
            [
                TargetState(target, own, layout, room, rules)
                for target, own in zip(targets, by_target, strict=True)
            ]
            for targets, by_target in zip(
                trained, target_rules or _uniform(trained, spec), strict=True
            )
        ]
        self.frozen = [target for group in groups for target in group if target.is_frozen]
        self.is_by_unit = not _stays_in_place(groups, layout)
        if not self.is_by_unit:
            # nothing has to be brought, so one optimizer call updates all units
            members = [[member for group in members for member in group]]
        self.groups = [UpdateGroup(group, room, rules) for group in members]

    def step(self, lr: float, scaling: Scale[T] | None = None) -> None:
        """Update all targets from their gradients.

        Args:
            lr: The learning rate of this step.
            scaling: The loss scale, and the flag that skips the update on the device. None:
                gradients are unscaled, and the update always happens.
        """
        self.for_each_group(lambda group: group.step(lr, scaling))

    def for_each_group(self, act: Callable[[UpdateGroup[T, X]], None]) -> None:
        """Call `act` with each group, in order.

        Args:
            act: Receives each group. There is one group per unit, or one for all units if every
                update is in place.
        """
        for group in self.groups:
            act(group)

    def step_group(self, index: int, lr: float, *, is_taken: bool = True) -> None:
        """Update one unit, as soon as its gradients are complete (G = M).

        Args:
            index: The position of the unit's group.
            lr: The learning rate.
            is_taken: If False, state is fetched and stored unchanged, since other ranks wait for
                the collectives.
        """
        assert self.is_by_unit, "units in place are updated together"
        self.groups[index].step(lr, None, is_taken=is_taken)

    def tensors(self) -> Iterator[tuple[X, dict[str, T]]]:
        """Yield each target with the optimizer state that this rank stores, by name.

        Names are exp_avg, step, master and so on. A target that owns its master copy includes it
        itself. Frozen targets come last, with no state.
        """
        for group in self.groups:
            for member in group.members:
                yield member.target, {name: slot.stored for name, slot in member.slots.items()}
        for target in self.frozen:
            yield target, {}

    def leaves(self) -> Iterator[tuple[X, OptimizerLeaf[T], slice]]:
        """Yield each target with its optimizer leaves, which have gradients during the step only.

        The slice selects the leaf's elements in the target's flat value.
        """
        for group in self.groups:
            for member in group.members:
                for part in member.parts:
                    first, numel = part.segment.start, part.segment.numel
                    yield member.target, part.leaf, slice(first, first + numel)

    def storages(self) -> Iterator[tuple[State, T]]:
        """Yield the stored tensors of optimizer state."""
        for _, tensors in self.tensors():
            for tensor in tensors.values():
                yield State.OPTIMIZER, tensor


@dataclass(slots=True)
class WholeLeaf(Generic[T]):
    """The value, gradient and state of a target whose optimizers update parts of it."""

    value: T
    gradient: T | None = None
    state: dict[str, T] = field(default_factory=dict)


class LeafPart(NamedTuple, Generic[T]):
    """The leaf of one optimizer, and the elements of the target that it updates."""

    segment: RuleRange
    leaf: OptimizerLeaf[T]
    nothing: T  # the leaf's value between updates, if its target is updated in parts


class TargetState(Generic[T, X]):
    """A target with its slots and its optimizer leaf.

    If `rests`, the leaf is the target's tensor for the full training; else it is empty between
    updates.

    A flat target whose tensors have several rules is updated in `parts`: a leaf for each run of
    tensors with one rule. Slots belong to the full target, so that what is stored and moved does
    not depend on groups. Only step counters are copied for an update, since every optimizer
    increments its leaves' counters.
    """

    def __init__(
        self,
        target: X,
        target_rules: Sequence[Rule],
        layout: Layout,
        room: TensorRuntime[T],
        rules: OptimizerFactory[T],
    ) -> None:
        self.target, self.layout, self.room = target, layout, room
        value = target.value()
        self.slots: dict[str, Slot[T]] = {}
        rule = target_rules[0]  # all rules of a target have the same state
        for name, shape in moment_shapes(rule.name, rule.hyper, room.shape(value)).items():
            self.slots[name] = target.create_slot(room.zeros_like(value, layout.moments, shape))
        self.numbers = OPTIMIZERS[rule.name].numbers
        for name, initial in self.numbers.items():
            self.slots[name] = target.create_slot(room.scalar_like(value, DType.FP32, initial))
        if layout.master is not None and not target.owns_master:
            self.slots[MASTER] = target.create_slot(room.cast(value, layout.master, copy=True))
        self.moving = {  # slots that are moved or cast for each update
            name: slot
            for name, slot in self.slots.items()
            if not slot.is_resident
            or (name not in self.numbers and room.dtype(slot.stored) is not layout.update_dtype)
        }
        self._fetched: dict[str, T] = {}
        # Nothing is moved or cast: the leaf gets value and state once and keeps them, so later
        # updates only set its gradient. If other code replaces a storage between steps, the leaf
        # still has the old one, unless the leaf is the target's tensor.
        self._can_stay = (
            target.is_in_place
            and not target.owns_master
            and MASTER not in self.slots
            and not self.moving
            and layout.gradients is layout.parameters is layout.update_dtype
        )
        self._has_stayed = False
        itself = target.persistent_parameter() if self._can_stay else None
        self.rests = itself is not None
        self.parts: list[LeafPart[T]] = []
        if len(set(target_rules)) > 1:
            for segment in split_by_rule(target_rules, target.local_numels()):
                leaf = rules.create_leaf(value, layout.update_dtype)
                self.parts.append(LeafPart(segment, leaf, leaf.value))
            self.leaf: OptimizerLeaf[T] = WholeLeaf(self.parts[0].nothing)
        else:
            self.leaf = (
                rules.create_leaf(value, layout.update_dtype)
                if itself is None
                else rules.wrap_leaf(itself)
            )
            self.parts.append(
                LeafPart(RuleRange(rule, 0, room.numel(value)), self.leaf, self.leaf.value)
            )
        self.is_in_parts = len(self.parts) > 1
        self.nothing = self.leaf.value
        # The leaf is a master copy where it is stored, and needs only its gradient.
        self.has_master_in_place = MASTER in self.slots and target.is_in_place and not self.moving

    def register_state(self) -> None:
        """Give the optimizer the state that is used where it is stored, once."""
        for name, slot in self.slots.items():
            if name in self.moving:
                continue
            if name == MASTER:
                self.leaf.value = slot.stored
            else:
                self.leaf.state[name] = slot.stored

    def fetch(self) -> bool:
        """Bring value, gradient and state to the leaf; return False if there is no gradient."""
        leaf, updated = self.leaf, self.layout.update_dtype
        if (gradient := self.target.working_gradient()) is None:
            return False
        if self._has_stayed:
            leaf.gradient = gradient
            return True
        # after the early return: nothing is brought for a target without a gradient
        gradient = self.room.cast(gradient, updated)
        if MASTER in self.moving:
            leaf.value = self.slots[MASTER].fetch()
        elif MASTER not in self.slots:
            leaf.value = self.target.value()
        leaf.gradient = gradient
        for name, slot in self.moving.items():
            if name != MASTER:
                held = self._fetched[name] = slot.fetch()
                leaf.state[name] = held if name in self.numbers else self.room.cast(held, updated)
        if self.is_in_parts:
            self._give_parts(gradient)
        return True

    def _give_parts(self, gradient: T) -> None:
        """Give each part its views of value, gradient and state, and its copy of each number."""
        for number, (segment, leaf, _) in enumerate(self.parts):
            start, shape = segment.start, (segment.numel,)
            leaf.value = self.room.view_range(self.leaf.value, start, shape)
            leaf.gradient = self.room.view_range(gradient, start, shape)
            for name, whole in self.leaf.state.items():
                if name not in self.numbers:
                    leaf.state[name] = self.room.view_range(whole, start, shape)
                elif number == 0:
                    leaf.state[name] = whole
                else:
                    leaf.state[name] = self.room.cast(whole, DType.FP32, copy=True)

    def _drop_parts(self) -> None:
        """Drop the views and copies of `_give_parts`."""
        for _, leaf, nothing in self.parts:
            leaf.gradient, leaf.value = None, nothing
            for name in self.leaf.state:
                del leaf.state[name]

    def put(self) -> Iterator[tuple[T, T]]:
        """Store value and state, and drop each working copy as soon as it is stored.

        Yields:
            The value and the tensor to which it is still to be copied, if it is not stored yet.
        """
        leaf = self.leaf
        # Dropped first: the update has used it, and the state below may allocate.
        leaf.gradient = None
        if self.is_in_parts:
            self._drop_parts()
        if self._can_stay:
            self._has_stayed = True
            return
        for name, slot in self.moving.items():
            if name != MASTER:
                # `del` before the next slot: at most one working copy is live besides the leaf's
                # state.
                held, working = self._fetched.pop(name), leaf.state.pop(name)
                if working is not held:
                    self.room.copy(working, held)
                del working
                slot.put(held)
                del held
        if MASTER in self.moving:
            self.slots[MASTER].put(leaf.value)
        if (place := self.target.store(leaf.value)) is not None:
            yield leaf.value, place
        if MASTER not in self.slots or MASTER in self.moving:
            # The empty tensor frees the working copy.
            leaf.value = self.nothing


class UpdateGroup(Generic[T, X]):
    """Targets that are updated together, by one optimizer per rule."""

    def __init__(
        self,
        members: Sequence[TargetState[T, X]],
        room: TensorRuntime[T],
        rules: OptimizerFactory[T],
    ) -> None:
        self.members, self.room = list(members), room
        leaves: dict[Rule, list[OptimizerLeaf[T]]] = {}
        for part in (part for member in members for part in member.parts):
            leaves.setdefault(part.segment.rule, []).append(part.leaf)
        self.optimizers: dict[Rule, Optimizer[T]] = {
            rule: rules.create_optimizer(rule.name, own, rule.hyper) for rule, own in leaves.items()
        }
        for member in members:
            member.register_state()
        self._with_masters = [member for member in members if member.has_master_in_place]
        brought = [member for member in members if not member.rests]
        self._moving = [member for member in brought if not member.has_master_in_place]
        self._rests = len(brought) < len(members)

    def step(self, lr: float, scaling: Scale[T] | None, *, is_taken: bool = True) -> None:
        """Update the group from the targets' gradients.

        Args:
            lr: The learning rate.
            scaling: Loss scale and skip flag, None for an unscaled loss that is never skipped.
            is_taken: If False, state is fetched and stored without an update.
        """
        fetched = self._fetch_with_masters()
        fetched += [member for member in self._moving if member.fetch()]
        if not fetched and not self._rests:
            return
        beside = fetched or self.members
        scalars = scaling.scalars_for(beside[0].leaf.value) if scaling else None
        if is_taken:
            for rule, optimizer in self.optimizers.items():
                optimizer.step(lr * rule.lr_factor, scalars)
        # Values are copied by one operator after all members, because a GPU launches a kernel per
        # call.
        if copies := [copy for member in fetched for copy in member.put()]:
            self.room.copy_all(copies)

    def _fetch_with_masters(self) -> list[TargetState[T, X]]:
        """Bring the gradients of master copies in place, cast by one operator.

        Members without a gradient are left out.
        """
        held = [(member, member.target.working_gradient()) for member in self._with_masters]
        members = [member for member, gradient in held if gradient is not None]
        gradients = [gradient for _, gradient in held if gradient is not None]
        if members:
            cast = self.room.cast_all(gradients, members[0].layout.update_dtype)
            for member, gradient in zip(members, cast, strict=True):
                member.leaf.gradient = gradient
        return members


def _uniform(groups: Sequence[Sequence[X]], spec: OptimizerSpec) -> list[TargetRules]:
    """Return one rule for each target."""
    return [[(uniform_rule(spec),)] * len(targets) for targets in groups]


def _stays_in_place(groups: Sequence[Sequence[X]], layout: Layout) -> bool:
    """Return True if one call can update all: no tensor is gathered, moved or cast.

    False for groups without targets, in which all parameters are frozen.
    """
    targets = [target for group in groups for target in group]
    is_whole = bool(targets) and all(target.is_in_place for target in targets)
    return is_whole and layout.update_dtype is layout.gradients is layout.moments


def moment_shapes(rule: str, spec: OptimizerSpec, shape: Shape) -> dict[str, Shape]:
    """Return the shapes of the moments that a rule keeps of a tensor, by torch's names.

    Args:
        rule: A key of `OPTIMIZERS`.
        spec: The hyperparameters. SGD without momentum keeps no state.
        shape: The tensor's shape. Of two or more dimensions, Adafactor keeps two factors:
            `Adafactor._init_group` (torch/optim/_adafactor.py, 2.13).

    Example:
        >>> moment_shapes("adafactor", OptimizerSpec(name="adafactor"), (6, 4))
        {'row_var': (6, 1), 'col_var': (1, 4)}
    """
    row = OPTIMIZERS[rule]
    if row.needs_momentum and not spec.momentum:
        return {}
    if row.factors and len(shape) > 1:
        return dict(zip(row.factors, ((*shape[:-1], 1), (*shape[:-2], 1, shape[-1])), strict=True))
    return dict.fromkeys(row.moments, shape)


def moments_per_element(rule: Rule) -> int:
    """Return the moments per element of a large matrix: 0 if they are factored."""
    is_factored = OPTIMIZERS[rule.name].factors
    return 0 if is_factored else len(moment_shapes(rule.name, rule.hyper, ()))


def optimizer_itemsize(spec: OptimizerSpec, layout: Layout) -> int:
    """Return the bytes of optimizer state per element.

    Args:
        spec: The optimizer. If its rule is for matrices only, the rule of other tensors counts.
        layout: The dtypes of master copies (None: no master copies) and moments.

    Returns:
        Bytes per element: 12 for AdamW with fp32 masters.
    """
    master = layout.master.itemsize if layout.master else 0
    rule = uniform_rule(spec)
    return master + moments_per_element(rule) * layout.moments.itemsize


def saved_bytes(spec: Spec, facts: ModelFacts) -> int:
    """Return the bytes of the tensors in a checkpoint, which are the same for every placement.

    Args:
        spec: The spec.
        facts: The facts of the full model.

    Example:
        >>> saved_bytes(spec, facts)  # AdamW with fp32 states, P parameters in n tensors
        12 * P + 4 * n
    """
    layout = spec.precision.effective_layout
    master = layout.master.itemsize if layout.master else 0
    # The scale and its counter (`interpreter.loss.LossScale`), each of 4 bytes.
    total = 8 if layout.gradients is DType.FP16 else 0
    if isinstance(shape := spec.model, ModelShape) and shape.bias_update_rate is not None:
        of_real = 8 if spec.precision.compute_fp64 else DType.FP32.itemsize
        routers = sum(map(shape.has_experts, range(shape.layers)))
        total += routers * (shape.experts or 0) * of_real  # a bias per expert
    for unit in facts.units:
        for tensor in unit.tensors:
            is_stored_as_bytes = tensor.num_quantized > 0
            total += tensor.numel * (1 if is_stored_as_bytes else layout.parameters.itemsize)
        for tensor, rule in zip(unit.trained, rules_of_unit(spec.optimizer, unit), strict=True):
            moments = moment_shapes(rule.name, rule.hyper, tensor.shape).values()
            total += tensor.numel * master + sum(map(prod, moments)) * layout.moments.itemsize
            total += len(OPTIMIZERS[rule.name].numbers) * DType.FP32.itemsize
    return total
