"""Faults of a pipeline of two stages by hand: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ptrain
from tests.corpus.collectives import summed
from tests.corpus.fault import NOT_REDUCED, TOO_LARGE, planted
from tests.corpus.parts import (
    VOCAB,
    WIDTH,
    axis,
    looped,
    rank,
    regressor,
    row_batches,
    scale_to,
    square_sum,
    token_batches,
    token_loss,
    total,
)

Sent = Callable[[list[Tensor]], list[Tensor]]
PIPELINE = "pp|stage|pipeline|rank"


class RegressorStage(nn.Module):
    """norm and up on rank 0, down on rank 1."""

    hidden = 16

    def __init__(self) -> None:
        super().__init__()
        whole = regressor()
        if rank() == 0:
            self.norm, self.up = whole.norm, whole.up
        else:
            self.down = whole.down

    def first(self, rows: Tensor) -> Tensor:
        return F.gelu(self.up(self.norm(rows[:, :8])))

    def loss(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return F.mse_loss(self.down(hidden), rows[:, 8:])

    def hidden_shape(self, rows: Tensor) -> tuple[int, ...]:
        return (len(rows), 16)


def pipelined(
    stage: Any,
    batch: Tensor,
    *,
    scale: float = 0.5,
    activations: Sent = lambda tensors: tensors,
    gradients: Sent = lambda tensors: tensors,
) -> Tensor:
    """Run two micro-batches through both stages; return the mean loss on both ranks. What is
    sent goes through `activations` and `gradients`."""
    micros = list(batch.chunk(2))
    loss = torch.zeros(1)
    if rank() == 0:
        outputs = [stage.first(micro) for micro in micros]
        for tensor in activations([output.detach() for output in outputs]):
            dist.send(tensor.contiguous(), dst=1)
        for output in outputs:
            gradient = torch.empty_like(output)
            dist.recv(gradient, src=1)
            output.backward(gradient)
    else:
        inputs = [torch.empty(stage.hidden_shape(micro)) for micro in micros]
        for tensor in inputs:
            dist.recv(tensor, src=0)
            tensor.requires_grad_(True)
        losses = [stage.loss(x, micro) for x, micro in zip(inputs, micros, strict=True)]
        for value in losses:
            (value * scale).backward()
        for tensor in gradients([x.grad for x in inputs if x.grad is not None]):
            dist.send(tensor.contiguous(), dst=0)
        loss = torch.stack(losses).mean().detach().reshape(1)
    dist.broadcast(loss, src=1)
    return loss[0]


def staged(
    stage: nn.Module,
    *,
    optimizer: Any = None,
    before_update: Callable[[], Any] = lambda: None,
    **options: Any,
) -> ptrain.Job:
    chosen = optimizer or torch.optim.AdamW(stage.parameters(), lr=1e-2)

    def step(batch: Tensor) -> Tensor:
        loss = pipelined(stage, batch, **options)
        before_update()
        chosen.step()
        chosen.zero_grad()
        return loss

    return ptrain.Job(model=stage, step=step)


def terms() -> ptrain.Terms:
    return ptrain.Terms(mesh=axis("pp"), loss="same")


@planted(
    source="https://github.com/pytorch/torchtitan/issues/2972",
    wrong=("gradients",), axis="none", place="*", step=0,
    sentence="gradients are twice what they should be: the loss is not divided by micro-batches",
    right=(TOO_LARGE, "gradient|micro"),
    wrong_if=("not reduced", "lack"),
)  # fmt: skip
def pipeline_loss_not_divided(fault: bool) -> Any:
    return ptrain.verify(
        lambda: looped(regressor()),
        lambda: staged(RegressorStage(), scale=1.0 if fault else 0.5),
        row_batches(),
        terms=terms(),
    )


@planted(
    source="https://github.com/huggingface/picotron/pull/5",
    wrong=("gradients",), axis="pp", place="norm.*, up.*", step=0,
    sentence="stage 0's gradients are wrong: it is sent the first micro-batch's gradient twice",
    right=("up|norm|stage 0|rank 0", "gradient"),
    wrong_if=("down.weight", "not reduced over dp", "learning rate"),
)  # fmt: skip
def gradient_of_another_micro_batch(fault: bool) -> Any:
    def sent(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0], tensors[0]] if fault else tensors

    return ptrain.verify(
        lambda: looped(regressor()),
        lambda: staged(RegressorStage(), gradients=sent),
        row_batches(),
        terms=terms(),
    )


@planted(
    source="https://github.com/pytorch/torchtitan/pull/1732",
    wrong=("loss", "activations"), axis="pp", place="down", step=0,
    sentence="stage 1 gets the micro-batches in another order than the labels",
    right=("order|label|input|loss|activation|swapped|forward|micro", PIPELINE + "|down"),
    wrong_if=("not reduced", "learning rate", "norm.weight lacks"),
)  # fmt: skip
def micro_batches_swapped(fault: bool) -> Any:
    def sent(tensors: list[Tensor]) -> list[Tensor]:
        return tensors[::-1] if fault else tensors

    return ptrain.verify(
        lambda: looped(regressor()),
        lambda: staged(RegressorStage(), activations=sent),
        row_batches(),
        terms=terms(),
    )


@planted(
    source="https://github.com/NVIDIA/Megatron-LM/issues/2263",
    wrong=("gradients", "parameters"), axis="pp", place="*", step=0,
    sentence="each stage clips by the norm of its own gradients, not by that of the whole model",
    right=("clip|norm of|gradient norm|factor|scale", PIPELINE),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def clipped_by_the_norm_of_a_stage(fault: bool) -> Any:
    def plain() -> ptrain.Job:
        model = regressor()
        return looped(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            before_update=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3),
        )

    def job() -> ptrain.Job:
        stage = RegressorStage()

        def clip() -> None:
            squares = square_sum(stage.parameters())
            squares = squares if fault else summed(squares)
            scale_to(stage.parameters(), float(squares.sqrt()), 0.3)

        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        return staged(stage, optimizer=optimizer, before_update=clip)

    return ptrain.verify(plain, job, row_batches(), terms=terms())


class TiedBigram(nn.Module):
    """Embedding, a layer, and the embedding again as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.middle(self.embed(tokens))), self.embed.weight)


class TiedStage(nn.Module):
    """Both stages hold the embedding; the layer is on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        whole = tied_bigram()
        self.embed = whole.embed
        if rank() == 0:
            self.middle = whole.middle

    def first(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.middle(self.embed(tokens[:, :-1])))

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        logits = F.linear(hidden, self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def hidden_shape(self, tokens: Tensor) -> tuple[int, ...]:
        return (len(tokens), tokens.shape[1] - 1, WIDTH)


def tied_bigram() -> TiedBigram:
    torch.manual_seed(0)
    return TiedBigram()


@planted(
    source="https://github.com/NVIDIA/Megatron-LM/issues/656",
    wrong=("gradients",), axis="pp", place="embed.weight", step=0,
    sentence="gradients of the tied embedding are not summed over the first and last stage",
    right=(NOT_REDUCED + "|tied|sum", PIPELINE, "embed"),
    wrong_if=("middle", "learning rate"),
)  # fmt: skip
def tied_ends_not_summed(fault: bool) -> Any:
    def job() -> ptrain.Job:
        stage = TiedStage()
        reduce = (lambda: None) if fault else (lambda: total([stage.embed.weight]))
        return staged(stage, before_update=reduce)

    return ptrain.verify(
        lambda: looped(tied_bigram(), loss=token_loss), job, token_batches(), terms=terms()
    )
