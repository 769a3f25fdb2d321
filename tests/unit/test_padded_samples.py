"""Samples padded to equal slices: padding does not count."""

from __future__ import annotations

import pytest
import torch

from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import blank_batch, read_batch, shard_batch
from ptrain.models.cross_entropy import IGNORED
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.verification.reference import ReferenceTraining

EXACT = ("precision={layout: fp32, compute: fp64}", "model.layers=2")


def spec_of(*changes: str, sequence: int = 27) -> Spec:
    keys = [f"batch={{global: 4, micro: 2, sequence: {sequence}, pad: true}}", *EXACT, *changes]
    return load("cp-zigzag", keys).spec


def test_padding_is_no_target_and_changes_no_sample() -> None:
    spec = spec_of()
    assert (spec.batch.sequence, spec.batch.padding, spec.batch.unpadded_tokens) == (28, 1, 27)
    plain = load("zero2", ["mesh={dp_shard: 1}", "batch={global: 4, micro: 2, sequence: 27}"]).spec
    own, other = (read_batch(open_corpus(s.data), spec=s, step=1) for s in (spec, plain))
    assert own.sample_ids == other.sample_ids
    assert own.global_tokens == other.global_tokens == 4 * 27 and own.global_samples == 4
    for padded, bare in zip(own.micro_batches(2), other.micro_batches(2), strict=True):
        assert padded.inputs.shape == (2, 28)
        assert torch.equal(padded.inputs[:, :27], bare.inputs)
        assert torch.equal(padded.targets[:, :27], bare.targets)
        assert (padded.targets[:, 27:] == IGNORED).all()


def test_one_device_with_padded_samples_computes_the_unpadded_result() -> None:
    bare = load(
        "zero2", ["mesh={dp_shard: 1}", "batch={global: 4, micro: 2, sequence: 27}", *EXACT]
    ).spec
    first, second = (ReferenceTraining(spec).accumulate(0) for spec in (spec_of(), bare))
    assert abs(first.loss - second.loss) < 1e-12
    for name, gradient in first.sums.items():
        torch.testing.assert_close(gradient, second.sums[name], rtol=1e-9, atol=1e-12)


def test_samples_of_a_users_loop_are_padded() -> None:
    spec = spec_of()
    tokens = torch.arange(4 * 28).reshape(4, 28)
    share = shard_batch(tokens, spec, 0)
    assert share.global_tokens == 4 * 27
    (whole,) = share.micro_batches(4)
    assert torch.equal(whole.inputs[:, :27], tokens[:, :-1])
    assert torch.equal(whole.targets[:, :27], tokens[:, 1:])
    assert (whole.targets[:, 27:] == IGNORED).all()
    labels = torch.where(tokens % 2 == 0, tokens, IGNORED)
    with_labels = spec_of("data.ignored=[]")
    assert shard_batch((tokens, labels), with_labels, 0).global_tokens == 4 * 13


def test_a_blank_batch_is_as_long_as_a_padded_one() -> None:
    spec = spec_of()
    own, blank = read_batch(open_corpus(spec.data), spec=spec, step=0), blank_batch(spec)
    assert [t.shape for t in own.tensors] == [t.shape for t in blank.tensors]


@pytest.mark.parametrize("sequence", [28, 32])
def test_a_sequence_that_divides_is_left_as_it_is(sequence: int) -> None:
    spec = spec_of(sequence=sequence)
    assert (spec.batch.sequence, spec.batch.padding) == (sequence, 0)
    local = read_batch(open_corpus(spec.data), spec=spec, step=0)
    assert local.labels is None and len(blank_batch(spec).tensors) == 1
