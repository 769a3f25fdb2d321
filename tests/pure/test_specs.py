"""The built-in specs match their names, and `ptrain specs` shows them."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from functools import cache
from math import prod

import pytest

from ptrain.algebra.legality import check, find_unsupported, require_runnable
from ptrain.axes.pipeline.catalogue import pipeline_of
from ptrain.cli import specs as verb
from ptrain.commands import add_arguments
from ptrain.cost import State
from ptrain.derivation.estimate import derive
from ptrain.errors import PtrainError, SpecError
from ptrain.facts.parameters import facts
from ptrain.report.printed import minimal_spec
from ptrain.selection.fit import fit
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.names import SPEC_FOLDERS, find_spec, list_files, load_names, specs_folder
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis, M, R
from ptrain.spec.spec import Spec
from ptrain.spec.text import parse, read
from ptrain.spec.write import to_yaml

STRATEGIES = {
    "ddp": ["dp_replicate=2: R,R,R,R"],
    "zero1": ["dp_shard=2: R,S,R,R"],
    "zero2": ["dp_shard=2: R,S,S,R"],
    "zero3": ["dp_shard=2: S*,S,S,R"],
    "zero3-keep": ["dp_shard=2: S*,S,S,R"],
    "hsdp": ["dp_replicate=2: R,R,R,R", "dp_shard=2: S*,S,S,R"],
    "hsdp-full-optimizer": ["dp_replicate=2: R,S,R,R", "dp_shard=2: S*,S,S,R"],
    "ddp-zero-redundancy": ["dp_replicate=2: R,S,R,R"],
    "zero-offload": ["dp_shard=2: O,O,S,R"],
    "zero-offload-ds": ["dp_shard=2: R,O,O,R"],
    "fsdp-offload": ["dp_shard=2: S*@host,O,O,R"],
    "nvme-offload": ["dp_shard=2: S*@file,S@file,O,R"],
    "fsdp-mixed": ["dp_shard=2: M,S,S,R"],
    "optimizer-in-backward": ["dp_replicate=2: R,R,M,R"],
    "muon": ["dp_shard=2: S*,S*,S*,R"],
    "checkpoint-full": ["dp_shard=2: S*,S,S,M"],
    "checkpoint-selective": ["dp_shard=2: S*,S,S,M"],
    "activation-offload": ["dp_shard=2: S*,S,S,O"],
    "cp-ring": ["cp=2: R,R,R,S"],
    "cp-zigzag": ["cp=2: R,R,R,S"],
    "cp-all-gather": ["cp=2: R,R,R,S*"],
    "cp-ulysses": ["cp=2: R,R,R,S"],
    "cp-hybrid": ["cp=4: R,R,R,S"],
    "tp": ["tp=2: S,S,S,R"],
    "tp-sp": ["tp=2: S,S,S,S"],
    "tp-saved": ["tp=2: S,S,S,S*"],
    "tp-naive": ["tp=2: S,S,S,R"],
    "tp-dp": ["dp_replicate=2: R,R,R,R", "tp=2: S,S,S,R"],
    "tp-zero3": ["dp_shard=2: S*,S,S,R", "tp=2: S,S,S,R"],
    **{f"pp-{schedule}": ["pp=2: S,S,S,R"] for schedule in ScheduleName},
    "pp-dp": ["pp=2: S,S,S,R", "dp_replicate=2: R,R,R,R"],
    "pp-zero2": ["pp=2: S,S,S,R", "dp_shard=2: R,S,S,R"],
    "pp-zero3": ["pp=2: S,S,S,R", "dp_shard=2: S*,S,S,R"],
    "3d": ["pp=2: S,S,S,R", "dp_shard=2: S*,S,S,R", "tp=2: S,S,S,R"],
}
KEPT = {"zero3-keep", "pp-zero3", "3d"}  # units are not resharded after forward


def numel(model: object, sequence: int) -> int:
    assert isinstance(model, ModelShape)
    return facts(model, sequence).numel


def test_the_strategies_are_those_of_the_contract():
    assert set(list_files("strategies")) == set(STRATEGIES)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_its_tuple_and_a_tiny_model(name):
    spec = load(name).spec
    placed = [f"{f.axis}={f.degree}: {f.placement}" for f in spec.factors]
    assert placed == STRATEGIES[name]
    assert spec.name == name
    assert spec.sync.reshard_after_forward is (name not in KEPT)
    assert 0.5e6 < numel(spec.model, spec.batch.sequence) < 1e6
    assert spec.batch.accumulate == (1 if used_up(spec) else 8 // spec.data_degree)
    assert spec.cluster is not None
    assert not check(spec) and not find_unsupported(spec)


@pytest.mark.parametrize("schedule", ScheduleName)
def test_a_schedule_has_a_strategy_of_its_name(schedule):
    spec = load(f"pp-{schedule}").spec
    assert spec.pipeline.schedule is schedule
    assert pipeline_of(spec) is not None


def test_the_default_schedules_strategy_is_its_tuple_and_is_listed_with_others():
    written = ["mesh={pp: 2, dp_shard: 2}", "placement={pp: pp-1f1b, dp_shard: zero2}"]
    assert load("pp-dp", written).spec.factors == load("pp-zero2").spec.factors


@pytest.mark.parametrize(
    ("mesh", "placement", "finding", "remedy"),
    [
        ("{cp: 2}", "{cp: cp-zigzag}", "cp-zigzag sets more than a placement",
         "placement: cp-zigzag` or `placement.cp: [R, R, R, S]` and `context: {attention: zigzag}"),
        ("{dp_shard: 2, cp: 2}", "{dp_shard: zero3, cp: cp-zigzag}",
         "cp-zigzag sets more than a placement",
         "placement.cp: [R, R, R, S]` and `context: {attention: zigzag}"),
        ("{pp: 2, dp_shard: 2}", "{pp: pp-zbv, dp_shard: zero2}", ("pp-zbv sets more than a "
                                                                  "placement"),
         "placement.pp: [S, S, S, R]` and `pipeline: {schedule: zbv}"),
        ("{dp_shard: 2, cp: 2}", "{dp_shard: cp-ring, tp: tp}",
         "cp-ring belongs to cp, not to dp_shard",
         "placement.cp: [R, R, R, S]` and `context: {attention: ring}` and `mesh: {cp: N}"),
        ("{dp_shard: 2}", "{dp_shard: cp-ring}", "cp-ring belongs to cp, not to dp_shard",
         "placement: cp-ring` and `mesh: {cp: N}"),
        ("{dp_shard: 2, tp: 2}", "{dp_shard: hsdp, tp: tp}", ("hsdp covers the axes "
                                                             "dp_replicate and dp_shard"),
         "placement.dp_replicate: [R, R, R, R]` and `placement.dp_shard: [S*, S, S, R]"),
    ],
)  # fmt: skip
def test_a_strategy_that_is_more_than_a_tuple_names_the_missing_keys(
    mesh, placement, finding, remedy
):
    with pytest.raises(SpecError) as caught:
        load("zero3", [f"mesh={mesh}", f"placement={placement}"])
    (fault,) = caught.value.faults
    assert (fault.finding, fault.remedy) == (finding, f"Use `{remedy}`.")


def used_up(spec: Spec) -> bool:
    return any(factor.placement.gradients == M for factor in spec.factors)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_spells_its_tuple_out(name):
    placement = read(find_spec(name)).root["placement"]  # type: ignore[index]
    assert all(isinstance(modes, dict) and len(modes) == 4 for modes in placement.values())


@pytest.mark.parametrize("stage", ["dp", "zero1", "zero2", "zero3"])
def test_the_papers_specs_have_the_papers_size(stage):
    large, small = load(f"70b-{stage}").spec, load(f"7b5-{stage}").spec
    assert numel(large.model, large.batch.sequence) == 70_000_058_368
    assert abs(numel(small.model, small.batch.sequence) - 7_500_000_000) < 4096
    assert (large.world_size, small.world_size) == (8, 64)
    for spec in (large, small):
        assert spec.precision.layout.name == "zero16"
        assert spec.cluster is not None
        assert 79 * 2**30 < spec.cluster.device_memory < 80 * 2**30  # as torch reports it
        assert spec.cluster.devices == spec.world_size


def test_the_papers_model_over_three_axes_fills_its_cluster_with_tp_in_a_node():
    spec = require_runnable(load("70b-3d"))
    assert numel(spec.model, spec.batch.sequence) == 70_000_058_368
    assert [(f.axis, f.degree) for f in spec.factors] == [("pp", 4), ("dp_shard", 4), ("tp", 8)]
    assert spec.precision.layout.name == "zero16" and spec.cluster is not None
    assert spec.cluster.devices == spec.world_size == 128
    assert spec.cluster.devices_per_node == spec.degree(Axis.TP)
    assert fit(spec, derive(spec).exact).fits


@pytest.mark.parametrize("name", list_files("node"))
def test_a_node_spec_is_predicted_for_8_devices_with_its_fit(name):
    spec = require_runnable(load(name))
    assert spec.name == name and spec.world_size == 8 and spec.cluster is not None
    assert (spec.cluster.name, spec.precision.layout.name) == ("h100-8", "bf16")
    exact = derive(spec).exact
    parts = prod(f.degree for f in spec.factors if f.placement.optimizer != R)
    of_moments = 2 * 2 * numel(spec.model, spec.batch.sequence) / parts
    assert exact.bytes_of(State.OPTIMIZER) == pytest.approx(of_moments, rel=1e-3)
    assert {row.rank for row in exact.peak} == set(range(8)) and exact.sent_bytes() > 0
    assert fit(spec, exact).fits is (name != "8b-ddp")


def test_the_node_specs_are_every_data_strategy_and_tp_with_its_products():
    placed = {name: [f.axis.value for f in load(name).spec.factors] for name in list_files("node")}
    assert placed == {
        "8b-ddp": ["dp_replicate"],
        **{f"8b-zero{stage}": ["dp_shard"] for stage in (1, 2, 3)},
        "8b-hsdp": ["dp_replicate", "dp_shard"],
        "8b-tp": ["tp"],
        "8b-tp-sp": ["tp"],
        "8b-tp-dp": ["dp_replicate", "tp"],
        "8b-tp-zero3": ["dp_shard", "tp"],
    }


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("llama-tiny", 0.80e6, 0.81e6),
        ("llama-10m", 9e6, 12e6),
        ("llama3-8b", 8.02e9, 8.04e9),
        ("llama3-70b", 70.5e9, 70.6e9),
        ("llama3-405b", 405.8e9, 405.9e9),
        ("llama-70e9", 70.00e9, 70.01e9),
        ("gpt-tiny", 0.83e6, 0.85e6),
        ("gpt2-124m", 124e6, 125e6),
        ("gpt2-1558m", 1557e6, 1558e6),
        ("gpt-7b5", 7.499e9, 7.501e9),
    ],
)
def test_a_preset_has_the_parameter_count_in_its_name(name, low, high):
    base = {"model": {"preset": name}, "mesh": {}, "batch": {"sequence": 1024}}
    sequence = 128 if name.endswith("tiny") else 1024
    assert low < numel(load(base).spec.model, sequence) < high


def test_every_model_and_cluster_is_named_here():
    for section, name in [("model", m) for m in list_files("models")] + [
        ("cluster", c) for c in list_files("clusters")
    ]:
        base = {"model": {"preset": "llama-tiny"}, "mesh": {}, "batch": {"sequence": 8}}
        assert load(base | {section: {"preset": name}}).spec


def test_every_file_has_a_description():
    for path in specs_folder().rglob("*.yaml"):
        comments = [
            line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")
        ]
        assert any(not line.startswith("# yaml-language-server") for line in comments), path


def test_aliases_name_strategies():
    assert set(load_names().aliases.values()) <= set(STRATEGIES)


def test_the_readme_of_the_specs_names_every_folder():
    text = (specs_folder() / "README.md").read_text(encoding="utf-8")
    for folder in specs_folder().iterdir():
        assert folder.name in text or folder.name == "README.md"


def run(*words: str) -> int:
    parser = ArgumentParser()
    add_arguments(parser, "specs")
    return verb.run(parser.parse_intermixed_args(list(words)))


def test_specs_lists_every_name(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run() == 0
    out = capsys.readouterr().out
    for name in [*list_files(*SPEC_FOLDERS, "models", "clusters"), *load_names().aliases]:
        assert name in out
    assert max(map(len, out.splitlines())) <= 80


def test_specs_lists_for_machines(capsys):
    assert run("--json") == 0
    record = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in record["specs"]}
    assert rows["hsdp"]["placement"] == {"dp_replicate": "R,R,R,R", "dp_shard": "S*,S,S,R"}
    assert rows["hsdp"]["ranks"] == 4
    assert record["aliases"]["fsdp"] == "zero3"


def test_show_prints_a_spec_that_runs(capsys):
    assert run("show", "fsdp", "mesh.dp_shard=4") == 0
    tree = parse(capsys.readouterr().out, "out.yaml")
    assert isinstance(tree.root, dict)
    assert load(tree.root).spec == load("zero3", ["mesh.dp_shard=4"]).spec
    assert tree.locate(("mesh", "dp_shard")).line == 4


def test_show_gives_json_and_a_list_for_a_sweep(capsys):
    assert run("show", "zero3", "--json") == 0
    found, resolved = json.loads(capsys.readouterr().out), load("zero3").spec.resolved
    assert load(found).spec == load("zero3").spec
    assert {**resolved, **found} == resolved
    assert set(resolved) - set(found) == {"bucket"}  # see below
    assert run("show", "zero3", "mesh.dp_shard=2,4", "--json") == 0
    assert [row["mesh"] for row in json.loads(capsys.readouterr().out)] == [
        {"dp_shard": 2},
        {"dp_shard": 4},
    ]


@cache
def placed_as(strategy: str) -> tuple[Spec, tuple[str, ...]]:
    """A strategy, and what gives another file its placement."""
    there = load(strategy).spec
    mesh = ", ".join(f"{factor.axis}: {factor.degree}" for factor in there.factors)
    return there, (
        f"placement={strategy}",
        f"mesh={{{mesh}}}",
        f"optimizer.name={there.optimizer.name}",
        f"optimizer.clip={'null' if used_up(there) else '1.0'}",
        f"precision.layout={there.precision.layout.name}",
        f"batch={{micro: 1, global: {there.world_size}, sequence: 128}}",
        "reshard=true",
        "sync.reshard_after_backward=true",
        "tensor.plan=paired",
        f"context={json.dumps(there.resolved.get('context'))}",
        f"recompute={there.resolved.get('recompute', 'none')}",
        f"pipeline.schedule={ScheduleName.ONE_F_ONE_B}",
    )


# experts with places of their own wait for some placements
@pytest.mark.parametrize("name", list_files("strategies", "paper", "node"))
def test_the_shown_spec_is_legal_with_every_placement(name, tmp_path):
    spec = load(name).spec
    file = tmp_path / "shown.yaml"
    file.write_text(to_yaml(minimal_spec(spec).mapping), encoding="utf-8")
    assert load(file).spec == spec
    even = f"model.vocab={spec.model.vocab + spec.model.vocab % 2}"
    first = [*list_files(*SPEC_FOLDERS)].index(name)
    for other in [*STRATEGIES][first % 5 :: 5]:  # each meets several specs
        there, changes = placed_as(other)
        if there.degree(Axis.TP) > 1:  # shards of slices that are not equal do not run yet
            changes = (*changes, even)
        assert require_runnable(load(file, changes)).factors == there.factors


@pytest.mark.parametrize(
    ("name", "has", "lacks", "said"),
    [
        ("ddp", {"bucket"}, {"sync", "reduce_scatter"}, "last"),
        ("zero1", {"bucket", "reduce_scatter"}, {"sync"}, "last"),
        ("zero3", {"reduce_scatter", "sync"}, {"bucket"}, "every"),
        ("zero-offload-ds", {"offload"}, {"bucket", "sync"}, "every"),
        ("nvme-offload", {"offload", "sync"}, {"bucket"}, "temporary folder"),
    ],
)
def test_options_without_effect_are_hidden_and_listed(name, has, lacks, said):
    found = minimal_spec(load(name).spec)
    assert has <= set(found.mapping)
    assert not lacks & set(found.mapping)
    assert any(said in line for line in found.left_out)
    assert any("unit, overlap, prefetch, gather_after_update" in line for line in found.left_out)
    obeyed = [line for line in found.left_out if "no effect" in line]
    assert all(place in obeyed[0] for place in lacks)


def test_options_without_effect_on_tp_are_hidden_and_named():
    sections = ["reduce_scatter", "bucket"]
    by_itself = ["unit", "overlap", "prefetch", "gather_after_update"]
    resharding = ["sync.reshard_after_forward", "sync.reshard_after_backward"]
    found = minimal_spec(load("tp").spec)
    assert not {"sync", *by_itself, *sections} & set(found.mapping)
    places = ["sync.gradients", *by_itself, *resharding, *sections]
    assert found.left_out == (f"no effect with this placement: {', '.join(places)}",)


def test_a_written_dial_is_shown_as_it_is_written():
    written = ["sync.gradients=last", "unit=block", "overlap=none", "prefetch=0"]
    found = minimal_spec(load("zero3", [*written, "gather_after_update=blocking"]).spec)
    assert found.mapping["sync"]["gradients"] == "last"
    assert (found.mapping["overlap"], found.mapping["prefetch"]) == ("none", 0)
    assert not any("as the" in line for line in found.left_out)


@pytest.mark.parametrize("name", ["llama3-8b", "h100-8"])
def test_show_prints_models_and_clusters_unchanged(name, capsys):
    assert run("show", name) == 0
    text = list_files("models", "clusters")[name].read_text(encoding="utf-8")
    assert capsys.readouterr().out == text
    assert run("show", name, "--json") == 0
    assert json.loads(capsys.readouterr().out) == parse(text, name).root


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show"], "NAME is missing"),
        (["zero3"], "specs show zero3"),
        (["show", "zero4"], "Did you mean 'zero3'"),
        (["show", "llama3-8b", "train.steps=3"], "model.preset=llama3-8b"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(words, message):
    with pytest.raises(PtrainError, match=message):
        run(*words)
