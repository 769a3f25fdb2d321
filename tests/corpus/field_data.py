"""Faults of the ranks' input: samplers, and positions within packed samples."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.fault import planted
from tests.corpus.parts import (
    LENGTH,
    VOCAB,
    WIDTH,
    TokenWriter,
    axis,
    looped,
    my_rows,
    rank,
    regressor,
    row_batches,
)
from tests.corpus.tensor import SlicedRegressor

END = 0  # the token that ends a document


@planted(
    source="https://github.com/huggingface/accelerate/issues/3092",
    wrong=("data", "loss", "activations"), axis="tp", place="rank 1", step=0,
    sentence="the ranks of tp read different samples: rank 1's loader is one batch ahead",
    right=("sample|data|batch|input|row", "tp|rank", "differ|other|same|not equal|unequal"),
    wrong_if=("not reduced", "learning rate", "bias is added", "lack"),
)  # fmt: skip
def tensor_ranks_read_other_samples(fault: bool) -> Any:
    batches = row_batches()
    ahead = 1 if fault and rank() == 1 else 0
    return ptrain.verify(
        lambda: looped(regressor()),
        lambda: looped(SlicedRegressor()),
        batches,
        share=[batches[(number + ahead) % len(batches)] for number in range(len(batches))],
        terms=ptrain.Terms(mesh=axis("tp"), loss="same"),
    )


@planted(
    source="https://github.com/NVlabs/LongLive/issues/71",
    wrong=("data", "gradients", "loss"), axis="dp", place="rank 1", step=0,
    sentence="rank 1's sampler shuffles by a seed of its own: samples are read twice, or never",
    right=("sample|row|data", "twice|never|missing|other|not in|overlap|differ|duplicate|repeat"),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def samplers_seeded_by_rank(fault: bool) -> Any:
    rows = row_batches().flatten(0, 1)

    def batches(seed: int) -> Tensor:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        return rows[order].unflatten(0, (-1, 8))

    return ptrain.verify(
        lambda: looped(regressor()),
        lambda: looped(DistributedDataParallel(regressor())),
        batches(5),
        share=[my_rows(batch) for batch in batches(5 + rank() if fault else 5)],
    )


class PackedWriter(TokenWriter):
    """The writer on packed documents: a token sees its own document, whose positions begin at 0
    if `restarts`."""

    def __init__(self, restarts: bool) -> None:
        super().__init__()
        self.restarts = restarts

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], dim=1)
        document = (before == END).cumsum(dim=1)
        same = document[:, :, None] == document[:, None, :]
        seen = same & torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        if self.restarts:
            places = seen.sum(dim=-1) - 1
        x = self.embed(tokens) + self.position(places)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH)).masked_fill(~seen, -torch.inf)
        x = x + self.proj(scores.softmax(dim=-1) @ v)
        return self.head(x + self.mlp(x))


def packed_writer(restarts: bool) -> PackedWriter:
    torch.manual_seed(0)
    return PackedWriter(restarts)


def packed_batches() -> list[Tensor]:
    """Return tokens of samples that each hold two documents, [batch, length + 1]."""
    generator = torch.Generator().manual_seed(4)
    batches = []
    for _ in range(6):
        tokens = torch.randint(1, VOCAB, (4, 1), generator=generator)
        for _ in range(LENGTH):
            tokens = torch.cat([tokens, tokens[:, -1:] * 3 % (VOCAB - 1) + 1], dim=1)
        ends = torch.randint(2, LENGTH - 2, (4, 1), generator=generator)
        batches.append(tokens.scatter(1, ends, END))
    return batches


def packed_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of all labels but those that begin a document."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    wanted = labels.masked_fill(inputs == END, -100)
    losses = F.cross_entropy(
        model(inputs).flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum"
    )
    return losses / (len(tokens) * (LENGTH - 1))


@planted(
    source="https://github.com/hiyouga/LlamaFactory/pull/7318",
    wrong=("activations", "loss"), axis="none", place="position", step=0,
    sentence="positions run on from one packed document to the next: they do not restart at 0",
    right=("position", "input|output|differ|document|restart|forward|activation|index|wrong"),
    wrong_if=("not reduced", "learning rate", "qkv.weight", "counted twice"),
)  # fmt: skip
def positions_run_on_across_documents(fault: bool) -> Any:
    return ptrain.verify(
        lambda: looped(packed_writer(True), loss=packed_loss),
        lambda: looped(DistributedDataParallel(packed_writer(not fault)), loss=packed_loss),
        packed_batches(),
        share=my_rows,
        terms=ptrain.Terms(document_end=END),
    )
