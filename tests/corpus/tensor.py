"""Faults of tensor parallelism, by hand and by DTensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import ptrain
from tests.corpus.collectives import (
    CopyToRanks,
    GatherCopies,
    GatherParts,
    SumOverRanks,
    own_part,
    summed,
)
from tests.corpus.fault import NOT_REDUCED, TENSOR, planted
from tests.corpus.parts import (
    VOCAB,
    WIDTH,
    Regressor,
    adamw,
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


class SlicedRegressor(nn.Module):
    """The regressor with `up` cut by columns and `down` by rows over tp."""

    def __init__(
        self, *, copies: bool = True, bias_on_all: bool = False, slices_rows: bool = False
    ):
        super().__init__()
        whole = regressor()
        self.norm, self.up, self.down = whole.norm, whole.up, whole.down
        self.up.weight = nn.Parameter(own_part(whole.up.weight.data, 0))
        self.up.bias = nn.Parameter(own_part(whole.up.bias.data, 0))
        self.down.weight = nn.Parameter(own_part(whole.down.weight.data, 1))
        self.copies, self.bias_on_all, self.slices_rows = copies, bias_on_all, slices_rows

    def forward(self, x: Tensor) -> Tensor:
        if self.slices_rows:  # as in sequence parallelism
            x = GatherParts.apply(self.norm(own_part(x, 0)), 0)
        else:
            x = self.norm(x)
            x = CopyToRanks.apply(x) if self.copies else x
        y = F.linear(F.gelu(self.up(x)), self.down.weight)
        if self.bias_on_all:
            return SumOverRanks.apply(y + self.down.bias)
        return SumOverRanks.apply(y) + self.down.bias


def terms() -> ptrain.Terms:
    return ptrain.Terms(mesh=axis("tp"), loss="same")


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@planted(
    source="https://github.com/NovaSky-AI/SkyRL/pull/1886",
    wrong=("gradients",), axis="tp", place="norm.*", step=0,
    sentence="gradients of norm lack the sum over tp: up's input gradient is not all-reduced",
    right=(NOT_REDUCED, TENSOR, "norm"),
    wrong_if=("down.weight", "learning rate"),
)  # fmt: skip
def input_gradient_not_reduced(fault: bool) -> Any:
    return ptrain.verify(
        lambda: looped(regressor()),
        lambda: looped(SlicedRegressor(copies=not fault)),
        row_batches(),
        terms=terms(),
    )


@planted(
    source="https://github.com/Wenyueh/MinivLLM/issues/80",
    wrong=("loss", "activations"), axis="tp", place="down*", step=0,
    sentence="the bias of down is added on every rank of tp before the all-reduce",
    right=("down", "bias|output|forward|activation|loss"),
    wrong_if=("not reduced", "up.weight", "learning rate"),
)  # fmt: skip
def bias_added_on_every_rank(fault: bool) -> Any:
    def biased() -> Regressor:
        model = regressor()
        torch.nn.init.constant_(model.down.bias, 0.5)
        return model

    def job() -> ptrain.Job:
        model = SlicedRegressor(bias_on_all=fault)
        torch.nn.init.constant_(model.down.bias, 0.5)
        return looped(model)

    return ptrain.verify(lambda: looped(biased()), job, row_batches(), terms=terms())


@planted(
    source="https://github.com/NVIDIA/Megatron-LM/issues/1446",
    wrong=("gradients",), axis="tp", place="norm.*", step=0,
    sentence="gradients of norm are not summed over tp: each rank's norm sees a slice of the rows",
    right=(NOT_REDUCED, TENSOR, "norm"),
    wrong_if=("up.weight", "down.weight"),
)  # fmt: skip
def norm_of_a_slice_not_reduced(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = SlicedRegressor(slices_rows=True)
        reduce = (lambda: None) if fault else (lambda: total(model.norm.parameters()))
        return looped(model, before_update=reduce)

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), terms=terms())


class Bigram(nn.Module):
    """Logits of the next token from one token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


class VocabSlicedBigram(Bigram):
    """The embedding cut by the vocabulary over tp."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.embed.weight = nn.Parameter(own_part(self.embed.weight.data, 0))
        self.masks = masks

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - rank() * self.embed.weight.shape[0]
        is_own = (local >= 0) & (local < self.embed.weight.shape[0])
        x = F.embedding(local.where(is_own, 0), self.embed.weight)
        if self.masks:
            x = x * is_own[..., None]
        return self.head(SumOverRanks.apply(x))


def bigram(**options: Any) -> Bigram:
    torch.manual_seed(0)
    return VocabSlicedBigram(**options) if options else Bigram()


@planted(
    source="https://arxiv.org/abs/2506.09280",
    wrong=("loss", "activations"), axis="tp", place="embed*", step=0,
    sentence="the vocabulary-parallel embedding adds row 0 for tokens of the other rank: no mask",
    right=("embed", "mask|output|forward|activation|loss|token"),
    wrong_if=("not reduced", "head.weight", "learning rate"),
)  # fmt: skip
def embedding_without_its_mask(fault: bool) -> Any:
    return ptrain.verify(
        lambda: looped(bigram(), loss=token_loss),
        lambda: looped(bigram(masks=not fault), loss=token_loss),
        token_batches(),
        terms=terms(),
    )


def clipped() -> ptrain.Job:
    model = regressor()
    return looped(
        model,
        optimizer=sgd(model),
        before_update=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3),
    )


@planted(
    source="https://github.com/meta-pytorch/torchtune/issues/2420",
    wrong=("gradients", "parameters"), axis="tp", place="*", step=0,
    sentence="the norm to clip by counts the parameters that tp repeats once on every rank",
    right=("clip|norm of|gradient norm|factor|scale", "tp|rank|twice|every|replicat"),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def norm_counts_copies_twice(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = SlicedRegressor()
        cut = [model.up.weight, model.up.bias, model.down.weight]
        copied = [model.norm.weight, model.norm.bias, model.down.bias]

        def clip() -> None:
            if fault:
                squares = summed(square_sum(model.parameters()))
            else:
                squares = summed(square_sum(cut)) + square_sum(copied)
            scale_to(model.parameters(), float(squares.sqrt()), 0.3)

        return looped(model, optimizer=sgd(model), before_update=clip)

    return ptrain.verify(clipped, job, row_batches(), terms=terms())


@planted(
    source="https://github.com/OrderLab/TrainCheck-Evaluation-Workloads (deepspeed-1801)",
    wrong=("gradients", "parameters"), axis="tp", place="norm.*", step=0,
    sentence="gradients of what tp repeats are clipped on rank 0 only: norm differs between ranks",
    right=("norm|down.bias", "clip|rank 1|ranks|differ|replica"),
    wrong_if=("not reduced", "up.weight", "learning rate"),
)  # fmt: skip
def clipped_on_the_first_rank(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = SlicedRegressor()
        cut = [model.up.weight, model.up.bias, model.down.weight]
        copied = [model.norm.weight, model.norm.bias, model.down.bias]

        def clip() -> None:
            norm = float((summed(square_sum(cut)) + square_sum(copied)).sqrt())
            scale_to(cut, norm, 0.3)
            if rank() == 0 or not fault:
                scale_to(copied, norm, 0.3)

        return looped(model, optimizer=sgd(model), before_update=clip)

    return ptrain.verify(clipped, job, row_batches(), terms=terms())


class ScaledRows(nn.Module):
    """Rows times a scale, then a linear layer; the scale may be a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.full((8,), 0.7)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.scale)


class ScaledInSlices(ScaledRows):
    """Each rank of tp runs its slice of the rows with the repeated scale."""

    def __init__(self, hints: bool) -> None:
        super().__init__()
        self.mesh, self.hints = axis("tp"), hints
        for name, parameter in (("scale", self.scale), ("weight", self.out.weight),
                                ("bias", self.out.bias)):  # fmt: skip
            copied = nn.Parameter(distribute_tensor(parameter.data, self.mesh, [Replicate()]))
            setattr(self if name == "scale" else self.out, name, copied)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (self.local(p, [Replicate()]) for p in (self.out.weight, self.out.bias))
        scale = self.local(self.scale, [Partial()] if self.hints else None)
        return F.linear(GatherCopies.apply(own_part(x, 0) * scale, 0), weight, bias)

    def local(self, parameter: Tensor, placements: Any) -> Tensor:
        assert isinstance(parameter, DTensor)
        return parameter.to_local(grad_placements=placements)


@planted(
    source="https://github.com/pytorch/torchtitan/pull/2532",
    wrong=("gradients",), axis="tp", place="scale", step=0,
    sentence="the gradient of scale is not summed over tp: to_local lacks grad_placements",
    right=(NOT_REDUCED, TENSOR, "scale"),
    wrong_if=("out.weight", "learning rate"),
)  # fmt: skip
def to_local_without_placements(fault: bool) -> Any:
    def scaled(sliced: bool) -> ptrain.Job:
        torch.manual_seed(0)
        return looped(ScaledInSlices(not fault) if sliced else ScaledRows())

    return ptrain.verify(
        lambda: scaled(False),
        lambda: scaled(True),
        row_batches(),
        terms=ptrain.Terms(loss="same"),
    )


class ScaledHeads(nn.Module):
    """Two heads of 8 features, each times one scale that both share."""

    def __init__(self, is_cut: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)
        self.head_scale = nn.Parameter(torch.full((8,), 0.8))
        if is_cut:
            self.up.weight = nn.Parameter(own_part(self.up.weight.data, 0))
            self.up.bias = nn.Parameter(own_part(self.up.bias.data, 0))
            self.down.weight = nn.Parameter(own_part(self.down.weight.data, 1))
        self.is_cut = is_cut

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(CopyToRanks.apply(x) if self.is_cut else x).unflatten(-1, (-1, 8))
        y = F.linear((heads * self.head_scale).flatten(-2), self.down.weight)
        return (SumOverRanks.apply(y) if self.is_cut else y) + self.down.bias


@planted(
    source="https://github.com/NVIDIA/Megatron-LM/issues/7452",
    wrong=("gradients",), axis="tp", place="head_scale", step=0,
    sentence="the gradient of head_scale lacks the sum over tp: a rank has only its own heads'",
    right=(NOT_REDUCED, TENSOR, "head_scale"),
    wrong_if=("up.weight", "down.weight"),
)  # fmt: skip
def shared_scale_not_reduced(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = ScaledHeads(True)
        reduce = (lambda: None) if fault else (lambda: total([model.head_scale]))
        return looped(model, before_update=reduce)

    return ptrain.verify(lambda: looped(ScaledHeads(False)), job, row_batches(), terms=terms())


@planted(
    source="https://github.com/tenstorrent/tt-metal/issues/55947",
    wrong=("gradients", "loss", "activations"), axis="tp", place="*", step=0,
    sentence="masks of repeated activations differ between the ranks of tp: seeded by rank",
    right=("mask|random|seed|differ|loss|forward|output|activation", TENSOR),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def mask_seeded_by_rank(fault: bool) -> Any:
    def masked(model: nn.Module, seed: int) -> ptrain.Job:
        generator = torch.Generator().manual_seed(seed)

        def loss(called: nn.Module, rows: Tensor) -> Tensor:
            mask = torch.rand(8, generator=generator) < 0.75
            return F.mse_loss(called(rows[:, :8] * mask), rows[:, 8:])

        return looped(model, loss=loss, optimizer=adamw(model))

    return ptrain.verify(
        lambda: masked(regressor(), 3),
        lambda: masked(SlicedRegressor(), 3 + (rank() if fault else 0)),
        row_batches(),
        terms=terms(),
    )
