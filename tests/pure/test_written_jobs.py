"""Values written in a spec are fixed in every candidate of a search; `auto` and missing values are
searched."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest

from ptrain.cli.main import main
from ptrain.cost import PLACED
from ptrain.errors import SpecError
from ptrain.selection.choose import Chooser, neighbours
from ptrain.selection.job import searched_job, words_of
from ptrain.selection.where import recompute_of
from ptrain.spec.dials import GatherAfterUpdate, Overlap, ReduceScatterVia
from ptrain.spec.load import load
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.spec import Spec
from tests.pure.searches import without_known

_OPEN = "mesh.dp_shard=auto"


def candidates(source: str, *words: str, devices: int = 4) -> list[Spec]:
    """The specs of all that is scored of a job."""
    job = searched_job(source, [*words, "cluster.devices=8"], devices=devices)
    chooser = Chooser(job)
    specs = [
        block.scored(row).candidate.spec(job.base)
        for block in chooser.search.blocks()
        for row in block.rows
    ]
    assert specs
    return specs


def tuples(specs: list[Spec], axis: Axis) -> set[str]:
    return {str(f.placement) for spec in specs for f in spec.factors if f.axis is axis}


@pytest.mark.parametrize(
    ("source", "words", "field", "value"),
    [
        ("zero3", [_OPEN, "unit=3 blocks"], "unit", "3 blocks"),
        ("zero3", [_OPEN, "prefetch=2", "overlap=backward"], "prefetch", 2),
        ("zero3", [_OPEN, "overlap=backward"], "overlap", Overlap.BACKWARD),
        ("zero3", [_OPEN, "sync.reshard_after_forward=2"], "sync.reshard_after_forward", 2),
        ("zero3-keep", [_OPEN], "sync.reshard_after_forward", False),
        ("zero3", [_OPEN, "sync.gradients=every"], "sync.gradients", "every"),
        ("ddp", ["mesh.dp_replicate=auto", "bucket=per-tensor"], "bucket_bytes", 1),
        (
            "zero1",
            [_OPEN, "gather_after_update=during-update"],
            "gather_after_update",
            GatherAfterUpdate.DURING_UPDATE,
        ),
        (
            "zero2",
            [_OPEN, "reduce_scatter=all_to_all"],
            "reduce_scatter",
            ReduceScatterVia.ALL_TO_ALL,
        ),
        ("zero-offload", [_OPEN, "offload.update=device"], "offload.update", "device"),
        ("zero3", [_OPEN, "batch.micro=2"], "batch.micro", 2),
        ("zero3", [_OPEN, "precision.layout=bf16"], "precision.layout.name", "bf16"),
        ("zero3", [_OPEN, "loss=chunked"], "loss.chunk", 1024),
        ("zero3", [_OPEN, "optimizer.name=sgd"], "optimizer.name", "sgd"),
        ("pp-gpipe", ["mesh.pp=auto", "pipeline.split=layers"], "pipeline.split", "layers"),
    ],
)
def test_a_dial_that_is_written_is_in_every_candidate(source, words, field, value):
    specs = candidates(source, *words, devices=2)
    values: set[Any] = {attrgetter(field)(spec) for spec in specs if spec.world_size > 1}
    assert {str(v) if isinstance(value, str) else v for v in values} == {value}


@pytest.mark.parametrize(
    ("source", "words", "axis", "expected"),
    [
        ("zero3", [_OPEN], Axis.DP_SHARD, {"S*,S,S,R"}),
        ("zero3", ["mesh=auto"], Axis.DP_SHARD, {"S*,S,S,R"}),
        (
            "zero3",
            [_OPEN, "placement.dp_shard=[S*@host, O, O, R]"],
            Axis.DP_SHARD,
            {"S*@host,O,O,R"},
        ),
        ("nvme-offload", [_OPEN], Axis.DP_SHARD, {"S*@file,S@file,O,R"}),
        ("hsdp", ["placement.dp_shard=auto"], Axis.DP_REPLICATE, {"R,R,R,R"}),
        ("tp-saved", ["mesh={dp_shard: auto, tp: auto}"], Axis.TP, {"S,S,S,S*"}),
    ],
)
def test_a_tuple_that_is_written_is_in_every_candidate(source, words, axis, expected):
    specs = candidates(source, *words)
    assert tuples(specs, axis) == expected


def test_offloading_candidates_use_the_written_tier():
    specs = candidates("nvme-offload", "placement=auto", "offload.tier=file", devices=2)
    placed = {f.placement[state].tier for s in specs for f in s.factors for state in PLACED}
    kept = {tier for spec in specs for tier in spec.activations.tiers}
    assert placed == kept == {Tier.DEVICE, Tier.FILE}


def test_auto_is_searched_at_every_key():
    words = "placement=auto", "batch.micro=auto", "unit=auto"
    specs = candidates("hsdp", *words)
    assert len(tuples(specs, Axis.DP_SHARD)) > 5
    assert {spec.batch.micro for spec in specs} == {1, 2, 4}
    chooser = Chooser(searched_job("hsdp", [*words, "cluster.devices=8"], devices=4))
    best = next(chooser.search.run(chooser.job.where).best).candidate
    around = [other.spec(chooser.job.base) for other in neighbours(chooser.search, best)]
    assert len({spec.unit for spec in around}) > 2
    assert {(s.degree(Axis.DP_REPLICATE), s.degree(Axis.DP_SHARD)) for s in specs} == {(2, 2)}


def test_a_mesh_that_is_auto_leaves_every_axis_open_and_the_tuples_as_they_are():
    specs = candidates("zero3", "mesh=auto", "batch.micro=auto")
    degrees = {axis: {spec.degree(axis) for spec in specs} for axis in Axis}
    assert degrees[Axis.DP_SHARD] == {1, 2, 4} and degrees[Axis.PP] == {1, 2, 4}
    assert degrees[Axis.TP] >= {1, 2} and degrees[Axis.DP_REPLICATE] == {1, 2, 4}


def test_a_degree_that_a_model_is_given_stays_and_the_others_are_searched():
    job = searched_job("llama3-8b", ["mesh.tp=2", "batch.global=64"], cluster="h100-8")
    assert [rule.text for rule in job.where.constraints] == ["mesh.tp=2"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"none", "selective", "full", "offload"}),
        (["activations=R"], {"none"}),
        (["activations=M"], {"selective", "full"}),
        (["activations=O"], {"offload"}),
        (["recompute=full"], {"full"}),
        (["activations=M", "recompute=selective"], {"selective"}),
        (["recompute=none"], {"none", "offload"}),
        (["placement.dp_shard=[S*, S, S, M]"], {"selective", "full"}),
        (["activations=auto", "recompute=auto"], {"none", "selective", "full", "offload"}),
    ],
)
def test_how_blocks_keep_activations_is_as_it_is_written(words, expected):
    specs = candidates("zero3", _OPEN, *words)
    assert {recompute_of(spec) for spec in specs} == expected


def test_fixed_values_are_listed(capsys):
    words = ["mesh.dp_shard=auto", "unit=2 blocks", "activations=M", "--devices", "2"]
    assert main(["select", "zero3", *words, "--exact", "2"]) == 0
    stays = "placement.dp_shard=S*,S,S,R, unit=2 blocks, recompute=selective or full"
    assert f"fixed by the spec: {stays}" in capsys.readouterr().out


def test_a_tier_without_rates_is_searched(capsys):
    words = ["llama3-8b", "--cluster", "h100-8", "offload.tier=file", "batch.global=8"]
    where = ["--where", "recompute=full", "--where", "pp=1", "--where", "tp=1", "--exact", "2"]
    assert main(["select", *words, *where]) == 0
    assert "fixed by the spec: offload.tier=file" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["mesh=auto", "placement=auto"])
def test_a_run_of_an_open_spec_names_the_command_that_chooses(word, capsys):
    assert main(["predict", "zero3", word]) == 2
    assert "ptrain select SPEC" in capsys.readouterr().err


def test_a_schedule_that_is_written_is_that_of_every_pipeline_and_none_without_one():
    specs = candidates("pp-gpipe", "mesh=auto")
    piped = {str(s.pipeline.schedule) for s in specs if s.degree(Axis.PP) > 1}
    assert piped == {"gpipe"}
    assert any(spec.degree(Axis.PP) == 1 for spec in specs)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hsdp", ["placement=auto", "mesh=auto"]),
        ("zero3", [_OPEN, "unit=sub-block", "overlap=backward"]),
        ("checkpoint-selective", ["batch.micro=auto"]),
        ("nvme-offload", ["batch.micro=auto"]),
        ("nvme-offload", ["placement=auto", "offload.tier=file"]),
        ("3d", ["mesh=auto", "batch.micro=auto"]),
        ("zero3", ["unit=auto", "activations=auto"]),
    ],
)
def test_words_of_a_candidate_load_to_it(source, words):
    devices = 8 if source == "3d" else 4 if source == "hsdp" else 2
    chooser = Chooser(searched_job(source, [*words, "cluster.devices=8"], devices=devices), count=4)
    for row in without_known(chooser.choose).ranking:
        name, *said = words_of(chooser.job, row.spec)
        loaded = load(name, said).spec
        for field in ("factors", "batch", "sync", "unit", "overlap", "pipeline", "activations"):
            assert getattr(loaded, field) == getattr(row.spec, field), field
        for field in ("precision", "loss", "tensor", "optimizer", "bucket_bytes", "offload"):
            assert getattr(loaded, field) == getattr(row.spec, field), field


def test_the_overrides_of_a_candidate_reset_open_keys(tmp_path):
    file = tmp_path / "open.yaml"
    lines = (
        "model: {preset: llama-tiny}",
        "mesh: {dp_shard: 2}",
        "placement: {dp_shard: 'R,S,S,R'}",
        "batch: {global: 16, sequence: 64}",
        *("unit: auto", "overlap: auto", "prefetch: auto", "gather_after_update: auto"),
        "cluster: {preset: laptop}",
    )
    file.write_text("\n".join(lines), encoding="utf-8")
    chooser = Chooser(searched_job(str(file), [], devices=2), count=20)
    for row in without_known(chooser.choose).ranking:
        name, *said = words_of(chooser.job, row.spec)
        loaded = load(name, said).spec
        for dial in ("unit", "overlap", "prefetch", "gather_after_update", "sync", "batch"):
            assert getattr(loaded, dial) == getattr(row.spec, dial)


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (["batch.micro=2"], "this spec leaves nothing to search"),
        (
            [_OPEN, 'activations={"0-1": M}'],
            "not supported yet: a search with per-block activation modes",
        ),
        (
            [_OPEN, "recompute.budget=2 GiB"],
            "not supported yet: a search with per-block activation modes",
        ),
        ([_OPEN, "unit=blok"], "must be block, sub-block"),
        ([_OPEN, "placement.dp_shard=zero4"], "no strategy named"),
    ],
)
def test_an_invalid_value_is_reported(words, finding):
    with pytest.raises(SpecError, match=finding):
        searched_job("zero3", words, devices=2)
