"""A spec loads to one resolved value, whichever way it was written, and loads again to the same."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ptrain.cost import State
from ptrain.errors import Fault, SpecError
from ptrain.spec.dials import (
    WHOLE_BUCKET,
    GatherAfterUpdate,
    GradientSync,
    Overlap,
    ReduceScatterVia,
    Reshard,
    UnitKind,
    UnitSize,
)
from ptrain.spec.load import load
from ptrain.spec.model import ExternalModel, ModelShape
from ptrain.spec.names import SPEC_FOLDERS, list_files, load_names
from ptrain.spec.placement import DATA_AXES, Axis
from ptrain.spec.precision import LAYOUTS, DType
from ptrain.spec.spec import Spec
from ptrain.spec.text import parse, parse_scalar
from ptrain.spec.write import to_yaml
from tests.pure.changes import BASE, load_changed

FILES = list_files(*SPEC_FOLDERS)
MODEL = {"layers": 2, "hidden": 42, "heads": 3, "kv_heads": 1, "ffn": 101, "vocab": 259}


def load_placed(spec: Spec) -> dict[str, str]:
    return {f"{f.axis}={f.degree}": str(f.placement) for f in spec.factors}


@pytest.mark.parametrize("name", FILES)
def test_every_spec_loads_by_name_by_path_and_from_its_resolved_form(name, tmp_path):
    spec = load(name).spec
    assert load(FILES[name]).spec == spec == load(str(FILES[name])).spec
    assert load(spec.resolved).spec == spec
    written = tmp_path / "again.yaml"
    written.write_text(to_yaml(spec.resolved), encoding="utf-8")
    assert load(written).spec == spec


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"target": "package.module:build", "arguments": {"a": 3e-4, "b": "3e-4"}}},
        {"model": {"target": "m:f", "arguments": {"c": "on", "d": "1:30", "e": "0o7", "f": None}}},
        {"model": MODEL | {"family": "gpt", "kv_heads": 3, "dropout": 0.1}},
        {"mesh": {}, "placement": {}},
        {"optimizer": {"name": "sgd", "momentum": 0.9, "clip": None, "lr": 1e-5}},
        {"precision": {"layout": "zero16", "compute": "fp64"}},
        {"data": {"path": "tokens.bin"}},
        {"profile": [3, 4], "checkpoint": "at_end", "timeout": 7.5, "reduce_scatter": True},
        {"cluster": {"preset": "h100-8", "devices": 4}},
        {"cluster": {"preset": "h100-8", "host_memory": "2 TiB"}},
        {"sync": {"gradients": "last", "reshard_after_backward": False}},
        {"reshard": 2, "unit": "3 blocks", "overlap": "none", "prefetch": 0},
        {"reshard": "non-root"},
        {"unit": "sub-block", "gather_after_update": "during-update", "bucket": "per-tensor"},
        {"bucket": "whole", "overlap": "backward"},
        {"placement": {"dp_shard": "O,O,S@file,R"}, "offload": {"tier": "file", "path": "/x"}},
        {"placement": {"dp_shard": "M,S*@host,R@host,R"}, "offload": {"update": "device"}},
        {"precision": {"layout": "zero20", "moments": "bf16"}},
        {"precision": {"parameters": "fp16", "master": "fp64"}},
        {"precision": {"layout": "zero16", "master": "none", "reduced": "fp32"}},
        {"optimizer": {"name": "muon"}},
    ]
    + [{"precision": {"layout": name}} for name in LAYOUTS],
)
def test_a_resolved_spec_resolves_to_itself(changes, tmp_path):
    spec = load_changed(**changes)
    written = tmp_path / "spec.yaml"
    written.write_text(to_yaml(spec.resolved), encoding="utf-8")
    assert load(written).spec == spec


def test_every_dial_has_its_value():
    spec = load_changed(
        unit="2 blocks",
        overlap="backward",
        prefetch=3,
        gather_after_update="next-forward",
        bucket="whole",
        sync={"reshard_after_forward": 2},
    )
    assert spec.unit == UnitSize(kind=UnitKind.BLOCKS, count=2)
    assert (spec.overlap, spec.prefetch) == (Overlap.BACKWARD, 3)
    assert spec.gather_after_update is GatherAfterUpdate.NEXT_FORWARD
    assert spec.bucket_bytes == WHOLE_BUCKET and load_changed(bucket="per-tensor").bucket_bytes == 1
    assert spec.sync.reshard_after_forward == 2
    assert load_changed(unit="1 blocks").unit == load_changed().unit_size == UnitSize()
    assert load_changed().unit is None
    assert load_changed(unit="model").unit.kind is UnitKind.MODEL


@pytest.mark.parametrize("value", [True, False, 2, "non-root"])
def test_reshard_is_another_word_for_a_key_of_sync(value):
    spec = load_changed(reshard=value)
    assert spec == load_changed(sync={"reshard_after_forward": value})
    assert type(spec.sync.reshard_after_forward) in (type(value), Reshard)
    assert spec.sync.reshard_after_forward == value
    assert load_changed(reshard=value, sync={"reshard_after_forward": value}) == spec
    assert load(load_changed(reshard=1000).resolved, [f"reshard={str(value).lower()}"]).spec == spec


def test_reshard_overrides_a_strategys_policy():
    assert load("zero3-keep", ["reshard=true"]).spec.sync.reshard_after_forward is True


@pytest.mark.parametrize(
    ("offload", "placement", "expected"),
    [
        (None, "O,O,S,R", "O,O,S,R"),
        ({"tier": "host"}, "O,S@file,S,R", "O,S@file,S,R"),
        ({"tier": "file"}, "S*@host,O,O,R", "S*@host,S@file,S@file,R"),
        ({"tier": "file"}, "S@host,O,R,R", "O,S@file,R,R"),
    ],
)
def test_o_is_on_the_tier_of_the_offload_and_a_written_tier_stays(offload, placement, expected):
    changes = {"offload": offload} if offload else {}
    spec = load_changed(placement={"dp_shard": placement}, **changes)
    assert str(spec.factors[0].placement) == expected
    assert load(spec.resolved).spec == spec


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"parameters": "bf16", "gradients": "bf16", "master": "fp32"}, LAYOUTS["zero16"]),
        ({"layout": "zero16", "gradients": "fp32"}, LAYOUTS["megatron18"]),
        ({"layout": "zero16", "gradients": "fp32", "reduced": "bf16"}, LAYOUTS["fsdp-mixed"]),
        ({"layout": "megatron18", "reduced": "bf16"}, LAYOUTS["fsdp-mixed"]),
        ({"layout": "fp16", "parameters": "bf16", "gradients": "bf16"}, LAYOUTS["zero16"]),
        ({"layout": "zero16", "parameters": "fp16", "gradients": "fp16"}, LAYOUTS["fp16"]),
        ({"layout": "fp32", "master": "none"}, LAYOUTS["fp32"]),
        (
            {"layout": "zero20", "master": "none", "moments": "bf16"},
            replace(LAYOUTS["zero20"], name="custom", master=None, moments=DType.BF16),
        ),
    ],
)
def test_dtypes_given_with_a_layout_replace_its_dtypes(written, expected):
    assert load_changed(precision=written).precision.layout == expected


def test_fp16_on_the_way_to_the_update_scales_the_loss():
    for state in ("parameters", "reduced", "gradients"):
        assert load_changed(precision={state: "fp16"}).precision.layout.scales_loss
    assert not load_changed(precision={"moments": "fp16"}).precision.layout.scales_loss


def test_momentum_is_the_optimizers_usual_one():
    assert load_changed(optimizer={"name": "muon"}).optimizer.momentum == 0.95
    assert load_changed(optimizer={"name": "muon", "momentum": 0.0}).optimizer.momentum == 0
    assert load_changed(optimizer={"name": "sgd"}).optimizer.momentum == 0


def test_without_a_source_the_default_is_loaded():
    assert load().spec == load(load_names().default).spec
    assert load().spec.world_size == 2


def test_defaults_are_those_of_the_resolved_spec():
    spec = load_changed(model=MODEL)
    model = ModelShape(**MODEL, family=spec.model.family)
    bare = Spec(name="spec", model=model, factors=spec.factors, batch=spec.batch)
    assert {**vars_of(spec), "resolved": {}} == vars_of(bare)


def vars_of(spec: Spec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in Spec.__dataclass_fields__}


@pytest.mark.parametrize(
    ("mesh", "placement", "expected"),
    [
        ({"dp": 4}, "S*,S,S,R", {"dp_shard=4": "S*,S,S,R"}),
        ({"dp": 4}, "R,R,R,R", {"dp_replicate=4": "R,R,R,R"}),
        ({"dp": 4}, ["R", "S", "R", "R"], {"dp_shard=4": "R,S,R,R"}),
    ],
)
def test_dp_becomes_the_axis_of_its_tuple(mesh, placement, expected):
    assert load_placed(load_changed(mesh=mesh, placement={"dp": placement})) == expected


@pytest.mark.parametrize("name", sorted(set(list_files("strategies")) | set(load_names().aliases)))
def test_a_strategy_may_be_named_instead_of_written(name):
    target = load(name).spec
    mesh = {factor.axis.value: factor.degree for factor in target.factors}
    spec = load_changed(mesh=mesh, placement=name)
    assert spec.factors == target.factors
    assert spec.sync == target.sync


@pytest.mark.parametrize("name", ["Full-Shard", "FSDP", "hybrid-shard", "Stage 3", "stage-3"])
def test_names_of_other_tools_may_be_spelled_as_they_spell_them(name):
    assert load(name).spec == load(load_names().aliases[name.lower().replace("-", "_")]).spec


def test_a_named_strategy_takes_the_dp_degree():
    for name in list_files("strategies"):
        axes = [factor.axis for factor in load(name).spec.factors]
        if len(axes) == 1 and axes[0] in DATA_AXES:
            spec = load_changed(mesh={"dp": 2}, placement=name)
            assert [factor.axis for factor in spec.factors] == axes
            assert (
                load_changed(mesh={axes[0]: 2}, placement={axes[0]: name}).factors
                if (spec.sync == load_changed().sync and "recompute" not in spec.resolved)
                else True
            )


def test_an_axis_of_degree_one_vanishes():
    spec = load_changed(mesh={"dp_replicate": 1, "dp_shard": 2, "tp": 1})
    assert spec.factors == load_changed().factors
    assert load_changed(mesh={"dp_shard": 1}).factors == ()


def test_factors_keep_the_order_of_the_file():
    placement = {"dp_replicate": "R,R,R,R", "dp_shard": "S*,S,S,R"}
    outer = load_changed(mesh={"dp_replicate": 2, "dp_shard": 4}, placement=placement)
    inner = load_changed(mesh={"dp_shard": 4, "dp_replicate": 2}, placement=placement)
    assert [f.axis for f in outer.factors] == [Axis.DP_REPLICATE, Axis.DP_SHARD]
    assert [f.axis for f in inner.factors] == [Axis.DP_SHARD, Axis.DP_REPLICATE]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_auto_takes_the_ranks_that_are_left(world_size):
    mesh = {"dp_replicate": 2, "dp_shard": "auto"}
    placement = {"dp_replicate": "R,R,R,R", "dp_shard": "S*,S,S,R"}
    spec = load(BASE | {"mesh": mesh, "placement": placement}, world_size=world_size).spec
    assert spec.degree(Axis.DP_SHARD) == world_size // 2
    assert spec.world_size == world_size


@pytest.mark.parametrize(
    ("batch", "degree", "samples", "accumulate"),
    [
        ({"global": 16, "micro": 2}, 2, 16, 4),
        ({"micro": 2}, 4, 8, 1),
        ({"micro": 2, "accumulate": 3}, 2, 12, 3),
        ({"global": 12, "micro": 2, "accumulate": 3}, 2, 12, 3),
        ({"global": "4M tokens", "micro": 2}, 128, 1024, 4),
        ({"global": "4M tokens", "micro": 2}, 512, 1024, 1),
        ({"global": "1 tokens", "micro": 2}, 2, 4, 1),
    ],
)
def test_global_is_micro_times_accumulate_times_data_degree(batch, degree, samples, accumulate):
    spec = load_changed(batch={"sequence": 4096} | batch, mesh={"dp_shard": degree})
    assert (spec.batch.global_samples, spec.batch.accumulate) == (samples, accumulate)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("R,S,R,R", GradientSync.LAST),
        ("R,S,S,R", GradientSync.EVERY),
        ("S*,S,S,R", GradientSync.EVERY),
    ],
)
def test_whole_gradients_are_reduced_once(placement, expected):
    assert load_changed(placement={"dp_shard": placement}).sync.gradients is expected
    assert load_changed(mesh={}, placement={}).sync.gradients is GradientSync.LAST


def test_modes_of_a_tuple_have_the_order_of_the_paper():
    placement = load_changed(placement={"dp_shard": ["S*", "S", "R", "R"]}).factors[0].placement
    states = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS, State.ACTIVATIONS)
    assert [str(placement[state]) for state in states] == ["S*", "S", "R", "R"]


def test_presets_are_names_or_files_and_explicit_fields_win(tmp_path):
    (tmp_path / "mine.yaml").write_text("{layers: 3, hidden: 64, heads: 4, ffn: 96, vocab: 300}")
    (tmp_path / "spec.yaml").write_text(
        "model: {preset: mine.yaml, heads: 8}\nmesh: {}\nbatch: {sequence: 8}\n"
        "cluster: {preset: laptop, devices: 2}\n"
    )
    spec = load(tmp_path / "spec.yaml").spec
    assert isinstance(spec.model, ModelShape)
    assert (spec.model.layers, spec.model.heads, spec.model.kv_heads) == (3, 8, 8)
    assert spec.cluster is not None
    assert (spec.cluster.name, spec.cluster.devices) == ("laptop", 2)
    assert spec.name == "spec"


def test_a_gpt_needs_only_its_width():
    shape = {"family": "gpt", "layers": 2, "hidden": 32, "heads": 2, "vocab": 100}
    model = load_changed(model=shape).model
    assert isinstance(model, ModelShape)
    assert (model.ffn, model.kv_heads, model.tied) == (128, 2, True)


def test_a_target_keeps_its_arguments():
    model = load_changed(model={"target": "a.b:c", "arguments": {"width": 3}}).model
    assert model == ExternalModel(target="a.b:c", arguments={"width": 3})


@pytest.mark.parametrize(
    ("written", "expected"),
    [("native", "native"), ("stock", "native"), ("all_to_all", "all_to_all"), (True, "all_to_all")],
)
def test_reduce_scatter_has_two_ways_and_two_older_words(written, expected):
    assert load_changed(reduce_scatter=written).reduce_scatter is ReduceScatterVia(expected)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("1e5", 1e5), (".5", 0.5), ("1.", 1.0), ("-7", -7), ("+7", 7),
        ("010", 10), ("0o10", 8), ("0x10", 16), ("1:30", "1:30"), ("1_000", "1_000"),
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("no", "no"), ("y", "y"), ("True", True),
        ("false", False), ("~", None), ("null", None), ("2026-01-01", "2026-01-01"),
        ("S*", "S*"), ("R@host", "R@host"), ("80 GiB", "80 GiB"), ("0b1", "0b1"),
        (".inf", float("inf")), ("+.Inf", float("inf")), (".INF", float("inf")),
        ("-.inf", float("-inf")), ("-.Inf", float("-inf")), ("-.INF", float("-inf")),
        ("Null", None), ("NULL", None), ("TRUE", True), ("true", True), ("False", False),
        ("FALSE", False), ("+.inf", float("inf")), (".Inf", float("inf")), ("0xfF", 255),
    ],
)  # fmt: skip
def test_plain_scalars_follow_yaml_1_2(text, value):
    assert parse_scalar(text) == value
    assert type(parse_scalar(text)) is type(value)
    assert parse(f"key: {text}", "a.yaml").root == {"key": value}
    assert parse(f"key: '{text}'", "a.yaml").root == {"key": text}


@pytest.mark.parametrize("text", [".nan", ".NaN", ".NAN"])
def test_nan_has_three_spellings(text):
    assert math.isnan(parse_scalar(text))


def test_a_number_of_hundreds_of_digits_is_infinite():
    """Python reads no longer ones; 400 digits are beyond every field's range."""
    assert parse_scalar("9" * 400) == int("9" * 400)
    assert (parse_scalar("9" * 401), parse_scalar("-" + "9" * 401)) == (math.inf, -math.inf)


def test_a_document_locates_each_key(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(to_yaml(load_changed().resolved))
    document = load(file, ["mesh.dp_shard=4"])
    line = next(i for i, t in enumerate(file.read_text().splitlines(), 1) if t.startswith("batch"))
    fault = document.locate(Fault(place="batch.micro", finding="is too much", remedy="less"))
    assert (fault.source, fault.line, fault.text[fault.column - 1]) == (str(file), line, "2")
    assert (fault.finding, fault.remedy) == ("is too much", "less")
    fault = document.locate(Fault(place="mesh.dp_shard", finding="x"))
    assert (fault.source, fault.line) == ("command line: mesh.dp_shard=4", 0)
    fault = document.locate(Fault(place="mesh", finding="too many ranks"))
    assert fault.line and fault.finding.endswith("(with mesh.dp_shard=4 from the command line)")
    fault = document.locate(Fault(place="placement.dp_shard.parameters", finding="x"))
    assert fault.text[fault.column - 1 :].startswith("S*")
    assert document.locate(Fault(place="", finding="x")).finding == "x"


def test_a_built_in_name_wins_over_a_file_that_is_written_with_a_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = load_names().default
    Path(name).write_text("mesh: 3")
    assert load(name).spec.world_size == 2
    with pytest.raises(SpecError, match="must be a mapping"):
        load(f"./{name}")


def test_loading_needs_neither_torch_nor_numpy():
    code = (
        "import sys; from ptrain.spec.load import load; load();"
        "assert not {'torch', 'numpy', 'jsonschema'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
