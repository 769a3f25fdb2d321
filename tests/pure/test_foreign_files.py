"""Files of other tools given as a spec: the message names the kind of file."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from ptrain.spec.load import load
from tests.published import PUBLISHED
from tests.pure.test_bad_input import message_for

TITAN = """\
[job]
dump_folder = "./outputs"
[training]
local_batch_size = 8
seq_len = 2048
[parallelism]
data_parallel_shard_degree = -1
"""
DEEPSPEED = """\
{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, "gradient_clipping": 1.0,
 "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_offload_params: false}
num_processes: 8
"""


@pytest.mark.parametrize(
    ("name", "content", "kind", "remedy"),
    [
        ("job.toml", TITAN, "a TOML file: a torchtitan job config", "batch.micro=8 batch.seq"),
        ("other.toml", "a = 1\n", "a TOML file. A spec", "ptrain specs show zero3"),
        ("ours.toml", "[mesh]\ndp_shard = 2\n", "a TOML file. A spec", "ptrain specs show zero3"),
        ("ds_config.json", DEEPSPEED, "a DeepSpeed config", "placement.dp_shard.optimizer=O"),
        ("default.yaml", ACCELERATE, "an accelerate config", "placement=zero3-keep mesh.dp_sh"),
        ("qlora.yml", "base_model: a\nadapter: qlora\n", "an axolotl config", "specs show"),
        ("args.json", '{"num_train_epochs": 3, "save_steps": 5}', "Trainer", "checkpoint.every=5"),
        ("config.json", '{"model_type": "llama", "hidden_size": 32}', "the config.json", "config:"),
    ],
)
def test_a_file_of_another_tool_is_identified(name, content, kind, remedy, tmp_path):
    file = tmp_path / name
    file.write_text(content)
    (fault,) = message_for(file).faults
    assert kind in fault.finding and fault.finding.startswith("this is ")
    assert remedy in fault.remedy
    assert fault.source == str(file)


@pytest.mark.parametrize(
    ("section", "setting"),
    [
        ({"enable": True}, "compile=all"),
        ({"components": ["model", "loss"], "enable": True}, "compile=all"),
        ({"components": ["model"], "enable": True}, "compile=block"),
        ({"enable": True, "components": ["loss"]}, "compile=loss"),
        ({"components": ["model", "loss"], "enable": False}, ""),
    ],
)
def test_the_components_that_torchtitan_compiles_are_those_of_the_answer(
    section, setting, tmp_path
):
    file = tmp_path / "job.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    file.write_text("\n".join([TITAN, "[compile]", *lines]))
    (fault,) = message_for(file).faults
    assert re.findall(r"compile=\w+", fault.remedy) == ([setting] if setting else [])
    written = message_for("zero3", f"compile={json.dumps(section)}").faults
    assert written[-1].remedy.startswith(f"Use `{setting}`." if setting else "Remove it: ")


def test_the_command_for_a_config_of_transformers_reads_it(tmp_path):
    file = tmp_path / "a config.json"
    file.write_text(json.dumps(PUBLISHED["llama"]))
    (fault,) = message_for(file).faults
    command = shlex.split(fault.remedy.removeprefix("Use `").removesuffix("`."))
    assert command[:3] == ["ptrain", "predict", "zero3"]
    assert load(command[2], command[3:]).spec.model.hf == "LlamaForCausalLM"


def test_a_spec_in_json_stays_a_spec(tmp_path):
    file = tmp_path / "spec.json"
    spec = {"model": {"preset": "llama-tiny"}, "mesh": {"dp_shard": 2}, "batch": {"sequence": 8}}
    file.write_text(json.dumps(spec | {"placement": "zero3", "optimizer": {"lr": 1e-3}}))
    assert load(file).spec.name == "spec"
    file.write_text(
        json.dumps(spec | {"bf16": True, "gradient_clipping": 1.0, "placement": "zero3"})
    )
    assert [fault.place for fault in message_for(file).faults] == ["bf16", "gradient_clipping"]
