"""Faults of updates: optimizers that need whole matrices, schedules, averages, and tied weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.collectives import summed
from tests.corpus.fault import planted
from tests.corpus.optimizers import RATE
from tests.corpus.parts import (
    FEATURES,
    adamw,
    looped,
    my_rows,
    regression_loss,
    regressor,
    row_batches,
    size,
    token_batches,
    token_loss,
    writer,
)
from tests.corpus.resume import LATE, RESTART, ResumedRun, State
from tests.corpus.resume import compared as resumed


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the nearest matrix with orthogonal rows or columns, by Newton and Schulz."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(8):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


class WholeMatrices:
    """Steps along the orthogonal factor of a matrix's gradient, and along the gradient of what is
    no matrix; of a sharded gradient, the shard's own factor if `by_shard`."""

    def __init__(self, model: nn.Module, by_shard: bool = False) -> None:
        self.named = dict(model.named_parameters())
        self.by_shard = by_shard

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.named.values():
            change, rate = parameter.grad, 0.05
            if parameter.ndim == 2 and min(parameter.shape) > 1:
                change = self.factor(change)
            if parameter.ndim < 2:
                rate = 0.02
            parameter -= rate * change

    def factor(self, gradient: Tensor) -> Tensor:
        if not isinstance(gradient, DTensor):
            return orthogonal(gradient)
        mesh, placements = gradient.device_mesh, gradient.placements
        if self.by_shard:
            return DTensor.from_local(orthogonal(gradient.to_local()), mesh, placements)
        whole = DTensor.from_local(orthogonal(gradient.full_tensor()), mesh)
        return whole.redistribute(mesh, placements)

    def zero_grad(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None


@planted(
    source="https://github.com/deepspeedai/DeepSpeed/issues/8437",
    wrong=("parameters",), axis="dp", place="up.weight", step=0,
    sentence="each rank orthogonalises its own shard of the gradient of up, not the whole matrix",
    right=("up", "update|shard|own|orthogonal|whole|parameter|local"),
    wrong_if=("not reduced", "learning rate is", "norm.weight", "down.weight"),
)  # fmt: skip
def shards_made_orthogonal(fault: bool) -> Any:
    def plain() -> ptrain.Job:
        model = regressor()
        return looped(model, optimizer=WholeMatrices(model))

    def job() -> ptrain.Job:
        model = fully_shard(regressor())
        return looped(model, optimizer=WholeMatrices(model, fault))

    return ptrain.verify(plain, job, row_batches(), share=my_rows)


class LayerwiseRates:
    """Steps by a tenth of a parameter's norm along its gradient; norms are those of the shard if
    `by_shard`."""

    def __init__(self, model: nn.Module, by_shard: bool = False) -> None:
        self.parameters = list(model.parameters())
        self.by_shard = by_shard

    def norm(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.norm()
        squares = tensor.to_local().square().sum().reshape(1)
        return (squares if self.by_shard else summed(squares)).sqrt()[0]

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            ratio = (self.norm(parameter) + 0.1) / (self.norm(parameter.grad) + 1e-6)
            local, change = parameter, parameter.grad
            if isinstance(parameter, DTensor):
                local, change = parameter.to_local(), change.to_local()
            local -= 0.03 * ratio * change

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


@planted(
    source="https://github.com/deepspeedai/DeepSpeed/issues/490",
    wrong=("parameters",), axis="dp", place="*", step=0,
    sentence="each rank's trust ratio is that of its own shards: norms are not summed over dp",
    right=("update|parameter|ratio|step|norm", "shard|own|rank|local|factor|each|differ"),
    wrong_if=("not reduced over dp: grad", "sample", "counted twice"),
)  # fmt: skip
def trust_ratio_of_a_shard(fault: bool) -> Any:
    def plain() -> ptrain.Job:
        model = regressor()
        return looped(model, optimizer=LayerwiseRates(model))

    def job() -> ptrain.Job:
        model = fully_shard(regressor())
        return looped(model, optimizer=LayerwiseRates(model, fault))

    return ptrain.verify(plain, job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/THUDM/slime/issues/1546",
    wrong=("parameters",), axis="none", place="*", step=RESTART,
    sentence="the schedule counts its steps twice at the resume of step 3: the learning rate is "
             "too small",
    right=(RATE, LATE),
    wrong_if=("not reduced", "counted twice over", "sample", "moments"),
)  # fmt: skip
def schedule_counts_twice_on_resume(fault: bool) -> Any:
    def restore(run: ResumedRun, state: State) -> None:
        run.load(state)
        for _ in range(RESTART if fault else 0):
            run.schedule.step()

    return resumed(restore, decays=True)


@planted(
    source="https://github.com/huggingface/diffusers/issues/1864",
    wrong=("averages", "loss"), axis="none", place="*", step=2,
    sentence="the moving average decays too fast from step 2 on: each step overwrites the decay "
             "that the next one starts from",
    right=("average|ema|teacher", "decay|rate|step 2|differ|weight"),
    wrong_if=("not reduced", "learning rate", "never updated", "updated twice"),
)  # fmt: skip
def decay_of_the_average_overwritten(fault: bool) -> Any:
    def loop(model: nn.Module, inner: nn.Module, overwrites: bool) -> ptrain.Job:
        teacher = copy.deepcopy(inner).requires_grad_(False)
        most, done = [0.999], [0]

        def loss(called: nn.Module, rows: Tensor) -> Tensor:
            output = called(rows[:, :FEATURES])
            wanted = teacher(rows[:, :FEATURES])
            return F.mse_loss(output, rows[:, FEATURES:]) + F.mse_loss(output, wanted)

        def follow() -> None:
            kept = 1 - min(most[0], (1 + done[0]) / (3 + done[0]))
            done[0] += 1
            if overwrites:
                most[0] = kept
            for slow, parameter in zip(teacher.parameters(), inner.parameters(), strict=True):
                slow.lerp_(parameter.detach(), 1 - kept)

        job = looped(model, loss=loss, optimizer=adamw(model, lr=5e-2), after_update=follow)
        return ptrain.Job(model=model, step=job.step, average=dict(teacher.named_parameters()))

    def plain() -> ptrain.Job:
        model = regressor()
        return loop(model, model, False)

    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())
        return loop(model, model.module, fault)

    return ptrain.verify(plain, job, row_batches(8), share=my_rows)


@planted(
    source="https://github.com/lucidrains/DALLE-pytorch/issues/268",
    wrong=("parameters",), axis="dp", place="*", step=2,
    sentence="the ranks' learning rates differ: each lowers its own by its own loss",
    right=(RATE + "|rank", "rank|differ|own|other|learning rate|lr"),
    wrong_if=("not reduced", "counted twice", "moments"),
)  # fmt: skip
def rate_lowered_by_the_own_loss(fault: bool) -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.4, patience=0, threshold=0.0
        )

        def step(rows: Tensor) -> Tensor:
            loss = regression_loss(model, rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen = loss.detach().clone()
            if is_parallel and not fault:
                dist.all_reduce(seen)
                seen /= size()
            schedule.step(float(seen))
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    return ptrain.verify(
        lambda: loop(regressor(), False),
        lambda: loop(DistributedDataParallel(regressor()), True),
        row_batches(8),
        share=my_rows,
    )


@planted(
    source="https://github.com/verl-project/verl/issues/7834",
    wrong=("gradients",), axis="none", place="embed.weight, head.weight", step=0,
    sentence="embedding and head are no longer tied: each has only its own part of the gradient",
    right=("embed|head", "tied|untied|share|own|part|lack|separate|two|missing|twice"),
    wrong_if=("not reduced", "learning rate", "qkv", "sample"),
)  # fmt: skip
def untied_once_materialised(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = writer(is_tied=True)
        if fault:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return looped(DistributedDataParallel(model), loss=token_loss)

    return ptrain.verify(
        lambda: looped(writer(is_tied=True), loss=token_loss),
        job,
        token_batches(),
        share=my_rows,
    )
