"""Values of converted specs: defaults of the tools, schedules, vocabularies and earlier keys."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from ptrain.errors import SpecError
from ptrain.report.printed import sparse_mapping
from ptrain.spec.foreign import KeyEffect
from ptrain.spec.foreign_files import iter_leaves
from ptrain.spec.load import load
from tests.pure.test_convert import (
    ACCELERATE,
    FILES,
    MEGATRON,
    TINY,
    TRAINER,
    outcomes,
    overrides,
    write,
)


@pytest.mark.parametrize("name", FILES)
def test_a_converted_spec_has_the_values_that_differ_from_defaults_alone(name, tmp_path):
    file = write(tmp_path, name, FILES[name][0])
    spec = load(file, overrides(name)).spec
    mapping = sparse_mapping(spec)
    again = load(mapping).spec
    assert replace(again, resolved=spec.resolved) == spec
    for route, value in iter_leaves((), mapping):
        if route[0] in ("name", "mesh", "placement", "batch"):
            continue
        without = copy.deepcopy(mapping)
        section: Any = without
        for key in route[:-1]:
            section = section[key]
        del section[route[-1]]
        try:
            left = load(without).spec
        except SpecError:
            continue
        assert replace(left, resolved=spec.resolved) != spec, (route, value)
    assert "eps2" not in str(mapping) and "timeout" not in mapping


def test_a_published_model_is_written_as_its_preset(tmp_path):
    file = write(tmp_path, "args.json", TRAINER)
    mapping = sparse_mapping(load(file, ["devices=16"]).spec)
    assert mapping["model"] == {"preset": "mistral-7b"}
    assert mapping["placement"] == {"dp_shard": "M,S,S,R"}


def test_flags_of_megatron_for_a_llama_are_its_family(tmp_path):
    file = write(tmp_path, "run.sh", MEGATRON.replace("--swiglu", "--hidden-dropout 0 --swiglu"))
    model = sparse_mapping(load(file).spec)["model"]
    options = ("family", "norm", "activation", "bias", "positions", "tied", "hidden_dropout")
    assert model["layers"] == 4 and not {*options} & model.keys()
    text = MEGATRON.replace("--swiglu", "--squared-relu").replace(" --disable-bias-linear", "")
    model = sparse_mapping(load(write(tmp_path, "run.sh", text)).spec)["model"]
    assert (model["activation"], model["family"]) == ("relu2", "gpt")


TITAN_OF_2024 = """\
[job]
dump_folder = "o"
[training]
batch_size = 2
seq_len = 64
tensor_parallel_degree = 2
data_parallel_degree = -1
warmup_steps = 7
[experimental]
pipeline_parallel_degree = 2
enable_async_tensor_parallel = false
"""


def test_keys_of_earlier_versions_of_torchtitan_are_those_of_their_present_section(tmp_path):
    file = write(tmp_path, "job.toml", TITAN_OF_2024)
    spec = load(file, [TINY, "devices=8"]).spec
    assert {f.axis.value: f.degree for f in spec.factors} == {"pp": 2, "dp_shard": 2, "tp": 2}
    assert spec.optimizer.schedule.warmup == 7
    rows = outcomes(file, TINY, "devices=8")
    assert rows["experimental.pipeline_parallel_degree"] is KeyEffect.MAPPED
    assert KeyEffect.UNKNOWN not in rows.values()


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("ds.json", '{"zero_optimization": {}, "optimizer": {"type": "AdamW"}}', (1e-3, 0.999, 0)),
        ("ds.json", '{"zero_optimization": {}}', (3e-4, 0.95, 0)),
        ("cli.yaml", "trainer: {}\noptimizer: {class_path: torch.optim.AdamW}", (1e-3, 0.999, 0)),
        ("args.json", '{"optim": "adamw_torch", "warmup_steps": 3}', (5e-5, 0.999, 3)),
        ("job.toml", "[job]\n[training]\nsteps = 9\n", (8e-4, 0.95, 200)),
        ("run.sh", "--micro-batch-size 1 --global-batch-size 2 --lr 1e-4", (1e-4, 0.999, 0)),
    ],
)
def test_what_a_tool_assumes_is_in_the_spec_where_ptrain_assumes_something_else(
    name, text, wanted, tmp_path
):
    spec = load(write(tmp_path, name, text), [TINY, "devices=2"]).spec
    found = (spec.optimizer.lr, spec.optimizer.betas[1], spec.optimizer.schedule.warmup)
    assert found == wanted
    written = str(sparse_mapping(spec).get("optimizer"))
    assert ("betas" in written) is (wanted[1] == 0.999)


@pytest.mark.parametrize(
    ("name", "text", "schedule", "clip"),
    [
        (
            "args.json",
            '{"max_grad_norm": 0, "max_steps": 70, "lr_scheduler_type": "cosine"}',
            (70, 0.0),
            None,
        ),
        (
            "run.sh",
            "--micro-batch-size 1 --clip-grad 0.0 --train-iters 70 --lr 1e-3 --min-lr 1e-4 "
            "--lr-decay-style cosine --train-iters 70",
            (70, 0.1),
            None,
        ),
        ("run.sh", "--micro-batch-size 1 --train-iters 70 --lr-decay-style linear", (0, 0.1), 1),
        ("ds.json", '{"zero_optimization": {}, "gradient_clipping": 0.0}', (0, 0.1), None),
        ("cli.yaml", "trainer: {gradient_clip_val: null}", (0, 0.1), None),
    ],
)
def test_schedules_and_switches_of_clipping_are_those_of_the_tool(
    name, text, schedule, clip, tmp_path
):
    optimizer = load(write(tmp_path, name, text), [TINY, "devices=2"]).spec.optimizer
    assert (optimizer.schedule.decay_steps, optimizer.schedule.min_lr_ratio) == schedule
    assert optimizer.clip == clip


def test_values_that_a_file_lacks_are_named(tmp_path):
    rows = outcomes(write(tmp_path, "a.yaml", ACCELERATE), TINY)
    assert {"train.steps", "data", "optimizer.lr"} <= rows.keys()
    rows = outcomes(write(tmp_path, "args.json", TRAINER), "devices=16")
    assert "data" in rows and not {"train.steps", "optimizer.lr"} & rows.keys()
    text = MEGATRON.replace("--vocab-size 512", "")
    with pytest.raises(SpecError, match=r"model\.vocab=N"):
        load(write(tmp_path, "run.sh", text))


def test_the_vocabulary_is_padded_as_megatron_pads_it(tmp_path):
    text = MEGATRON.replace("--vocab-size 512", "--vocab-size 500")
    model = load(write(tmp_path, "run.sh", text)).spec.model
    assert (model.vocab, model.vocab_rows) == (500, 512)  # 128 for each of 4 ranks of tp
    text = text.replace("--vocab-size 500", "--vocab-size 500 --make-vocab-size-divisible-by 3")
    assert load(write(tmp_path, "run.sh", text)).spec.model.vocab_rows == 504


@pytest.mark.parametrize(
    "flag", ["--mtp-num-layers 1", "--quick-geglu", "--moe-layer-freq 2", "--window-size 64"]
)
def test_a_part_of_a_model_that_ptrain_lacks_is_rejected_by_name(flag, tmp_path):
    file = write(tmp_path, "run.sh", MEGATRON.replace("--swiglu", f"{flag} --swiglu"))
    with pytest.raises(SpecError) as caught:
        load(file)
    assert [fault.place for fault in caught.value.faults] == [flag.split()[0].removeprefix("--")]
    assert all(fault.remedy.startswith("Set it to") for fault in caught.value.faults)
