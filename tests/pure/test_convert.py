"""Conversion of other tools' configs to specs and back."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ptrain.cli.convert import _model_section
from ptrain.cli.main import main
from ptrain.errors import SpecError
from ptrain.spec.foreign import KeyEffect, find_answer, foreign_keys, load_hints
from ptrain.spec.foreign_rows import placement_rows
from ptrain.spec.load import load, read_conversion
from ptrain.spec.names import load_names
from ptrain.spec.precision import Matmul
from tests.published import PUBLISHED

TINY = "model={preset: llama-tiny}"
DEEPSPEED = """\
{"train_micro_batch_size_per_gpu": 2, "train_batch_size": 32, "gradient_clipping": 1.0,
 "bf16": {"enabled": true}, "zero_optimization": {"stage": 2, "overlap_comm": true,
 "offload_optimizer": {"device": "cpu", "pin_memory": true}}, "wall_clock_breakdown": false,
 "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "novel": {"key": 1}}
"""
ACCELERATE = """\
distributed_type: FSDP
num_processes: 8
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
"""
AXOLOTL = """\
base_model: meta-llama/Llama-3.1-8B
micro_batch_size: 1
gradient_accumulation_steps: 4
sequence_len: 8192
bf16: auto
wandb_project:
dp_shard_size: 4
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config: {reshard_after_forward: true, offload_params: false}
"""
TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
MEGATRON = """\
#!/bin/bash
GPUS_PER_NODE=8
NODES=${NODES:-2}
TP=4   # within a node
ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 # small
    --swiglu --ffn-hidden-size 128 --untie-embeddings-and-output-weights
    --position-embedding-type rope --normalization RMSNorm --disable-bias-linear
    --micro-batch-size 1 --global-batch-size 16 --seq-length 128 --bf16
    "--lr 0.001"
    --save $CHECKPOINTS
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NODES pretrain_gpt.py ${ARGS[@]}
"""
TRAINER = """\
{"model_name_or_path": "mistralai/Mistral-7B-v0.1", "per_device_train_batch_size": 4,
 "gradient_accumulation_steps": 2, "bf16": true, "gradient_checkpointing": true,
 "fsdp": "full_shard auto_wrap", "output_dir": "out", "max_steps": 100, "max_length": 2048}
"""
LIGHTNING = """\
trainer:
  strategy:
    class_path: lightning.pytorch.strategies.FSDPStrategy
    init_args: {sharding_strategy: FULL_SHARD, cpu_offload: false}
  devices: 4
  num_nodes: 2
  precision: bf16-mixed
  max_steps: 10
seed_everything: 1
model: {class_path: mine.Model}
"""
FILES = {
    "ds.json": (DEEPSPEED, {"dp_shard": "R,O,O,R"}, {"dp_shard": 16}, "zero16"),
    "accelerate.yaml": (
        *(ACCELERATE, {"dp_replicate": "R,R,R,R", "dp_shard": "M,S,S,R"}),
        *({"dp_replicate": 2, "dp_shard": 4}, "fsdp-mixed"),
    ),
    "axolotl.yml": (
        *(AXOLOTL, {"dp_shard": "M,S,S,R", "tp": "S,S,S,R"}),
        *({"dp_shard": 4, "tp": 2}, "fsdp-mixed"),
    ),
    "job.toml": (
        *(TITAN, {"pp": "S,S,S,R", "dp_shard": "M,S,S,R"}),
        *({"pp": 2, "dp_shard": 8}, "megatron18"),
    ),
    "run.sh": (
        *(MEGATRON, {"pp": "S,S,S,R", "dp_shard": "R,S,R,R", "tp": "S,S,S,S*"}),
        *({"pp": 2, "dp_shard": 2, "tp": 4}, "megatron18"),
    ),
    "args.json": (TRAINER, {"dp_shard": "M,S,S,R"}, {"dp_shard": 16}, "fsdp-mixed"),
    "cli.yaml": (LIGHTNING, {"dp_shard": "M,S,S,R"}, {"dp_shard": 8}, "fsdp-mixed"),
}
OVERRIDES = {"ds.json": [TINY], "accelerate.yaml": [TINY], "cli.yaml": [TINY]}
DEVICES = {"job.toml": ["devices=16"], "args.json": ["devices=16"]}


def overrides(name: str) -> list[str]:
    return [*OVERRIDES.get(name, []), *DEVICES.get(name, [])]


def write(folder: Path, name: str, content: str) -> Path:
    file = folder / name
    file.write_text(content, encoding="utf-8")
    return file


def outcomes(file: Path, *words: str) -> dict[str, KeyEffect]:
    conversion = read_conversion(file, words)
    assert conversion is not None
    return {row.key: row.outcome for row in conversion.outcomes}


@pytest.mark.parametrize("name", FILES)
def test_a_config_becomes_the_spec_of_its_placement(name, tmp_path):
    content, placement, mesh, layout = FILES[name]
    spec = load(write(tmp_path, name, content), overrides(name)).spec
    assert {factor.axis.value: str(factor.placement) for factor in spec.factors} == placement
    assert {factor.axis.value: factor.degree for factor in spec.factors} == mesh
    assert spec.precision.layout.name == layout


def keys_of_text(name: str, text: str) -> list[str]:
    """Return the keys of a file, by readers that `convert` does not use."""
    if name.endswith(".sh"):
        command = text.partition("torchrun")
        return re.findall(r"--([a-z_\d-]+)", command[0] + command[2].partition("pretrain")[0])
    reader = tomllib.loads if name.endswith(".toml") else yaml.safe_load

    def names(node: Any, above: str = "") -> Iterator[str]:
        for key, inner in node.items():
            if isinstance(inner, dict):
                yield from names(inner, f"{above}{key}.")
            else:
                yield f"{above}{key}"

    return list(names(reader(text)))


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_file_has_one_outcome(name, tmp_path):
    content = FILES[name][0]
    conversion = read_conversion(write(tmp_path, name, content), overrides(name))
    assert conversion is not None
    written = [row for row in conversion.outcomes if row.outcome is not KeyEffect.ASSUMED]
    assert sorted(row.key for row in written) == sorted(keys_of_text(name, content))
    mapped = [row for row in written if row.outcome is KeyEffect.MAPPED]
    assert mapped and all(row.setting for row in mapped)
    unknown = [row.key for row in written if row.outcome is KeyEffect.UNKNOWN]
    assert unknown == (["novel.key"] if "novel" in content else [])


def test_outcomes_tell_mapped_keys_from_those_that_do_something_else(tmp_path):
    ds = outcomes(write(tmp_path, "ds.json", DEEPSPEED), TINY)
    assert ds["zero_optimization.stage"] is KeyEffect.MAPPED
    assert ds["zero_optimization.offload_optimizer.pin_memory"] is KeyEffect.DEFAULT
    assert ds["wall_clock_breakdown"] is KeyEffect.NO_EFFECT
    assert ds["novel.key"] is KeyEffect.UNKNOWN
    assert ds["optimizer.params.lr"] is KeyEffect.DEFAULT
    assert ds["zero_optimization.use_multi_rank_bucket_allreduce"] is KeyEffect.ASSUMED
    fsdp = outcomes(write(tmp_path, "a.yaml", ACCELERATE), TINY)
    assert fsdp["fsdp_config.fsdp_sharding_strategy"] is KeyEffect.DIFFERS
    assert fsdp["fsdp_config.fsdp_reshard_after_forward"] is KeyEffect.MAPPED
    assert fsdp["batch.sequence"] is KeyEffect.ASSUMED


@pytest.mark.parametrize(
    ("dtype", "outcome", "matmul"),
    [
        ("bf16", KeyEffect.MAPPED, Matmul.AUTOCAST),
        ("fp16", KeyEffect.DIFFERS, Matmul.NONE),
    ],
)
def test_mixed_precision_of_ddp_keeps_fp32_parameters(tmp_path, dtype, outcome, matmul):
    text = f"{{distributed_type: MULTI_GPU, num_processes: 2, mixed_precision: {dtype}}}"
    file = write(tmp_path, "a.yaml", text)
    assert outcomes(file, TINY)["mixed_precision"] is outcome
    precision = load(file, [TINY]).spec.precision
    assert (precision.layout.name, precision.matmul) == ("fp32", matmul)


TRAINER_OF_FSDP = '{"per_device_train_batch_size": 1, "bf16": true, "fsdp": FSDP}'
AXOLOTL_OF_FSDP = "base_model: a/b\nmicro_batch_size: 1\nbf16: true\nsequence_len: 64\nfsdp: FSDP\n"


@pytest.mark.parametrize("text", [TRAINER_OF_FSDP, AXOLOTL_OF_FSDP])
@pytest.mark.parametrize(
    ("words", "modes"),
    [
        ('"shard_grad_op"', "M,S,S,R"),
        ("[full_shard]", "M,S,S,R"),
        ("[shard_grad_op, auto_wrap]", "M,S,S,R"),
        ('"auto_wrap full_shard"', "M,S,S,R"),
        ('"hybrid_shard"', "M,S,S,R"),
        ('"full_shard auto_wrap offload"', "S*@host,O,O,R"),
    ],
)
def test_words_of_fsdp_shard_in_any_order(text, words, modes, tmp_path):
    file = write(tmp_path, "args.yaml", text.replace("FSDP", words))
    spec = load(file, [TINY, "devices=8"]).spec
    placed = {factor.axis.value: str(factor.placement) for factor in spec.factors}
    assert placed["dp_shard"] == modes
    assert (spec.precision.layout.name, spec.precision.matmul) == ("fsdp-mixed", Matmul.NONE)
    assert outcomes(file, TINY, "devices=8")["fsdp"] is KeyEffect.MAPPED


@pytest.mark.parametrize("words", ["full_shrad", "[hybrid_shard_zero2]", "[full_shard, novel]"])
def test_words_of_fsdp_that_no_row_takes_are_rejected(words, tmp_path):
    file = write(tmp_path, "args.yaml", TRAINER_OF_FSDP.replace("FSDP", words))
    with pytest.raises(SpecError, match="fsdp"):
        load(file, [TINY, "devices=8"])


def test_bf16_of_fsdp_that_is_switched_on_alone_casts_shards(tmp_path):
    file = write(tmp_path, "args.json", TRAINER_OF_FSDP.replace("FSDP", "true"))
    spec = load(file, [TINY, "devices=8"]).spec
    assert (str(spec.factors[0].placement), spec.precision.layout.name) == ("M,S,S,R", "fsdp-mixed")


@pytest.mark.parametrize("stage", ["", "_stage_2", "_stage_2_offload", "_stage_3_offload"])
def test_bf16_of_each_deepspeed_strategy_of_lightning_has_a_master_copy(stage, tmp_path):
    text = "trainer: {devices: 2, precision: bf16-mixed, strategy: NAME}\nseed_everything: 1\n"
    file = write(tmp_path, "cli.yaml", text.replace("NAME", f"deepspeed{stage}"))
    precision = load(file, [TINY]).spec.precision
    assert (precision.layout.name, precision.matmul) == ("zero16", Matmul.NONE)


BF16_OF_DEEPSPEED = {
    "ds.json": '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}',
    "a.yaml": "{distributed_type: DEEPSPEED, num_processes: 2, mixed_precision: bf16, "
    "deepspeed_config: {zero_stage: 3}}",
    "args.json": '{"per_device_train_batch_size": 1, "bf16": true, "deepspeed": '
    '{"zero_optimization": {"stage": 3}}}',
    "axolotl.yml": "base_model: a/b\nmicro_batch_size: 1\nsequence_len: 64\nbf16: true\n"
    "deepspeed: {zero_optimization: {stage: 3}}\n",
    "cli.yaml": "trainer: {devices: 2, precision: bf16-mixed, strategy: deepspeed_stage_3}\n",
}


@pytest.mark.parametrize("name", BF16_OF_DEEPSPEED)
def test_bf16_of_deepspeed_is_reported_as_another_optimizer_state(name, tmp_path):
    file = write(tmp_path, name, BF16_OF_DEEPSPEED[name])
    conversion = read_conversion(file, [TINY, "devices=2"])
    assert conversion is not None
    rows = [row for row in conversion.outcomes if row.setting == "precision.layout=zero16"]
    assert [row.outcome for row in rows] == [KeyEffect.DIFFERS] and "master copy" in rows[0].note
    assert load(file, [TINY, "devices=2"]).spec.precision.layout.name == "zero16"


@pytest.mark.parametrize(("device", "modes"), [("cpu", "S*,O,O,R"), ("nvme", "S*,S@file,O,R")])
def test_an_offloaded_optimizer_of_deepspeed_keeps_gradients_on_the_host(device, modes, tmp_path):
    text = DEEPSPEED.replace('"stage": 2', '"stage": 3').replace('"cpu"', f'"{device}"')
    spec = load(write(tmp_path, "ds.json", text), [TINY]).spec
    assert str(spec.factors[0].placement) == modes
    text = "{distributed_type: DEEPSPEED, num_processes: 2, deepspeed_config: {zero_stage: 3, "
    file = write(tmp_path, "a.yaml", f"{text}offload_optimizer_device: {device}}}}}")
    assert str(load(file, [TINY]).spec.factors[0].placement) == modes


@pytest.mark.parametrize(
    ("components", "compiled"),
    [("", "all"), ('["model"]', "block"), ('["loss"]', "loss"), ('["model", "loss"]', "all")],
)
def test_the_components_that_torchtitan_compiles_become_those_of_the_spec(
    tmp_path, components, compiled
):
    text = '[job]\ndump_folder = "o"\n[training]\nseq_len = 64\n[compile]\n'
    more = f"components = {components}\n" if components else ""
    file = write(tmp_path, "job.toml", f"{text}{more}enable = true\n")
    assert load(file, [TINY, "devices=2"]).spec.compile == compiled
    file = write(tmp_path, "job.toml", f"{text}{more}enable = false\n")
    assert load(file, [TINY, "devices=2"]).spec.compile == "none"


def test_adapters_of_axolotl_are_those_of_a_built_in_model(tmp_path):
    text = "base_model: a/b\nmicro_batch_size: 1\nsequence_len: 64\nlora_r: 4\nlora_alpha: 8\n"
    file = write(tmp_path, "q.yml", f"{text}adapter: qlora\nload_in_4bit: true\n")
    spec = load(file, ["model.preset=llama-tiny", "devices=2"]).spec
    assert (spec.model.lora_rank, spec.model.lora_alpha, spec.frozen.dtype) == (4, 8, "nf4")
    file = write(tmp_path, "q.yml", text)
    assert load(file, ["model.preset=llama-tiny", "devices=2"]).spec.model.lora_rank is None


def test_all_reasons_for_a_rejection_are_given_at_once(tmp_path):
    text = "base_model: mine/Unknown-3B\nadapter: qlora\nrelora: true\n"
    text += "optimizer: adamw_bnb_8bit\n"
    file = write(tmp_path, "q.yml", text + "micro_batch_size: two\nsequence_len: 512\n")
    with pytest.raises(SpecError) as caught:
        load(file)
    places = {fault.place for fault in caught.value.faults}
    assert {"relora", "optimizer", "micro_batch_size", "model", "mesh"} <= places
    assert all(fault.remedy for fault in caught.value.faults)
    lines = {fault.place: fault.line for fault in caught.value.faults}
    assert (lines["relora"], lines["optimizer"]) == (3, 4)


def test_a_deepspeed_config_that_a_config_names_is_read(tmp_path):
    write(tmp_path, "ds.json", DEEPSPEED.replace(', "novel": {"key": 1}', ""))
    text = "distributed_type: DEEPSPEED\nnum_processes: 16\n"
    text += "deepspeed_config:\n  deepspeed_config_file: "
    spec = load(write(tmp_path, "a.yaml", f"{text}ds.json\n"), [TINY]).spec
    assert str(spec.factors[0].placement) == "R,O,O,R" and spec.world_size == 16
    with pytest.raises(SpecError, match=r"none\.json"):
        load(write(tmp_path, "b.yaml", f"{text}none.json\n"), [TINY])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '{"zero_optimization": {"stage": 3}, "train_batch_size": '),
        ("a.toml", "[training\nseq_len = 1\n"),
        ("a.yaml", "distributed_type: FSDP\n\tnum_processes: 8\n"),
        ("a.py", "config = {'a': 1"),
        ("a.sh", "--micro-batch-size 1 " * 60_000),
        ("a.json", '{"zero_optimization": ' * 5000 + "1" + "}" * 5000),
        ("a.toml", "a = " + "[" * 5000),
        ("a.py", "{" * 5000),
        ("a.sh", "\0"),
    ],
)
def test_a_broken_or_giant_file_is_one_message(name, content, tmp_path, capsys):
    file = write(tmp_path, name, content)
    assert main(["convert", str(file), "--model", "llama-tiny"]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and "Traceback" not in said


@pytest.mark.parametrize("value", ["[1]", "{a: 1}", "two", "true"])
def test_a_value_of_a_wrong_type_is_a_message(value, tmp_path):
    text = ACCELERATE.replace("dp_shard_size: 4", f"dp_shard_size: {value}")
    with pytest.raises(SpecError) as caught:
        load(write(tmp_path, "a.yaml", text), [TINY])
    assert any("dp_shard_size" in fault.place for fault in caught.value.faults)


def test_a_dictionary_in_python_is_read(tmp_path):
    file = write(tmp_path, "args.py", f"args = {json.loads(TRAINER)!r}\n")
    assert load(file, ["devices=16"]).spec.factors[0].degree == 16


def test_the_command_prints_a_spec_that_loads_and_a_line_for_each_key(tmp_path, capsys):
    file, out = write(tmp_path, "a.yaml", ACCELERATE), tmp_path / "spec.yaml"
    assert main(["convert", str(file), "--model", "llama-tiny", "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "fsdp_config.fsdp_sharding_strategy" in said and "differs" in said
    assert load(out).spec.world_size == 8
    assert main(["convert", str(out), "--to", "accelerate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["num_processes"] == 8


def test_other_commands_convert_on_the_way(tmp_path, capsys):
    file = write(tmp_path, "job.toml", TITAN)
    command = ["predict", str(file), "--model", "llama-tiny", "--devices", "4", "--json"]
    assert main([*command, "batch.sequence=128"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["fit"] is not None
    assert "torchtitan" in shown.err and "ptrain convert" in shown.err
    assert main(["plan", str(file), "--devices", "0"]) == 2
    assert main(["predict", str(file), "devices=none"]) == 2
    assert main(["plan", load_names().default, "--devices", "4"]) == 2
    assert "mesh.dp_shard=4" in capsys.readouterr().err


def test_every_row_of_flags_that_can_be_in_a_file_has_known_keys():
    """A setting in backticks that no table answers would never be written or accounted for."""
    for name, tool in load_hints()["tools"].items():
        for column in tool.get("flags", ()):
            keys = foreign_keys(*tool["tables"])
            for row in placement_rows(column):
                for case in row.cases:
                    for key in case:
                        said = find_answer((key,), 2, keys) or any(
                            k.endswith(f".{key}") for k in keys
                        )
                        assert said, (name, key)


def test_a_folder_with_a_config_alone_is_a_model(tmp_path):
    fields = PUBLISHED["llama"]
    write(tmp_path, "config.json", json.dumps(fields))
    shape = _model_section(str(tmp_path))
    assert (shape["family"], shape["hidden"]) == ("llama", fields["hidden_size"])
    assert _model_section(str(tmp_path / "config.json")) == shape
    write(tmp_path, "config.json", json.dumps(fields | {"model_type": "olmo2"}))
    assert _model_section(str(tmp_path)) == {"config": str(tmp_path / "config.json")}
    write(tmp_path, "config.json", json.dumps({"model_type": "llama", "hidden_act": "tanh"}))
    with pytest.raises(SpecError) as caught:
        _model_section(str(tmp_path))
    assert len(caught.value.faults) > 1  # all reasons at once
    assert _model_section("llama-tiny") == {"preset": "llama-tiny"}


LORA = "base_model: a/b\nmicro_batch_size: 1\nsequence_len: 64\nadapter: lora\nlora_r: 4\n"


def test_adapters_of_chosen_layers_differ_and_other_trained_parameters_are_rejected(tmp_path):
    text = f"{LORA}lora_target_modules: [q_proj, v_proj]\npeft_use_dora: false\n"
    rows = outcomes(write(tmp_path, "a.yml", text), TINY, "devices=2")
    assert rows["lora_target_modules"] is KeyEffect.DIFFERS
    text += "lora_modules_to_save: [embed_tokens, lm_head]\n"
    file = write(tmp_path, "b.yml", text.replace("dora: false", "dora: true"))
    with pytest.raises(SpecError) as caught:
        load(file, [TINY, "devices=2"])
    places = {fault.place for fault in caught.value.faults}
    assert places == {"lora_modules_to_save", "peft_use_dora"}


@pytest.mark.parametrize(
    ("more", "batch"),
    [
        ("", (1, 8, 32)),
        ("pipeline_parallel_microbatch_size = 1\n", (1, 8, 32)),
        ("pipeline_parallel_microbatch_size = 4\n", (4, 2, 32)),
        ("pipeline_parallel_microbatch_size = 3\n", None),
        ("[training]\nlocal_batch_size = 8\nglobal_batch_size = 64\n", (1, 16, 64)),
    ],
)
def test_a_pipeline_of_torchtitan_splits_the_local_batch(more, batch, tmp_path):
    text = f"[parallelism]\npipeline_parallel_degree = 2\n{more}[metrics]\nlog_freq = 1\n"
    text += "" if "local_batch" in more else "[training]\nlocal_batch_size = 8\n"
    file = write(tmp_path, "job.toml", text)
    if batch is None:
        with pytest.raises(SpecError, match="microbatch size 3"):
            load(file, [TINY, "devices=8"])
        return
    spec = load(file, [TINY, "devices=8"]).spec
    batches = spec.batch
    assert (batches.micro, batches.accumulate, batches.global_samples) == batch


def test_a_pair_of_betas_is_that_of_the_spec(tmp_path):
    text = DEEPSPEED.replace('{"lr": "auto"}', '{"betas": [0.8, 0.999]}')
    file = write(tmp_path, "ds.json", text)
    assert load(file, [TINY]).spec.optimizer.betas == (0.8, 0.999)
    assert outcomes(file, TINY)["optimizer.params.betas"] is KeyEffect.MAPPED


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.json", '{"zero_optimization": {"stage": 3}}'),
        ("cli.yaml", "trainer: {strategy: fsdp, precision: bf16-mixed}\n"),
        ("a.yaml", "distributed_type: FSDP\n"),
    ],
)
def test_one_key_that_no_other_tool_has_is_enough(name, text, tmp_path):
    factor = load(write(tmp_path, name, text), [TINY, "devices=4"]).spec.factors[0]
    assert factor.degree == 4 and str(factor.placement).startswith(("S*", "M"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.json", "missing.json"),
        (".", "directory"),
        ("novel.yaml", "neither a spec nor a config of a known tool"),
    ],
)
def test_a_file_that_cannot_be_converted_is_reported_before_its_devices(
    name, said, tmp_path, capsys
):
    write(tmp_path, "novel.yaml", "novel: 1\n")
    command = ["convert", str(tmp_path / name), "--model", "llama-tiny", "--devices", "8"]
    assert main(command) == 2
    shown = capsys.readouterr().err
    assert said in shown and "--devices" not in shown


def test_the_advice_for_an_open_model_and_mesh_works_for_every_command(tmp_path):
    file = write(tmp_path, "ds.json", '{"zero_optimization": {"stage": 3}}')
    with pytest.raises(SpecError) as caught:
        load(file)
    remedies = [re.findall(r"Add `(.*?)`", fault.remedy)[0] for fault in caught.value.faults]
    assert load(file, remedies).spec.world_size == 8


def test_control_codes_of_keys_are_printed_as_numbers(tmp_path, capsys):
    text = DEEPSPEED.replace('"novel"', r'"evil\u001b[31mkey"')
    assert main(["convert", str(write(tmp_path, "ds.json", text)), TINY]) == 0
    assert "\x1b" not in capsys.readouterr().err


def test_a_number_of_devices_that_the_command_replaces_differs(tmp_path):
    file = write(tmp_path, "a.yaml", "distributed_type: FSDP\nnum_processes: 8\n")
    assert outcomes(file, TINY, "devices=8")["num_processes"] is KeyEffect.MAPPED
    assert outcomes(file, TINY, "devices=16")["num_processes"] is KeyEffect.DIFFERS


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_defaults_of_stage_3_are_assumed_at_stage_3_alone(stage, tmp_path):
    file = write(tmp_path, "ds.json", f'{{"zero_optimization": {{"stage": {stage}}}}}')
    rows = outcomes(file, TINY, "devices=8")
    assert ("zero_optimization.stage3_max_reuse_distance" in rows) is (stage == 3)


def test_defaults_of_the_optimizer_are_those_of_the_tool(tmp_path):
    file = write(tmp_path, "args.json", TRAINER)
    optimizer = load(file, ["devices=16"]).spec.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.betas) == (5e-5, 0.0, (0.9, 0.999))
    assert outcomes(file, "devices=16")["learning_rate"] is KeyEffect.ASSUMED
    file = write(tmp_path, "run.sh", MEGATRON)
    spec = load(file).spec
    assert (spec.model.hidden_dropout, spec.model.attention_dropout) == (0.1, 0.1)
    assert (spec.optimizer.weight_decay, spec.optimizer.betas) == (0.01, (0.9, 0.999))


def test_query_groups_of_megatron_need_their_switch(tmp_path):
    file = write(tmp_path, "run.sh", MEGATRON.replace("--swiglu", "--num-query-groups 4 --swiglu"))
    assert outcomes(file)["num-query-groups"] is KeyEffect.DIFFERS


def plain_placement(spec: Any) -> list[tuple[str, int, str, str]]:
    return [
        (
            f.axis.value,
            f.degree,
            *map(str, (f.placement.parameters, f.placement.optimizer, f.placement.gradients)),
        )
        for f in spec.factors
    ]


PAIRS = re.findall(
    r"```(\w*)\n((?:(?!```).)*)```\n\n```yaml\n(name: from-(?!fsdp)((?:(?!```).)*))```",
    Path("docs/coming-from.md").read_text(encoding="utf-8"),
    re.DOTALL,
)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[3].split()[0])
def test_each_pair_of_the_page_is_what_convert_writes(pair, tmp_path):
    form, text, spec, _ = pair
    suffix = {"yml": "yaml", "": "sh"}.get(form, form)
    wanted = load(write(tmp_path, "wanted.yaml", spec)).spec
    overrides = [f"devices={wanted.world_size}", "model={preset: llama3-8b}"]
    got = load(write(tmp_path, f"file.{suffix}", text), overrides).spec
    assert plain_placement(got) == plain_placement(wanted)
    assert (got.precision, got.sync) == (wanted.precision, wanted.sync)
    assert got.activations == wanted.activations and got.batch.micro == wanted.batch.micro


def test_a_file_without_a_number_of_devices_is_rejected_and_not_one_device(tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}')
    assert main(["convert", str(file), "--model", "llama3-8b"]) == 2
    assert "the file has no number of devices" in capsys.readouterr().err
    assert main(["convert", str(file), "--model", "llama3-8b", "--devices", "8"]) == 0
    assert "dp_shard: 8" in capsys.readouterr().out
