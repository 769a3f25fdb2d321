"""The update: torch's own optimizers on what each target gives them, unit by unit.

Gradients are cast to the dtype of what is updated; moments, counters and master copies lie in
slots (as shards, on any tier) and are brought to where the update is. One group of targets after
the other, so that nothing of a unit but its slots lives when the next one is updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ptrain.axes.data.run.target import Resident, Slot, Target, TensorTarget
from ptrain.costs import State
from ptrain.interpreter.scaling import LossScale
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.optimizers.build import build_optimizer, moment_names
from ptrain.rooms.tiers import cast
from ptrain.spec.precision import Layout
from ptrain.spec.spec import OptimizerSpec

MASTER, COUNTER = "master", "step"


class Update:
    """The update of all targets, given a group per unit. `hidden` says which of them are matrices
    within the model, in the same order (None: nobody asks)."""

    def __init__(
        self,
        groups: Sequence[Sequence[Target]],
        spec: OptimizerSpec,
        layout: Layout,
        hidden: Sequence[Sequence[bool]] | None = None,
    ) -> None:
        dtypes = _Dtypes.of(layout)
        members = [
            [
                _Member(target, _rule(spec, is_hidden), spec, dtypes)
                for target, is_hidden in zip(targets, flags, strict=True)
            ]
            for targets, flags in zip(groups, hidden or _nobody(groups), strict=True)
        ]
        self.is_by_unit = not _stays_in_place(groups, dtypes)
        if not self.is_by_unit:
            members = [[member for group in members for member in group]]
        self.groups = [_Group(group, spec) for group in members if group]

    def step(self, lr: float, scaling: LossScale | None = None) -> None:
        """One update with this learning rate, from the targets' gradients; none where they
        overflowed."""
        for group in self.groups:
            group.step(lr, scaling)

    def step_group(self, index: int, lr: float, *, is_taken: bool = True) -> None:
        """The update of one unit alone, as soon as its gradients are complete (G = M). Unless it
        `is_taken` everything is brought and put back as it is: other ranks wait for that."""
        assert self.is_by_unit, "units that stay in place are updated together"
        self.groups[index].step(lr, None, is_taken=is_taken)

    def tensors(self) -> Iterator[tuple[Target, dict[str, torch.Tensor]]]:
        """Each target with what this rank keeps of its optimizer state, by name: exp_avg, step,
        master … (a target that owns its master copy gives it itself)."""
        for group in self.groups:
            for member in group.members:
                yield member.target, {name: slot.stored for name, slot in member.slots.items()}

    def leaves(self) -> Iterator[tuple[Target, torch.Tensor]]:
        """Each target with the tensor that torch's optimizer knows it by, whose `grad` is there
        while it steps."""
        for group in self.groups:
            for member in group.members:
                yield member.target, member.leaf

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        for _, tensors in self.tensors():
            for tensor in tensors.values():
                yield State.OPTIMIZER, tensor


@dataclass(frozen=True, slots=True)
class _Dtypes:
    gradients: torch.dtype
    master: torch.dtype | None
    moments: torch.dtype
    updated: torch.dtype

    @classmethod
    def of(cls, layout: Layout) -> _Dtypes:
        return cls(
            gradients=TORCH_DTYPES[layout.gradients],
            master=TORCH_DTYPES[layout.master] if layout.master else None,
            moments=TORCH_DTYPES[layout.moments],
            updated=TORCH_DTYPES[layout.updated],
        )


class _Member:
    """A target, its slots, and the leaf that torch's optimizer knows it by: empty between
    updates."""

    def __init__(self, target: Target, rule: str, spec: OptimizerSpec, dtypes: _Dtypes) -> None:
        self.target = target
        self.rule = rule
        self.dtypes = dtypes
        self.slots: dict[str, Slot] = {}
        value = target.value()
        self.nothing = value.new_empty(0, dtype=dtypes.updated)
        self.leaf = self.nothing.clone()
        for name in moment_names(rule, spec):
            self.slots[name] = target.slot(torch.zeros_like(value, dtype=dtypes.moments))
        if rule == "adamw":
            self.slots[COUNTER] = target.slot(value.new_zeros((), dtype=torch.float32))
        if dtypes.master is not None and not target.owns_master:
            self.slots[MASTER] = target.slot(value.to(dtypes.master, copy=True))
        self.moving = {  # what is not used as and where it is kept
            name: slot
            for name, slot in self.slots.items()
            if not isinstance(slot, Resident)
            or (name != COUNTER and slot.stored.dtype != dtypes.updated)
        }
        self._fetched: dict[str, torch.Tensor] = {}

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Give it what stays where it is, once."""
        for name, slot in self.slots.items():
            if name in self.moving:
                continue
            if name == MASTER:
                self.leaf.data = slot.stored
            else:
                optimizer.state[self.leaf][name] = slot.stored

    def fetch(self, optimizer: torch.optim.Optimizer) -> bool:
        """Bring everything to the leaf; False where there is no gradient."""
        self.leaf.grad = None
        gradient = self.target.working_gradient()
        if gradient is None:
            return False
        gradient = _cast(gradient, self.dtypes.updated)
        if MASTER in self.moving:
            self.leaf.data = self.slots[MASTER].fetch()
        elif MASTER not in self.slots:
            self.leaf.data = self.target.value()
        self.leaf.grad = gradient
        for name, slot in self.moving.items():
            if name != MASTER:
                held = self._fetched[name] = slot.fetch()
                working = held if name == COUNTER else _cast(held, self.dtypes.updated)
                optimizer.state[self.leaf][name] = working
        return True

    def put(self, optimizer: torch.optim.Optimizer) -> None:
        """Back to where it is kept, each thing dropped as soon as it is there."""
        self.leaf.grad = None
        for name, slot in self.moving.items():
            if name != MASTER:
                held, working = self._fetched.pop(name), optimizer.state[self.leaf].pop(name)
                if working is not held:
                    held.copy_(working)
                del working
                slot.put(held)
                del held
        if MASTER in self.moving:
            self.slots[MASTER].put(self.leaf.detach())
        self.target.store(self.leaf.detach())
        if MASTER not in self.slots or MASTER in self.moving:
            self.leaf.data = self.nothing


class _Group:
    """Targets that are updated at once: by one optimizer, or two where the rule depends on the
    tensor."""

    def __init__(self, members: Sequence[_Member], spec: OptimizerSpec) -> None:
        self.members = list(members)
        rules = dict.fromkeys(member.rule for member in members)
        self.optimizers = {
            rule: build_optimizer(rule, [m.leaf for m in members if m.rule == rule], spec)
            for rule in rules
        }
        for member in members:
            member.join(self.optimizers[member.rule])

    def step(self, lr: float, scaling: LossScale | None, *, is_taken: bool = True) -> None:
        fetched = [member for member in self.members if member.fetch(self.optimizers[member.rule])]
        if not fetched:
            return
        scalars = scaling.beside(fetched[0].leaf) if scaling else (None, None)
        for optimizer in self.optimizers.values():
            for options in optimizer.param_groups:
                options["lr"] = lr
            # where torch.amp.GradScaler leaves them for fused optimizers
            optimizer.grad_scale, optimizer.found_inf = scalars
            if is_taken:
                optimizer.step()
        for member in fetched:
            member.put(self.optimizers[member.rule])


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else cast(tensor, dtype)


def _nobody(groups: Sequence[Sequence[Target]]) -> list[list[bool]]:
    return [[False] * len(targets) for targets in groups]


def _stays_in_place(groups: Sequence[Sequence[Target]], dtypes: _Dtypes) -> bool:
    """Whether nothing is gathered, moved or cast for the update, so that one call updates all."""
    is_whole = all(isinstance(target, TensorTarget) for group in groups for target in group)
    return is_whole and dtypes.updated == dtypes.gradients == dtypes.moments


def _rule(spec: OptimizerSpec, is_hidden: bool) -> str:
    """How a tensor is updated: Muon is for the matrices within the model."""
    return "adamw" if spec.name == "muon" and not is_hidden else spec.name
