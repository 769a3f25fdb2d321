"""Faults of the reduction of gradients over replicas."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.collectives import GatherParts, gathered, own_part
from tests.corpus.experts import whole_mixture
from tests.corpus.fault import DATA, NOT_REDUCED, TOO_LARGE, TOO_SMALL, planted
from tests.corpus.parts import (
    FEATURES,
    Regressor,
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
from tests.corpus.tensor import sgd


@planted(
    source="https://github.com/OpenNMT/OpenNMT-py/issues/2295",
    wrong=("gradients",), axis="dp", place="*", step=0,
    sentence="gradients are read before they are reduced over dp: the async all-reduce is awaited "
             "after the update only",
    right=(NOT_REDUCED + "|await|wait|async|too early|unfinished|before", DATA),
    wrong_if=("learning rate", "counted twice"),
)  # fmt: skip
def reduction_awaited_too_late(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = regressor()
        optimizer = adamw(model)
        parameters = list(model.parameters())
        slow = [torch.zeros(2_000_000) for _ in range(4)]  # what else is on the wire

        def step(rows: Tensor) -> Tensor:
            loss = regression_loss(model, rows)
            loss.backward()
            flat = torch.cat([p.grad.flatten() for p in parameters]) / size()
            works = [dist.all_reduce(tensor, async_op=True) for tensor in [*slow, flat]]
            if not fault:
                works[-1].wait()
            sizes = [p.numel() for p in parameters]
            for parameter, part in zip(parameters, flat.split(sizes), strict=True):
                parameter.grad = part.clone().view_as(parameter)
            optimizer.step()
            optimizer.zero_grad()
            for work in works:
                work.wait()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


def grid(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def averaged_over_grid(fault: bool, replicas: int, shards: int) -> Any:
    """Sum within the shards and divide by all ranks, then sum over the replicas, and divide by
    them once more if `fault`."""
    mesh = grid(replicas, shards)

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("shard"))
            parameter.grad /= size()
            dist.all_reduce(parameter.grad, group=mesh.get_group("replicate"))
            parameter.grad /= replicas if fault else 1

    def job() -> ptrain.Job:
        model = regressor()
        return looped(model, optimizer=sgd(model), before_update=lambda: reduce(model))

    def plain() -> ptrain.Job:
        model = regressor()
        return looped(model, optimizer=sgd(model))

    return ptrain.verify(
        plain,
        job,
        row_batches(),
        share=my_rows,
        terms=ptrain.Terms(mesh=mesh),
    )


@planted(
    source="https://github.com/pytorch/pytorch/issues/155903",
    wrong=("gradients",), axis="dp", place="*", step=0, ranks=4,
    sentence="gradients are half of what they should be: divided by all ranks, then by the "
             "replicas once more",
    right=(TOO_SMALL, "gradient"),
    wrong_if=("not reduced", "learning rate", "over shard"),
)  # fmt: skip
def replicas_averaged_twice(fault: bool) -> Any:
    return averaged_over_grid(fault, 2, 2)


@planted(
    source="https://github.com/pytorch/pytorch/issues/155903",
    wrong=("gradients",), axis="dp", place="*", step=0, ranks=8,
    sentence="gradients are a quarter of what they should be: divided by all 8 ranks, then by the "
             "4 replicas once more",
    right=("quarter|0.25|1/4|4 times too small|divided by 4|÷ 4|by 4|factor 4", "gradient"),
    wrong_if=("not reduced", "learning rate", "over shard"),
)  # fmt: skip
def unequal_replicas_averaged_twice(fault: bool) -> Any:
    return averaged_over_grid(fault, 4, 2)


@planted(
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/3135",
    wrong=("gradients",), axis="dp", place="experts.*", step=0, ranks=4,
    sentence="the experts' gradients are not reduced over the replicas: their mesh lacks that axis",
    right=(NOT_REDUCED, "expert", DATA),
    wrong_if=("router", "head.weight", "learning rate", "over shard"),
)  # fmt: skip
def experts_without_the_replicas(fault: bool) -> Any:
    mesh = grid(2, 2)

    def job() -> ptrain.Job:
        model = whole_mixture()

        def reduce() -> None:
            for name, parameter in model.named_parameters():
                axes = ("shard",) if fault and "experts" in name else ("shard", "replicate")
                for axis in axes:
                    dist.all_reduce(parameter.grad, group=mesh.get_group(axis))
                    parameter.grad /= 2

        return looped(model, before_update=reduce)

    return ptrain.verify(
        lambda: looped(whole_mixture()),
        job,
        row_batches(size=16),
        share=my_rows,
        terms=ptrain.Terms(mesh=mesh),
    )


class Adapted(Regressor):
    """The regressor with a low-rank adapter parallel to `up`, which `attach` adds."""

    def attach(self) -> None:
        torch.manual_seed(7)
        self.adapter_in = nn.Parameter(torch.randn(2, FEATURES) / 4)
        self.adapter_out = nn.Parameter(torch.randn(16, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        change = F.linear(F.linear(x, self.adapter_in), self.adapter_out)
        return self.down(F.gelu(self.up(x) + change))


def bare_adapted() -> Adapted:
    torch.manual_seed(0)
    return Adapted()


@planted(
    source="https://github.com/huggingface/transformers/pull/48873",
    wrong=("gradients",), axis="dp", place="adapter*", step=0,
    sentence="gradients of the adapter are not reduced over dp: it is attached after fully_shard",
    right=(NOT_REDUCED, "adapter", DATA),
    wrong_if=("up.weight", "down.weight", "learning rate"),
)  # fmt: skip
def adapter_attached_after_sharding(fault: bool) -> Any:
    def plain() -> ptrain.Job:
        model = bare_adapted()
        model.attach()
        return looped(model)

    def job() -> ptrain.Job:
        model = fully_shard(bare_adapted())
        model.attach()
        adapter = [model.adapter_in, model.adapter_out]
        return looped(model, before_update=lambda: None if fault else average(adapter))

    return ptrain.verify(plain, job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/deepspeedai/DeepSpeed/pull/7985",
    wrong=("gradients",), axis="none", place="*", step=0,
    sentence="the last micro-batch's gradient misses the reduction and leaks into the next step",
    right=("micro-batch|last|step before|earlier|sample|row",
           "miss|lack|leak|left|late|only|not in|previous"),
    wrong_if=("learning rate", "counted twice"),
)  # fmt: skip
def last_micro_batch_leaks_into_the_next_step(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = regressor()
        optimizer = adamw(model)
        kept = [torch.zeros_like(p) for p in model.parameters()]

        def step(rows: Tensor) -> Tensor:
            losses = []
            for number, micro in enumerate(rows.chunk(2)):
                losses.append(regression_loss(model, micro))
                (losses[-1] / 2).backward()
                if number == 0 or not fault:
                    keep()
            reduced = [held.clone() for held in kept]
            for held in kept:
                held.zero_()
            keep()
            for parameter, gradient in zip(model.parameters(), reduced, strict=True):
                parameter.grad = gradient
            average(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).mean().detach()

        def keep() -> None:
            for held, parameter in zip(kept, model.parameters(), strict=True):
                if parameter.grad is not None:
                    held += parameter.grad
                parameter.grad = None

        return ptrain.Job(model=model, step=step)

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


class TwoTowers(nn.Module):
    """Features of rows and of what belongs to them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.left(rows[:, :4]), self.right(rows[:, 4:8])
        return F.normalize(left, dim=-1), F.normalize(right, dim=-1)


def paired_rows() -> Tensor:
    rows = row_batches()
    rows[..., 4:8] = rows[..., :4].flip(-1) + 0.3 * rows[..., 4:8]
    return rows


@planted(
    source="https://github.com/facebookresearch/SLIP/issues/31",
    wrong=("gradients",), axis="dp", place="*", step=0,
    sentence="features of the other rank give no gradient: the gather is not differentiable",
    right=("gather|feature|negative|other rank|across|differentiable|detach|rows of", DATA),
    wrong_if=("learning rate", "counted twice", "not averaged", "not reduced"),
)  # fmt: skip
def features_gathered_without_gradient(fault: bool) -> Any:
    def gather(own: Tensor) -> Tensor:
        if not fault:
            return GatherParts.apply(own, 0)
        parts = list(gathered(own.detach(), 0).chunk(size()))
        parts[rank()] = own
        return torch.cat(parts)

    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        def loss(called: nn.Module, rows: Tensor) -> Tensor:
            left, right = called(rows)
            lefts, rights = (gather(left), gather(right)) if is_parallel else (left, right)
            labels = torch.arange(len(lefts))
            labels = own_part(labels, 0) if is_parallel else labels
            forth = F.cross_entropy(4 * left @ rights.T, labels)
            return (forth + F.cross_entropy(4 * right @ lefts.T, labels)) / 2

        return looped(model, loss=loss)

    return ptrain.verify(
        lambda: loop(TwoTowers(), False),
        lambda: loop(DistributedDataParallel(TwoTowers()), True),
        paired_rows(),
        share=my_rows,
    )


class Shared(nn.Module):
    """A layer that is called twice, and one that only some ranks' rows need."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.common = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
        self.rare = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        is_rare = x[:, :1] > 0.9
        y = self.common(hidden)
        return y + is_rare * self.rare(hidden) if is_rare.any() else y


def rare_rows() -> Tensor:
    """Return rows of which those of rank 1 alone need the rare layer in every batch."""
    rows = row_batches()
    rows[..., :4, 0] = rows[..., :4, 0].clamp(max=0.8)
    rows[..., 6, 0] = 1.5
    return rows


def slow_descent(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.02)


@planted(
    source="https://github.com/deepspeedai/DeepSpeed/pull/291",
    wrong=("gradients",), axis="dp", place="rare.*", step=0,
    sentence="the rare layer's gradient is divided by the ranks that used it, not by all",
    right=(TOO_LARGE, "rare"),
    wrong_if=("not reduced", "common", "trunk", "learning rate"),
)  # fmt: skip
def averaged_over_the_ranks_that_used_it(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = Shared()

        def reduce() -> None:
            for parameter in model.parameters():
                used = torch.tensor([float(parameter.grad is not None)])
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(used)
                dist.all_reduce(parameter.grad)
                parameter.grad /= float(used) if fault else size()

        return looped(model, optimizer=slow_descent(model), before_update=reduce)

    def plain() -> ptrain.Job:
        model = Shared()
        return looped(model, optimizer=slow_descent(model))

    return ptrain.verify(plain, job, rare_rows(), share=my_rows)
