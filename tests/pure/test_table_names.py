"""A committed table is found by its dependencies: each belongs to a setting, and no two different
settings share one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from ptrain.derivation.archive import TablePart, table_names
from ptrain.derivation.tables import Setting, chunk_of, full_chunks
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import LossSpec
from tests.pure.build import ODD_SHAPE, setting
from tests.saved_tensors import torch_version

MHA = replace(ODD_SHAPE, kv_heads=3)
GPT = ModelShape(family=Family.GPT, layers=3, hidden=42, heads=3, kv_heads=3, ffn=101, vocab=259)
DROPPED = replace(GPT, dropout=0.1)
KINDS = {"llama-gqa": ODD_SHAPE, "llama-mha": MHA, "gpt-plain": GPT, "gpt-dropout": DROPPED}
PRECISIONS = {DType.FP32: "full", DType.FP64: "full", DType.BF16: "bf16"}
BATCHES = {1: "-one", 2: "", 8: ""}


def name_parts() -> list[tuple[str, str, Setting]]:
    """Return the parts of a name for operators, for dtype and batch, and the setting."""
    return [
        (kind, f"-{precision}{one}", setting(shape, compute, batch=batch))
        for (kind, shape), (compute, precision), (batch, one) in product(
            KINDS.items(), PRECISIONS.items(), BATCHES.items()
        )
    ]


def with_tied_head(whole: Setting, *, is_tied: bool) -> Setting:
    return replace(whole, shape=replace(whole.shape, tied=is_tied))


@pytest.mark.parametrize("is_tied", [True, False])
def test_passes_are_named_by_family_tying_heads_dropout_dtype_and_batch(is_tied):
    tying, seen = "tied" if is_tied else "untied", set()
    for kind, rest, whole in name_parts():
        family, _, own = kind.partition("-")
        name = with_tied_head(whole, is_tied=is_tied).name(TablePart.PASSES)
        assert name == f"{family}-{tying}-{own}{rest}"
        seen.add(name)
    of_gpus = {name.replace("dropout", "dropout-cuda") for name in seen if "dropout" in name}
    assert seen | of_gpus == {
        name for name in table_names(TablePart.PASSES) if f"-{tying}-" in name
    }


def test_gpu_dropout_has_separate_tables():
    for kind, rest, whole in name_parts():
        name = replace(whole, is_for_cuda=True).name(TablePart.PASSES)
        mine = kind.replace("dropout", "dropout-cuda")
        assert name == f"{mine.replace('-', '-untied-', 1)}{rest}"
        assert name in table_names(TablePart.PASSES)


def test_a_block_is_named_without_the_tying():
    seen = set()
    for kind, rest, whole in name_parts():
        name = whole.name(TablePart.BLOCK)
        assert (name, whole.way(TablePart.BLOCK)) == (f"{kind}{rest}", "plain")
        seen |= {name, replace(whole, is_for_cuda=True).name(TablePart.BLOCK)}
    assert seen == table_names(TablePart.BLOCK)


def test_the_loss_is_named_without_heads_and_dropout():
    seen = set()
    for is_tied in (True, False):
        for kind, rest, whole in name_parts():
            name = with_tied_head(whole, is_tied=is_tied).name(TablePart.LOSS)
            assert name == f"{kind.partition('-')[0]}-{'tied' if is_tied else 'untied'}{rest}"
            seen.add(name)
    assert seen == table_names(TablePart.LOSS)


@pytest.mark.parametrize(
    ("chunk", "cut_to", "chunks"), [(8, 8, 4), (24, 24, 1), (32, 32, 1), (33, 32, 1), (5, 5, 6)]
)
def test_a_chunk_is_at_most_as_long_as_the_tokens_and_only_full_ones_count(chunk, cut_to, chunks):
    """2 samples of 16 tokens."""
    whole = replace(setting(ODD_SHAPE, sequence=16), loss=LossSpec(chunk=chunk))
    assert (chunk_of(whole), full_chunks(whole)) == (cut_to, chunks)


def test_a_table_names_the_traced_torch():
    release = {
        torch_version(setting(shape, compute)) for shape in KINDS.values() for compute in PRECISIONS
    }
    assert len(release) == 1
    assert release.pop().startswith("2.")
