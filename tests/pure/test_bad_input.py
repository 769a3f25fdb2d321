"""Every invalid spec gives one message per error with place, finding and fix; `load` raises only
SpecError."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ptrain.errors import PtrainError, SpecError
from ptrain.spec.load import load

GOOD = """\
name: good
model: {preset: llama-tiny}
mesh: {dp_shard: 2}
placement:
  dp_shard: {parameters: S*, optimizer: S, gradients: S, activations: R}
precision: {layout: fp32}
batch: {global: 16, micro: 2, sequence: 128}
optimizer: {name: adamw, lr: 3e-4, clip: 1.0}
train: {steps: 50, seed: 0}
"""


def message_for(path: Path | str, *overrides: str, world_size: int | None = None) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load(path, overrides, world_size=world_size)
    assert caught.value.exit_code == 2
    return caught.value


# Text to replace in GOOD, its replacement; then place, finding and fix (a part of each).
LINES = [
    # unknown, missing and doubled keys
    ("name: good", "nmae: good", "nmae", "unknown key 'nmae'", "Did you mean 'name'"),
    ("mesh: {dp_shard", "mesh: {dp_shrad", "mesh.dp_shrad", "unknown key", "'dp_shard'"),
    ("lr: 3e-4", "learning: 3e-4", "optimizer.learning", "unknown key", "`ptrain help optimizer`"),
    ("name: good", "<<: good", "<<", "unknown key", "Run `ptrain help keys`"),
    ("seed: 0", "seed: 0, seed: 1", "train.seed", "appears twice (first in line 9)", "Remove one"),
    ("train:", "mesh: {}\ntrain:", "mesh", "appears twice (first in line 3)", "Remove one"),
    ("model: {preset: llama-tiny}\n", "", "model", "the required key 'model' is missing", "preset"),
    (", sequence: 128", "", "batch.sequence", "missing in batch", "batch.sequence=128"),
    (", gradients: S,", ",", "placement.dp_shard.gradients", "all four states", "Add `gradients`"),
    # YAML traps
    ("lr: 3e-4", "lr: '3e-4'", "optimizer.lr", "the string '3e-4'", "Use `3e-4` without quotes"),
    ("steps: 50", "steps: 5_0", "train.steps", "the string '5_0'", "Use `50`"),
    ("steps: 50", "steps: 1:30", "train.steps", "the string '1:30'", "1..1000000000"),
    ("steps: 50", "steps: 2026-01-01", "train.steps", "the string '2026-01-01'", "integer"),
    ("clip: 1.0", "clip: on", "optimizer.clip", "the string 'on'", "finite number > 0"),
    ("seed: 0", "seed: 0}\ndeterministic: {a: off", "deterministic", "a mapping", "true or false"),
    ("seed: 0}", "seed: 0}\ncompile: on", "compile", "the string 'on'", "none, block, loss or all"),
    ("gradients: S,", "gradients: false,", "placement.dp_shard.gradients", "false", "quotes"),
    ("gradients: S,", "gradients: *S,", "placement.dp_shard.gradients", "aliases (*S)", "S*"),
    ("{layout: fp32}", "&p {layout: fp32}", "precision", "anchors (&p)", "Write the value in full"),
    ("steps: 50", "steps: !!python/object:a.b 50", "train.steps", "tags", "value without a tag"),
    ("steps: 50", "steps: !x 50", "train.steps", "tags (!x)", "value without a tag"),
    ("name: good", "? [a, b]\n: good", "", "a key must be a single word", "quote"),
    ("  dp_shard: {p", "\tdp_shard: {p", "", "not valid YAML", "YAML does not allow tabs"),
    ("{layout: fp32}", "{layout: fp32", "", "not valid YAML", ""),
    ("name: good", "name: *", "", "not valid YAML", "S*"),
    ("name: good", "name: @good", "", "not valid YAML", ""),
    ("train:", "---\ntrain:", "", "a second YAML document", "Remove `---`"),
    # numbers out of range
    ("lr: 3e-4", "lr: .nan", "optimizer.lr", "the number nan", "finite number > 0"),
    ("lr: 3e-4", "lr: .inf", "optimizer.lr", "the number inf", "finite number > 0"),
    ("lr: 3e-4", "lr: 1e400", "optimizer.lr", "the number inf", "<= 1e+06"),
    ("lr: 3e-4", "lr: -1", "optimizer.lr", "the number -1", "> 0"),
    ("lr: 3e-4", "lr: null", "optimizer.lr", "nothing", "> 0"),
    ("lr: 3e-4", "lr: 0", "optimizer.lr", "the number 0", "> 0"),
    ("lr: 3e-4", f"lr: {'9' * 5000}", "optimizer.lr", "the number inf", "<= 1e+06"),
    ("lr: 3e-4", "betas: [0.9]", "optimizer.betas", "[0.9]", "a list of 2 numbers"),
    ("lr: 3e-4", "betas: [0.9, 1.0]", "optimizer.betas", "[0.9, 1.0]", "in 0..0.999999"),
    ("dp_shard: 2", "dp_shard: 0", "mesh.dp_shard", "the number 0", "1..131072"),
    ("dp_shard: 2", "dp_shard: -1", "mesh.dp_shard", "the number -1", "1..131072"),
    ("dp_shard: 2", "dp_shard: 2.5", "mesh.dp_shard", "the number 2.5", "1..131072"),
    ("dp_shard: 2", "dp_shard: two", "mesh.dp_shard", "the string 'two'", "or auto"),
    ("dp_shard: 2", "dp_shard: 1000000000", "mesh.dp_shard", "1000000000", "1..131072"),
    ("dp_shard: 2", "dp_shard: true", "mesh.dp_shard", "the boolean true", "integer"),
    ("dp_shard: 2", "dp_shard: 131072, dp_replicate: 2", "mesh", "262144 ranks", "smaller"),
    ("seed: 0", "seed: -1", "train.seed", "the number -1", "0..9223372036854775807"),
    ("seed: 0", f"seed: {2**64}", "train.seed", str(2**64), "0..9223372036854775807"),
    ("steps: 50", "steps: 0", "train.steps", "the number 0", "1..1000000000"),
    ("train:", "timeout: 0\ntrain:", "timeout.step", "the number 0", "> 0"),
    ("train:", "checkpoint: {keep: 0}\ntrain:", "checkpoint.keep.last", "the number 0", "1..10"),
    ("micro: 2", "micro: 0", "batch.micro", "the number 0", "1..1000000"),
    ("train:", "bucket: 5 apples\ntrain:", "bucket", "the string '5 apples'", "MiB"),
    # modes and placements
    ("parameters: S*", "parameters: Q", "placement.dp_shard.parameters", "'Q'", "R, S, S*, M or O"),
    ("optimizer: S,", "optimizer: s,", "placement.dp_shard.optimizer", "'s'", "Did you mean `S`?"),
    ("parameters: S*", "parameters: M@host", "placement.dp_shard.parameters", "'M@host'", "tier"),
    ("gradients: S,", "gradients: O@file,", "placement.dp_shard.gradients", "", "mean `S@file`?"),
    ("gradients: S,", "gradients: R@nvme,", "placement.dp_shard.gradients", "", "mean `R@file`?"),
    ("gradients: S,", "gradients: S@cpu,", "placement.dp_shard.gradients", "", "Did you mean `O`?"),
    ("gradients: S,", "gradients: X@nvme,", "placement.dp_shard.gradients", "must be a mode", ""),
    ("  dp_shard: {", "  dp_replicate: {", "placement", "no entry", "placement.dp_shard=S*,S,S,R"),
    ("mesh: {", "mesh: {dp_replicate: 2, ", "placement", "dp_replicate: 2", "four other modes"),
    ("dp_shard: {parameters: S*,", "dp_shard: {", "placement.dp_shard.param", "all four", "Add"),
    ("mesh: {dp_shard: 2}", "mesh: {}", "placement.dp_shard", "no such axis", "`mesh.dp_shard=N`"),
    ("mesh: {dp_shard: 2}", "mesh: 2", "mesh", "must be a mapping", "its keys: pp, dp_replicate"),
    ("mesh: {dp_shard: 2}", "mesh:", "mesh", "got nothing", "its keys"),
    ("mesh: {dp_shard: 2}", "mesh: {dp: 2, dp_shard: 2}", "mesh.dp", "is set too", "Remove `dp`"),
    ("dp_shard: 2", "dp_shard: auto", "mesh.dp_shard", "needs the number of ranks", "torchrun"),
    # model, batch, data, cluster
    ("llama-tiny", "llama-tinny", "model.preset", "no model named", "Did you mean 'llama-tiny'"),
    ("llama-tiny", "none.yaml", "model.preset", "no model named 'none.yaml'", "file"),
    ("llama-tiny}", "llama-tiny, heads: 3}", "model.heads", "does not divide", "2, 4, 8"),
    ("llama-tiny}", "llama-tiny, heads: 3}", "model.heads", "does not divide", "16, 32, 64"),
    ("llama-tiny}", "llama-tiny, heads: 3, kv_heads: 5}", "model.heads", "", "`model.hidden`"),
    ("llama-tiny}", "llama-tiny, kv_heads: 3}", "model.kv_heads", "does not divide", "1, 2, 4"),
    ("llama-tiny}", "llama-tiny, heads: 128}", "model.heads", "is odd", "even"),
    ("{preset: llama-tiny}", "{layers: 2}", "model", "missing hidden, heads", "llama-tiny"),
    ("{preset: llama-tiny}", "{target: nofunction}", "model.target", "'nofunction'", "module:func"),
    ("llama-tiny}", "llama-tiny, target: 'a:b'}", "model.preset", "built-in", "remove it"),
    ("global: 16", "global: 15", "batch.global", "data degree=2 = 4", "12` or `batch.global=16`."),
    ("global: 16", "global: 16, accumulate: 3", "batch.global", "= 12", "batch.accumulate=4"),
    ("global: 16", "global: lots", "batch.global", "'lots'", "4M tokens"),
    ("llama-tiny", "nested.yaml", "model.preset", "refers to another preset", "Put the fields"),
    ("train:", "cluster: {preset: moon}\ntrain:", "cluster.preset", "no cluster", "laptop"),
    ("train:", "cluster: {devices: 2}\ntrain:", "cluster", "incomplete", "preset"),
    ("train:", "cluster: {device_memory: [1, 2]}\ntrain:", "cluster", "one value", "or smallest"),
    ("train:", "cluster: {flops: {a: 1}}\ntrain:", "cluster.flops", "one value", "all ranks"),
    ("train:", "cluster: {devices: [a, b]}\ntrain:", "cluster.devices", "one value", "slowest"),
    ("train:", "pipeline: gpipe\ntrain:", "pipeline", "a mapping", "{schedule: gpipe}"),
    ("train:", "pipeline: {split: dynamic}\ntrain:", "pipeline.split", "'dynamic'", "do not move"),
    ("train:", "pipeline: {split: Adaptive}\ntrain:", "pipeline.split", "", "--resume"),
    ("train:", "pipeline: {split: uniform}\ntrain:", "pipeline.split", "", "mean 'layers'?"),
    ("train:", "pipeline: {split: [0, 4]}\ntrain:", "pipeline.split", "a list", "from 1 to"),
    ("train:", "pipeline: {micro: 4}\ntrain:", "pipeline.micro", "unknown key", "'batch.micro'?"),
    ("train:", "data: {path: a, corpus: synthetic}\ntrain:", "data.path", "both", "Remove one"),
    ("train:", "data: {corpus: web}\ntrain:", "data.corpus", "'web'", "python-docs"),
    ("name: good", "name: ../good", "name", "'../good'", "1 to 64 letters"),
    ("name: good", f"name: {'a' * 300}", "name", "aaa...", "1 to 64 letters"),
    ("name: good", 'name: "a\\0b"', "name", "a\\x00b", "1 to 64 letters"),
    ("layout: fp32", "layout: fp23", "precision.layout", "'fp23'", "Did you mean 'fp32'"),
    ("{preset: llama-tiny}", "{hf: A, layers: 2}", "model.layers", "`hf` names", "model.config"),
    # in the grammar, not executed yet
    ("mesh: {", "mesh: {ep: 2, ", "placement", "the mesh has ep: 2", "Add `placement.ep=R,R,R,R`"),
    ("mesh: {", "mesh: {cp: 2, ", "placement", "the mesh has cp: 2", "Add `placement.cp=R,R,R,S`"),
    ("mesh: {", "mesh: {pp: 2, ", "placement", "the mesh has pp: 2", "placement.pp=S,S,S,R"),
    ("train:", "attention: flash\ntrain:", "attention", "not supported yet", "or sdpa-gqa or"),
    ("train:", "compile: head\ntrain:", "compile", "the string 'head'", "none, block, loss or all"),
    # the data axis' dials
    ("train:", "offload: {tier: host}\ntrain:", "offload.tier", "no state has mode O", "remove"),
    ("train:", "offload: {tier: disk}\ntrain:", "offload.tier", "host, file", "mean 'file'"),
    ("train:", "offload: {tier: nvme}\ntrain:", "offload.tier", "host, file", "mean 'file'"),
    ("train:", "offload: {update: disk}\ntrain:", "offload.update", "host, device", ""),
    ("train:", "offload: {update: gpu}\ntrain:", "offload.update", "device", "mean 'device'"),
    ("train:", "bucket: huge\ntrain:", "bucket", "a size like", "a number of bytes"),
    ("train:", "bucket: 12 apples\ntrain:", "bucket", "must be size, per-tensor, whole, or a", "B"),
    ("train:", "bucket: 25\ntrain:", "bucket", "1024..", "`25 MiB`? Or use `size`"),
    ("train:", "bucket: 1023 B\ntrain:", "bucket", "1024..", "Did you mean `1023 MiB`?"),
    ("train:", "bucket: 0.5 kB\ntrain:", "bucket", "1024..", "at least 1024 bytes or `size`"),
    ("train:", "bucket: per_tensor\ntrain:", "bucket", "per_tensor", "Did you mean 'per-tensor'?"),
    ("train:", "unit: 2\ntrain:", "unit", "the number 2", "Did you mean '2 blocks'?"),
    ("train:", "unit: 3-blocks\ntrain:", "unit", "the string", "Did you mean '3 blocks'?"),
    ("train:", "unit: blok\ntrain:", "unit", "the string", "Did you mean 'block'?"),
    ("train:", "unit: subblock\ntrain:", "unit", "the string", "Did you mean 'sub-block'?"),
    ("train:", "reduce_scatter: alltoall\ntrain:", "reduce_scatter", "", "mean 'all_to_all'?"),
    ("train:", "overlap: true\ntrain:", "overlap", "none, backward", "Did you mean 'backward'?"),
    ("train:", "overlap: on\ntrain:", "overlap", "none, backward", "Did you mean 'backward'?"),
    ("train:", "overlap: 1\ntrain:", "overlap", "none, backward, or null; got the number", ""),
    ("train:", "sync: last\ntrain:", "sync", "a mapping", "Use `sync: {gradients: last}`."),
    ("{layout: fp32}", "fp16", "precision", "a mapping", "Use `precision: {layout: fp16}`."),
    ("{layout: fp32}", "mixed", "precision", "a mapping", "{layout: fsdp-mixed}"),
    ("train:", "unit: 0 blocks\ntrain:", "unit", "block, sub-block, ends, n blocks or model", ""),
    ("train:", "reshard: 1\ntrain:", "sync.reshard_after_forward", "shards >= 2", ""),
    ("train:", "reshard: often\ntrain:", "reshard", "true, false, non-root or a number", ""),
    ("train:", "reshard: non_root\ntrain:", "reshard", "the string 'non_root'", "non-root"),
    (
        "train:",
        "reshard: non-root\nsync: {reshard_after_forward: true}\ntrain:",
        "reshard",
        "alias of sync.reshard_after_forward, which is true",
        "",
    ),
    (
        "train:",
        "reshard: false\nsync: {reshard_after_forward: true}\ntrain:",
        "reshard",
        "alias of sync.reshard_after_forward, which is true",
        "Remove one of the two.",
    ),
    ("layout: fp32", "master: fp23", "precision.master", "none", "fp32"),
    ("train:", "prefetch: -1\ntrain:", "prefetch", "0..10000", ""),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "place", "finding", "remedy"), LINES)
def test_an_error_states_place_finding_and_fix(old, new, place, finding, remedy, tmp_path):
    assert GOOD.count(old) >= 1
    file = tmp_path / "spec.yaml"
    file.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    (tmp_path / "nested.yaml").write_text("preset: llama-tiny\n")
    faults = message_for(file).faults
    fault = next((f for f in faults if finding in f.finding and place in f.place), faults[0])
    assert fault.place.startswith(place)
    assert finding in fault.finding
    assert remedy in f"{fault.finding} {fault.remedy}"
    assert fault.source == str(file)
    assert fault.line == 0 or fault.text
    message = str(fault)
    assert message.startswith(f"{file}:{fault.line}:{fault.column}: error:" if fault.line else "")
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("old", "new", "line", "pointed_at"),
    [
        ("steps: 50", "steps: none", 9, "none"),
        ("optimizer: S,", "optimizer: X,", 5, "X"),
        ("{dp_shard: 2}", "{dp_shard: 2, tq: 3}", 3, "tq"),
        ("{dp_shard: 2}", "[dp_shard]", 3, "[dp_shard]"),
        (", sequence: 128", "", 7, "batch"),
        ("global: 16", "global: 15", 7, "15"),
        ("preset: llama-tiny", "preset: llama-tin", 2, "llama-tin"),
        ("name: good", "name: ä/ö", 1, "ä/ö"),
        ("seed: 0", "seed: &a 0", 9, "&a"),
        ("activations: R", "activations: Q", 5, "Q"),
    ],
)
def test_the_caret_points_at_the_fault(old, new, line, pointed_at, tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    (fault,) = message_for(file).faults
    assert (fault.line, fault.text[fault.column - 1 :][: len(pointed_at)]) == (line, pointed_at)
    shown, caret = str(fault).splitlines()[1:3]
    assert shown[caret.index("^") :].startswith(pointed_at)


def test_all_faults_come_at_once_in_the_order_of_the_file(tmp_path):
    text = GOOD.replace("name: good", "name: a/b").replace("llama-tiny", "llama-tinny")
    text = text.replace("dp_shard: 2", "dp_shard: 2, ep: 0").replace("S*", "Q")
    text = text.replace("lr: 3e-4", "lr: x").replace("seed: 0", "seed: -1, seed: 2")
    file = tmp_path / "spec.yaml"
    file.write_text(text + "compile: head\neval: &x {every: !!int 3}\nlog: *x\n")
    error = message_for(file)
    places = [fault.place for fault in error.faults]
    assert places == [
        "name", "model.preset", "mesh.ep", "placement.dp_shard.parameters", "optimizer.lr",
        "train.seed", "compile", "eval", "eval.every", "log",
    ]  # fmt: skip
    assert str(error).count("error:") == len(places)


def test_an_error_causes_no_further_errors(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(GOOD.replace("dp_shard: 2", "dp_shard: x").replace("global: 16", "global: 15"))
    assert [fault.place for fault in message_for(file).faults] == ["mesh.dp_shard"]


@pytest.mark.parametrize(
    ("content", "finding", "remedy"),
    [
        (b"", "the spec is empty", "specs show"),
        (b"# only a comment\n", "the spec is empty", "specs show"),
        (b"- a\n- b\n", "a spec must be a mapping; got a list", "key: value"),
        (b"just words\n", "got a single value", "key: value"),
        (b"model: \xff\xfe\n", "byte 7 is not UTF-8", "UTF-8"),
        (b"\x7fELF\0\0\0", "binary", "YAML"),
        (b"model: \x07\n", "not valid YAML", ""),
        (b"a" * (2**20 + 1), "larger than 1 MiB", "at most 1 MiB"),
        (b"#" + b"a" * 100_000_000, "larger than 1 MiB", "at most 1 MiB"),
        (b"a: " + b"[" * 3000, "nested deeper than 32 levels", "flat"),
        (b"[" * 100_000, "nested deeper than 32 levels", "flat"),
        (b"{a: " * 3000, "nested deeper than 32 levels", "flat"),
        (b"a: &a [x]\nb: &b [*a,*a]\nc: [*b,*b]\n", "anchors", "Write the value in full"),
        (b"mesh: {a: 1\n", "not valid YAML", ""),
    ],
)
def test_a_file_that_is_no_spec_is_rejected(content, finding, remedy, tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_bytes(content)
    faults = message_for(file).faults
    fault = next((f for f in faults if finding in f.finding), faults[0])
    assert finding in fault.finding
    assert remedy in fault.remedy
    assert fault.source == str(file)


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("none.yaml", "no such file or directory"),
        (".", "it is a directory"),
        ("no/such/spec", "no such file or directory"),
        ("a\0b", "no spec named"),
        ("a/b\0c.yaml", "null"),
        ("", "no spec named"),
        ("a" * 300, "no spec named"),
        ("a" * 300 + ".yaml", "file name too long"),
    ],
)
def test_a_path_that_leads_nowhere_is_rejected(name, finding, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert finding in message_for(name).faults[0].finding


def test_an_unreadable_file_is_rejected(tmp_path):
    file = tmp_path / "loop.yaml"
    file.symlink_to(file)
    assert "cannot read the spec" in message_for(file).faults[0].finding


@pytest.mark.parametrize(
    ("world_size", "mesh", "finding", "remedy"),
    [
        (
            3,
            "dp_shard=2",
            "mesh dp_shard=2 needs 2 ranks, but 3 were started",
            "use `mesh.dp_shard=3",
        ),
        (1, "dp_shard=2", "needs 2 ranks, but 1 were started", "use `mesh.dp_shard=1"),
    ],
)
def test_a_mesh_that_does_not_fit_the_ranks_is_rejected(
    world_size, mesh, finding, remedy, tmp_path
):
    file = tmp_path / "spec.yaml"
    file.write_text(GOOD)
    (fault,) = message_for(file, f"mesh.{mesh}", world_size=world_size).faults
    assert finding in fault.finding
    assert remedy in fault.remedy


def test_auto_with_degrees_that_do_not_divide_the_ranks_is_rejected(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(GOOD)
    changes = ["mesh={dp_replicate: 2, dp_shard: auto}", "placement.dp_replicate=R,R,R,R"]
    (fault,) = message_for(file, *changes, world_size=3).faults
    assert "3 ranks are not a multiple of 2" in fault.finding
    changes[0] = "mesh={dp_replicate: auto, dp_shard: auto}"
    (fault,) = message_for(file, *changes, world_size=4).faults
    assert "one axis size may be auto" in fault.finding


@pytest.mark.parametrize(
    ("placement", "place", "finding", "remedy"),
    [
        (
            "placement=ddp",
            "placement",
            "ddp needs the axis dp_replicate;",
            "mesh: {dp_replicate: 2}",
        ),
        ("placement=hsdp", "placement", "needs the axes dp_replicate and dp_shard", "dp_shard: 2}"),
        ("placement=zero4", "placement", "no strategy named", "Did you mean 'zero"),
        ("placement.dp_shard=ddp", "placement.dp_shard", "not to dp_shard", "dp_replicate: ddp"),
        (
            "placement.dp_shard=hsdp",
            "placement.dp_shard",
            ("covers the axes dp_replicate and dp_shard"),
            "placement: hsdp",
        ),
        ("placement.dp_shard=zero3-keep", "placement.dp_shard", "more than", "placement: zero3"),
        ("placement.dp_shard=tp", "placement.dp_shard", "belongs to tp", "placement: {tp: tp}"),
        ("placement.dp_shard=cp-ring", "placement.dp_shard", "belongs to cp", "placement: cp-ring"),
        (
            "placement.dp_shard=R,S",
            "placement.dp_shard",
            "4 modes",
            ("4 modes (parameters, optimizer, gradients, activations)"),
        ),
        (
            "placement.dp_shard=[R,S,S,R,R]",
            "placement.dp_shard",
            "got 5",
            ("4 modes (parameters, optimizer, gradients, activations)"),
        ),
        ("placement.dp_shard=[R,S,S,1]", "placement.dp_shard.activations", "number 1", "quotes"),
    ],
)
def test_a_strategy_in_the_wrong_place_is_answered_with_the_right_place(
    placement, place, finding, remedy, tmp_path
):
    file = tmp_path / "spec.yaml"
    file.write_text(GOOD)
    (fault,) = message_for(file, placement).faults
    assert fault.place == place
    assert finding in fault.finding
    assert remedy in f"{fault.finding} {fault.remedy}"


def test_python_callers_get_the_same_faults():
    base = {"model": {"preset": "llama-tiny"}, "mesh": {}, "batch": {"sequence": 8}}
    with pytest.raises(SpecError, match="must be an integer"):
        load(base | {"train": {"steps": object()}})
    with pytest.raises(SpecError, match="unknown key '3'"):
        load(base | {3: 4})
    with pytest.raises(SpecError, match="finite number"):
        load(base | {"optimizer": {"lr": float("nan")}})


def test_no_input_of_random_characters_breaks_the_loader(tmp_path):
    import random

    random.seed(7)
    alphabet = GOOD + "[]{}:,&*!?|>'\"%@`\t\x00\x85\ufeff\u2028-#~"
    file = tmp_path / "spec.yaml"
    for _ in range(100):
        text = list(GOOD)
        for _ in range(random.randint(1, 6)):
            text[random.randrange(len(text))] = random.choice(alphabet)
        file.write_text("".join(text), encoding="utf-8")
        try:
            load(file)
        except PtrainError as error:
            assert str(error)


@pytest.mark.parametrize("verb", ["predict", "plan"])
def test_a_command_ends_with_status_2_and_without_a_traceback(verb, tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(GOOD.replace("lr: 3e-4", "lr: on"))
    done = subprocess.run(
        [sys.executable, "-m", "ptrain", verb, str(file), "train.steps=0"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("error:") == 2
    assert "Traceback" not in done.stderr
    assert f"{file}:8:" in done.stderr
