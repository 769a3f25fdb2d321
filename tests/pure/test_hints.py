"""What a fault guesses at: only words that are near to what was written."""

from __future__ import annotations

import pytest

from ptrain.errors import SpecError
from ptrain.spec.load import load
from ptrain.spec.names import names


def message(*overrides: str, source: str = "") -> str:
    with pytest.raises(SpecError) as caught:
        load(source or names().default, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "precision.layout=fp8",
        "precision.parameters=fp8",
        "nope=1",
        "model.preset=nosuch",
        "placement=nosuch",
        "unit=0 blocks",
        "bucket=12 apples",
    ],
)
def test_a_word_that_is_far_from_all_others_is_not_guessed_at(override):
    assert "did you mean" not in message(override)


def test_a_spec_far_from_all_others_is_not_guessed_at():
    assert "did you mean" not in message(source="nosuch")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("precision.layout=zero61", "zero16"),
        ("optimizer.nmae=adamw", "name"),
        ("overlap=on", "backward"),
        ("overlap=off", "none"),
        ("unit=sub_block", "sub-block"),
        ("cluster.memory=80 GiB", "device_memory"),
        ("cluster.host=1 TB", "host_memory"),
        ("cluster.inter_node=50 GB/s", "inter_node_bandwidth"),
        ("cluster.intra_node=450 GB/s", "intra_node_bandwidth"),
        ("cluster.inter_node_latncy=1e-5", "inter_node_latency"),
    ],
)
def test_a_near_word_is_asked_for(override, meant):
    assert f"did you mean '{meant}'?" in message(override)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("{dp_shard: S*,S,M,R}", "{dp_shard: [S*, S, M, R]}"),
        ("{dp_shard: S*, S, S, R}", "{dp_shard: [S*, S, S, R]}"),
        ("{dp_replicate: R,R,R,R, dp_shard: S*,S,S,R}", "{dp_replicate: [R, R, R, R]}"),
        ("{dp_replicate: ddp, dp_shard: S*,S,S,R, tp: tp}", "{dp_shard: [S*, S, S, R]}"),
        ("{dp_shard: zero3, tp: S,S,S,S*}", "{tp: [S, S, S, S*]}"),
        ("{tp: S,S}", "{tp: [S, S, S, R]}"),
        ("{dp_shard: S*,S,\n  M,R}", "{dp_shard: [S*, S, M, R]}"),
    ],
)
def test_modes_cut_at_commas_within_braces_are_one_fault(written, meant, tmp_path):
    file = tmp_path / "spec.yaml"
    text = "model: {preset: llama-tiny}\nmesh: {dp_shard: 2}\nbatch: {sequence: 128}\nplacement: "
    file.write_text(text + written)
    with pytest.raises(SpecError) as caught:
        load(file)
    (fault,) = caught.value.faults
    assert (fault.place, fault.line, fault.remedy) == ("placement", 4, f"write a list: {meant}")
    axis, first = meant.strip("{").replace("[", "").split(",")[0].split(": ")
    assert fault.text[: fault.column - 1].endswith(f"{axis}: ")
    assert fault.text[fault.column - 1 :].startswith(first)


def test_an_option_that_another_makes_void_is_refused():
    said = message("model.preset=gpt-tiny", "model.rope_base=5")
    assert "model.rope_base: positions: learned, and none that turn" in said
    assert "write positions: rope" in said


def test_what_a_shape_has_is_taken():
    assert load("zero3", ["model.dropout=0.5"]).spec.model.dropout == 0.5
    assert load("zero3", ["model.dropout=0"]).spec.model.dropout == 0
    assert load("zero3", ["model.preset=gpt-tiny", "model.dropout=0.5"]).spec.model.dropout == 0.5
    assert load("zero3", ["model.rope_base=5"]).spec.model.rope_base == 5
