"""Faults that both sides have, since they stand in code that the reference takes from the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.fault import planted
from tests.corpus.parts import (
    adamw,
    looped,
    my_rows,
    regression_loss,
    regressor,
    row_batches,
    token_batches,
    token_loss,
    writer,
)

DIVIDED = ("not reduced", "counted twice", "tp", "dp lacks")


def both(job: Callable[[nn.Module], ptrain.Job], build: Any, batches: Any) -> Any:
    """Compare a job on the plain and on the wrapped model."""
    return ptrain.verify(
        lambda: job(build()),
        lambda: job(DistributedDataParallel(build())),
        batches,
        share=my_rows,
    )


def on_tokens(loss: Callable[[nn.Module, Tensor], Tensor], build: Any = writer) -> Any:
    return both(lambda model: looped(model, loss=loss), build, token_batches(8))


@planted(
    source="https://github.com/huggingface/transformers/issues/27517",
    wrong=("loss", "data"), axis="none", place="*", step=0,
    sentence="labels are not shifted: the model is asked for the token it is given",
    right=("label|target|token", "shift|same|copy|given|input"),
    wrong_if=DIVIDED,
)  # fmt: skip
def labels_not_shifted(fault: bool) -> Any:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        labels = tokens[:, :-1] if fault else tokens[:, 1:]
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten())

    return on_tokens(loss)


@planted(
    source="https://github.com/huggingface/transformers/issues/47394",
    wrong=("loss", "data"), axis="none", place="*", step=0,
    sentence="labels are shifted twice: the model is asked for the token after the next",
    right=("label|target|token", "shift|next|two|after"),
    wrong_if=DIVIDED,
)  # fmt: skip
def labels_shifted_twice(fault: bool) -> Any:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        if fault:
            logits, labels = model(tokens[:, :-1])[:, :-1], tokens[:, 2:]
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return token_loss(model, tokens)

    return on_tokens(loss)


@planted(
    source="https://github.com/paiml/entrenar/issues/310",
    wrong=("activations", "loss"), axis="none", place="*", step=0,
    sentence="there is no causal mask: outputs depend on later tokens",
    right=("causal|mask|later|future|following|after it", "token|mask|output|position|logit"),
    wrong_if=DIVIDED,
)  # fmt: skip
def no_causal_mask(fault: bool) -> Any:
    return on_tokens(token_loss, lambda: writer(causal=not fault))


@planted(
    source="https://github.com/NVIDIA/apex/issues/480",
    wrong=("optimizer state",), axis="none", place="*", step=1,
    sentence="the optimizer's state is emptied before every step: there is no momentum",
    right=("optimizer|moment|state|exp_avg", "lost|empt|reset|zero|step|new|counter|stay"),
    wrong_if=DIVIDED,
)  # fmt: skip
def state_emptied_every_step(fault: bool) -> Any:
    def job(model: nn.Module) -> ptrain.Job:
        optimizer = adamw(model)
        empty = optimizer.state.clear if fault else (lambda: None)
        return looped(model, optimizer=optimizer, before_update=empty)

    return both(job, regressor, row_batches(8))


@planted(
    source="https://x.com/karpathy/status/1013244313327681536",
    wrong=("gradients",), axis="none", place="*", step=1,
    sentence="gradients are never zeroed: each step adds to those of the steps before",
    right=("gradient", "zero|before|accumul|earlier|previous|kept|stale|left"),
    wrong_if=DIVIDED,
)  # fmt: skip
def gradients_never_zeroed(fault: bool) -> Any:
    def job(model: nn.Module) -> ptrain.Job:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(rows: Tensor) -> Tensor:
            loss = regression_loss(model, rows)
            loss.backward()
            optimizer.step()
            if not fault:
                optimizer.zero_grad()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    return both(job, regressor, row_batches(8))


@planted(
    source="https://karpathy.github.io/2019/04/25/recipe/",
    wrong=("parameters",), axis="none", place="down.*", step=0,
    sentence="down never moves: its parameters are not handed to the optimizer",
    right=("down", "not move|never|optimizer|not updated|unchanged|still|update|stay"),
    wrong_if=(*DIVIDED, "up.weight"),
)  # fmt: skip
def head_not_in_the_optimizer(fault: bool) -> Any:
    def job(model: nn.Module) -> ptrain.Job:
        handed = [p for name, p in model.named_parameters() if not (fault and "down" in name)]
        return looped(model, optimizer=torch.optim.AdamW(handed, lr=1e-2))

    return both(job, regressor, row_batches(8))


class CutModel(nn.Module):
    """Two layers, between which the graph may be cut."""

    def __init__(self, cuts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(8, 16), nn.Linear(16, 1)
        self.cuts = cuts

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.trunk(x))
        return self.head(x.detach() + 0 * x.sum() if self.cuts else x)


@planted(
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/2995",
    wrong=("gradients",), axis="none", place="trunk.*", step=0,
    sentence="trunk gets no gradient: its output is detached",
    right=("trunk", "no gradient|zero|0|none|never|not move|detach|still|unchanged|update"),
    wrong_if=(*DIVIDED, "head.weight"),
)  # fmt: skip
def trunk_detached(fault: bool) -> Any:
    return both(looped, lambda: CutModel(fault), row_batches(8))


@planted(
    source="https://x.com/karpathy/status/1013244313327681536",
    wrong=("loss",), axis="none", place="*", step=0,
    sentence="softmax is taken twice: cross entropy is given probabilities, not logits",
    right=("softmax|probabilit|logit|normal", "twice|loss|logit|softmax|probab"),
    wrong_if=DIVIDED,
)  # fmt: skip
def softmax_before_cross_entropy(fault: bool) -> Any:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        scores = logits.softmax(dim=-1) if fault else logits
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    return on_tokens(loss)


@planted(
    source="https://github.com/jzhang38/EasyContext/issues/21",
    wrong=("parameters",), axis="none", place="*", step=2,
    sentence="from step 2 on nothing moves: the learning rate is zero",
    right=("learning rate|lr|update|parameter|schedule", "zero|0|not move|still|stop|no update|"
           "unchanged"),
    wrong_if=DIVIDED,
)  # fmt: skip
def learning_rate_falls_to_zero(fault: bool) -> Any:
    def job(model: nn.Module) -> ptrain.Job:
        optimizer = adamw(model)
        last = 2 if fault else 20
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(0.0, 1 - step / last)
        )
        return looped(model, optimizer=optimizer, after_update=schedule.step)

    return both(job, regressor, row_batches(8))


@planted(
    source="https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449",
    wrong=("loss", "data"), axis="none", place="*", step=0,
    sentence="the last token of a document is asked for the first of the next one",
    right=("document|packed|boundary|label|target", "next|across|boundary|other|document"),
    wrong_if=DIVIDED,
)  # fmt: skip
def labels_across_documents(fault: bool) -> Any:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        labels = tokens[:, 1:].clone()
        if not fault:
            labels[:, 3] = -100  # where the second document begins
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten())

    return on_tokens(loss)


@planted(
    source="https://github.com/pytorch/pytorch/issues/51800",
    wrong=("parameters",), axis="none", place="*", step=0,
    sentence="all weights begin at zero: hidden units are all alike and never part",
    right=("zero|same|alike|initial|symmetr", "weight|parameter|initial|unit|gradient"),
    wrong_if=DIVIDED,
)  # fmt: skip
def weights_begin_at_zero(fault: bool) -> Any:
    def build() -> nn.Module:
        model = regressor()
        for parameter in model.up.parameters() if fault else ():
            torch.nn.init.zeros_(parameter)
        for parameter in model.down.parameters() if fault else ():
            torch.nn.init.constant_(parameter, 0.1)
        return model

    return both(looped, build, row_batches(8))
