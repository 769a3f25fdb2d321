"""The update: an optimizer's rules on what each target gives them, unit by unit.

Gradients are cast to the dtype of what is updated; moments, counters and master copies lie in
slots (as shards, on any tier) and are brought to where the update is. One group of targets after
the other, so that nothing of a unit but its slots lives when the next one is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ptrain.cost import State
from ptrain.rooms.room import Optimizer, OptimizerLeaf, Room, Rules, T
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.optimizers import OPTIMIZERS
from ptrain.spec.precision import DType, Layout

MASTER, COUNTER = "master", "step"


class Slot(Protocol[T]):
    """Where one tensor of optimizer state lives between steps: as a shard, on any tier."""

    @property
    def stored(self) -> T:
        """What this rank keeps."""
        ...

    @property
    def is_resident(self) -> bool:
        """Whether it is kept as and where it is used."""
        ...

    def fetch(self) -> T:
        """The state of all that the target updates, where it is updated, in the stored dtype: the
        stored tensor itself if it is that already."""
        ...

    def put(self, working: T) -> None:
        """Keep this rank's part of what `fetch` gave, after the update changed it."""


class Resident(Generic[T]):
    """State that is kept as it is used."""

    is_resident = True

    def __init__(self, stored: T) -> None:
        self.stored = stored

    def fetch(self) -> T:
        return self.stored

    def put(self, working: T) -> None:
        """It is there."""


class Target(Protocol[T]):
    """A local tensor that the optimizer updates."""

    @property
    def owns_master(self) -> bool:
        """Whether `value` is the master copy itself, which needs no other (Theta = M)."""
        ...

    @property
    def is_frozen(self) -> bool:
        """Whether it is updated by nobody: it has neither a gradient nor optimizer state."""
        ...

    @property
    def is_in_place(self) -> bool:
        """Whether value, gradient and state are updated where and as they are kept."""
        ...

    def lasting(self) -> T | None:
        """Return the tensor by which an optimizer may know it for good: it is its value, and has
        its gradient whenever there is one. None where these have to be brought."""
        ...

    def working_gradient(self) -> T | None:
        """The gradient of all that is updated, where it is updated, in the gradients' dtype."""
        ...

    def value(self) -> T:
        """Return what the optimizer updates, where it is updated: in the parameters' dtype, or the
        master copy itself (`owns_master`). It is valid until `store`."""
        ...

    def store(self, value: T) -> None:
        """Write it back, in any dtype, and make the parameters whole where they must be."""

    def slot(self, initial: T) -> Slot[T]:
        """Keep `initial` (0-d, or shaped like `value`, on the tier of the update) as optimizer
        state, in its dtype."""
        ...


X = TypeVar("X", bound="Target[Any]")  # what a room has for targets


class Scale(Protocol[T]):
    """The scale of a loss, where it has one, and whether the update is left out: 1 where a gradient
    overflowed, or the training stops."""

    def beside(self, tensor: T) -> tuple[T | None, T]:
        """Both, where `tensor` is updated."""
        ...


class TargetsUpdate(Generic[T, X]):
    """The update of all targets, given a group per unit. `hidden` says which of those that are not
    frozen are matrices within the model, in the same order (None: nobody asks)."""

    def __init__(
        self,
        groups: Sequence[Sequence[X]],
        spec: OptimizerSpec,
        layout: Layout,
        room: Room[T],
        rules: Rules[T],
        hidden: Sequence[Sequence[bool]] | None = None,
    ) -> None:
        trained = [[target for target in group if not target.is_frozen] for group in groups]
        members = [
            [
                Member(target, rule_of(spec, is_hidden), spec, layout, room, rules)
                for target, is_hidden in zip(targets, flags, strict=True)
            ]
            for targets, flags in zip(trained, hidden or _nobody(trained), strict=True)
        ]
        self.frozen = [target for group in groups for target in group if target.is_frozen]
        self.is_by_unit = not _stays_in_place(groups, layout)
        if not self.is_by_unit:
            members = [[member for group in members for member in group]]
        self.groups = [UpdateGroup(group, spec, rules) for group in members]

    def step(self, lr: float, scaling: Scale[T] | None = None) -> None:
        """One update with this learning rate, from the targets' gradients; none where `scaling`
        says so, on the device."""
        self.do(lambda group: group.step(lr, scaling))

    def do(self, act: Callable[[UpdateGroup[T, X]], None]) -> None:
        """Do the same to all groups, one after the other."""
        for group in self.groups:
            act(group)

    def step_group(self, index: int, lr: float, *, is_taken: bool = True) -> None:
        """The update of one unit alone, as soon as its gradients are complete (G = M). Unless it
        `is_taken` everything is brought and put back as it is: other ranks wait for that."""
        assert self.is_by_unit, "units in place are updated together"
        self.groups[index].step(lr, None, is_taken=is_taken)

    def tensors(self) -> Iterator[tuple[X, dict[str, T]]]:
        """Each target with what this rank keeps of its optimizer state, by name: exp_avg, step,
        master … (a target that owns its master copy gives it itself); frozen ones last, with
        nothing."""
        for group in self.groups:
            for member in group.members:
                yield member.target, {name: slot.stored for name, slot in member.slots.items()}
        for target in self.frozen:
            yield target, {}

    def leaves(self) -> Iterator[tuple[X, OptimizerLeaf[T]]]:
        """Each target with the leaf that its optimizer knows it by, whose gradient is there while
        it steps."""
        for group in self.groups:
            for member in group.members:
                yield member.target, member.leaf

    def storages(self) -> Iterator[tuple[State, T]]:
        for _, tensors in self.tensors():
            for tensor in tensors.values():
                yield State.OPTIMIZER, tensor


class Member(Generic[T, X]):
    """A target, its slots, and the leaf that its optimizer knows it by: the target's own tensor for
    good (`rests`), else empty between updates."""

    def __init__(
        self,
        target: X,
        rule: str,
        spec: OptimizerSpec,
        layout: Layout,
        room: Room[T],
        rules: Rules[T],
    ) -> None:
        self.target, self.rule, self.layout, self.room = target, rule, layout, room
        value = target.value()
        self.slots: dict[str, Slot[T]] = {}
        for name in moment_names(rule, spec):
            self.slots[name] = target.slot(room.zeros_like(value, layout.moments))
        self.numbers = OPTIMIZERS[rule].numbers
        for name, initial in self.numbers.items():
            self.slots[name] = target.slot(room.scalar_like(value, DType.FP32, initial))
        if layout.master is not None and not target.owns_master:
            self.slots[MASTER] = target.slot(room.cast(value, layout.master, copy=True))
        self.moving = {  # what is not used as and where it is kept
            name: slot
            for name, slot in self.slots.items()
            if not slot.is_resident
            or (name not in self.numbers and room.dtype(slot.stored) is not layout.updated)
        }
        self._fetched: dict[str, T] = {}
        # Nothing of it is moved or cast: once it was brought to the leaf it stays there, and no
        # later update brings it again. A storage that somebody swaps between steps is not seen,
        # but where the target's own tensor is the leaf.
        self._can_stay = (
            target.is_in_place
            and not target.owns_master
            and MASTER not in self.slots
            and not self.moving
            and layout.gradients is layout.parameters is layout.updated
        )
        self._is_there = False
        itself = target.lasting() if self._can_stay else None
        self.rests = itself is not None
        self.leaf = rules.leaf(value, layout.updated) if itself is None else rules.leaf_of(itself)
        self.nothing = self.leaf.value

    def join(self) -> None:
        """Give the optimizer what stays where it is, once."""
        for name, slot in self.slots.items():
            if name in self.moving:
                continue
            if name == MASTER:
                self.leaf.value = slot.stored
            else:
                self.leaf.state[name] = slot.stored

    def fetch(self) -> bool:
        """Bring everything to the leaf; False where there is no gradient."""
        leaf, updated = self.leaf, self.layout.updated
        if (gradient := self.target.working_gradient()) is None:
            return False
        if self._is_there:
            leaf.gradient = gradient
            return True
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
        return True

    def put(self) -> None:
        """Back to where it is kept, each thing dropped as soon as it is there."""
        leaf = self.leaf
        leaf.gradient = None
        if self._can_stay:
            self._is_there = True
            return
        for name, slot in self.moving.items():
            if name != MASTER:
                held, working = self._fetched.pop(name), leaf.state.pop(name)
                if working is not held:
                    self.room.copy(working, held)
                del working
                slot.put(held)
                del held
        if MASTER in self.moving:
            self.slots[MASTER].put(leaf.value)
        self.target.store(leaf.value)
        if MASTER not in self.slots or MASTER in self.moving:
            leaf.value = self.nothing


class UpdateGroup(Generic[T, X]):
    """Targets that are updated at once: by one optimizer, or two where the rule depends on the
    tensor."""

    def __init__(
        self, members: Sequence[Member[T, X]], spec: OptimizerSpec, rules: Rules[T]
    ) -> None:
        self.members = list(members)
        self.optimizers: dict[str, Optimizer[T]] = {
            rule: rules.optimizer(rule, [m.leaf for m in members if m.rule == rule], spec)
            for rule in dict.fromkeys(member.rule for member in members)
        }
        for member in members:
            member.join()
        self._moving = [member for member in members if not member.rests]
        self._rests = len(self._moving) < len(members)

    def step(self, lr: float, scaling: Scale[T] | None, *, is_taken: bool = True) -> None:
        fetched = [member for member in self._moving if member.fetch()]
        if not fetched and not self._rests:
            return
        beside = fetched or self.members
        scalars = scaling.beside(beside[0].leaf.value) if scaling else None
        if is_taken:
            for optimizer in self.optimizers.values():
                optimizer.step(lr, scalars)
        for member in fetched:
            member.put()


def _nobody(groups: Sequence[Sequence[X]]) -> list[list[bool]]:
    return [[False] * len(targets) for targets in groups]


def _stays_in_place(groups: Sequence[Sequence[X]], layout: Layout) -> bool:
    """Whether nothing is gathered, moved or cast for the update, so that one call updates all. Of
    a unit without targets, of which all is frozen, nobody says so."""
    targets = [target for group in groups for target in group]
    is_whole = bool(targets) and all(target.is_in_place for target in targets)
    return is_whole and layout.updated is layout.gradients is layout.moments


def rule_of(spec: OptimizerSpec, is_hidden: bool) -> str:
    """How a tensor is updated: Muon is for the matrices within the model."""
    return spec.name if is_hidden else spec.row.remainder or spec.name


def moment_names(rule: str, spec: OptimizerSpec) -> tuple[str, ...]:
    """Return what a rule keeps of the shape of a tensor, by torch's names."""
    row = OPTIMIZERS[rule]
    return () if row.needs_momentum and not spec.momentum else row.moments


def optimizer_itemsize(spec: OptimizerSpec, layout: Layout) -> int:
    """Bytes of optimizer state per updated element: 12 for AdamW with a master copy in fp32."""
    master = layout.master.itemsize if layout.master else 0
    return master + len(moment_names(rule_of(spec, False), spec)) * layout.moments.itemsize
