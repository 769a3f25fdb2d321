"""Faults of data parallelism: DistributedDataParallel, and all-reduces by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.collectives import MeanOverRanks
from tests.corpus.fault import DATA, NOT_REDUCED, TOO_LARGE, TOO_SMALL, planted
from tests.corpus.parts import (
    accumulated,
    adamw,
    average,
    looped,
    my_rows,
    rank,
    regression_loss,
    regressor,
    row_batches,
    size,
    token_batches,
    total,
    writer,
)


def stepped(model: nn.Module, forward_backward: Any) -> ptrain.Job:
    """Return a loop whose forward and backward are the script's own."""
    optimizer = adamw(model)

    def step(rows: Tensor) -> Any:
        loss = forward_backward(rows)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ptrain.Job(model=model, step=step)


@planted(
    source="https://github.com/modelscope/FunASR/pull/3472",
    wrong=("gradients",), axis="dp", place="*", step=0,
    sentence="the last micro-batch's gradients are not reduced over dp: no_sync covers it",
    right=(NOT_REDUCED, DATA + "|micro"),
    wrong_if=("learning rate", "sample is counted"),
)  # fmt: skip
def no_sync_on_the_last_micro_batch(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())

        def forward_backward(rows: Tensor) -> Tensor:
            losses = []
            for number, micro in enumerate(rows.chunk(2)):
                model.require_backward_grad_sync = number == (0 if fault else 1)
                losses.append(regression_loss(model, micro))
                (losses[-1] / 2).backward()
            return torch.stack(losses).mean().detach()

        return stepped(model, forward_backward)

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/jingyaogong/minimind/issues/853",
    wrong=("gradients",), axis="dp", place="*", step=0,
    sentence="no gradient is reduced over dp: forward goes past the wrapper, by model.module",
    right=(NOT_REDUCED, DATA),
    wrong_if=("learning rate", "optimizer was made"),
)  # fmt: skip
def wrapper_bypassed(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())
        called = model.module if fault else model
        return looped(model, loss=lambda _, rows: regression_loss(called, rows))

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/areal-project/AReaL/pull/1273",
    wrong=("gradients",), axis="none", place="*", step=0,
    sentence="gradients are half of what they should be: divided by the micro-batches twice",
    right=(TOO_SMALL, "gradient"),
    wrong_if=("not reduced", "lack"),
)  # fmt: skip
def accumulation_divided_twice(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())
        scale = 0.25 if fault else 0.5
        return stepped(model, lambda rows: accumulated(model, rows, scale=scale))

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/karpathy/nanoGPT/issues/206",
    wrong=("gradients",), axis="none", place="*", step=0,
    sentence="gradients are twice what they should be: micro-batches are summed, not averaged",
    right=(TOO_LARGE, "gradient|micro"),
    wrong_if=("not reduced", "lack"),
)  # fmt: skip
def accumulation_not_divided(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())
        scale = 1.0 if fault else 0.5
        return stepped(model, lambda rows: accumulated(model, rows, scale=scale))

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/NVlabs/stylegan3/issues/184",
    wrong=("gradients",), axis="dp", place="*", step=0,
    sentence="gradients are twice what they should be: summed over dp, not averaged",
    right=(TOO_LARGE, DATA),
    wrong_if=("not reduced", "lack"),
)  # fmt: skip
def summed_over_ranks(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = regressor()
        reduce = total if fault else average
        return looped(model, before_update=lambda: reduce(model.parameters()))

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


def masked_loss(model: nn.Module, tokens: Tensor, count: Tensor | None = None) -> Tensor:
    """Cross entropy over tokens that are no padding (0), over their own number or a given one."""
    logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    counted = (labels != 0).flatten()
    return (losses * counted).sum() / (counted.sum() if count is None else count)


@planted(
    source="https://github.com/huggingface/transformers/pull/34191",
    wrong=("gradients", "loss"), axis="dp", place="*", step=0,
    sentence="the mean of the ranks' means is taken, though they have unequal numbers of tokens",
    right=("weight|mean of|normal|token|count|number of|share", DATA),
    wrong_if=("not reduced", "lack", "learning rate"),
)  # fmt: skip
def mean_of_unequal_means(fault: bool) -> Any:
    batches = token_batches()
    batches[:, 2:, 4:] = 0  # the second half of the samples is short

    def job() -> ptrain.Job:
        model = DistributedDataParallel(writer())

        def loss(called: nn.Module, tokens: Tensor) -> Tensor:
            own = (my_rows(tokens)[:, 1:] != 0).sum()
            everyone = (tokens[:, 1:] != 0).sum() / size()
            return masked_loss(called, my_rows(tokens), own if fault else everyone)

        return looped(model, loss=loss)

    return ptrain.verify(lambda: looped(writer(), loss=masked_loss), job, batches)


class Standardised(nn.Module):
    """A regressor whose features are standardised by the batch's mean, over all ranks or not."""

    def __init__(self, over_ranks: bool) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 1)
        self.over_ranks = over_ranks

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        mean = x.mean(dim=0)
        return self.out(F.gelu(x - (MeanOverRanks.apply(mean) if self.over_ranks else mean)))


def standardised(over_ranks: bool) -> Standardised:
    torch.manual_seed(0)
    return Standardised(over_ranks)


@planted(
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html",
    wrong=("loss", "gradients", "activations"), axis="dp", place="*", step=0,
    sentence="the batch's statistics are those of a rank's share, not of the whole batch",
    right=("statistic|batch norm|batchnorm|mean over|loss|forward|output|activation", DATA),
    wrong_if=("not reduced", "counted twice", "learning rate"),
)  # fmt: skip
def statistics_of_a_share(fault: bool) -> Any:
    def job() -> ptrain.Job:
        return looped(DistributedDataParallel(standardised(not fault)))

    return ptrain.verify(lambda: looped(standardised(False)), job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/huggingface/accelerate/issues/641",
    wrong=("gradients",), axis="dp", place="*", step=0,
    sentence="gradients are clipped on each rank before they are reduced over dp",
    right=("clip|norm", "before|own|each rank|rank"),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def clipped_before_reduction(fault: bool) -> Any:
    def clip(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)

    def plain() -> ptrain.Job:
        model = regressor()
        return looped(model, before_update=lambda: clip(model))

    def job() -> ptrain.Job:
        model = regressor()

        def before_update() -> None:
            if fault:
                clip(model)
            average(model.parameters())
            if not fault:
                clip(model)

        return looped(model, before_update=before_update)

    return ptrain.verify(plain, job, row_batches(), share=my_rows)


class TwoHeads(nn.Module):
    """A trunk with two heads, of which a micro-batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](F.gelu(self.trunk(x)))


@planted(
    source="https://github.com/pytorch/pytorch/issues/69031",
    wrong=("gradients",), axis="dp", place="heads.0.*", step=0,
    sentence="gradients of heads.0 are not reduced over dp: the last pass does not use it",
    right=(NOT_REDUCED, DATA, "heads.0"),
    wrong_if=("heads.1", "learning rate"),
)  # fmt: skip
def head_unused_in_the_last_pass(fault: bool) -> Any:
    def two_heads() -> TwoHeads:
        torch.manual_seed(0)
        return TwoHeads()

    def halves(model: nn.Module, rows: Tensor) -> Tensor:
        losses = []
        for head, micro in enumerate(rows.unflatten(0, (2, -1))):
            loss = F.mse_loss(model(micro[:, :8], head), micro[:, 8:])
            (loss / 2).backward()
            losses.append(loss.detach())
        return (losses[0] + losses[1]) / 2

    def plain() -> ptrain.Job:
        model = two_heads()
        return stepped(model, lambda rows: halves(model, rows))

    def job() -> ptrain.Job:
        model = two_heads()

        def forward_backward(rows: Tensor) -> Tensor:
            loss = halves(model, rows)
            average([*model.trunk.parameters(), *model.heads[1].parameters()])
            if not fault:
                average(model.heads[0].parameters())
            return loss

        return stepped(model, forward_backward)

    def share(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (2, -1)).chunk(size(), dim=1)[rank()].flatten(0, 1)

    return ptrain.verify(plain, job, row_batches(), share=share)


@planted(
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/20340",
    wrong=("gradients",), axis="dp", place="up.*", step=3,
    sentence="gradients of up are not reduced over dp once it is unfrozen, from step 3",
    right=(NOT_REDUCED, DATA, "up"),
    wrong_if=("down.weight", "norm.weight"),
)  # fmt: skip
def unfrozen_after_wrapping(fault: bool) -> Any:
    def thawing(is_wrapped: bool) -> ptrain.Job:
        plain = regressor()
        plain.up.requires_grad_(False)
        model = DistributedDataParallel(plain) if is_wrapped else plain
        optimizer = adamw(plain)
        steps = iter(range(100))

        def forward_backward(rows: Tensor) -> Tensor:
            if next(steps) == 3:
                plain.up.requires_grad_(True)
            loss = regression_loss(model, rows)
            loss.backward()
            if is_wrapped and not fault:
                average(plain.up.parameters())
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return ptrain.Job(model=model, step=forward_backward)

    return ptrain.verify(
        lambda: thawing(False), lambda: thawing(True), row_batches(8), share=my_rows
    )


@planted(
    source="https://github.com/HorizonRobotics/alf/pull/1804",
    wrong=("parameters",), axis="dp", place="rank 1", step=0,
    sentence="rank 1 starts from other weights: they are drawn there and never broadcast",
    right=("weight|parameter", "start|initial|broadcast|before the first", "rank|replica"),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def weights_never_broadcast(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = regressor()
        if fault and rank() > 0:
            torch.manual_seed(rank())
            torch.nn.init.uniform_(model.up.weight, -0.3, 0.3)
        return looped(model, before_update=lambda: average(model.parameters()))

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)
