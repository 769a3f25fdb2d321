"""Faults of optimizers, schedules and averages of the weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.fault import DATA, NEW_MOMENTS, NOT_REDUCED, planted
from tests.corpus.parts import (
    adamw,
    average,
    looped,
    my_rows,
    rank,
    regression_loss,
    regressor,
    row_batches,
    size,
)

RATE = "learning rate|lr|schedule|larger|update|step size|too large|too small|factor"


def compared(job: Any, reference: Any = None, num_steps: int = 6) -> Any:
    plain = reference or (lambda: looped(regressor()))
    return ptrain.verify(plain, job, row_batches(num_steps), share=my_rows)


def grouped(model: nn.Module, prefix: str) -> torch.optim.AdamW:
    """Return AdamW that decays all parameters but those whose name begins with norm."""
    named = list(model.named_parameters())
    kept = [p for name, p in named if name.startswith(prefix + "norm")]
    decayed = [p for name, p in named if not name.startswith(prefix + "norm")]
    groups = [{"params": decayed}] + ([{"params": kept, "weight_decay": 0.0}] if kept else [])
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.5)


@planted(
    source="https://github.com/pytorch/pytorch/issues/101343",
    wrong=("parameters",), axis="none", place="norm.*", step=0,
    sentence="norm decays: its names have a prefix once wrapped, and miss the group without decay",
    right=("norm", "decay|update|group|optimizer"),
    wrong_if=("not reduced", "up.weight", "counted twice"),
)  # fmt: skip
def decay_by_names_of_the_wrapper(fault: bool) -> Any:
    def plain() -> ptrain.Job:
        model = regressor()
        return looped(model, optimizer=grouped(model, ""))

    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())
        return looped(model, optimizer=grouped(model, "" if fault else "module."))

    return compared(job, plain)


@planted(
    source="https://github.com/huggingface/accelerate/issues/2142",
    wrong=("parameters",), axis="dp", place="*", step=1,
    sentence="the learning rate falls too fast: the schedule steps once for every rank",
    right=(RATE, "learning rate|lr|schedule|update|factor"),
    wrong_if=("not reduced", "counted twice", "sample"),
)  # fmt: skip
def schedule_steps_for_every_rank(fault: bool) -> Any:
    def scheduled(model: nn.Module, times: int) -> ptrain.Job:
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return looped(
            model,
            optimizer=optimizer,
            after_update=lambda: [schedule.step() for _ in range(times)],
        )

    times = size() if fault else 1
    return compared(
        lambda: scheduled(DistributedDataParallel(regressor()), times),
        lambda: scheduled(regressor(), 1),
    )


@planted(
    source="https://github.com/OpenNMT/OpenNMT-py/issues/617",
    wrong=("optimizer state", "parameters"), axis="none", place="*", step=3,
    sentence="the moments are lost at step 3: a new optimizer is made for each epoch",
    right=(NEW_MOMENTS, "lost|new|reset|zero|step 3|restart|fresh|anew"),
    wrong_if=("not reduced", "counted twice", "sample"),
)  # fmt: skip
def optimizer_made_for_each_epoch(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())
        state = {"optimizer": adamw(model), "step": 0}

        def step(rows: Tensor) -> Tensor:
            if state["step"] % 3 == 0 and fault:
                state["optimizer"] = adamw(model)
            state["step"] += 1
            loss = regression_loss(model, rows)
            loss.backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    return compared(job, num_steps=8)


@planted(
    source="https://x.com/karpathy/status/1013244313327681536",
    wrong=("gradients",), axis="none", place="*", step=1,
    sentence="gradients of the step before are kept: zero_grad is not called",
    right=("gradient", "step before|earlier|kept|zero_grad|accumul|previous|last step|not zero|"
           "left from|stale"),
    wrong_if=("not reduced", "counted twice", "learning rate"),
)  # fmt: skip
def gradients_of_the_step_before_kept(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())
        optimizer = adamw(model)

        def step(rows: Tensor) -> Tensor:
            loss = regression_loss(model, rows)
            loss.backward()
            optimizer.step()
            if not fault:
                optimizer.zero_grad()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    return compared(job)


@planted(
    source="https://github.com/deepspeedai/DeepSpeed/pull/2058",
    wrong=("parameters",), axis="dp", place="*", step=0,
    sentence="half of the parameters are not sent to the other rank after its update of them",
    right=("parameter|weight|update", DATA, "differ|not sent|broadcast|gather|stale|not updated|"
           "not the same|differ|old|replica|not move"),
    wrong_if=("not reduced", "learning rate", "counted twice"),
)  # fmt: skip
def updated_slices_not_gathered(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = regressor()
        parameters = list(model.parameters())
        owner = {p: number % size() for number, p in enumerate(parameters)}
        optimizer = torch.optim.AdamW([p for p in parameters if owner[p] == rank()], lr=1e-2)

        def send() -> None:
            for parameter in parameters:
                if not (fault and owner[parameter] == 1):
                    dist.broadcast(parameter.data, src=owner[parameter])
                parameter.grad = None

        return looped(
            model,
            optimizer=optimizer,
            before_update=lambda: average(parameters),
            after_update=send,
        )

    return compared(job)


class Taught(nn.Module):
    """A student and its teacher, which is a moving average of it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = regressor(), regressor()
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)

    def follow(self) -> None:
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for slow, quick in pairs:
            slow.data.lerp_(quick.data, 0.2)


def taught_loss(model: nn.Module, rows: Tensor) -> Tensor:
    output, slow = model(rows[:, :8])
    return F.mse_loss(output, rows[:, 8:]) + 0.5 * F.mse_loss(output, slow.detach() + 0.1)


@planted(
    source="https://github.com/lightly-ai/lightly-train/issues/968",
    wrong=("parameters",), axis="none", place="teacher.*", step=1,
    sentence="the teacher moves twice a step: its average is updated for every micro-batch",
    right=("teacher", "twice|average|ema|update|move|parameter|micro|loss"),
    wrong_if=("not reduced", "student.up.weight lacks", "learning rate"),
)  # fmt: skip
def teacher_follows_every_micro_batch(fault: bool) -> Any:
    def plain() -> ptrain.Job:
        model = Taught()
        optimizer = adamw(model.student)
        return looped(model, loss=taught_loss, optimizer=optimizer, after_update=model.follow)

    def job() -> ptrain.Job:
        inner = Taught()
        model = DistributedDataParallel(inner)
        optimizer = adamw(inner.student)

        def step(rows: Tensor) -> Tensor:
            losses = []
            for number, micro in enumerate(rows.chunk(2)):
                losses.append(taught_loss(model, micro))
                (losses[-1] / 2).backward()
                if fault and number == 0:
                    inner.follow()
            optimizer.step()
            optimizer.zero_grad()
            inner.follow()
            return torch.stack(losses).mean().detach()

        return ptrain.Job(model=model, step=step)

    return compared(job, plain)


@planted(
    source="https://github.com/pytorch/pytorch/issues/67570",
    wrong=("parameters", "gradients"), axis="dp", place="*", step=0,
    sentence="each parameter is updated in backward before its gradient is reduced over dp",
    right=(NOT_REDUCED + "|before|replica", DATA),
    wrong_if=("learning rate", "counted twice"),
)  # fmt: skip
def updated_in_backward_before_reduction(fault: bool) -> Any:
    def hooked(is_parallel: bool) -> ptrain.Job:
        model = regressor()
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

        def update(parameter: Tensor) -> None:
            if is_parallel and not fault:
                average([parameter])
            optimizers[parameter].step()
            if is_parallel and fault:
                average([parameter])
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)

        def step(rows: Tensor) -> Tensor:
            loss = regression_loss(model, rows)
            loss.backward()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    return compared(lambda: hooked(True), lambda: hooked(False))


@planted(
    source="https://github.com/huggingface/accelerate/pull/1013",
    wrong=("parameters",), axis="none", place="*", step=0,
    sentence="updates are twice as large: the learning rate is multiplied by the ranks",
    right=("learning rate|lr|update|step size", "twice|double|2|larger|factor|multipl"),
    wrong_if=("not reduced", "counted twice"),
)  # fmt: skip
def learning_rate_times_the_ranks(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())
        return looped(model, optimizer=adamw(model, lr=1e-2 * (size() if fault else 1)))

    return compared(job)


@planted(
    source="https://github.com/huggingface/diffusers/blob/main/src/diffusers/training_utils.py",
    wrong=("parameters",), axis="none", place="*", step=3,
    sentence="from step 3 the averaged weights are trained: evaluation left them in place",
    right=("parameter|weight|loss", "average|ema|other|step 3|replaced|evaluat|differ|differ"),
    wrong_if=("not reduced", "counted twice", "learning rate"),
)  # fmt: skip
def averaged_weights_left_in_place(fault: bool) -> Any:
    def evaluated(model: nn.Module, restores: bool) -> ptrain.Job:
        slow = [p.detach().clone() for p in model.parameters()]
        done = iter(range(1, 100))

        def evaluate() -> None:
            for mean, parameter in zip(slow, model.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 0.3)
            if next(done) == 3:
                kept = [p.detach().clone() for p in model.parameters()]
                for mean, parameter in zip(slow, model.parameters(), strict=True):
                    parameter.data.copy_(mean)
                if restores:
                    for parameter, own in zip(model.parameters(), kept, strict=True):
                        parameter.data.copy_(own)

        return looped(model, after_update=evaluate)

    return compared(
        lambda: evaluated(DistributedDataParallel(regressor()), not fault),
        lambda: evaluated(regressor(), True),
        num_steps=8,
    )
