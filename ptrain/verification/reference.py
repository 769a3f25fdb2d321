"""The single-device reference: a training of a spec with the full global batch on one device.

Theorem 5 is tested against it, so it shares no execution with the interpreter: a plain module, a
loop, and torch's optimizers one tensor at a time on full tensors in the layout's dtypes. It takes
the arithmetic from the spec (samples, initial weights, dtypes of each state with master copies,
clipping, schedule). It reads the mesh only for the micro-batches that form the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import Split, read_batch
from ptrain.facts.float8 import products_of
from ptrain.models.initialize import build_model, cast_module, initialize, read_module_weights
from ptrain.models.modes import seed_of_step
from ptrain.models.moe import Gate, scale_losses, weight_router_losses
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.objective import Objective, SampleBatch, StepBatch, objective_of
from ptrain.models.products import use_float8
from ptrain.models.quantized import quantize_frozen
from ptrain.models.units import ROOT, unit_modules
from ptrain.optimizers.build import initial_state, reference_optimizer
from ptrain.optimizers.groups import rule_of
from ptrain.spec.job import OPTIMIZERS
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import (
    INITIAL_SCALE,
    SCALE_BACKOFF,
    SCALE_GROWTH,
    SCALE_INTERVAL,
    Matmul,
)
from ptrain.spec.spec import Spec
from ptrain.train.loop_inputs import learning_rate


class ReferenceOptimizer:
    """The optimizers of the reference, with master copies and the loss scale.

    Args:
        module: The model, in the dtype of the layout's parameters.
        spec: The spec.

    Attributes:
        parameters: The model's parameters, by name.
        updated: The tensors that the optimizers update: parameters or their master copies, by name.
        optimizers: One optimizer per update rule.
        scale: The loss scale; 1.0 for a layout without one.
        steps_since_change: The number of steps since the scale changed.
    """

    def __init__(self, module: nn.Module, spec: Spec) -> None:
        self.spec = spec
        self.layout = spec.precision.effective_layout
        self.parameters = dict(module.named_parameters())
        self.updated: dict[str, Tensor] = {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        }
        if self.layout.master is not None:
            dtype = TORCH_DTYPES[self.layout.master]
            self.updated = {
                name: parameter.detach().to(dtype, copy=True)
                for name, parameter in self.updated.items()
            }
        within = _block_parameters(module)
        self._rules = {
            name: rule_of(spec.optimizer, name, tensor.dim(), name in within)
            for name, tensor in self.updated.items()
        }
        self.optimizers = {
            rule: reference_optimizer(
                rule.name,
                [self.updated[name] for name, own in self._rules.items() if own == rule],
                rule.hyper,
                self.layout.update_dtype,
            )
            for rule in dict.fromkeys(self._rules.values())
        }
        self.scale = INITIAL_SCALE if self.layout.scales_loss else 1.0
        self.steps_since_change = 0

    @torch.no_grad()
    def update(self, sums: Mapping[str, Tensor], lr: float) -> float:
        """Apply one optimizer step.

        Args:
            sums: The gradients of the scaled loss, by name. They are clipped in place.
            lr: The learning rate.

        Returns:
            The 2-norm of the unscaled gradients before clipping; infinite if the step is skipped
            because a scaled gradient overflows.
        """
        gradients = list(sums.values())
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients])
        norm = float(squares.sum().sqrt()) / self.scale
        if not math.isfinite(norm) and self.layout.scales_loss:
            self._rescale(overflowed=True)
            return math.inf
        if self.spec.optimizer.clip is not None:
            # The addend of torch.nn.utils.clip_grad_norm_ (torch/nn/utils/clip_grad.py, torch
            # 2.13).
            factor = min(1.0, self.spec.optimizer.clip / (norm + 1e-6))
            for gradient in gradients:
                gradient.mul_(factor)
        for name, gradient in sums.items():
            tensor = self.updated[name]
            # Cast first: in the 16 bits of a gradient, the quotient could underflow.
            tensor.grad = gradient.to(tensor.dtype) / self.scale
        self._step(lr)
        self._rescale(overflowed=False)
        return norm

    def optimizer_of(self, name: str) -> torch.optim.Optimizer:
        """Return the optimizer that updates a tensor."""
        return self.optimizers[self._rules[name]]

    def initial_entries(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer state of a tensor as torch creates it in the first step."""
        rule = self._rules[name]
        return initial_state(rule.name, rule.hyper, self.updated[name])

    def _step(self, lr: float) -> None:
        moments = TORCH_DTYPES[self.layout.moments]
        for rule, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = lr * rule.lr_factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for state in optimizer.state.values():
                for name, tensor in state.items():
                    if name not in OPTIMIZERS[rule.name].numbers and tensor is not None:
                        # torch keeps moments in the dtype of the updated tensor. Rounded, they have
                        # the values that the layout stores.
                        tensor.copy_(tensor.to(moments))
        for name, updated in self.updated.items():
            if updated is not self.parameters[name]:
                self.parameters[name].copy_(updated)

    def _rescale(self, *, overflowed: bool) -> None:
        """Change the loss scale by the rule of torch.amp.GradScaler."""
        if not self.layout.scales_loss:
            return
        # As `update` does in torch/amp/grad_scaler.py (torch 2.13).
        self.steps_since_change = 0 if overflowed else self.steps_since_change + 1
        if overflowed:
            self.scale *= SCALE_BACKOFF
        elif self.steps_since_change == SCALE_INTERVAL:
            self.scale *= SCALE_GROWTH
            self.steps_since_change = 0


def _block_parameters(module: nn.Module) -> set[str]:
    """Return the names of the parameters inside blocks."""
    blocks = [name for unit in unit_modules(module) for name in unit if name != ROOT]
    return {
        f"{block}.{name}"
        for block in blocks
        for name, _ in module.get_submodule(block).named_parameters()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The figures of a training of some steps.

    Attributes:
        losses: The mean loss of each global batch, before its update.
        gradient_norms: The 2-norm of each global gradient before clipping; empty if not computed,
            infinite in steps that are skipped by loss scaling.
        parameters: The final parameters as full tensors, by canonical name.
        moved_distance: The distance of the parameters from their initial values, relative to these
            (2-norms of all tensors as one vector); only for the reference.
        repeated_loss: The loss of the first batch after all updates; None if it was not computed.
    """

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    parameters: Mapping[str, Tensor]
    moved_distance: float = 0.0
    repeated_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A micro-batch of one data rank.

    Attributes:
        data_index: The index of the data rank.
        k: The index of the micro-batch on its rank.
        samples: The samples.
        batch: The data rank's share of the global batch.
        sample_ids: The ids of the samples.
    """

    data_index: int
    k: int
    samples: SampleBatch
    batch: StepBatch
    sample_ids: tuple[int, ...]

    def loss(self, objective: Objective, module: nn.Module) -> Tensor:
        """Return the micro-batch's share of the global batch's mean loss (0-d)."""
        loss = objective.run(module, self.samples)
        return loss / objective.divisor(self.batch, self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The result of forward and backward of a global batch.

    Attributes:
        sums: The gradients of the scaled loss, by name.
        scale: The loss scale.
        loss: The mean loss, without the scale.
    """

    sums: dict[str, Tensor]
    scale: float
    loss: float

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the unscaled loss, by name."""
        return {name: total / self.scale for name, total in self.sums.items()}


class ReferenceTraining:
    """A training of a plain module on the CPU of this process, without wrappers and collectives.

    Attributes:
        module: The model.
        updater: Its optimizers.
        source: The training samples.
        objective: The loss.
        sample_offset: The number of samples to skip, as in a program.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.module = _build_module(spec)
        self.updater = ReferenceOptimizer(self.module, spec)
        self.source = open_corpus(spec.data)
        self.objective = objective_of(spec)
        self.sample_offset = 0

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The current parameters by name, without copies."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}

    def micro_batches(self, step: int) -> Iterable[MicroBatch]:
        """Return all data ranks' micro-batches of `step`, in the order in which they are summed."""
        for index in range(self.spec.data_degree):
            yield from self.micro_batches_of(index, step)

    def micro_batches_of(self, index: int, step: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of one data rank."""
        local = read_batch(
            self.source, spec=self.spec, step=step, data_index=index,
            data_degree=self.spec.data_degree, split=Split.TRAIN, offset=self.sample_offset,
        )  # fmt: skip
        micro = self.spec.batch.micro
        for k, samples in enumerate(local.micro_batches(micro)):
            ids = local.sample_ids[k * micro : (k + 1) * micro]
            yield MicroBatch(data_index=index, k=k, samples=samples, batch=local, sample_ids=ids)

    def accumulate(self, step: int) -> Pass:
        """Accumulate gradients over the full global batch of a step.

        By Theorem 3 the gradient is the sum over all samples, divided by their global number.
        Dropout is seeded for each data rank, as on a data rank with a single device. Each
        micro-batch's gradient is rounded to the dtype of the reduction, and the sum to the dtype
        of stored gradients.

        Args:
            step: The step, from 0.

        Returns:
            The gradients and the loss.
        """
        layout = self.updater.layout
        travels, kept = TORCH_DTYPES[layout.reduced], TORCH_DTYPES[layout.gradients]
        if layout.scales_loss:
            scale_losses(self.module, torch.tensor(self.updater.scale))
        sums: dict[str, Tensor] = {}
        total = 0.0
        clear_router_counts(self.module)
        for micro_batch in self.micro_batches(step):
            if micro_batch.k == 0:
                torch.manual_seed(seed_of_step(self.spec.train.seed, step, micro_batch.data_index))
            # One context around model and loss, as a loop has; a program has one for each block.
            is_cast = self.spec.precision.matmul is Matmul.AUTOCAST
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
                loss = micro_batch.loss(self.objective, self.module)
            (loss * self.updater.scale).backward()
            total += loss.item()
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.to(travels)
                    gradient = gradient.to(torch.promote_types(travels, kept))
                    sums[name] = sums[name].add_(gradient) if name in sums else gradient
                    parameter.grad = None
        sums = {name: sum_.to(kept) for name, sum_ in sums.items()}
        return Pass(sums=sums, scale=self.updater.scale, loss=total)

    def update(self, step: int, sums: Mapping[str, Tensor]) -> float:
        """Update the parameters and the routers' biases.

        Args:
            step: The step, from 0, which sets the learning rate.
            sums: The gradients of the scaled loss, by name. They are clipped in place.

        Returns:
            The gradient norm before clipping; infinite if the step is skipped.
        """
        norm = self.updater.update(sums, learning_rate(self.spec.optimizer, step))
        update_router_biases(self.module)
        return norm


def run_reference(device: ReferenceTraining, steps: int) -> Iterator[Trajectory | None]:
    """Run steps of a reference from the initial weights, as a generator that can be interleaved.

    Args:
        device: The reference, before its first step.
        steps: The number of steps, at least 1.

    Yields:
        None after each step but the last; then the trajectory, for which the loss of the first
        batch is computed once more.
    """
    initial = {name: tensor.clone() for name, tensor in device.parameters.items()}
    losses, norms = list[float](), list[float]()
    for step in range(steps):
        accumulated = device.accumulate(step)
        norms.append(device.update(step, accumulated.sums))
        losses.append(accumulated.loss)
        if step + 1 < steps:
            yield None
    parameters = device.parameters
    yield Trajectory(
        losses=tuple(losses), gradient_norms=tuple(norms), parameters=parameters,
        moved_distance=relative_distance(initial, parameters),
        repeated_loss=device.accumulate(0).loss,
    )  # fmt: skip


def relative_distance(start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> float:
    """Return |end - start| / |start| in the 2-norm of all tensors as one vector."""
    moved = sum((end[name].double() - start[name].double()).square().sum() for name in start)
    length = sum(start[name].double().square().sum() for name in start)
    return float(torch.as_tensor(moved / length).sqrt())


def _build_module(spec: Spec) -> nn.Module:
    with torch.device("cpu"):
        module = build_model(
            spec.model, sequence=spec.batch.sequence, allow_import=True, seed=spec.train.seed
        )
    if isinstance(spec.model, ModelShape):  # the model of a user function keeps its weights
        initialize(module, spec.train.seed)
    else:
        read_module_weights(module, spec.model.pretrained)
    cast_module(module, TORCH_DTYPES[spec.precision.effective_layout.parameters])
    quantize_frozen(module, spec)
    if isinstance(spec.model, ModelShape) and spec.precision.matmul.is_fp8:
        use_float8(module, products_of(spec.model).scaled, spec.precision.matmul)
    weight_router_losses(module, 1.0 / spec.batch.global_samples)
    return module


def clear_router_counts(module: nn.Module) -> None:
    """Reset the counts of tokens per expert in all routers of a model."""
    for gate in module.modules():
        if isinstance(gate, Gate) and gate.load_E is not None:
            gate.load_E.zero_()


@torch.no_grad()
def update_router_biases(module: nn.Module) -> None:
    """Update the biases of all routers by their counts of a full step, and reset the counts.

    Source: Wang et al. 2024 (arXiv:2408.15664), algorithm 1: b_i += u sign(mean(c) - c_i), with the
    number c_i of tokens that chose expert i.
    """
    for gate in module.modules():
        if isinstance(gate, Gate) and gate.load_E is not None and gate.bias_E is not None:
            rate = gate.shape.bias_update_rate
            assert rate is not None, "there are biases"
            chosen_E = gate.load_E.double()
            gate.bias_E += rate * (chosen_E.mean() - chosen_E).sign()
    clear_router_counts(module)
