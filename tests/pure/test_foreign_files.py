"""Files of other tools given as a spec: the message names the kind of file."""

from __future__ import annotations

import json
import shlex

import pytest

from ptrain.spec.load import load
from tests.published import PUBLISHED
from tests.pure.test_bad_input import message_for


@pytest.mark.parametrize(
    ("name", "content", "kind", "remedy"),
    [
        ("other.toml", "a = 1\n", "a TOML file. A spec", "ptrain specs show zero3"),
        ("ours.toml", "[mesh]\ndp_shard = 2\n", "a TOML file. A spec", "ptrain specs show zero3"),
        ("index.json", '{"metadata": {}, "weight_map": {}}', "the index of", "ptrain specs show"),
        ("config.json", '{"model_type": "llama", "hidden_size": 32}', "the config.json", "config:"),
        ("run.sh", "echo --verbose\n", "a file of no known tool", "ptrain specs show zero3"),
    ],
)
def test_a_file_that_is_no_config_is_identified(name, content, kind, remedy, tmp_path):
    file = tmp_path / name
    file.write_text(content)
    (fault,) = message_for(file).faults
    assert kind in fault.finding and fault.finding.startswith("this is ")
    assert remedy in fault.remedy
    assert fault.source == str(file)


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
