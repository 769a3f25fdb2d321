"""Ignored targets: where they are declared, and the count that a loss is divided by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ptrain.axes.context.attention import all_spans, context_of
from ptrain.axes.context.run.slices import slice_batch
from ptrain.data.corpus import Corpus, open_corpus
from ptrain.data.sampler import (
    LocalBatch,
    Split,
    blank_batch,
    read_batch,
    require_trainable_data,
    shard_batch,
)
from ptrain.errors import SpecError
from ptrain.models.cross_entropy import IGNORED
from ptrain.models.objective import Objective
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.verification.reference import ReferenceTraining

SPACE = 32  # a byte that is frequent, and more so in some samples than in others


def spec_of(*changes: str) -> Spec:
    return load("zero2", ["batch.sequence=16", "data.ignored=[32]", *changes]).spec


def shares(spec: Spec, source: Corpus | None = None, step: int = 0) -> list[LocalBatch]:
    source = source or open_corpus(spec.data)
    degree = spec.data_degree
    return [
        read_batch(source, spec=spec, step=step, data_index=index, data_degree=degree)
        for index in range(degree)
    ]


def count_targets(local: LocalBatch) -> int:
    return sum(int((b.targets != IGNORED).sum()) for b in local.micro_batches(2))


def test_ignored_tokens_are_inputs_and_no_targets() -> None:
    (local, other) = shares(spec_of())
    for samples in local.micro_batches(2):
        following = samples.inputs[:, 1:]
        targets = samples.targets[:, :-1]
        assert (following == SPACE).any()
        assert torch.equal(targets == IGNORED, following == SPACE)
        assert torch.equal(targets[targets != IGNORED], following[following != SPACE])
    assert count_targets(local) != count_targets(other)


def test_a_step_is_divided_by_the_targets_that_count_on_all_ranks() -> None:
    parts = shares(spec_of())
    total = sum(map(count_targets, parts))
    assert [part.global_tokens for part in parts] == [total, total]
    assert [part.global_samples for part in parts] == [16, 16]
    assert total < 16 * 16


def test_a_step_without_a_target_that_counts_has_no_loss_and_divides_by_one() -> None:
    spec = spec_of(f"data.ignored={[*range(259)]}")
    (local, _) = shares(spec)
    assert count_targets(local) == 0 and local.global_tokens == 1


def test_the_reference_is_torchs_mean_over_the_whole_batch() -> None:
    """One device with all samples of a step in one call of torch's cross entropy."""
    spec = spec_of("precision={layout: fp32, compute: fp64}", "model.layers=1")
    reference = ReferenceTraining(spec)
    samples = [micro_batch.samples for micro_batch in reference.micro_batches(0)]
    inputs = torch.cat([part.inputs for part in samples])
    targets = torch.cat([part.targets for part in samples])
    logits = reference.module(inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten())  # -100 is what it ignores, and the mean
    loss.backward()
    wanted = {name: p.grad for name, p in reference.module.named_parameters()}
    reference.module.zero_grad(set_to_none=True)
    run = reference.accumulate(0)
    assert abs(run.loss - loss.item()) < 1e-12
    for name, gradient in run.sums.items():
        torch.testing.assert_close(gradient.double(), wanted[name], rtol=1e-9, atol=1e-12)


def test_a_mask_marks_the_tokens_of_a_file_that_are_no_targets(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 259, 4000).astype(np.uint16)
    mask = generator.integers(0, 2, 4000).astype(bool)
    np.save(tmp_path / "tokens.npy", tokens)
    np.save(tmp_path / "mask.npy", mask)
    spec = load(
        "zero2",
        [
            "batch.sequence=16",
            f"data.path={tmp_path / 'tokens.npy'}",
            f"data.loss_mask={tmp_path / 'mask.npy'}",
        ],
    ).spec
    source = open_corpus(spec.data)
    windows = source.num_samples(16)
    for part in shares(spec, source):
        for row, sample in zip(part.micro_batches(1), part.sample_ids, strict=True):
            start = 16 * (sample % windows)
            own = slice(start + 1, start + 17)
            wanted = np.where(mask[own], tokens[own].astype(np.int64), IGNORED)
            assert row.targets[0].tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("mask", "finding"),
    [
        (np.zeros(3999, bool), "3999 values for 4000 tokens"),
        (np.zeros((2, 2000), bool), "bool of shape (2, 2000)"),
        (np.zeros(4000, np.float32), "float32 of shape (4000,)"),
        (None, "No such file"),
    ],
)
def test_a_mask_that_does_not_fit_its_tokens_is_rejected(
    tmp_path: Path, mask: np.ndarray | None, finding: str
) -> None:
    np.save(tmp_path / "tokens.npy", np.zeros(4000, np.uint16))
    if mask is not None:
        np.save(tmp_path / "mask.npy", mask)
    spec = spec_of(
        f"data.path={tmp_path / 'tokens.npy'}", f"data.loss_mask={tmp_path / 'mask.npy'}"
    )
    with pytest.raises(SpecError) as caught:
        open_corpus(spec.data)
    (fault,) = caught.value.faults
    assert fault.place == "data.loss_mask" and finding in fault.finding


def test_token_slices_have_their_targets_and_the_count_of_all() -> None:
    spec = load("cp-zigzag", ["batch.sequence=16", "data.ignored=[32]"]).spec
    (local,) = shares(spec)
    step = context_of(spec)
    assert step is not None
    parts = [slice_batch(local, spans) for spans in all_spans(step)]
    assert {part.global_tokens for part in parts} == {local.global_tokens}
    numbers = [int((part.targets != IGNORED).sum()) for part in parts]
    assert sum(numbers) == local.global_tokens and numbers[0] != numbers[1]


def test_samples_of_a_users_loop_are_masked() -> None:
    spec = spec_of()
    tokens = torch.arange(16 * 17).reshape(16, 17) % 40
    part = shard_batch(tokens, spec, 0)
    assert part.global_tokens == int((tokens[:, 1:] != SPACE).sum())
    labels = tokens.masked_fill(tokens % 3 == 0, IGNORED)
    own = shard_batch((tokens, labels), spec, 1)
    is_counted = (tokens % 3 != 0) & (tokens != SPACE)
    assert own.global_tokens == int(is_counted[:, 1:].sum())
    with pytest.raises(SpecError, match=r"Use `data.ignored"):
        shard_batch((tokens, labels), replace(spec, data=replace(spec.data, ignored=None)), 1)
    masked = replace(spec, data=replace(spec.data, ignored=None, loss_mask="mask.npy"))
    with pytest.raises(SpecError, match=r"Pass `\(tokens, labels\)`"):
        shard_batch(tokens, masked, 1)


def test_a_blank_batch_holds_as_much_as_one_with_samples() -> None:
    spec = spec_of()
    sizes = [sum(t.nbytes for t in b.tensors) for b in (blank_batch(spec), shares(spec)[0])]
    assert sizes[0] == sizes[1] == 8 * 2 * 17 * 8
    assert Objective().divisor(blank_batch(spec), next(blank_batch(spec).micro_batches(2))) > 0


def test_a_mask_is_held_out_with_its_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.zeros(4000, np.uint16))
    places = np.arange(4000)  # one that counts is trained on, in none of the first step's samples
    np.save(tmp_path / "mask.npy", (places == 3700) | (places >= 3800))
    spec = load(
        "zero2",
        [
            "batch={global: 4, micro: 2, sequence: 16}",
            "eval.every=1",
            f"data.path={tmp_path / 'tokens.npy'}",
            f"data.loss_mask={tmp_path / 'mask.npy'}",
        ],
    ).spec
    source = open_corpus(spec.data)
    require_trainable_data(source, spec)
    assert read_batch(source, spec=spec, step=0).global_tokens == 1
    held = read_batch(source, spec=spec, step=0, split=Split.HELD_OUT)
    assert held.global_tokens == 4 * 16
