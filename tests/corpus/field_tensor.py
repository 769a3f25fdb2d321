"""Faults of tensor parallelism: losses over a cut vocabulary, fused projections, adapters, norms
of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import ptrain
from tests.corpus.collectives import CopyToRanks, GatherCopies, GatherParts, SumOverRanks, own_part
from tests.corpus.fault import NOT_REDUCED, TENSOR, TOO_LARGE, TOO_SMALL, planted
from tests.corpus.field_gradients import Adapted, bare_adapted, grid
from tests.corpus.fsdp2 import local_gradients
from tests.corpus.parts import (
    VOCAB,
    WIDTH,
    Regressor,
    TokenWriter,
    average,
    axis,
    looped,
    my_rows,
    rank,
    regressor,
    row_batches,
    scale_to,
    square_sum,
    token_batches,
    total,
)
from tests.corpus.tensor import Bigram, SlicedRegressor, bigram, sgd, terms


@planted(
    source="https://github.com/EleutherAI/gpt-neox/pull/1259",
    wrong=("gradients",), axis="tp", place="norm.*", step=0,
    sentence="gradients of norm are averaged over tp, not summed: they are half",
    right=("norm", TOO_SMALL + "|averaged|mean|not summed|divided"),
    wrong_if=("up.weight", "down.weight", "learning rate", "unreduced", "not reduced"),
)  # fmt: skip
def norm_of_a_slice_averaged(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = SlicedRegressor(slices_rows=True)
        reduce = average if fault else total
        return looped(
            model,
            optimizer=sgd(model),
            before_update=lambda: reduce(model.norm.parameters()),
        )

    def plain() -> ptrain.Job:
        model = regressor()
        return looped(model, optimizer=sgd(model))

    return ptrain.verify(plain, job, row_batches(), terms=terms())


class HeadSlicedBigram(Bigram):
    """The head cut by the vocabulary over tp: logits of this rank's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(own_part(self.head.weight.data, 0))
        self.head.bias = nn.Parameter(own_part(self.head.bias.data, 0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(CopyToRanks.apply(self.embed(tokens)))


def head_sliced() -> HeadSlicedBigram:
    torch.manual_seed(0)
    return HeadSlicedBigram()


def log_total(logits: Tensor) -> Tensor:
    """Return the log of the sum over the ranks of exponentials, [...]."""
    most = logits.detach().amax(dim=-1)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return SumOverRanks.apply((logits - most[..., None]).exp().sum(dim=-1)).log() + most


def wanted_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the label's logit of the rank that has it, [...]."""
    local = labels - rank() * logits.shape[-1]
    is_own = (local >= 0) & (local < logits.shape[-1])
    own = logits.gather(-1, local.where(is_own, 0)[..., None]).squeeze(-1)
    return SumOverRanks.apply(own * is_own)


@planted(
    source="https://github.com/NVIDIA/Megatron-LM/issues/7464",
    wrong=("loss",), axis="tp", place="*", step=0,
    sentence="label smoothing takes the mean of this rank's log-probabilities, not of all",
    right=("loss|logit|smooth", "smooth|log-prob|mean|vocabular|own|local|differs between|slice"),
    wrong_if=("not reduced over dp", "learning rate", "norm.weight", "forward pass differs"),
)  # fmt: skip
def smoothing_of_the_own_vocabulary(fault: bool) -> Any:
    def plain_loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, tokens[:, 1:].flatten(), label_smoothing=0.2)

    def sliced_loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
        if fault:
            mean = logits.mean(dim=-1)
        else:
            mean = SumOverRanks.apply(logits.sum(dim=-1)) / VOCAB
        kept = 0.8 * wanted_logit(logits, labels) + 0.2 * mean
        return (log_total(logits) - kept).mean()

    return ptrain.verify(
        lambda: looped(bigram(), loss=plain_loss),
        lambda: looped(head_sliced(), loss=sliced_loss),
        token_batches(),
        terms=terms(),
    )


@planted(
    source="https://github.com/NVIDIA/Megatron-LM/issues/7452",
    wrong=("loss", "gradients"), axis="tp", place="*", step=0,
    sentence="the sum of the softmax counts gathered logits once on every rank of tp: the loss is "
             "log(2) too large",
    right=("loss|softmax|logit", "twice|every rank|once on|too large|double|gathered|repeat|0.69"),
    wrong_if=("not reduced over dp", "learning rate", "embed is wrong"),
)  # fmt: skip
def gathered_logits_counted_on_every_rank(fault: bool) -> Any:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        own, labels = model(tokens[:, :-1]), tokens[:, 1:]
        if fault:
            total_of_all = log_total(GatherCopies.apply(own, -1))
        else:
            total_of_all = log_total(own)
        return (total_of_all - wanted_logit(own, labels)).mean()

    def plain_loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return ptrain.verify(
        lambda: looped(bigram(), loss=plain_loss),
        lambda: looped(head_sliced(), loss=loss),
        token_batches(),
        terms=terms(),
    )


class SlicedAdapted(Adapted):
    """The adapted regressor over tp: `up` and `adapter_out` cut by columns, `down` by rows; the
    first factor of the adapter is repeated, and sees a slice of the rows."""

    def cut(self) -> None:
        for owner, name, dim in (
            (self.up, "weight", 0), (self.up, "bias", 0), (self.down, "weight", 1),
            (self, "adapter_out", 0),
        ):  # fmt: skip
            setattr(owner, name, nn.Parameter(own_part(getattr(owner, name).data, dim)))

    def forward(self, x: Tensor) -> Tensor:
        x = CopyToRanks.apply(self.norm(x))
        low = GatherParts.apply(F.linear(own_part(x, 0), self.adapter_in), 0)
        hidden = F.gelu(self.up(x) + F.linear(low, self.adapter_out))
        return SumOverRanks.apply(F.linear(hidden, self.down.weight)) + self.down.bias


def plain_adapted() -> Adapted:
    model = bare_adapted()
    model.attach()
    return model


@planted(
    source="https://github.com/modelscope/mcore-bridge/pull/173",
    wrong=("gradients",), axis="tp", place="adapter_in", step=0,
    sentence="gradients of the adapter's repeated factor are not summed over tp",
    right=(NOT_REDUCED, TENSOR, "adapter_in"),
    wrong_if=("adapter_out", "up.weight", "norm.weight", "learning rate"),
)  # fmt: skip
def repeated_adapter_not_summed(fault: bool) -> Any:
    def job() -> ptrain.Job:
        torch.manual_seed(0)
        model = SlicedAdapted()
        model.attach()
        model.cut()
        reduce = (lambda: None) if fault else (lambda: total([model.adapter_in]))
        return looped(model, before_update=reduce)

    return ptrain.verify(lambda: looped(plain_adapted()), job, row_batches(), terms=terms())


class WithShortcut(SlicedRegressor):
    """The regressor over tp with a linear shortcut, which every rank has; it is added to each
    rank's part of the sum if `adds_parts`."""

    def __init__(self, adds_parts: bool) -> None:
        super().__init__()
        self.adds_parts = adds_parts
        self.shortcut = shortcut()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y = F.linear(F.gelu(self.up(CopyToRanks.apply(x))), self.down.weight)
        y, own = (y + self.shortcut(x), 0) if self.adds_parts else (y, self.shortcut(x))
        return SumOverRanks.apply(y) + own + self.down.bias


def shortcut() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(8, 1, bias=False)


class WholeWithShortcut(Regressor):
    """The regressor with a linear shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut = shortcut()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.gelu(self.up(x))) + self.shortcut(x)


def whole_with_shortcut() -> WholeWithShortcut:
    torch.manual_seed(0)
    return WholeWithShortcut()


@planted(
    source="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634",
    wrong=("loss", "activations"), axis="tp", place="*", step=0,
    sentence="the shortcut's output is counted once on every rank: added before the all-reduce",
    right=("shortcut|output", TOO_LARGE + "|every rank|before the all-reduce|added"),
    wrong_if=("not reduced", "learning rate", "bias is added"),
)  # fmt: skip
def shortcut_added_on_every_rank(fault: bool) -> Any:
    return ptrain.verify(
        lambda: looped(whole_with_shortcut()),
        lambda: looped(WithShortcut(fault)),
        row_batches(),
        terms=terms(),
    )


class HeadedWriter(TokenWriter):
    """The writer with two heads of attention; over tp with one of them."""

    def __init__(self, heads: int, cut: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.heads = heads
        if cut is not None:
            self.qkv.weight = nn.Parameter(cut(self.qkv.weight.data))
            self.qkv.bias = nn.Parameter(cut(self.qkv.bias.data))
            self.proj.weight = nn.Parameter(own_part(self.proj.weight.data, 1))
        self.is_cut = cut is not None

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        normed = self.norm(x)
        qkv = self.qkv(CopyToRanks.apply(normed) if self.is_cut else normed)
        split = (part.unflatten(-1, (self.heads, -1)) for part in qkv.chunk(3, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in split)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        seen = torch.ones(scores.shape[-2:]).tril().bool()
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ v
        y = F.linear(mixed.transpose(1, 2).flatten(-2), self.proj.weight)
        x = x + (SumOverRanks.apply(y) if self.is_cut else y) + self.proj.bias
        return self.head(x + self.mlp(x))


def heads_of_rank(fused: Tensor) -> Tensor:
    """Return this rank's rows of the queries, of the keys and of the values."""
    return torch.cat([own_part(part, 0) for part in fused.chunk(3)])


@planted(
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/1324",
    wrong=("activations", "loss"), axis="tp", place="qkv*, proj*", step=0,
    sentence="qkv is cut as one matrix: rank 0 takes queries and half of the keys for its heads",
    right=("qkv|attention|head|proj|quer|key", "row|slice|shard|cut|output|input|mix|forward|lay|"
           "differ|order|interleav"),
    wrong_if=("not reduced", "learning rate", "embed.weight lacks", "mask"),
)  # fmt: skip
def fused_projection_cut_as_one(fault: bool) -> Any:
    cut = (lambda fused: own_part(fused, 0)) if fault else heads_of_rank

    def whole() -> HeadedWriter:
        torch.manual_seed(0)
        return HeadedWriter(2)

    def sliced() -> HeadedWriter:
        torch.manual_seed(0)
        return HeadedWriter(1, cut)

    def part(name: str, full: Tensor) -> Tensor:
        if name.startswith("qkv."):
            return cut(full)
        return own_part(full, 1) if name == "proj.weight" else full

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return ptrain.verify(
        lambda: looped(whole(), loss=loss),
        lambda: looped(sliced(), loss=loss),
        token_batches(),
        terms=ptrain.Terms(mesh=axis("tp"), loss="same", part=part),
    )


@planted(
    source="https://github.com/ByteDance-Seed/VeOmni/pull/862",
    wrong=("gradients", "parameters"), axis="dp", place="*", step=0, ranks=4,
    sentence="the norm to clip by counts every shard once per replica: summed over all ranks",
    right=("clip|norm of|gradient norm|factor|scale", "replica|twice|every rank|all ranks|counted"),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def norm_counts_every_replica(fault: bool) -> Any:
    mesh = grid(2, 2)

    def plain() -> ptrain.Job:
        model = regressor()
        parameters = list(model.parameters())
        return looped(
            model,
            optimizer=sgd(model),
            before_update=lambda: torch.nn.utils.clip_grad_norm_(parameters, 0.3),
        )

    def job() -> ptrain.Job:
        model = fully_shard(regressor(), mesh=mesh)

        def clip() -> None:
            slices = local_gradients(model)
            squares = square_sum(slices)
            dist.all_reduce(squares, group=None if fault else mesh.get_group("shard"))
            scale_to(slices, float(squares.sqrt()), 0.3)

        return looped(model, optimizer=sgd(model), before_update=clip)

    return ptrain.verify(plain, job, row_batches(), share=my_rows)
