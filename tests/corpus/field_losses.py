"""Faults of terms of the loss: balancing, distillation, pairs, smoothing, and counts of tokens."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.collectives import summed
from tests.corpus.fault import TOO_LARGE, TOO_SMALL, planted
from tests.corpus.parts import (
    FEATURES,
    adamw,
    looped,
    my_rows,
    rank,
    row_batches,
    size,
    token_batches,
    writer,
)

TERM = "balanc|auxiliary|aux|term|second loss"


class AttachLoss(torch.autograd.Function):
    """Identity on x; in backward the loss gets a gradient of one, as if it were added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())


class SoftMixture(nn.Module):
    """Four experts, all of which a router weighs for every row, and a head; returns the router's
    probabilities too."""

    def __init__(self, attaches: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(FEATURES, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, 8) for _ in range(4))
        self.head = nn.Linear(8, 1)
        self.attaches = attaches

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.router(x).softmax(dim=-1)
        if self.attaches is not None:
            attached = AttachLoss.apply(weights, 0.2 * concentration(weights))
            weights = attached if self.attaches else weights
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return self.head(F.gelu((outputs * weights[..., None]).sum(dim=1))), weights


def concentration(weights: Tensor) -> Tensor:
    """Return how far each row's weights are from equal ones, as a mean over the rows."""
    return weights.shape[-1] * weights.square().sum(dim=-1).mean()


def mixture_loss(model: nn.Module, rows: Tensor, times: float) -> Tensor:
    output, weights = model(rows[:, :FEATURES])
    loss = F.mse_loss(output, rows[:, FEATURES:])
    return loss + times * 0.2 * concentration(weights) if times else loss


@planted(
    source="https://github.com/NVIDIA-NeMo/Automodel/issues/1408",
    wrong=("gradients",), axis="none", place="router.weight", step=0,
    sentence="the balancing loss has no gradient: what its autograd function returns is discarded",
    right=("router", TERM + "|no gradient|detach|lack|missing"),
    wrong_if=("not reduced", "learning rate", "head.weight", "experts."),
)  # fmt: skip
def balancing_loss_without_gradient(fault: bool) -> Any:
    def loop(model: nn.Module) -> ptrain.Job:
        return looped(model, loss=lambda called, rows: mixture_loss(called, rows, 0))

    return ptrain.verify(
        lambda: loop(SoftMixture(True)),
        lambda: loop(DistributedDataParallel(SoftMixture(not fault))),
        row_batches(),
        share=my_rows,
    )


@planted(
    source="https://github.com/microsoft/protein-frame-flow/issues/23",
    wrong=("loss", "gradients"), axis="none", place="router.weight", step=0,
    sentence="the auxiliary loss is counted twice: the model's loss has it already",
    right=("loss|router|" + TERM, TOO_LARGE + "|too large|added again"),
    wrong_if=("not reduced", "learning rate", "head.weight", "experts."),
)  # fmt: skip
def auxiliary_loss_counted_twice(fault: bool) -> Any:
    def loop(model: nn.Module, times: float) -> ptrain.Job:
        return looped(model, loss=lambda called, rows: mixture_loss(called, rows, times))

    return ptrain.verify(
        lambda: loop(SoftMixture(), 1),
        lambda: loop(DistributedDataParallel(SoftMixture()), 2 if fault else 1),
        row_batches(),
        share=my_rows,
    )


@planted(
    source="https://github.com/NVIDIA/Megatron-LM/issues/3672",
    wrong=("loss", "gradients"), axis="dp", place="router.weight", step=0,
    sentence="the global balancing loss is half: one rank's rows, divided by the rows of all",
    right=("loss|router|" + TERM, TOO_SMALL + "|too small"),
    wrong_if=("not reduced", "learning rate", "head.weight", "experts."),
)  # fmt: skip
def balancing_loss_divided_by_all_rows(fault: bool) -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        def loss(called: nn.Module, rows: Tensor) -> Tensor:
            output, weights = called(rows[:, :FEATURES])
            loads = weights.detach().mean(dim=0)
            loads = summed(loads) / size() if is_parallel else loads
            count = len(rows) * (size() if is_parallel and fault else 1)
            balance = 4 * (loads * weights.sum(dim=0) / count).sum()
            return F.mse_loss(output, rows[:, FEATURES:]) + 0.5 * balance

        return looped(model, loss=loss)

    return ptrain.verify(
        lambda: loop(SoftMixture(), False),
        lambda: loop(DistributedDataParallel(SoftMixture()), True),
        row_batches(),
        share=my_rows,
    )


@planted(
    source="https://github.com/modelscope/easydistill/pull/16",
    wrong=("loss", "gradients"), axis="none", place="*", step=0,
    sentence="the distillation term is divided by the number of tokens twice",
    right=("distil|kl|term|loss|teacher", TOO_SMALL + "|too small|divided|token|times"),
    wrong_if=("not reduced", "learning rate", "sample is counted"),
)  # fmt: skip
def distillation_divided_by_tokens_twice(fault: bool) -> Any:
    def loop(model: nn.Module, times: int) -> ptrain.Job:
        teacher = copy.deepcopy(writer(is_tied=True)).requires_grad_(False)

        def loss(called: nn.Module, tokens: Tensor) -> Tensor:
            logits = called(tokens[:, :-1]).flatten(0, 1)
            wanted = teacher(tokens[:, :-1]).flatten(0, 1).softmax(dim=-1)
            divergence = F.kl_div(logits.log_softmax(dim=-1), wanted, reduction="sum")
            hard = F.cross_entropy(logits, tokens[:, 1:].flatten())
            return hard + divergence / len(logits) ** times

        return looped(model, loss=loss)

    return ptrain.verify(
        lambda: loop(writer(), 1),
        lambda: loop(DistributedDataParallel(writer()), 2 if fault else 1),
        token_batches(),
        share=my_rows,
    )


def log_probability(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probability of each sample, [batch]."""
    logits = model(tokens[:, :-1]).log_softmax(dim=-1)
    return logits.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(dim=-1)


@planted(
    source="https://github.com/allenai/open-instruct/pull/1182",
    wrong=("loss",), axis="dp", place="*", step=0,
    sentence="the reference model's log-probabilities are 0: gathered by MAX over zeros",
    right=("log-prob|margin|pair|frozen|cache|all-reduce|maximum|max|term", "loss"),
    wrong_if=("not reduced", "learning rate", "counted twice"),
)  # fmt: skip
def reference_gathered_by_maximum(fault: bool) -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        frozen = writer(is_tied=True).requires_grad_(False)

        def cached(pairs: Tensor) -> Tensor:
            """Return the frozen model's log-probabilities [pairs, 2], through the ranks' cache."""
            own = torch.stack([log_probability(frozen, pairs[:, side]) for side in (0, 1)], dim=1)
            if not is_parallel:
                return own
            whole = torch.full((len(pairs) * size(), 2), 0.0 if fault else -torch.inf)
            whole[rank() * len(pairs) : (rank() + 1) * len(pairs)] = own
            dist.all_reduce(whole, op=dist.ReduceOp.MAX)
            return whole.chunk(size())[rank()]

        def loss(called: nn.Module, pairs: Tensor) -> Tensor:
            chosen, rejected = cached(pairs).unbind(dim=1)
            margin = log_probability(called, pairs[:, 0]) - log_probability(called, pairs[:, 1])
            return -F.logsigmoid(0.3 * (margin - (chosen - rejected))).mean()

        return looped(model, loss=loss)

    return ptrain.verify(
        lambda: loop(writer(), False),
        lambda: loop(DistributedDataParallel(writer()), True),
        token_batches(size=8).unflatten(1, (4, 2)),
        share=my_rows,
    )


def masked_batches() -> list[list[Tensor]]:
    """Return inputs and labels; every second sample has labels for two of its tokens only."""
    batches = []
    for tokens in token_batches():
        labels = tokens[:, 1:].clone()
        labels[1::2, 2:] = -100
        batches.append([tokens[:, :-1], labels])
    return batches


def masked_sum(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")


@planted(
    source="https://github.com/allenai/open-instruct/pull/1161",
    wrong=("loss", "gradients"), axis="none", place="*", step=0,
    sentence="the mean of the micro-batches' means is taken, though they have unequal tokens",
    right=("token|micro-batch|weight|count", "mean|weigh|unequal|micro-batch|divid|accumul"),
    wrong_if=("not reduced", "learning rate", "sample is counted twice"),
)  # fmt: skip
def mean_of_unequal_micro_batches(fault: bool) -> Any:
    def whole_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return masked_sum(model, *batch) / (batch[1] >= 0).sum()

    def job() -> ptrain.Job:
        model = DistributedDataParallel(writer())
        optimizer = adamw(model)

        def step(batch: list[Tensor]) -> Tensor:
            inputs, labels = batch
            loss = torch.zeros(())
            for tokens, wanted in zip(inputs.chunk(2), labels.chunk(2), strict=True):
                count = 2 * (wanted >= 0).sum() if fault else (labels >= 0).sum()
                part = masked_sum(model, tokens, wanted) / count
                part.backward()
                loss += part.detach()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return ptrain.Job(model=model, step=step)

    return ptrain.verify(
        lambda: looped(writer(), loss=whole_loss),
        job,
        masked_batches(),
        share=lambda batch: [my_rows(part) for part in batch],
    )
