"""Faults of loaders: the rows of each global batch on a rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ptrain
from tests.corpus.fault import planted
from tests.corpus.parts import (
    adamw,
    looped,
    my_rows,
    rank,
    regression_loss,
    regressor,
    row_batches,
    size,
    total,
)

SAMPLES = "sample|row|data|batch|loader"
BATCH = 8


def dataset(num_rows: int) -> Tensor:
    return row_batches(1, num_rows)[0]


def wrapped() -> ptrain.Job:
    return looped(DistributedDataParallel(regressor()))


def shuffled(rows: Tensor, epochs: list[int]) -> list[Tensor]:
    """Return the global batches of the epochs, shuffled as DistributedSampler does."""
    batches: list[Tensor] = []
    for epoch in epochs:
        generator = torch.Generator().manual_seed(epoch)
        batches += rows[torch.randperm(len(rows), generator=generator)].split(BATCH)
    return batches


@planted(
    source="https://github.com/pytorch/pytorch/issues/31771",
    wrong=("data",), axis="dp", place="*", step=2,
    sentence="from the second epoch on the ranks have other samples: set_epoch is never called",
    right=(SAMPLES, "epoch|other|not those|differ|order|shuffl|missing|not in|step 2"),
    wrong_if=("not reduced", "learning rate", "optimizer state"),
)  # fmt: skip
def epoch_never_set(fault: bool) -> Any:
    rows = dataset(16)
    sampler = DistributedSampler(TensorDataset(rows), size(), rank())
    loader = DataLoader(TensorDataset(rows), batch_size=BATCH // size(), sampler=sampler)
    own = []
    for epoch in range(3):
        if not fault:
            sampler.set_epoch(epoch)
        own += [batch for (batch,) in loader]
    return ptrain.verify(lambda: looped(regressor()), wrapped, shuffled(rows, [0, 1, 2]), share=own)


@planted(
    source="https://github.com/huggingface/datasets/issues/8568",
    wrong=("data",), axis="dp", place="*", step=0,
    sentence="every rank reads the same samples: the stream is not split between the ranks",
    right=(SAMPLES, "same|twice|duplicat|every rank|all ranks|both ranks|2 times|missing|counted"),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def same_samples_on_every_rank(fault: bool) -> Any:
    rows = dataset(48)

    def stream() -> Iterator[Tensor]:
        for number, row in enumerate(rows):
            if fault or number % size() == rank():
                yield row

    own = torch.stack(list(stream()))[: len(rows) // size()].split(BATCH // size())
    return ptrain.verify(lambda: looped(regressor()), wrapped, list(rows.split(BATCH)), share=own)


@planted(
    source="https://github.com/pytorch/pytorch/issues/25162",
    wrong=("data",), axis="dp", place="rank 1", step=1,
    sentence="at the uneven end of an epoch a sample is counted twice: the sampler pads",
    right=(SAMPLES, "twice|duplicat|pad|2 times|counted|repeat|uneven|other|unequal"),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def uneven_end_is_padded(fault: bool) -> Any:
    rows = dataset(13)
    sampler = DistributedSampler(TensorDataset(rows), size(), rank(), shuffle=False)
    padded = [batch for (batch,) in DataLoader(TensorDataset(rows), 4, sampler=sampler)] * 3
    batches = list(rows.split(BATCH)) * 3
    own = padded if fault else [batch[rank() :: size()] for batch in batches]

    def job() -> ptrain.Job:
        model = regressor()
        sizes = iter([8, 5] * 50)

        def loss(called: nn.Module, mine: Tensor) -> Tensor:
            if fault:
                return regression_loss(called, mine) / size()
            return regression_loss(called, mine) * len(mine) / next(sizes)

        return looped(model, loss=loss, before_update=lambda: total(model.parameters()))

    terms = ptrain.Terms(loss="sum")
    return ptrain.verify(lambda: looped(regressor()), job, batches, share=own, terms=terms)


@planted(
    source="https://github.com/huggingface/accelerate/issues/2016",
    wrong=("data",), axis="none", place="*", step=3,
    sentence="after the restart at step 3 the loader begins again: other samples than one device's",
    right=(SAMPLES, "again|other|differ|repeat|restart|step 3|not those|begin"),
    wrong_if=("not reduced", "optimizer state", "learning rate"),
)  # fmt: skip
def loader_begins_again_on_resume(fault: bool) -> Any:
    batches = list(row_batches(6))
    seen = batches[:3] + (batches[:3] if fault else batches[3:])
    own = [my_rows(batch) for batch in seen]
    return ptrain.verify(lambda: looped(regressor()), wrapped, batches, share=own)


@planted(
    source="https://github.com/OrderLab/TrainCheck-Evaluation-Workloads (stackoverflow-67180955)",
    wrong=("data", "loss"), axis="dp", place="rank 1", step=0,
    sentence="every rank draws the same noise for its samples: one seed on all ranks",
    right=(SAMPLES + "|noise|loss|input", "same|seed|random|noise|differ|rank 1|other"),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def same_noise_on_every_rank(fault: bool) -> Any:
    batches = row_batches()
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(batches.shape, generator=generator) * 0.1
    noise[..., 8:] = 0
    own = []
    for batch, drawn in zip(batches, noise, strict=True):
        mine = drawn[: BATCH // size()] if fault else my_rows(drawn)
        own.append(my_rows(batch) + mine)
    return ptrain.verify(lambda: looped(regressor()), wrapped, list(batches + noise), share=own)


@planted(
    source="https://github.com/lhotse-speech/lhotse/pull/695",
    wrong=("gradients", "loss", "data"), axis="none", place="*", step=0,
    sentence="the last row of each rank is never seen: an incomplete micro-batch is dropped",
    right=(SAMPLES + "|micro", "drop|lack|missing|never|left out|0 times|not counted|without"),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def incomplete_micro_batch_dropped(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())
        optimizer = adamw(model)

        def step(rows: Tensor) -> Tensor:
            micros = [micro for micro in rows.split(3) if len(micro) == 3 or not fault]
            num_rows = sum(len(micro) for micro in micros)
            loss = torch.zeros(())
            for micro in micros:
                part = regression_loss(model, micro) * len(micro) / num_rows
                part.backward()
                loss += part.detach()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return ptrain.Job(model=model, step=step)

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


@planted(
    source="https://github.com/modelscope/ms-swift/pull/9907",
    wrong=("data",), axis="dp", place="*", step=2,
    sentence="labels of the second shard belong to other rows: they are shuffled by another seed",
    right=(SAMPLES + "|label|target|loss", "other|label|target|loss|differ|shuffl"),
    wrong_if=("not reduced", "learning rate", "optimizer state"),
)  # fmt: skip
def labels_of_other_rows(fault: bool) -> Any:
    batches = list(row_batches())
    own = []
    for number, batch in enumerate(batches):
        mine = my_rows(batch).clone()
        if fault and number >= 2:
            mine[:, 8:] = mine[:, 8:].roll(1, dims=0)
        own.append(mine)

    def loss(called: nn.Module, rows: Tensor) -> Tensor:
        return F.mse_loss(called(rows[:, :8]), rows[:, 8:])

    return ptrain.verify(
        lambda: looped(regressor(), loss=loss),
        lambda: looped(DistributedDataParallel(regressor()), loss=loss),
        batches,
        share=own,
    )
