"""Plan -> program: the real parts, wrapped and ready to train, behind one interface.

Between forward and update nothing reads a value off a tensor: the same code runs on gloo, NCCL,
and on fake ranks with fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from ptrain.axes.data.apply import Wrapped
from ptrain.costs import Phase, State
from ptrain.data.sampler import LocalBatch
from ptrain.interpreter.clip import clip_gradients
from ptrain.interpreter.materialize import build_module, wrap
from ptrain.interpreter.mesh import Mesh
from ptrain.interpreter.optimizer import Update
from ptrain.interpreter.registry import Registry
from ptrain.interpreter.world import World
from ptrain.models.loss import token_loss_sum
from ptrain.models.units import unit_modules
from ptrain.plan.lower import lower
from ptrain.plan.step import Plan
from ptrain.spec.axis import DATA_AXES
from ptrain.spec.spec import Spec


class Observer(Protocol):
    """Whoever wants to know where in a step the program is."""

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """`phase` begins, for this micro-batch (counted from 0; 0 in the update)."""


class Program:
    """One rank of a training job: `forward_backward(batch)`, then `step(lr)`, over and over."""

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
        self.batch: LocalBatch | None = None
        self.update = Update(wrapped.targets(), spec.optimizer, plan.update.layout)
        self._loss = torch.zeros(
            (),
            dtype=torch.promote_types(next(model.parameters()).dtype, torch.float32),
            device=mesh.world.device,
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

    def forward_backward(self, batch: LocalBatch) -> torch.Tensor:
        """K micro-batches forward and backward. Returns this rank's share of the global mean loss
        (0-d, valid until the next call): the shares of all data ranks add up to it."""
        self.batch = batch
        self._loss.zero_()
        last = self.plan.accumulate.micro_batches - 1
        for index, (inputs, targets) in enumerate(batch.micro_batches(self.spec.batch.micro)):
            with self.wrapped.micro_batch(index == last):
                self._enter(Phase.FORWARD, index)
                loss = token_loss_sum(self.wrapped.module(inputs), targets) / batch.global_tokens
                self._enter(Phase.BACKWARD, index)
                loss.backward()
            self._loss.add_(loss.detach())
            del loss
        return self._loss

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor | None:
        """Reduce what is still partial, clip, update. Returns the global gradient norm before
        clipping (0-d), None where the spec does not clip."""
        self._enter(Phase.UPDATE, 0)
        norm = None
        self.wrapped.reduce_gradients()
        if self.plan.clip is not None:
            gradients = self.gradients()
            norm = clip_gradients(gradients, self.plan.clip, self.mesh, self.registry)
            del gradients
        self.update.step(lr)
        self.wrapped.clear_gradients()
        return norm

    @torch.no_grad()
    def evaluate(self, batch: LocalBatch) -> torch.Tensor:
        """This rank's share of the global mean loss of a batch, without a gradient (0-d)."""
        self.model.eval()
        total = torch.zeros_like(self._loss)
        for inputs, targets in batch.micro_batches(self.spec.batch.micro):
            total += token_loss_sum(self.model(inputs), targets) / batch.global_tokens
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
        (DTensor where a rank holds a part), the same names and shapes whatever the placement."""
        self.update.prepare()
        model: dict[str, torch.Tensor] = {}
        optimizer: dict[str, torch.Tensor] = {}
        for target, tensors in self.update.tensors():
            model.update(target.export())
            for key, tensor in tensors.items():
                named = target.split(tensor)
                optimizer.update({f"{name}.{key}": value for name, value in named.items()})
        return {"model": model, "optimizer": optimizer}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """What `state_dict` gave, filled from a checkpoint of any placement."""
        self.update.prepare()
        for target, tensors in self.update.tensors():
            target.load(dict(state["model"]))
            for key, tensor in tensors.items():
                named = {
                    name.removesuffix(f".{key}"): value
                    for name, value in state["optimizer"].items()
                    if name.endswith(f".{key}")
                }
                tensor.copy_(target.join(named))

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Every local tensor that lives now and belongs to a state; one storage may come twice."""
        yield from self.wrapped.storages()
        yield from self.update.storages()
        for buffer in self.model.buffers():
            yield State.OTHER, buffer
        yield State.OTHER, self._loss
        if self.batch is not None:
            yield State.OTHER, self.batch.tokens

    def _enter(self, phase: Phase, micro_batch: int) -> None:
        for observer in self.observers:
            observer.phase(phase, micro_batch)


def interpret(
    spec: Spec,
    model: nn.Module | None = None,
    world: World | None = None,
    *,
    allow_import: bool = False,
) -> Program:
    """The program of a legal spec on this rank.

    `model`, if given, is wrapped instead of the spec's: a real module with its own weights, equal
    on all ranks. Raises SpecError if the mesh needs other ranks than the world has.
    """
    world = world or World.join(spec.timeout, device=spec.device, backend=spec.backend)
    module = build_module(spec, allow_import=allow_import) if model is None else model
    plan = lower(spec, unit_modules(module, spec.unit))
    mesh = Mesh(plan.mesh, world)
    wrapped = wrap(module, spec, plan, mesh, mesh.registry)
    return Program(spec, plan, mesh, wrapped, module)
