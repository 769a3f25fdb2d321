"""The padded length of samples for equal slices, and specs that are not padded."""

from __future__ import annotations

import pytest

from ptrain.algebra.legality import check, find_unsupported
from ptrain.axes.context.attention import attention_of
from ptrain.errors import SpecError
from ptrain.spec.batch import batch_lines
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

TP = "placement={cp: [R, R, R, S], tp: [S, S, S, %s]}"


def padded_spec(name: str, *changes: str, sequence: int = 100) -> Spec:
    return load(name, [f"batch={{global: 8, sequence: {sequence}, pad: true}}", *changes]).spec


@pytest.mark.parametrize(
    ("name", "changes", "tokens"),
    [
        ("cp-ring", ("mesh.cp=8",), 104),
        ("cp-zigzag", ("mesh.cp=8",), 112),
        ("cp-all-gather", ("mesh.cp=8",), 104),
        ("cp-ulysses", ("mesh.cp=8", "model.heads=8", "model.kv_heads=8"), 104),
        ("cp-hybrid", ("context.attention={ulysses: 2, ring: 4}", "mesh.cp=8"), 112),
        ("cp-hybrid", ("context.attention={ulysses: 8, ring: 1}", "mesh.cp=8",
                       "model.heads=8", "model.kv_heads=8"), 104),
        ("cp-zigzag", ("mesh={cp: 2, tp: 4}", "model.kv_heads=4", TP % "R"), 100),
        ("cp-zigzag", ("mesh={cp: 2, tp: 4}", "model.kv_heads=4", TP % "S"), 104),
        ("tp-sp", ("mesh={tp: 8}", "model.heads=8", "model.kv_heads=8"), 104),
    ],
)  # fmt: skip
def test_a_sample_is_padded_to_the_next_multiple_of_its_slices(name, changes, tokens):
    spec = padded_spec(name, *changes)
    assert not check(spec) and not find_unsupported(spec)
    assert (spec.batch.sequence, spec.batch.unpadded_tokens) == (tokens, 100)
    assert spec.batch.tokens == 8 * 100


def test_zigzag_is_the_default():
    spec = load(
        {
            "name": "a",
            "model": {"preset": "llama-tiny"},
            "mesh": {"cp": 2},
            "placement": {"cp": "R,R,R,S"},
            "batch": {"sequence": 98, "pad": True},
        }
    ).spec
    assert str(attention_of(spec)) == "zigzag" and spec.batch.sequence == 100


def test_a_padded_spec_is_written_as_it_was_and_pads_for_another_mesh():
    spec = padded_spec("cp-zigzag", "mesh.cp=8")
    assert load(spec.resolved).spec == spec
    assert load(spec.resolved, ["mesh.cp=2"]).spec.batch.sequence == 100


def test_padding_is_reported():
    batch = padded_spec("cp-zigzag", "mesh.cp=8").batch
    assert batch_lines(batch, 1) == [
        "batch.sequence: 100 tokens are padded to 112; 10.7% of the computation is padding"
    ]


def test_padding_that_nothing_needs_is_rejected():
    (fault,) = check(padded_spec("zero2"))
    assert fault.place == "batch.pad"
    assert fault.finding == "has no effect: no axis shards the tokens of a sample"
    assert check(load("zero2", ["mesh={dp_shard: 1}", "batch.pad=true"]).spec) == ()


def test_a_truncated_sample_is_named_if_padding_is_not_requested():
    (fault,) = check(load("cp-zigzag", ["batch.sequence=99"]).spec)
    assert fault.remedy == (
        "Use `batch.sequence=96` or `batch.sequence=100`, or `batch.pad=true`, which adds "
        "ignored targets."
    )


def test_a_length_that_is_named_does_for_slices_of_tp_too():
    changes = ["mesh={cp: 2, tp: 4}", "model.kv_heads=4", TP % "S", "batch.sequence=102"]
    of_cp = next(f for f in check(load("cp-zigzag", changes).spec) if "of cp" in f.finding)
    assert of_cp.remedy.startswith("Use `batch.sequence=96` or `batch.sequence=104`,")
    for sequence in (96, 104):
        assert not check(load("cp-zigzag", [*changes, f"batch.sequence={sequence}"]).spec)


def test_a_hybrid_is_not_given_degrees_that_it_does_not_have():
    (fault,) = check(load("cp-hybrid", ["batch.sequence=36"]).spec)
    assert fault.remedy.startswith(
        "Use `batch.sequence=32` or `batch.sequence=40`, or `context.attention=ring`, or `batch.pad"
    )


def test_samples_that_are_no_tokens_are_not_padded():
    changes = ["data={target: 'a:b'}", "step={target: 'a:c'}"]
    with pytest.raises(SpecError) as caught:
        padded_spec("tp-sp", *changes)
    (fault,) = caught.value.faults
    assert fault.place == "batch.pad"


def test_a_model_with_unknown_attention_is_not_padded():
    changes = ["model={target: 'a:b'}", "mesh={tp: 8}", "batch.sequence=100"]
    places = [fault.place for fault in check(padded_spec("tp-sp", *changes))]
    assert places == ["batch.pad"]


def test_a_mean_by_micro_batch_is_not_padded():
    (fault,) = check(padded_spec("tp-sp", "loss={target: 'a:c'}", "mesh={tp: 2}", sequence=101))
    assert fault.place == "batch.pad" and fault.finding.startswith("a:c returns the mean")
