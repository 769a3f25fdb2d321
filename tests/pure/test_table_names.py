"""A committed table is found by what it depends on: each is some setting's, and no two settings
that differ share one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from ptrain.derivation import blocks, loss_chunks
from ptrain.derivation.activations import saved, table_name, torch_version
from ptrain.derivation.archive import TablePart, names
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import LossSpec
from tests.pure.build import ODD_SHAPE

MHA = replace(ODD_SHAPE, kv_heads=3)
GPT = replace(MHA, family=Family.GPT)
DROPPED = replace(GPT, dropout=0.1)
KINDS = {"llama-gqa": ODD_SHAPE, "llama-mha": MHA, "gpt-plain": GPT, "gpt-dropout": DROPPED}
PRECISIONS = {DType.FP32: "full", DType.FP64: "full", DType.BF16: "bf16"}
BATCHES = {1: "-one", 2: "", 8: ""}


def settings() -> list[tuple[str, str, ModelShape, DType, int]]:
    return [
        (kind, f"-{precision}{one}", shape, compute, batch)
        for (kind, shape), (compute, precision), (batch, one) in product(
            KINDS.items(), PRECISIONS.items(), BATCHES.items()
        )
    ]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_whole_model_is_named_by_family_tying_heads_dropout_dtype_and_batch(is_tied):
    tied, found = "tied" if is_tied else "untied", set()
    for kind, rest, shape, compute, batch in settings():
        family, _, own = kind.partition("-")
        name = table_name(replace(shape, tied=is_tied), compute, batch)
        assert name == f"{family}-{tied}-{own}{rest}"
        found.add(name)
    of_gpus = {name.replace("dropout", "dropout-cuda") for name in found if "dropout" in name}
    assert found | of_gpus == {name for name in names(TablePart.MODEL) if f"-{tied}-" in name}


def test_what_gpus_drop_has_tables_of_its_own():
    for kind, rest, shape, compute, batch in settings():
        name = table_name(shape, compute, batch, is_for_cuda=True)
        mine = kind.replace("dropout", "dropout-cuda")
        assert name == f"{mine.replace('-', '-untied-', 1)}{rest}"
        assert name in names(TablePart.MODEL)


def test_a_block_is_named_without_the_tying():
    found = set()
    for kind, rest, shape, compute, batch in settings():
        setting = blocks.Setting(shape=shape, batch=batch, sequence=16, compute=compute)
        assert (setting.name, setting.kind) == (f"{kind}{rest}", "plain")
        found |= {setting.name, replace(setting, is_for_cuda=True).name}
    assert found == names(TablePart.BLOCK)


def test_the_loss_is_named_without_heads_and_dropout():
    found = set()
    for is_tied in (True, False):
        for kind, rest, shape, compute, batch in settings():
            name = loss_chunks.file_name(replace(shape, tied=is_tied), compute, batch)
            assert name == f"{kind.partition('-')[0]}-{'tied' if is_tied else 'untied'}{rest}"
            found.add(name)
    assert found == names(TablePart.LOSS)


@pytest.mark.parametrize(
    ("chunk", "cut_to", "chunks"), [(8, 8, 4), (24, 24, 1), (32, 32, 1), (33, 32, 1), (5, 5, 6)]
)
def test_a_chunk_is_no_longer_than_the_tokens_and_only_full_ones_count(chunk, cut_to, chunks):
    """2 samples of 16 tokens."""
    setting = loss_chunks.LossSetting(
        shape=ODD_SHAPE, batch=2, sequence=16, compute=DType.FP32, loss=LossSpec(chunk=chunk)
    )
    assert (setting.chunk, setting.chunks, type(setting.chunks)) == (cut_to, chunks, int)


def test_a_table_knows_the_torch_that_was_traced():
    release = {torch_version(shape, compute) for shape in KINDS.values() for compute in PRECISIONS}
    assert len(release) == 1
    assert release.pop().startswith("2.")


def test_one_sample_alone_saves_less_than_a_batch_counts_for_it():
    for shape in KINDS.values():
        one, two = (len(saved(shape, DType.FP32, batch=batch)) for batch in (1, 2))
        assert 0 < one <= two
