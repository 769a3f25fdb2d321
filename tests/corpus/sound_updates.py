"""Sound programs whose optimizers or updates are unusual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.fault import sound
from tests.corpus.parts import (
    average,
    looped,
    my_rows,
    regression_loss,
    regressor,
    row_batches,
    size,
)
from tests.corpus.precision import MasterWeights


def alike(job: Callable[[nn.Module], ptrain.Job], build: Any = regressor) -> Any:
    """Compare a job on the plain model and within DDP."""
    return ptrain.verify(
        lambda: job(build()),
        lambda: job(DistributedDataParallel(build())),
        row_batches(),
        share=my_rows,
    )


def by_optimizer(make: Callable[[nn.Module], Any]) -> Any:
    return alike(lambda model: looped(model, optimizer=make(model)))


class SignDescent:
    """Descent by the sign of a running mean of the gradients; no optimizer of torch."""

    def __init__(self, model: nn.Module, lr: float = 1e-3) -> None:
        self.parameters, self.lr = list(model.parameters()), lr
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, mean in zip(self.parameters, self.means, strict=True):
            mean.lerp_(parameter.grad, 0.1)
            parameter -= self.lr * mean / (mean.abs() + 1e-3)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


@sound("an optimizer of the user's own, which is none of torch's")
def own_optimizer() -> Any:
    return by_optimizer(SignDescent)


class Adafactored(torch.optim.Optimizer):
    """Second moments of matrices as the product of their rows' and columns' means."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            square, state = parameter.grad.square() + 1e-12, self.state[parameter]
            if parameter.ndim == 2:
                rows = state.setdefault("rows", torch.zeros(len(square)))
                columns = state.setdefault("columns", torch.zeros(square.shape[1]))
                rows.lerp_(square.mean(1), 0.1)
                columns.lerp_(square.mean(0), 0.1)
                second = rows[:, None] * columns / rows.mean()
            else:
                second = state.setdefault("second", torch.zeros_like(square)).lerp_(square, 0.1)
            parameter -= self.param_groups[0]["lr"] * parameter.grad / (second.sqrt() + 1e-3)


@sound("an optimizer with factored second moments")
def factored_moments() -> Any:
    return by_optimizer(lambda model: Adafactored(model.parameters()))


@sound("torch's Adafactor")
def adafactor_of_torch() -> Any:
    return by_optimizer(lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2))


@sound("LBFGS, which calls its closure several times a step")
def closures_of_lbfgs() -> Any:
    def job(model: nn.Module) -> ptrain.Job:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3)

        def step(rows: Tensor) -> Tensor:
            losses = []

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = regression_loss(model, rows)
                loss.backward()
                losses.append(loss.detach())
                return loss

            optimizer.step(closure)
            return losses[0]

        return ptrain.Job(model=model, step=step)

    return alike(job)


@sound("gradients are clipped by value")
def clipped_by_value() -> Any:
    def job(model: nn.Module) -> ptrain.Job:
        return looped(
            model,
            before_update=lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 0.05),
        )

    return alike(job)


@sound("AdamW with foreach")
def foreach_updates() -> Any:
    return by_optimizer(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True))


@sound("AdamW, fused")
def fused_updates() -> Any:
    return by_optimizer(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


@sound("groups with learning rates and decays of their own")
def groups_of_parameters() -> Any:
    def make(model: nn.Module) -> torch.optim.AdamW:
        named = list(model.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for name, p in named if "up" in name], "lr": 3e-3},
                {"params": [p for name, p in named if "down" in name], "weight_decay": 0.3},
                {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )

    return by_optimizer(make)


@sound("SGD with Nesterov's momentum and a schedule that warms up and falls")
def momentum_with_a_schedule() -> Any:
    def job(model: nn.Module) -> ptrain.Job:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
        return looped(model, optimizer=optimizer, after_update=schedule.step)

    return alike(job)


@sound("a moving average of the weights is kept beside the model")
def average_beside_the_model() -> Any:
    def job(model: nn.Module) -> ptrain.Job:
        slow = torch.optim.swa_utils.AveragedModel(
            model.module if isinstance(model, DistributedDataParallel) else model
        )
        return looped(model, after_update=lambda: slow.update_parameters(model))

    return alike(job)


@sound("the mean of each gradient's rows is taken off")
def centralised_gradients() -> Any:
    def job(model: nn.Module) -> ptrain.Job:
        def centralise() -> None:
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.grad -= parameter.grad.mean(dim=1, keepdim=True)

        return looped(model, before_update=centralise)

    return alike(job)


@sound("each parameter is reduced and updated in backward, by a hook")
def updated_in_backward() -> Any:
    def hooked(is_parallel: bool) -> ptrain.Job:
        model = regressor()
        optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

        def update(parameter: Tensor) -> None:
            if is_parallel:
                average([parameter])
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)

        def step(rows: Tensor) -> Tensor:
            loss = regression_loss(model, rows)
            loss.backward()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    return ptrain.verify(lambda: hooked(False), lambda: hooked(True), row_batches(), share=my_rows)


@sound("ZeroRedundancyOptimizer: each rank updates its parameters and sends them")
def optimizer_without_redundancy() -> Any:
    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2
        )
        return looped(model, optimizer=optimizer)

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


@sound("master weights in fp32 of a model in bf16")
def masters_of_a_bf16_model() -> Any:
    def low(is_parallel: bool) -> ptrain.Job:
        model = regressor().bfloat16()
        reduce = (lambda: average(model.parameters())) if is_parallel else (lambda: None)
        return looped(model, optimizer=MasterWeights(model, lr=5e-3), before_update=reduce)

    return ptrain.verify(
        lambda: low(False),
        lambda: low(True),
        row_batches().bfloat16(),
        share=my_rows,
        terms=ptrain.Terms(dtype=torch.bfloat16),
    )


@sound("two optimizers, one for matrices and one for vectors")
def two_optimizers() -> Any:
    def job(model: nn.Module) -> ptrain.Job:
        matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.05)
        vectors = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=1e-2)
        inner = looped(model, optimizer=matrices, before_update=vectors.step)

        def step(rows: Tensor) -> Any:
            vectors.zero_grad()
            return inner.step(rows)

        return ptrain.Job(model=model, step=step)

    return alike(job)


@sound("gradients are gathered and averaged in the order of the ranks, without an all-reduce")
def averaged_by_a_gather() -> Any:
    def job() -> ptrain.Job:
        model = regressor()

        def reduce() -> None:
            for parameter in model.parameters():
                parts = [torch.empty_like(parameter.grad) for _ in range(size())]
                dist.all_gather(parts, parameter.grad)
                parameter.grad = torch.stack(parts).mean(dim=0)

        return looped(model, before_update=reduce)

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)
