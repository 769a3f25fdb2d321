"""The sampler: no sample missing, none doubled, the same global batch on every mesh."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptrain.data.corpus import Corpus, open_corpus, stream_sample
from ptrain.data.sampler import (
    LocalBatch,
    Split,
    batch_positions,
    read_batch,
    require_trainable_data,
    shard_batch,
)
from ptrain.errors import PtrainError, SpecError
from ptrain.spec.batch import Batch
from ptrain.spec.job import DataSpec, EvalSpec, TrainSpec
from ptrain.spec.spec import Spec
from tests.pure.build import ODD_SHAPE

MESHES = [1, 2, 4, 8]
SEQUENCE = 4


def counting_tokens(num_tokens: int, held_out: int = 21) -> Corpus:
    """Token i is i: a window shows where it was cut."""
    return Corpus(
        name="counted",
        train=np.arange(num_tokens, dtype=np.uint16),
        held_out=np.arange(held_out, dtype=np.uint16),
        vocab=None,
    )


def make_spec(
    global_samples: int = 16, micro: int = 2, *, seed: int = 0, vocab: int = 2**16, every: int = 0
) -> Spec:
    return Spec(
        name="test",
        model=replace(ODD_SHAPE, vocab=vocab),
        factors=(),
        batch=Batch(global_samples=global_samples, micro=micro, sequence=SEQUENCE, accumulate=1),
        train=TrainSpec(seed=seed),
        eval=EvalSpec(every=every),
    )


def global_batch(source: Corpus, spec: Spec, step: int, degree: int) -> list[LocalBatch]:
    return [
        read_batch(source, spec=spec, step=step, data_index=index, data_degree=degree)
        for index in range(degree)
    ]


@pytest.mark.parametrize("degree", MESHES)
@pytest.mark.parametrize("micro", [1, 2])
def test_an_epoch_holds_every_sample_once_on_every_mesh(degree, micro):
    source, spec = counting_tokens(8 * 16 * SEQUENCE + 1), make_spec(micro=micro)
    windows = source.num_samples(SEQUENCE)
    assert windows == 8 * 16
    for epoch in range(3):
        seen = Counter(
            sample_id
            for step in range(8 * epoch, 8 * epoch + 8)
            for local in global_batch(source, spec, step, degree)
            for sample_id in local.sample_ids
        )
        assert seen == Counter(range(epoch * windows, (epoch + 1) * windows))


@pytest.mark.parametrize("degree", MESHES)
def test_an_epoch_that_ends_in_mid_step_loses_and_doubles_nothing(degree):
    source, spec = counting_tokens(13 * SEQUENCE + 1), make_spec()
    steps, windows = 13, 13  # 13 steps of 16 samples are 16 epochs of 13 windows
    seen = Counter(
        sample_id
        for step in range(steps)
        for local in global_batch(source, spec, step, degree)
        for sample_id in local.sample_ids
    )
    assert seen == Counter(range(16 * windows))


@pytest.mark.parametrize("degree", MESHES)
def test_every_mesh_sees_the_same_global_batch(degree):
    source, spec = counting_tokens(1000), make_spec()
    one = read_batch(source, spec=spec, step=3)
    parts = global_batch(source, spec, 3, degree)
    by_id = {
        sample_id: row
        for part in parts
        for sample_id, row in zip(part.sample_ids, part.tokens, strict=True)
    }
    assert sorted(by_id) == sorted(one.sample_ids)
    for sample_id, row in zip(one.sample_ids, one.tokens, strict=True):
        assert torch.equal(by_id[sample_id], row)
    assert {part.global_tokens for part in parts} == {16 * SEQUENCE}


@pytest.mark.parametrize("degree", MESHES)
def test_a_micro_batch_of_all_ranks_is_a_run_of_the_global_batch(degree):
    spec = make_spec(global_samples=32, micro=2)
    ranks = [list(batch_positions(spec, data_index=i, data_degree=degree)) for i in range(degree)]
    for k in range(32 // (2 * degree)):
        together = [position for rank in ranks for position in rank[2 * k : 2 * k + 2]]
        assert together == list(range(2 * degree * k, 2 * degree * (k + 1)))


def test_a_sample_is_a_window_and_its_targets_are_the_next_tokens():
    local = read_batch(counting_tokens(1000), spec=make_spec(), step=5)
    starts = torch.tensor(local.sample_ids) % 249 * SEQUENCE
    assert torch.equal(local.tokens, starts[:, None] + torch.arange(SEQUENCE + 1))
    for samples in local.micro_batches(2):
        assert torch.equal(samples.targets, samples.inputs + 1)


def test_an_epoch_predicts_every_token_but_the_first_once():
    source, spec = counting_tokens(16 * SEQUENCE + 1), make_spec()
    local = read_batch(source, spec=spec, step=0)
    targets = torch.cat([samples.targets.flatten() for samples in local.micro_batches(2)])
    assert targets.sort().values.tolist() == list(range(1, 16 * SEQUENCE + 1))


def test_micro_batches_are_views_of_the_batch():
    local = read_batch(counting_tokens(1000), spec=make_spec(), step=0)
    storage = local.tokens.untyped_storage().data_ptr()
    pairs = [(samples.inputs, samples.targets) for samples in local.micro_batches(2)]
    assert len(pairs) == 8
    for inputs, targets in pairs:
        assert inputs.shape == targets.shape == (2, SEQUENCE)
        assert inputs.untyped_storage().data_ptr() == storage
        assert targets.untyped_storage().data_ptr() == storage
    assert local.tokens.dtype is torch.int64
    assert local.tokens.shape == (16, SEQUENCE + 1)


def of_images() -> Spec:
    """Pairs of samples of the user's own."""
    return replace(make_spec(), data=DataSpec(corpus=None, target="mine:pairs"))


def test_samples_that_are_handed_over_come_in_the_dtype_that_the_model_computes_in():
    images, labels = torch.arange(32, dtype=torch.float64).view(16, 2), torch.arange(16)
    own = shard_batch((images, labels), of_images(), 0)
    image, label = own.tensors
    assert (image.dtype, label.dtype) == (torch.float32, torch.int64)
    assert torch.equal(image.double(), images) and torch.equal(label, labels)


@pytest.mark.parametrize(
    ("samples", "finding"),
    [
        ((torch.zeros(16, 2), torch.zeros(15)), "got [1]: float32 [15]"),
        ({"image": torch.zeros(16, 2), "weight": torch.zeros(())}, "got ['weight']: float32 []"),
        ((torch.zeros(16, 2), "a cat"), "got [1]: str"),
        (torch.zeros(15), "got float32 [15]"),
        ((), "got tuple without tensors"),
    ],
)
def test_the_tensor_that_is_no_global_batch_is_named(samples, finding):
    with pytest.raises(SpecError) as caught:
        shard_batch(samples, of_images(), 0)
    (fault,) = caught.value.faults
    assert fault.place == "batch" and fault.finding == finding
    assert "batch.global = 16" in fault.remedy


def test_a_step_does_not_depend_on_the_time_of_its_request():
    source, spec = counting_tokens(1000), make_spec()
    first = read_batch(source, spec=spec, step=7)
    read_batch(source, spec=spec, step=8)
    assert torch.equal(read_batch(source, spec=spec, step=7).tokens, first.tokens)


def test_seeds_and_epochs_have_different_orders():
    orders = {
        (seed, epoch): tuple(
            stream_sample(epoch * 100 + place, windows=100, seed=seed) % 100 for place in range(100)
        )
        for seed in (0, 1, -1)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == len(orders)
    assert tuple(range(100)) not in orders.values()


@given(windows=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 99))
@settings(max_examples=50)
def test_the_order_of_an_epoch_is_a_permutation(windows, seed, epoch):
    drawn = [
        stream_sample(epoch * windows + place, windows=windows, seed=seed)
        for place in range(windows)
    ]
    assert sorted(drawn) == list(range(epoch * windows, (epoch + 1) * windows))


@given(place=st.integers(0, 10**12 - 1))
@settings(max_examples=50)
def test_a_huge_corpus_needs_no_memory(place):
    assert 0 <= stream_sample(place, windows=10**12, seed=0) < 10**12


def test_the_order_is_spread_evenly_over_the_corpus():
    """Each tenth of the draws takes about a tenth of its windows from each tenth of the corpus:
    chi-squared over 100 cells of 100, 81 degrees of freedom, mean 81 and deviation 12.7."""
    drawn = np.array([stream_sample(place, windows=10_000, seed=0) for place in range(10_000)])
    cells = np.histogram2d(np.arange(10_000), drawn, bins=10)[0]
    assert 81 - 5 * 12.7 < ((cells - 100) ** 2 / 100).sum() < 81 + 5 * 12.7


def test_the_held_out_split_has_separate_windows():
    source, spec = counting_tokens(1000, held_out=5 * SEQUENCE + 1), make_spec(global_samples=4)
    local = read_batch(source, spec=spec, step=0, split=Split.HELD_OUT)
    assert int(local.tokens.max()) <= 5 * SEQUENCE
    assert len(set(local.sample_ids)) == 4


def test_a_corpus_shorter_than_a_sample_is_rejected():
    with pytest.raises(
        PtrainError,
        match=r"has 4 tokens, but a sample needs 5\n  remedy: Use a smaller `batch.sequence`",
    ):
        require_trainable_data(counting_tokens(SEQUENCE), make_spec())


def test_a_short_held_out_split_matters_only_to_who_evaluates():
    source = counting_tokens(1000, held_out=SEQUENCE)
    require_trainable_data(source, make_spec())
    with pytest.raises(PtrainError, match="held_out split"):
        require_trainable_data(source, make_spec(every=10))


def test_a_token_outside_the_vocabulary_is_rejected_with_the_size_that_fits():
    source, spec = counting_tokens(1000), make_spec(vocab=500)
    with pytest.raises(PtrainError, match=r"contains token 999.*\n  remedy: Use `model.vocab=1000"):
        require_trainable_data(source, spec)
    with pytest.raises(PtrainError, match=r"but model.vocab is 500"):
        for step in range(20):
            read_batch(source, spec=spec, step=step)


def test_a_built_in_corpus_needs_the_vocabulary_of_its_tokenizer():
    source = open_corpus(DataSpec())
    require_trainable_data(source, make_spec(vocab=259))
    with pytest.raises(PtrainError, match=r"Use `model\.vocab=259`"):
        require_trainable_data(source, make_spec(vocab=258))
