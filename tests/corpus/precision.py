"""Faults of mixed precision: master weights, scalers, and accumulation in 16 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.fault import planted
from tests.corpus.parts import (
    adamw,
    average,
    looped,
    my_rows,
    rank,
    regression_loss,
    regressor,
    row_batches,
    token_batches,
    token_loss,
    total,
    writer,
)

ROUNDING = "round|precision|bf16|16 bit|bfloat16|dtype|cast"


class MasterWeights:
    """AdamW on copies of the parameters in fp32, which are rounded to them after each update."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.parameters = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.inner = torch.optim.AdamW(self.masters, lr=lr)

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.data.copy_(master.data)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


@planted(
    source="https://github.com/vllm-project/speculators/pull/765",
    wrong=("parameters",), axis="none", place="norm.weight", step=0,
    sentence="norm.weight never moves: updates are lost in bf16, there are no master weights",
    right=("norm", "update|move|" + ROUNDING),
    wrong_if=("not reduced", "counted twice"),
)  # fmt: skip
def updates_lost_without_master_weights(fault: bool) -> Any:
    def low(is_wrapped: bool) -> ptrain.Job:
        plain = regressor().bfloat16()
        if is_wrapped and fault:
            optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=5e-4)
        else:
            optimizer = MasterWeights(plain, lr=5e-4)
        reduce = (lambda: average(plain.parameters())) if is_wrapped else (lambda: None)
        return looped(plain, optimizer=optimizer, before_update=reduce)

    return ptrain.verify(
        lambda: low(False),
        lambda: low(True),
        row_batches(12).bfloat16(),
        share=my_rows,
        terms=ptrain.Terms(dtype=torch.bfloat16),
    )


def clipped_by(model: nn.Module, scale: float, unscales: bool) -> None:
    """Undo the loss's scale, and clip before or after that."""
    if not unscales:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= scale
    if unscales:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@planted(
    source="https://github.com/pytorch/examples/issues/1196",
    wrong=("gradients", "parameters"), axis="none", place="*", step=0,
    sentence="gradients are clipped before they are unscaled: far too small",
    right=("clip|scale|unscale|small|factor|gradient", "small|scale|factor|clip|times|norm"),
    wrong_if=("not reduced", "counted twice", "learning rate"),
)  # fmt: skip
def clipped_before_unscaling(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(rows: Tensor) -> Tensor:
            loss = regression_loss(model, rows)
            (loss * 1024).backward()
            clipped_by(model, 1024, unscales=not fault)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    def plain() -> ptrain.Job:
        model = regressor()
        return looped(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            before_update=lambda: clipped_by(model, 1, unscales=True),
        )

    return ptrain.verify(plain, job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/pytorch/pytorch/pull/76918",
    wrong=("parameters",), axis="dp", place="norm.*, up.*", step=3,
    sentence="at step 3 rank 0 updates its slices, rank 1 skips: each looks for overflow alone",
    right=("update|skip|overflow|inf|parameter", "rank|slice|own|step 3|differ|differ"),
    wrong_if=("not reduced", "learning rate", "counted twice"),
)  # fmt: skip
def overflow_seen_by_one_rank(fault: bool) -> Any:
    batches = row_batches()
    batches[3, 7, 8] = 1000.0  # a target whose gradient at `down` is infinite in fp16

    def guarded(is_parallel: bool) -> ptrain.Job:
        model = regressor()
        parts = [[*model.norm.parameters(), *model.up.parameters()], [*model.down.parameters()]]
        own = parts[rank()] if is_parallel else parts[0] + parts[1]
        optimizer = torch.optim.SGD(own, lr=0.05)

        def step(rows: Tensor) -> Tensor:
            loss = regression_loss(model, rows) * len(rows) / 8
            loss.backward()
            if is_parallel:
                total(model.parameters())
            overflows = torch.tensor(float(any((p.grad * 300).half().isinf().any() for p in own)))
            if is_parallel and not fault:
                dist.all_reduce(overflows)
            if not overflows:
                optimizer.step()
            for number, part in enumerate(parts if is_parallel else ()):
                for parameter in part:
                    dist.broadcast(parameter.data, src=number)
            model.zero_grad()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    return ptrain.verify(
        lambda: guarded(False),
        lambda: guarded(True),
        batches,
        share=my_rows,
        terms=ptrain.Terms(loss="sum"),
    )


@planted(
    source="https://github.com/deepspeedai/DeepSpeed/issues/1800",
    wrong=("gradients",), axis="none", place="*", step=0,
    sentence="gradients are rounded: micro-batches are accumulated in bf16",
    right=(ROUNDING, "gradient|accumul"),
    wrong_if=("not reduced", "counted twice", "learning rate"),
)  # fmt: skip
def accumulated_in_bf16(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = writer()
        optimizer = adamw(model)
        kept = torch.bfloat16 if fault else torch.float32

        def step(tokens: Tensor) -> Tensor:
            sums = [torch.zeros_like(p, dtype=kept) for p in model.parameters()]
            loss = torch.zeros(())
            for micro in tokens.chunk(2):
                part = token_loss(model, micro) / 2
                part.backward()
                loss += part.detach()
                for held, parameter in zip(sums, model.parameters(), strict=True):
                    held += parameter.grad.to(kept)
                    parameter.grad = None
            for held, parameter in zip(sums, model.parameters(), strict=True):
                parameter.grad = held.float()
            average(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return ptrain.Job(model=model, step=step)

    return ptrain.verify(
        lambda: looped(writer(), loss=token_loss), job, token_batches(), share=my_rows
    )


@planted(
    source="https://github.com/pytorch/pytorch/issues/106395",
    wrong=("gradients",), axis="dp", place="*", step=0,
    sentence="gradients are rounded: the reduce-scatter over dp runs in bf16",
    right=(ROUNDING, "gradient|reduc"),
    wrong_if=("not reduced", "counted twice", "learning rate"),
)  # fmt: skip
def reduced_in_bf16(fault: bool) -> Any:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if fault else None)
    return ptrain.verify(
        lambda: looped(writer(), loss=token_loss),
        lambda: looped(fully_shard(writer(), mp_policy=policy), loss=token_loss),
        token_batches(),
        share=my_rows,
    )
