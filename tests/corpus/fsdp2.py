"""Faults around fully_shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import ptrain
from tests.corpus.ddp import stepped
from tests.corpus.fault import DATA, NOT_REDUCED, TOO_LARGE, planted
from tests.corpus.parts import (
    Regressor,
    adamw,
    looped,
    my_rows,
    regression_loss,
    regressor,
    row_batches,
    scale_to,
    square_sum,
)


def sharded(**options: Any) -> FSDPModule:
    model = regressor()
    fully_shard(model.up, **options)
    return fully_shard(model, **options)


def local_gradients(model: torch.nn.Module) -> list[Tensor]:
    """Return each parameter's slice with its gradient's slice."""
    slices = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        local = parameter.to_local().detach()
        local.grad = parameter.grad.to_local()
        slices.append(local)
    return slices


@planted(
    source="https://github.com/areal-project/AReaL/issues/312",
    wrong=("gradients", "parameters"), axis="dp", place="*", step=0,
    sentence="each rank clips by the norm of its own slices, not by the norm of the whole gradient",
    right=("clip|norm", "own|local|rank|slice|shard"),
    wrong_if=("not reduced", "learning rate", "counted twice"),
)  # fmt: skip
def clipped_by_the_norm_of_a_shard(fault: bool) -> Any:
    def plain() -> ptrain.Job:
        model = regressor()
        return looped(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            before_update=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3),
        )

    def job() -> ptrain.Job:
        model = sharded()

        def clip() -> None:
            slices = local_gradients(model)
            squares = square_sum(slices)
            if not fault:
                torch.distributed.all_reduce(squares)
            scale_to(slices, float(squares.sqrt()), 0.3)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return looped(model, optimizer=optimizer, before_update=clip)

    return ptrain.verify(plain, job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/pytorch/pytorch/pull/118298",
    wrong=("gradients",), axis="dp", place="*", step=0,
    sentence="gradients never reach the sharded parameters: the reduce-scatter is left off",
    right=(NOT_REDUCED + "|no gradient|never|reduce-scatter|do not move|does not move", ),
    wrong_if=("learning rate", "frozen"),
)  # fmt: skip
def reduction_left_off(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = sharded()

        def forward_backward(rows: Tensor) -> Tensor:
            losses = []
            for number, micro in enumerate(rows.chunk(2)):
                is_last = number == 1
                model.set_requires_gradient_sync(is_last and not fault)
                losses.append(regression_loss(model, micro))
                (losses[-1] / 2).backward()
            return torch.stack(losses).mean().detach()

        return stepped(model, forward_backward)

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


@planted(
    source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
    wrong=("parameters",), axis="none", place="*", step=0,
    sentence="parameters do not move: the optimizer holds those from before fully_shard",
    right=("optimizer|update|step", "not move|never move|not updated|before|unchanged|no update|"
           "does not hold|other parameters|still"),
    wrong_if=("not reduced", "learning rate is"),
)  # fmt: skip
def optimizer_of_the_old_parameters(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = regressor()
        early = adamw(model)
        fully_shard(model)
        return looped(model, optimizer=early if fault else adamw(model))

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/pytorch/torchtitan/issues/2972",
    wrong=("gradients",), axis="dp", place="*", step=0,
    sentence="gradients are twice what they should be: the reduce-scatter does not divide by dp",
    right=(TOO_LARGE, DATA),
    wrong_if=("not reduced", "lack"),
)  # fmt: skip
def division_disabled(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = sharded()
        for module in model.modules():
            if isinstance(module, FSDPModule) and fault:
                module.set_force_sum_reduction_for_comms(True)  # gloo scales in no other way
                module.set_gradient_divide_factor(1.0)
        return looped(model)

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


@planted(
    source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
    wrong=("gradients",), axis="dp", place="norm.*", step=0,
    sentence="gradients of norm are not reduced over dp: its parameters are ignored_params",
    right=(NOT_REDUCED, DATA, "norm"),
    wrong_if=("up.weight", "down.weight"),
)  # fmt: skip
def ignored_parameters_not_reduced(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = regressor()
        assert isinstance(model, Regressor)
        ignored = set(model.norm.parameters()) if fault else None
        return looped(fully_shard(model, ignored_params=ignored))

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/3530",
    wrong=("gradients",), axis="none", place="*", step=0,
    sentence="only the last micro-batch counts: gradients of the earlier one are thrown away",
    right=("micro|sample|rows|part of the batch|half", "lost|thrown|missing|lack|left out|"
           "not counted|dropped|only|0 times"),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def earlier_micro_batches_thrown_away(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = sharded()

        def forward_backward(rows: Tensor) -> Tensor:
            losses = []
            for micro in rows.chunk(2):
                if fault:
                    model.zero_grad()
                losses.append(regression_loss(model, micro))
                (losses[-1] / 2).backward()
            return torch.stack(losses).mean().detach()

        return stepped(model, forward_backward)

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)
