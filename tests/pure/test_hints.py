"""Suggestions for misspelled words: only words close to the input."""

from __future__ import annotations

import re

import pytest

from ptrain.errors import SpecError
from ptrain.spec import check, foreign
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.load import load
from ptrain.spec.names import load_names


def message(*overrides: str, source: str = "") -> str:
    with pytest.raises(SpecError) as caught:
        load(source or load_names().default, overrides)
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
def test_a_close_word_is_suggested(override, meant):
    assert f"Did you mean '{meant}'?" in message(override)


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
    assert (fault.place, fault.line, fault.remedy) == ("placement", 4, f"Use a list: `{meant}`.")
    axis, first = meant.strip("{").replace("[", "").split(",")[0].split(": ")
    assert fault.text[: fault.column - 1].endswith(f"{axis}: ")
    assert fault.text[fault.column - 1 :].startswith(first)


def test_an_option_that_another_makes_void_is_rejected():
    said = message("model.preset=gpt-tiny", "model.rope_base=5")
    assert "model.rope_base: positions: learned has no rotary embeddings" in said
    assert "set `model.positions=rope`" in said


def test_existing_shape_fields_are_accepted():
    assert load("zero3", ["model.dropout=0.5"]).spec.model.dropout == 0.5
    assert load("zero3", ["model.dropout=0"]).spec.model.dropout == 0
    assert load("zero3", ["model.preset=gpt-tiny", "model.dropout=0.5"]).spec.model.dropout == 0.5
    assert load("zero3", ["model.rope_base=5"]).spec.model.rope_base == 5


# A key of another tool with a value, as the command line has it, and the answer's first word.
FOREIGN = """
training.local_batch_size=8 -> batch.micro=8
training.global_batch_size=64 -> batch.global=64
training.seq_len=4096 -> batch.sequence=4096
training.steps=1000 -> train.steps=1000
training.max_norm=1.0 -> optimizer.clip=1.0
training.mixed_precision_param=bfloat16 -> precision.layout=fsdp-mixed
training.enable_cpu_offload=true -> placement=fsdp-offload
parallelism.data_parallel_shard_degree=8 -> mesh.dp_shard=8
parallelism.data_parallel_shard_degree=-1 -> mesh.dp_shard=auto
data_parallel_replicate_degree=2 -> mesh.dp_replicate=2
parallelism.tensor_parallel_degree=2 -> mesh.tp=2
tensor_parallel_degree=2 -> mesh.tp=2
pipeline_parallel_degree=4 -> mesh.pp=4
context_parallel_degree=2 -> mesh.cp=2
parallelism.expert_parallel_degree=2 -> mesh.ep=2
parallelism.pipeline_parallel_schedule=Interleaved1F1B -> pipeline.schedule=interleaved
parallelism.fsdp_reshard_after_forward=never -> reshard=false
activation_checkpoint.mode=full -> activations=M
activation_checkpoint.mode=selective -> recompute=selective
lr_scheduler.warmup_steps=200 -> optimizer.schedule.warmup=200
lr_scheduler.min_lr_factor=0.1 -> optimizer.schedule.min_lr_ratio=0.1
optimizer.early_step_in_backward=true -> placement=optimizer-in-backward
checkpoint.interval=500 -> checkpoint.every=500
metrics.log_freq=10 -> log.every=10
validation.freq=100 -> eval.every=100
comm.init_timeout_seconds=600 -> timeout.init=600
model.flavor=8B -> model.preset=NAME
base_model=meta-llama/Llama-3.1-8B -> model.pretrained=FOLDER
micro_batch_size=2 -> batch.micro=2
sequence_len=4096 -> batch.sequence=4096
lora_r=16 -> model.lora_rank=16
model.lora_r=16 -> model.lora_rank=16
lora_alpha=32 -> model.lora_alpha=32
lora_dropout=0.05 -> model.arguments.dropout=0.05
adapter=ia3 -> model.target=MODULE:FUNCTION
flash_attention=true -> attention=sdpa
flex_attention=true -> attention=flex
pad_to_sequence_len=true -> batch.pad=true
num_epochs=3 -> train.steps=STEPS
evals_per_epoch=4 -> eval.every=STEPS
saves_per_epoch=1 -> checkpoint.every=STEPS
optimizer=adamw_torch_fused -> optimizer.name=adamw
lr_scheduler=cosine -> optimizer.schedule.decay_steps=STEPS
cosine_min_lr_ratio=0.1 -> optimizer.schedule.min_lr_ratio=0.1
wandb_project=mine -> log.trackers=wandb
train_on_inputs=false -> data.loss_mask=FILE
fsdp_config.fsdp_sharding_strategy=FULL_SHARD -> placement=zero3
fsdp_sharding_strategy=SHARD_GRAD_OP -> placement=zero3-keep
fsdp_sharding_strategy=HYBRID_SHARD -> placement=hsdp
fsdp_config.fsdp_offload_params=true -> placement=fsdp-offload
fsdp_config.fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP -> unit=block
fsdp_reshard_after_forward=false -> reshard=false
fsdp_activation_checkpointing=true -> activations=M
activation_checkpointing.partition_activations=true -> activations=M
activation_checkpointing.cpu_checkpointing=true -> activations=M@host
fsdp_forward_prefetch=true -> prefetch=1
mixed_precision=bf16 -> precision.layout=fsdp-mixed
mixed_precision=fp16 -> precision.layout=fp16
num_processes=8 -> mesh.dp_shard=8
distributed_type=FSDP -> placement=zero3
parallelism_config.parallelism_config_tp_size=2 -> mesh.tp=2
deepspeed_config.zero_stage=2 -> placement=zero2
per_device_train_batch_size=4 -> batch.micro=4
training_args.per_device_train_batch_size=4 -> batch.micro=4
gradient_accumulation_steps=8 -> batch.accumulate=8
train.gradient_accumulation_steps=8 -> batch.accumulate=8
gradient_checkpointing=true -> activations=M
train.gradient_checkpointing=true -> activations=M
learning_rate=1e-4 -> optimizer.lr=0.0001
weight_decay=0.1 -> optimizer.weight_decay=0.1
adam_beta1=0.8 -> optimizer.betas=[0.8, 0.999]
adam_epsilon=1e-6 -> optimizer.eps=1e-06
max_grad_norm=1.0 -> optimizer.clip=1.0
lr_scheduler_type=cosine -> optimizer.schedule.decay_steps=STEPS
lr_scheduler_type=constant -> optimizer.schedule.decay_steps=0
warmup_ratio=0.03 -> optimizer.schedule.warmup=STEPS
warmup_steps=100 -> optimizer.schedule.warmup=100
num_train_epochs=3 -> train.steps=STEPS
max_steps=1000 -> train.steps=1000
bf16=true -> precision.layout=fsdp-mixed
fp16=true -> precision.layout=fp16
optim=adamw_torch -> optimizer.name=adamw
save_steps=500 -> checkpoint.every=500
eval_steps=500 -> eval.every=500
eval_strategy=no -> eval.every=0
logging_steps=10 -> log.every=10
report_to=wandb -> log.trackers
data_seed=1 -> train.seed=1
full_determinism=true -> deterministic=true
ddp_bucket_cap_mb=25 -> bucket=25 MiB
ddp_timeout=1800 -> timeout.step=1800
fsdp=full_shard auto_wrap -> placement=zero3
use_liger_kernel=true -> loss=fused
auto_find_batch_size=true -> batch.micro=auto
zero_optimization.stage=3 -> placement=zero3
zero_optimization.offload_optimizer.device=cpu -> placement.dp_shard.optimizer=O
bf16.enabled=true -> precision.layout=zero16
train_micro_batch_size_per_gpu=4 -> batch.micro=4
"""


@pytest.mark.parametrize("row", FOREIGN.strip().splitlines())
def test_a_key_of_another_tool_is_answered_with_the_equivalent_key(row):
    written, _, meant = row.partition(" -> ")
    remedy = message(written).partition("remedy: ")[2]
    assert remedy.startswith((f"Use `{meant}`.", f"Did you mean '{meant}")), remedy


@pytest.mark.parametrize("key", ["partition_activations", "cpu_checkpointing"])
def test_recomputation_that_deepspeed_disables_is_not_suggested(key):
    assert "Remove it: this is the default." in message(f"activation_checkpointing.{key}=false")


def test_the_answer_has_the_syntax_of_the_place_it_was_written_in(tmp_path):
    file = tmp_path / "mine.yaml"
    text = "model: {preset: llama-tiny}\nmesh: {dp_shard: 2}\nbatch: {sequence: 128}\n"
    file.write_text(f"{text}training: {{seq_len: 256, novel: 1}}\nlora_r: 4\nplacement: zero3\n")
    with pytest.raises(SpecError) as caught:
        load(file, ["save_steps=5"])
    assert [(fault.place, fault.line, fault.remedy[:42]) for fault in caught.value.faults] == [
        ("training.seq_len", 4, "Use `batch: {sequence: 256}`."),
        ("training.novel", 4, "Remove it: no key stands for it."),
        ("lora_r", 5, "Use `model: {lora_rank: 4}`. For a built-i"),
        ("save_steps", 0, "Use `checkpoint.every=5`."),
    ]


@pytest.mark.parametrize("value", ["false", "true"])
@pytest.mark.parametrize(
    "key", ["bf16", "gradient_checkpointing", "cpu_offload", "flash_attention"]
)
def test_a_setting_that_is_off_needs_no_key(key, value):
    assert ("Remove it" in message(f"{key}={value}")) is (value == "false")


SHARES = (
    *("optimizer.betas", "optimizer.eps", "optimizer.schedule.min_lr_ratio", "model.norm_eps"),
    *("model.attention_dropout", "model.hidden_dropout", "model.rotary"),
)


def answers() -> list[str]:
    hints = foreign.load_hints()
    said = [said for rows in hints["keys"].values() for said in rows.values()]
    texts = {text for each in said for text in ([each] if isinstance(each, str) else each.values())}
    assert {text[1:] for text in texts if text.startswith("@")} == hints["shared"].keys()
    return sorted({*texts, *hints["shared"].values()} - {f"@{name}" for name in hints["shared"]})


@pytest.mark.parametrize("answer", answers())
def test_each_answer_is_a_key_with_a_legal_value_or_a_sentence(answer):
    match = foreign.ANSWER.fullmatch(answer)
    if not match:
        assert answer.startswith(("Remove it", "Set it", "It does something else: "))
        assert answer.endswith(".")
        return
    key, value, more = match.groups()
    route = tuple(key.split("."))
    known = check._key_aliases(SpecRaw, ())
    assert route in known or route[:2] == ("model", "arguments") or route[0] == "placement"
    assert more is None or more.endswith(".")
    value = re.sub(r"(\bN[*/])?\{[\w.]+\}", "N", value)  # another key of a file
    value = re.sub(r"\bN\b", "0.05" if key in SHARES else "2", value)
    if re.search(r"\b[A-Z]{2,}\b(?!\.)", value.replace("MiB", "")):
        return  # STEPS, FOLDER: the reader's own
    try:
        load("zero3", [f"{key}={value}"])
    except SpecError as error:  # a legal value that requires other keys
        said = str(error)
        assert "unknown key" not in said and "no strategy" not in said
        assert f"error: {key}: must be" not in said


def test_an_answer_by_value_covers_all_values():
    tables = foreign.load_hints()["keys"].values()
    said = [said for rows in tables for said in rows.values() if not isinstance(said, str)]
    assert said and all(list(cases)[-1] == "else" for cases in said)
