"""Plan -> program: the real parts, wrapped and ready to train, behind one interface.

Between forward and update nothing reads a value off a tensor: the same code runs on gloo, NCCL,
and on fake ranks with fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Protocol

import torch
from torch import nn

from ptrain.axes.data.run.flat import parameters_by_unit
from ptrain.axes.data.run.target import Named, Target
from ptrain.axes.data.run.wrapped import Wrapped
from ptrain.axes.pipeline.run.apply import Pipelined
from ptrain.axes.pipeline.run.stage import Asked
from ptrain.axes.pipeline.run.staged import Staged
from ptrain.axes.tensor.run.apply import micro_batch
from ptrain.costs import Phase, State
from ptrain.data.sampler import LocalBatch
from ptrain.errors import PtrainError
from ptrain.interpreter.agreement import require_equal_models
from ptrain.interpreter.clip import ByOperator, global_norm, scale_down
from ptrain.interpreter.loss import Loss
from ptrain.interpreter.materialize import build_module, wrap
from ptrain.interpreter.optimizer import MASTER, Update
from ptrain.interpreter.scaling import LossScale
from ptrain.interpreter.stages import stages_of_module, wrap_stages
from ptrain.models.attention import require_trainable
from ptrain.models.facts import untraced_facts
from ptrain.models.heads import head_of
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.units import ROOT
from ptrain.plan.lower import lower
from ptrain.plan.step import FlatUnits, Plan
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.registry import Registry
from ptrain.rooms.world import World
from ptrain.spec.axis import DATA_AXES
from ptrain.spec.spec import Spec


class Observer(Protocol):
    """Whoever wants to know where in a step the program is."""

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """`phase` begins, for this micro-batch (counted from 0; 0 in the update)."""


class GradientObserver(Protocol):
    """Whoever wants to see the gradients of an update, which `Program.gradients` gives."""

    def reduced(self) -> None:
        """They are sums over the ranks, in the optimizer's layout."""

    def clipped(self, norm: torch.Tensor | None) -> None:
        """They are as the optimizer is given them; `norm` is what it was before (0-d)."""


class Program:
    """One rank of a training job: `forward_backward(batch, lr)`, then `step(lr)`, over and over.
    `step` is `reduce()` and then `apply(lr)`, for whoever wants to decide between the two.

    `scaling` is the scale of the loss, None where the layout has none. With `updates_in_backward`
    (G = M) every unit is updated in the backward pass, and `step` only ends the update. There
    `admits(i)`, where set, decides whether the i-th group of targets takes its reduced gradient;
    one that does not stays as it is, in the same collectives.
    """

    def __init__(
        self, spec: Spec, plan: Plan, mesh: Mesh, wrapped: Wrapped, model: nn.Module
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.mesh = mesh
        self.world = mesh.world
        self.model = model
        self.wrapped = wrapped
        self.observers: list[Observer] = []
        self.gradient_observers: list[GradientObserver] = []
        self.batch: LocalBatch | None = None
        layout = plan.update.layout
        hidden = _hidden(model, plan) if spec.optimizer.name == "muon" else None
        self.update = wrapped.own_update(spec.optimizer, layout) or Update(
            wrapped.targets(), spec.optimizer, layout, hidden
        )
        self.scaling = LossScale(mesh, plan.update.scale_axes) if layout.scales_loss else None
        self.updates_in_backward = isinstance(plan.wrap, FlatUnits) and plan.wrap.consumed
        self.admits: Callable[[int], bool] | None = None
        self._norm: torch.Tensor | None = None  # between the halves of a step
        self._lr: float | None = None
        self._operators = micro_batch(plan.tensor)
        self.loss = Loss(plan)
        by_layer = (plan.pipeline.axis,) if plan.pipeline else ()  # the last stage has the loss
        self._sharers = mesh.size(tuple(a for a in mesh.axes if a not in (*DATA_AXES, *by_layer)))
        if self.updates_in_backward:
            wrapped.consume_with(self._update_unit)
        self._loss = torch.zeros(
            (),
            dtype=torch.promote_types(next(model.parameters()).dtype, torch.float32),
            device=mesh.world.device,
        )
        self._pipelined = (
            Pipelined(
                spec, plan, mesh, wrapped, Asked(self.loss.given, self._stage_loss, self._enter)
            )
            if isinstance(wrapped, Staged)
            else None
        )

    @property
    def registry(self) -> Registry:
        return self.mesh.registry

    @property
    def data_index(self) -> int:
        """This rank's row-major place over the data axes: which samples it takes."""
        index = 0
        for axis in DATA_AXES:
            if axis in self.mesh.axes:
                index = index * self.mesh.degrees[axis] + self.mesh.coordinate(axis)
        return index

    @property
    def random_index(self) -> int:
        """Whose random numbers this rank draws: those of its samples' ranks, and where these have
        layers or slices of the tokens of their own, its own."""
        index, tensor, pipeline = self.data_index, self.plan.tensor, self.plan.pipeline
        axes = (
            *((pipeline.axis,) if pipeline else ()),
            *((tensor.axis,) if tensor and tensor.is_sequence else ()),
        )
        for axis in axes:
            index = index * self.mesh.degrees[axis] + self.mesh.coordinate(axis)
        return index

    def forward_backward(self, batch: LocalBatch, lr: float | None = None) -> torch.Tensor:
        """K micro-batches forward and backward. Returns this rank's share of the global mean loss
        (0-d, valid until the next call): the shares of all ranks add up to it.

        `lr` is the learning rate of the update to come. Raises PtrainError without it where
        backward updates."""
        if lr is None and self.updates_in_backward:
            raise PtrainError(
                "forward_backward: gradients are materialized (G = M), backward is the update\n"
                "  remedy: give the learning rate, forward_backward(batch, lr)"
            )
        self._lr = lr
        self.batch = batch
        self._loss.zero_()
        if self._pipelined is not None:
            with self._operators():
                self._pipelined.train(batch)
            return self._loss.div_(self._sharers)
        last = self.plan.accumulate.micro_batches - 1
        for index, (inputs, targets) in enumerate(batch.micro_batches(self.spec.batch.micro)):
            with self._operators(), self.wrapped.micro_batch(index == last):
                self._enter(Phase.FORWARD, index)
                loss = self.loss.run(self.wrapped.module, inputs, targets) / batch.global_tokens
                self._enter(Phase.BACKWARD, index)
                loss.backward(self.scaling.seed(loss) if self.scaling else None)
            self._loss.add_(loss.detach())
            del loss
        return self._loss.div_(self._sharers)

    def _stage_loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Of one micro-batch on the last stage, of which backward begins."""
        assert self.batch is not None, "of a batch"
        loss = self.loss.of(output, targets) / self.batch.global_tokens
        self._loss.add_(loss.detach())
        return loss * self.scaling.seed(loss) if self.scaling else loss

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor | None:
        """Reduce what is still partial, clip, update. Returns the global gradient norm before
        clipping (0-d), None where the spec does not clip. Where a gradient of a scaled loss
        overflowed, nothing is updated but the scale."""
        norm = self.reduce()
        self.apply(lr)
        return norm

    @torch.no_grad()
    def reduce(self) -> torch.Tensor | None:
        """The first half of `step`: all that changes gradients but their clipping, and nothing that
        changes parameters or optimizer state. Returns what `step` does."""
        self._enter(Phase.UPDATE, 0)
        if not self.updates_in_backward:
            self.wrapped.reduce_gradients()
            for observer in self.gradient_observers:
                observer.reduced()
            self._norm = self._check_and_measure()
        return self._norm

    @torch.no_grad()
    def apply(self, lr: float) -> None:
        """The second half of `step`: clip, update."""
        if not self.updates_in_backward:
            if self._norm is not None and self.plan.clip is not None:
                scale_down(self.gradients(), self._norm, self.plan.clip)
            for observer in self.gradient_observers:
                observer.clipped(self._norm)
            self._update(lr)
        self._norm = None
        self.wrapped.finish_update()
        self.wrapped.clear_gradients()

    def _check_and_measure(self) -> torch.Tensor | None:
        """In a function of its own, so that no gradient outlives it."""
        gradients = self.gradients() if self.scaling or self.plan.clip else []
        if self.scaling is not None:
            self.scaling.check(gradients)
        if self.plan.clip is None:
            return None
        by_operator = self._by_operator() if self.plan.clip.operator_axes else None
        copied = [id(each.gradient) for each in self._targets() if self._is_copy(each)]
        return global_norm(gradients, self.plan.clip, self.mesh, self.scaling, by_operator, copied)

    def _targets(self) -> Iterator[Target]:
        return chain.from_iterable(self.wrapped.targets())

    def _is_copy(self, target: Target) -> bool:
        """Whether another stage has it too, where it is counted."""
        return isinstance(self.wrapped, Staged) and self.wrapped.is_copy(target)

    def _by_operator(self) -> ByOperator:
        found = [each.cut_and_whole() for each in self._targets() if not self._is_copy(each)]
        return ByOperator(
            cut=[view for cut, _ in found for view in cut],
            whole=[view for _, whole in found for view in whole],
        )

    def _update(self, lr: float) -> None:
        if self.scaling is None:
            self.update.step(lr)
            return
        assert isinstance(self.update, Update), "a scaled loss has master copies"
        self.update.step(lr, self.scaling)
        self.scaling.update()

    @torch.no_grad()
    def _update_unit(self, index: int) -> None:
        assert self._lr is not None, "forward_backward asks for it"
        assert isinstance(self.update, Update), "units are flat where backward updates"
        is_taken = self.admits is None or self.admits(index)
        self.update.step_group(index, self._lr, is_taken=is_taken)

    @torch.no_grad()
    def evaluate(self, batch: LocalBatch) -> torch.Tensor:
        """This rank's share of the global mean loss of a batch, without a gradient (0-d)."""
        self.model.eval()
        total = torch.zeros_like(self._loss)

        def add(loss: torch.Tensor) -> None:
            total.add_(loss / batch.global_tokens)

        with self._operators():
            if self._pipelined is not None:
                self._pipelined.evaluate(batch, lambda output, to: add(self.loss.of(output, to)))
            else:
                for inputs, targets in batch.micro_batches(self.spec.batch.micro):
                    add(self.loss.run(self.model, inputs, targets))
        total.div_(self._sharers)
        self.wrapped.end_evaluation()
        self.model.train()
        return total

    def gradients(self) -> list[torch.Tensor]:
        """The local gradients as the optimizer sees them, after `reduce_gradients`."""
        found = [target.gradient for group in self.wrapped.targets() for target in group]
        return [gradient for gradient in found if gradient is not None]

    @torch.no_grad()
    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """`model` by parameter name and `optimizer` by `name.exp_avg`, `name.step` …: full tensors
        (DTensor where a rank holds a part), the same names, shapes and dtypes whatever the
        placement; `scaling` where the loss is scaled."""
        dtype = TORCH_DTYPES[self.plan.update.layout.parameters]
        model: dict[str, torch.Tensor] = {}
        optimizer: dict[str, torch.Tensor] = {}
        for target, tensors in self.update.tensors():
            exported = self._canonical(target.export())
            if target.owns_master:
                optimizer.update(_keyed(exported, MASTER))
                exported = {name: value.to(dtype) for name, value in exported.items()}
            model.update(exported)
            for key, tensor in tensors.items():
                optimizer.update(_keyed(self._canonical(target.split(tensor)), key))
        state = {"model": model, "optimizer": optimizer}
        return state | ({"scaling": self.scaling.state()} if self.scaling else {})

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """What `state_dict` gave, filled from a checkpoint of any placement."""
        for target, tensors in self.update.tensors():
            held = _of_key(state["optimizer"], MASTER) if target.owns_master else state["model"]
            target.load(self._own(held))
            for key, tensor in tensors.items():
                tensor.copy_(target.join(self._own(_of_key(state["optimizer"], key))))
        if self.scaling is not None:
            for key, tensor in self.scaling.state().items():
                tensor.copy_(state["scaling"][key])

    def _canonical(self, named: Named) -> Named:
        return self.wrapped.canonical(named) if isinstance(self.wrapped, Staged) else named

    def _own(self, named: Mapping[str, torch.Tensor]) -> Named:
        return self.wrapped.own(named) if isinstance(self.wrapped, Staged) else dict(named)

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Every local tensor that lives now and belongs to a state; one storage may come twice."""
        yield from self.wrapped.storages()
        yield from self.update.storages()
        if self.scaling is not None:
            yield from self.scaling.storages()
        for buffer in self.model.buffers():
            yield State.OTHER, buffer
        yield State.OTHER, self._loss
        if self.batch is not None:
            yield State.OTHER, self.batch.tokens

    def _enter(self, phase: Phase, micro_batch: int) -> None:
        for observer in self.observers:
            observer.phase(phase, micro_batch)


def _hidden(model: nn.Module, plan: Plan) -> list[list[bool]]:
    """Which parameters are matrices within the model, unit by unit in the targets' order: what
    belongs to no unit but the root (embeddings, the head) is none."""
    return [
        [modules != (ROOT,) and parameter.dim() == 2 for _, parameter in named]
        for modules, named in parameters_by_unit(model, plan.units)
    ]


def _keyed(named: Named, key: str) -> Named:
    return {f"{name}.{key}": value for name, value in named.items()}


def _of_key(optimizer: Mapping[str, torch.Tensor], key: str) -> Named:
    """One kind of optimizer state, by parameter name."""
    end = f".{key}"
    return {
        name.removesuffix(end): value for name, value in optimizer.items() if name.endswith(end)
    }


def interpret(
    spec: Spec,
    model: nn.Module | None = None,
    world: World | None = None,
    *,
    allow_import: bool = False,
) -> Program:
    """The program of a legal spec on this rank.

    `model`, if given, is wrapped instead of the spec's: a real module with its own weights, equal
    on all ranks. Raises SpecError if the mesh needs other ranks than the world has, and on every
    rank if the ranks' models or layouts differ.
    """
    world = world or World.join(spec.timeout, device=spec.device, backend=spec.backend)
    require_trainable(spec.model, world.device)
    module = build_module(spec, allow_import=allow_import) if model is None else model
    facts = untraced_facts(module, spec)
    stages = stages_of_module(spec, module, facts)
    plan = lower(spec, facts.unit_modules, facts.roles, stages.all if stages else (), facts.blocks)
    require_equal_models(module, plan.update.layout, world)
    head = head_of(module, spec) if plan.loss else ROOT
    mesh = Mesh(plan.mesh, world)
    if stages is None:
        wrapped = wrap(module, spec, plan, mesh, mesh.registry)
        program = Program(spec, plan, mesh, wrapped, module)
        program.loss.attach(module, head)
        return program
    staged = wrap_stages(module, spec, plan, mesh, stages)
    program = Program(spec, plan, mesh, staged, staged.module)
    if staged.last is not None:
        program.loss.attach(staged.last, head)
    return program
