"""The ledger of samples compares batches by their tokens, not by sample names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ptrain.data.sampler import LocalBatch
from ptrain.report.finding import Subject
from ptrain.runtime.world import World
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.train.exchange import Exchange
from ptrain.verification.capture import sample_mismatches
from ptrain.verification.reference import MicroBatch, ReferenceTraining

ROWS = torch.tensor([[1, 2, 3], [4, 5, 6], [1, 2, 3], [7, 8, 9]])  # the first and third are equal


class Reference(ReferenceTraining):
    """One device of which only the samples are asked."""

    def __init__(self) -> None:
        self.spec = resolve_auto(load("zero2", ("mesh={dp_shard: 1}",)))

    def micro_batches_of(self, index: int, step: int) -> Iterator[MicroBatch]:
        batch = LocalBatch(tokens=ROWS, global_tokens=8, sample_ids=(0, 1, 2, 3))
        for k, rows in enumerate(batch.micro_batches(2)):
            ids = 2 * k, 2 * k + 1
            yield MicroBatch(data_index=index, k=k, samples=rows, batch=batch, sample_ids=ids)


def batch_mismatches(rows: Tensor) -> list[str]:
    given = LocalBatch(tokens=rows, global_tokens=8, sample_ids=(0, 1, 2, 3))
    found = list(sample_mismatches(given, Reference(), 0, 0, Exchange(World())))
    assert all(each.subject is Subject.BATCH for each in found)
    return [each.told for each in found]


def test_a_batch_with_two_equal_rows_is_the_batch_that_it_should_be() -> None:
    assert batch_mismatches(ROWS) == []


def test_a_repeated_row_is_named_with_the_row_it_replaces() -> None:
    assert batch_mismatches(ROWS[[0, 1, 2, 1]]) == ["sample 3 missing; sample 1 seen twice"]
    assert batch_mismatches(ROWS[[0, 1, 3, 3]]) == ["sample 0 missing; sample 3 seen twice"]


def test_different_tokens_and_another_order_are_distinguished() -> None:
    assert batch_mismatches(ROWS[[1, 0, 2, 3]]) == ["samples 0, 1, 0, 3 in another order or place"]
    assert batch_mismatches(ROWS[[0, 1, 2, 3]] + 10 * torch.tensor([[0], [0], [0], [1]])) == [
        "sample 3 missing; tokens of no sample of this step"
    ]
