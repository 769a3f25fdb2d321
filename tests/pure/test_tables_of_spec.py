"""The documented vocabulary of a spec, compared with independent lists: closed sets, defaults,
layouts, limits and plain values. A test is a full table."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, fields

import pytest

from ptrain.errors import SpecError
from ptrain.spec import (
    activations,
    block,
    dials,
    job,
    keys,
    model,
    pipeline,
    placement,
    spec,
    text,
)
from ptrain.spec.check import FILE
from ptrain.spec.cluster import Cluster
from ptrain.spec.leaf import (
    Boolean,
    Choice,
    Either,
    FreeMapping,
    Integer,
    Numbers,
    Real,
    Section,
    Size,
    Text,
)
from ptrain.spec.names import SPEC_FOLDERS, specs_folder
from ptrain.spec.placement import (
    CUTTING_AXES,
    DATA_AXES,
    EXPERT_AXES,
    REDUCED_AXES,
    SAMPLE_AXES,
    TOKEN_AXES,
    Axis,
    Distribution,
    Mode,
    Placement,
    Tier,
)
from ptrain.spec.precision import (
    CUSTOM,
    INITIAL_SCALE,
    LAYOUTS,
    SCALE_BACKOFF,
    SCALE_GROWTH,
    SCALE_INTERVAL,
    DType,
    Layout,
    Precision,
)
from tests.pure.test_schema import KEYS, VALIDATOR

SETS = {
    Axis: "pp dp_replicate dp_shard cp ep tp",
    Distribution: "R S S* M",
    Tier: "device host file",
    DType: "fp64 fp32 bf16 fp16 fp8",
    dials.GradientSync: "every last",
    dials.ReduceScatterVia: "native all_to_all",
    dials.UnitKind: "block sub-block blocks ends model",
    dials.Overlap: "none backward",
    dials.GatherAfterUpdate: "blocking during-update next-forward",
    activations.Operators: "matmul attention softmax norm collective",
    activations.Scope: "block attention",
    model.Family: "llama gpt",
    model.Attention: "sdpa sdpa-gqa eager flex",
    pipeline.ScheduleName: "naive gpipe 1f1b bfs interleaved zero-bubble zbv dualpipev",
    pipeline.SplitBy: "parameters time layers",
    placement.Role: """column fused_column transposed_column group_column row transposed_row
        vocabulary head whole_input latent_input latent experts whole_experts inner_column inner_row
        shared norm last_norm positions count block first_block last_block""",
}


def test_every_word_of_every_closed_set_is_the_one_that_users_write():
    written = {kind: [each.value.replace(" ", "_") for each in kind] for kind in SETS}
    assert written == {kind: words.split() for kind, words in SETS.items()}


def test_every_constant_of_a_keyword_equals_the_keyword():
    unlike = {
        "REPLICATED": "R", "SHARDED": "S", "GATHERED": "S*", "MATERIALIZED": "M",
        "ONE_F_ONE_B": "1f1b",
    }  # fmt: skip
    for kind in SETS:
        for each in kind:
            plain = each.name.lower().replace("_", "")
            said = each.value.replace("-", "").replace("_", "").replace(" ", "")
            assert said == unlike.get(each.name, plain), each


def test_axes_of_data_and_axes_that_cut_layers():
    assert [axis.value for axis in DATA_AXES] == ["dp_replicate", "dp_shard"]
    assert [axis.value for axis in EXPERT_AXES] == ["ep"]
    assert [axis.value for axis in SAMPLE_AXES] == ["dp_replicate", "dp_shard", "ep"]
    assert [axis.value for axis in REDUCED_AXES] == ["dp_replicate", "dp_shard", "cp", "ep"]
    assert [axis.value for axis in TOKEN_AXES] == ["cp"]
    assert [axis.value for axis in CUTTING_AXES] == ["cp", "ep", "tp"]


def test_the_five_modes_and_how_far_each_tier_is():
    assert [str(mode) for mode in placement.MODES] == ["R", "S", "S*", "M", "O"]
    named = (placement.R, placement.S, placement.S_STAR, placement.M, placement.OFFLOADED)
    assert [str(mode) for mode in named] == ["R", "S", "S*", "M", "O"]
    assert [mode.tier.value for mode in named] == ["device"] * 4 + ["host"]
    assert [cut.value for cut in placement.CUT] == ["S", "S*"]
    distances = {tier.value: copies for tier, copies in placement.TIER_DISTANCE.items()}
    assert distances == {"device": 0, "host": 1, "file": 2}
    whole = Mode.parse("R")
    assert str(Placement(parameters=whole, optimizer=whole, gradients=whole)) == "R,R,R,R"


# Parameters, gradients, master, moments, reduced; whether both are kept, and the loss is scaled.
WORDS_OF_LAYOUTS = {
    "fp32": ("fp32", "fp32", None, "fp32", "fp32", False, False),
    "bf16": ("bf16", "bf16", None, "bf16", "bf16", False, False),
    "fp16": ("fp16", "fp16", "fp32", "fp32", "fp16", False, True),
    "zero16": ("bf16", "bf16", "fp32", "fp32", "bf16", False, False),
    "megatron18": ("bf16", "fp32", "fp32", "fp32", "fp32", False, False),
    "zero20": ("bf16", "fp32", "fp32", "fp32", "bf16", True, False),
    "fsdp-mixed": ("bf16", "fp32", "fp32", "fp32", "bf16", False, False),
}


def test_every_layout_has_the_dtypes_that_its_name_promises():
    found = {
        name: (
            layout.parameters.value,
            layout.gradients.value,
            layout.master.value if layout.master else None,
            layout.moments.value,
            layout.reduced.value,
            layout.keeps_both,
            layout.scales_loss,
        )
        for name, layout in LAYOUTS.items()
    }
    assert found == WORDS_OF_LAYOUTS
    assert [layout.name for layout in LAYOUTS.values()] == list(WORDS_OF_LAYOUTS)


def test_elements_have_their_bytes_and_loss_scales_the_figures_of_torch():
    assert {each.value: each.itemsize for each in DType} == {
        "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1,
    }  # fmt: skip
    scales = (INITIAL_SCALE, SCALE_GROWTH, SCALE_BACKOFF, SCALE_INTERVAL)
    assert scales == (65536.0, 2.0, 0.5, 2000)
    assert CUSTOM == "custom" and Precision().layout.name == "fp32"
    assert Precision().compute_fp64 is False
    fp32 = DType.FP32
    bare = Layout(
        name="a", parameters=fp32, gradients=fp32, master=None, moments=fp32, reduced=fp32
    )
    assert (bare.keeps_both, bare.scales_loss) == (False, False)


SECTIONS = {
    job.OptimizerSpec: {
        "name": "adamw", "lr": 0.0003, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1,
        "momentum": 0.0, "clip": 1.0, "decay": "all", "groups": (),
        "beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "d": 1.0,
        "schedule": {"warmup": 0, "decay_steps": 0, "min_lr_ratio": 0.1},
    },
    job.DataSpec: {
        "corpus": "python-docs",
        "path": None,
        "sources": None,
        "loss_mask": None,
        "ignored": None,
        "tokenizer": "bytes",
        "target": None,
        "arguments": None,
        "folder": None,
    },
    job.TrainSpec: {"steps": 50, "seed": 0},
    job.EvalSpec: {"every": 0, "batches": 4},
    job.CheckpointSpec: {"at_end": False, "every": 0, "background": False, "keep": None},
    job.Timeout: {"init": 300.0, "step": 120.0},
    job.LogSpec: {"every": 10, "trackers": ()},
    keys.FrozenSpec: {"dtype": None, "dp_replicate": None, "dp_shard": None},
    keys.Offload: {"tier": None, "path": None, "update": "host"},
    keys.TensorSpec: {"plan": "paired", "loss_parallel": True, "experts": "cut",
                        "asynchronous": False},
    spec.ActivationSpec: {
        "default": {"policy": None, "tier": "device"}, "by_block": (), "every": 1, "budget": None,
        "is_open": False,
    },
    spec.LossSpec: {"chunk": None, "fused": False, "function": None, "step": None},
    dials.SyncPolicy: {
        "gradients": "every", "reshard_after_forward": True, "reshard_after_backward": True,
    },
    dials.UnitSize: {"kind": "block", "count": 1},
    activations.Policy: {"scope": "block", "keep": ()},
    activations.ActivationMode: {"policy": None, "tier": "device"},
    pipeline.PipelineSpec: {"schedule": "1f1b", "stages": None, "split": "parameters"},
}  # fmt: skip


def test_missing_keys_have_the_documented_default():
    assert {kind: asdict(kind()) for kind in SECTIONS} == SECTIONS


def test_recomputation_policies_save_what_their_names_state():
    assert (activations.FULL.scope.value, activations.FULL.keep) == ("block", ())
    assert activations.SELECTIVE.scope is activations.Scope.BLOCK
    assert [each.value for each in activations.SELECTIVE.keep] == ["matmul", "attention"]
    assert (activations.ATTENTION_ONLY.scope.value, activations.ATTENTION_ONLY.keep) == (
        "attention",
        (),
    )
    assert (
        activations.ActivationMode() == activations.PLAIN and activations.ActivationMode().is_plain
    )


def defaults(kind: type) -> dict[str, object]:
    """Of the fields that may be left out."""
    found = {}
    for each in fields(kind):
        if each.default is not MISSING:
            found[each.name] = each.default
        elif each.default_factory is not MISSING:
            found[each.name] = each.default_factory()
    return found


def test_models_and_clusters_have_the_documented_defaults():
    options = defaults(block.BlockOptions)
    assert defaults(model.ModelShape) == options | {
        "attention": "sdpa", "preset": "", "pretrained": None, "ignored": ()
    }  # fmt: skip
    by_family = [name for name in options if name in model.FAMILIES[model.Family.GPT]]
    assert by_family == ["tied", "norm", "activation", "bias", "positions"]
    said = {spot.name: spot.type.__metadata__[0].description for spot in fields(block.BlockOptions)}
    for name, value in options.items():
        word = str(value).lower().removesuffix(".0").replace("e-0", "e-")
        assert f"Default: {word}" in said[name] or value is None, name
    begun = {"blocks": None, "pretrained": None}
    assert defaults(model.ExternalModel) == {"arguments": {}, "folder": None, **begun}
    assert defaults(model.HuggingFaceModel) == {"config": {}, "attention": None, **begun}
    assert defaults(Cluster) == {
        "preset": None, "name": "cluster", "devices_per_node": 0, "inter_node_bandwidth": 0.0,
        "intra_node_latency": 5e-6, "inter_node_latency": 1e-5, "flops": 0.0, "host_memory": None,
        "kind": None, "price": None, "sm": None, "rates": None, "reserve": None,
        "interference": None, "stragglers": None, "host_bandwidth": None,
    }  # fmt: skip


def test_two_shapes_that_differ_in_the_presets_name_alone_are_equal():
    shape = {"layers": 1, "hidden": 2, "heads": 1, "kv_heads": 1, "ffn": 3, "vocab": 5}
    named = [model.ModelShape(family=model.Family.GPT, preset=name, **shape) for name in "ab"]
    assert named[0] == named[1]


def test_a_spec_of_four_parts_has_the_defaults_of_all_others():
    found = defaults(spec.Spec)
    plain = {
        "cluster": None, "reduce_scatter": "native", "bucket_bytes": 26_214_400, "overlap": None,
        "unit": None, "prefetch": None, "gather_after_update": None, "profile": (),
        "consistency_every": 0, "deterministic": False, "device": "auto", "backend": "auto",
        "resolved": {}, "trivial_factors": (), "context": None, "routing": None,
        "overlap_shared_experts": False, "verify_every": 0,
    }  # fmt: skip
    assert {key: found[key] for key in plain} == plain
    made = {key: type(value).__name__ for key, value in found.items() if key not in plain}
    assert made == {
        "precision": "Precision", "optimizer": "OptimizerSpec", "data": "DataSpec",
        "train": "TrainSpec", "sync": "SyncPolicy", "offload": "Offload", "frozen": "FrozenSpec",
        "tensor": "TensorSpec", "pipeline": "PipelineSpec", "activations": "ActivationSpec",
        "loss": "LossSpec", "eval": "EvalSpec", "checkpoint": "CheckpointSpec",
        "timeout": "Timeout", "log": "LogSpec", "compile": "Compiled",
    }  # fmt: skip
    assert dials.WHOLE_BUCKET == 1_099_511_627_776


def test_a_kind_of_value_without_limits_accepts_its_documented_values():
    whole, real, numbers, words = Integer("a"), Real("a"), Numbers("a"), Text("a")
    assert (whole.low, whole.high, whole.words) == (1, 1_000_000_000, ())
    assert (real.low, real.high, real.excludes_low, real.accepts_null) == (
        0.0,
        math.inf,
        False,
        False,
    )
    assert (numbers.low, numbers.high, numbers.count, numbers.is_integer) == (0, 1, 0, False)
    assert (words.pattern, words.kind, words.accepts_null) == (
        r"[^\x00-\x1f]{1,500}",
        "a text",
        False,
    )
    size = Size("a")
    limits = (size.low, size.high, size.rate, size.words, size.example)
    assert limits == (1, 10**18, False, (), "80 GiB")
    assert FreeMapping("a").values is None and Choice("a", {}).slips == {}
    assert Either("a", "b", ()).hint is None
    assert (Section(int, "a").other_schemas, Section(int, "a").accepts_null) == ((), False)
    assert (
        Boolean("a").description
        == whole.description
        == words.description
        == Section(int, "a").description
        == "a"
    )


def test_every_plain_word_and_number_of_yaml_1_2_is_read_as_documented():
    words = {
        None: ["", "~", "null", "Null", "NULL"],
        True: ["true", "True", "TRUE"],
        False: ["false", "False", "FALSE"],
        math.inf: [".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"],
        -math.inf: ["-.inf", "-.Inf", "-.INF"],
    }
    for value, written in words.items():
        assert [text.parse_scalar(each) for each in written] == [value] * len(written)
        assert {type(text.parse_scalar(each)) for each in written} == {type(value)}
    assert all(math.isnan(text.parse_scalar(each)) for each in (".nan", ".NaN", ".NAN"))
    numbers = {
        "12": 12, "-3": -3, "+4": 4, "007": 7, "0o17": 15, "0x1f": 31, "0xAB": 171,
        "1.5": 1.5, "-.5": -0.5, "2.": 2.0, "1e3": 1000.0, "1E3": 1000.0, "3e-4": 0.0003,
        "1e+2": 100.0,
    }  # fmt: skip
    read = {written: text.parse_scalar(written) for written in numbers}
    assert read == numbers
    assert {key: type(value) for key, value in read.items()} == {
        key: type(value) for key, value in numbers.items()
    }


def test_values_of_yaml_1_1_only_stay_texts():
    words = "yes Yes YES no No NO on On ON off Off OFF y n tRue nULL 1_000 1:30 0b1 0O7 0X1F 0xg 1e"
    words += " XXtrueXX .iNF +.nan 2026-01-01 0o8 e5 . - +"
    assert [text.parse_scalar(word) for word in words.split()] == words.split()


def test_a_file_of_one_mebibyte_is_read_and_one_byte_more_is_not(tmp_path):
    file, rest = tmp_path / "a.yaml", b"a: 1\n#"
    file.write_bytes(rest + b"-" * (2**20 - len(rest)))
    assert text.read(file).root == {"a": 1}
    file.write_bytes(rest + b"-" * (2**20 - len(rest) + 1))
    with pytest.raises(SpecError, match="larger than 1 MiB"):
        text.read(file)


def test_values_are_nested_up_to_32_levels():
    assert not text.parse_value("[" * 32 + "]" * 32, "a").faults
    with pytest.raises(SpecError, match="deeper than 32 levels"):
        text.parse_value("[" * 33 + "]" * 33, "a")


def test_nodes_without_a_position_have_line_0_and_no_text():
    mark = text.SourceMark(source="a")
    assert (mark.line, mark.column, mark.text) == (0, 0, "")
    assert mark.make_fault("b", "c").remedy == ""
    tree = text.Tree(root=1, source="a")
    assert (tree.keys, tree.values, tree.faults) == ({}, {}, {})


def test_roles_that_a_users_plan_may_give():
    given = [each.value for each in placement.GIVEN]
    assert given == [
        "column", "fused column", "row", "vocabulary", "head", "whole input", "shared", "norm",
        "last norm", "count", "experts",
    ]  # fmt: skip
    assert all(" " in about for about in placement.GIVEN.values())


def test_the_folders_of_specs_and_the_schemas_file():
    assert SPEC_FOLDERS == ("strategies", "experts", "paper", "node")
    assert FILE == "ptrain.schema.json" and specs_folder().name == "specs"


def test_the_committed_schema_equals_the_grammar_key_by_key():
    assert json.loads((specs_folder() / FILE).read_text(encoding="utf-8")) == VALIDATOR.schema


def test_an_error_for_a_union_lists_all_alternatives():
    reshard = "true, false, non-root or a number of shards >= 2"
    wanted = {place: each.values_text for place, each in KEYS.items() if isinstance(each, Either)}
    assert wanted == {
        "model.config": "a mapping, or the name of a JSON file",
        "batch.global": "an integer in 1..2147483647 (samples), or tokens like 4M tokens",
        "sync.reshard_after_forward": reshard,
        "reduce_scatter": "native or all_to_all",
        "unit": "block, sub-block, ends, n blocks or model",
        "activations": "a mode (R, M or O; M@host), or modes by block",
        "compile": "none, block, loss or all",
        "tensor.plan": "paired or naive, or a mapping of module names to roles",
        "context.attention": "ring, zigzag, all-gather, ulysses or {ulysses: U, ring: R}",
        "pipeline.split": "parameters, time, layers or a list of each stage's number of layers",
        "reshard": reshard,
    }


def test_an_error_for_a_formatted_text_shows_the_format():
    kinds = {place: each.kind for place, each in KEYS.items() if isinstance(each, Text)}
    assert {place: kind for place, kind in kinds.items() if kind != "a text"} == {
        "name": "a name of 1 to 64 letters, digits, . _ - (no . in front)",
        "model.hf": "a class or a model type, like LlamaForCausalLM or llama",
        "model.target": "package.module:function",
        "data.target": "package.module:function",
        "loss.target": "package.module:function",
        "step.target": "package.module:function",
        "model.blocks": "names of modules, like encoder.layers.*",
        "cluster.rates.date": "a date, 2026-11-24",
    }
