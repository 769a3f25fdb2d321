"""Folders of published models: the loaded model computes the result of the transformers class, and
the exported files equal the loaded ones."""

from __future__ import annotations

import copy
import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ptrain.cli.main import main
from ptrain.convert.export import export_checkpoint
from ptrain.errors import PtrainError, SpecError
from ptrain.interpreter.program import interpret
from ptrain.models.initialize import build_model, initialize
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_yaml
from ptrain.train import saving
from ptrain.train.exchange import Exchange
from tests.published_folders import CASES, save_folder, tensors

transformers = pytest.importorskip("transformers")
SEQUENCE = 16


def spec_of(folder: Path, *more: str, beside: str = "") -> Spec:
    batch = f"batch={{global: 2, micro: 1, sequence: {SEQUENCE}}}"
    words = (f"model={{pretrained: {folder}{beside}}}", "mesh={}", "placement={}", batch, *more)
    return load("ddp", words).spec


def logits(folder: Path) -> torch.Tensor:
    """Return what transformers' class gives."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        result: torch.Tensor = model.eval()(tokens(), use_cache=False).logits
    return result


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 259, (2, SEQUENCE), generator=generator)


def run_of(folder: Path, run: Path, *more: str, beside: str = "") -> Path:
    """A run folder with a checkpoint of a model that has just begun, on one rank."""
    return run_of_spec(spec_of(folder, *more, beside=beside), run)


def run_of_spec(spec: Spec, run: Path) -> Path:
    """Save a checkpoint of a spec's model before its first step, on one rank."""
    program = interpret(spec, world=World(), allow_import=True)
    run.mkdir()
    (run / "spec.resolved.yaml").write_text(to_yaml(spec.resolved))
    saving.save_checkpoint(program, run / "checkpoints", 1, Exchange(World()))
    return run


@pytest.mark.parametrize("case", CASES)
def test_a_published_folder_is_read_and_exported_as_it_was(case: str, tmp_path: Path) -> None:
    folder = save_folder(case, tmp_path / "in")
    spec = spec_of(folder)
    module = build_model(spec.model, sequence=SEQUENCE)
    initialize(module, seed=0)
    expected = logits(folder)
    with torch.no_grad():
        torch.testing.assert_close(module(tokens()), expected, rtol=1e-5, atol=1e-5)
    exported = export_checkpoint(run_of(folder, tmp_path / "run"), tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and exported.tensors == len(after)
    for name, tensor in before.items():
        rows = after[name] if name != "transformer.wpe.weight" else tensor[:SEQUENCE]
        assert torch.equal(tensor[: len(rows)], after[name]), name
    assert torch.equal(logits(tmp_path / "out"), expected)
    (tmp_path / "own").touch()  # with the umask
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "own").stat().st_mode}


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_padding_of_the_vocabulary_is_neither_read_nor_exported(case: str, tmp_path: Path) -> None:
    folder = save_folder(case, tmp_path / "in")
    spec = spec_of(folder, beside=", vocab_multiple: 64")
    module = build_model(spec.model, sequence=SEQUENCE)
    initialize(module, seed=0)
    rows = module.embed.weight
    assert len(rows) == 320 and not rows[259:].any()
    with torch.no_grad():
        torch.testing.assert_close(
            module(tokens())[..., :259], logits(folder), rtol=1e-5, atol=1e-5
        )
    run = run_of(folder, tmp_path / "run", beside=", vocab_multiple: 64")
    export_checkpoint(run, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 259
    assert torch.equal(logits(tmp_path / "out"), logits(folder))


def test_files_of_an_index_are_read_and_written(tmp_path: Path, monkeypatch: Any) -> None:
    folder = save_folder("qwen3_moe", tmp_path / "in", max_shard_size="40KB")
    assert len([*folder.glob("*.safetensors")]) > 2
    monkeypatch.setattr("ptrain.convert.export.FILE_BYTES", 30_000)
    export_checkpoint(run_of(folder, tmp_path / "run"), tmp_path / "out")
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 2
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert torch.equal(logits(tmp_path / "out"), logits(folder))


def test_bare_names_and_sixteen_bits_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = save_folder("gpt2", tmp_path / "in")
    bare = {name.removeprefix("transformer."): x for name, x in tensors(folder).items()}
    halves = {name: tensor.bfloat16() for name, tensor in bare.items()}
    mask = {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "lm_head.weight": halves["wte.weight"] + 0}
    save_file(halves | mask, folder / "model.safetensors", metadata={"format": "pt"})
    module = build_model(spec_of(folder).model, sequence=SEQUENCE)
    initialize(module, seed=0)
    embedding = dict(module.named_parameters())["embed.weight"]
    assert torch.equal(embedding, halves["wte.weight"].float())


def test_a_run_is_exported_in_its_dtype_with_its_tokenizer(tmp_path: Path) -> None:
    folder = save_folder("llama", tmp_path / "in")
    (folder / "tokenizer.json").write_text("{}")
    run = run_of(folder, tmp_path / "run", "precision.layout=bf16", "model.dropout=0.1")
    exported = export_checkpoint(run, tmp_path / "out", step=1)
    assert set(exported.copied) == {"tokenizer.json", "generation_config.json"}
    assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["max_position_embeddings"] == 2048


def test_a_model_trained_from_scratch_is_exported(tmp_path: Path) -> None:
    spec = spec_of(save_folder("llama", tmp_path / "in"))
    run = run_of(tmp_path / "in", tmp_path / "run", "model.pretrained=null", *SHAPE)
    assert export_checkpoint(run, tmp_path / "out").architecture == "LlamaForCausalLM"
    module = build_model(load(str(run / "spec.resolved.yaml")).spec.model, sequence=SEQUENCE)
    initialize(module, seed=spec.train.seed)
    with torch.no_grad():
        torch.testing.assert_close(module(tokens()), logits(tmp_path / "out"))


@pytest.mark.parametrize(
    "words", [("model.rope_base=500.0",), ("model.rope_scaling=linear", "model.rope_factor=4")]
)
def test_keys_written_with_a_folder_override_its_config_in_the_export(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    run = run_of(save_folder("llama", tmp_path / "in"), tmp_path / "run", *words)
    export_checkpoint(run, tmp_path / "out")
    module = build_model(spec_of(tmp_path / "in", *words).model, sequence=SEQUENCE)
    initialize(module, seed=0)
    with torch.no_grad():
        torch.testing.assert_close(module(tokens()), logits(tmp_path / "out"), rtol=1e-5, atol=1e-5)


def test_a_field_missing_in_a_file_has_the_default_of_its_class(tmp_path: Path) -> None:
    folder = save_folder("mixtral", tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    for name in ("num_experts_per_tok", "rope_parameters", "rms_norm_eps", "tie_word_embeddings"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    module = build_model(spec_of(folder).model, sequence=SEQUENCE)
    initialize(module, seed=0)
    with torch.no_grad():
        torch.testing.assert_close(module(tokens()), logits(folder), rtol=1e-5, atol=1e-5)


def older(config: dict[str, Any]) -> dict[str, Any]:
    """A config of Gemma 3 as transformers 4 wrote it."""
    rope, every = config.pop("rope_parameters"), config.pop("_sliding_window_pattern")
    full, local = rope["full_attention"], rope["sliding_attention"]
    config |= {"rope_theta": full.pop("rope_theta"), "rope_scaling": full}
    return config | {
        "rope_local_base_freq": local["rope_theta"],
        "sliding_window_pattern": every,
    }


def test_layers_by_turns_are_read_of_older_files_too(tmp_path: Path) -> None:
    folder = save_folder("gemma3, scaled", tmp_path / "in")
    expected, path = spec_of(folder).model, folder / "config.json"
    config = json.loads(path.read_text())
    assert expected == replace(expected, window_rope_base=90.0, rope_factor=4.0, global_every=6)
    path.write_text(json.dumps(older(copy.deepcopy(config))))
    assert spec_of(folder).model == expected
    config["rope_parameters"]["sliding_attention"] |= {"rope_type": "linear", "factor": 2.0}
    path.write_text(json.dumps(config))
    with pytest.raises(SpecError, match="rotary scaling of sliding-window layers is not supported"):
        spec_of(folder)


def test_a_single_expert_is_read_and_exported(tmp_path: Path) -> None:
    folder = save_folder("mixtral", tmp_path / "in", num_local_experts=1, num_experts_per_tok=1)
    export_checkpoint(run_of(folder, tmp_path / "run"), tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


SHAPE = ("model.layers=2", "model.hidden=32", "model.heads=4", "model.ffn=48", "model.vocab=259")


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (("--to there already",), "already exists"),
        (("step 7",), "does not have a checkpoint of step 7; .*: 1"),
        (("no run",), "is not a run folder"),
        (("run too long",), "is not a run folder"),
        (("model.residual_scale=0.5",), "no class of Transformers"),
        (("model.rope_scaling=yarn",), "no class of Transformers"),
        (("--to too long",), "cannot be written: .*File name too long"),
    ],
    ids=str,
)
def test_an_impossible_export_leaves_no_files(
    words: tuple[str, ...], finding: str, tmp_path: Path
) -> None:
    (word,) = words
    more = (word, *(["model.rope_factor=4"] if "yarn" in word else [])) if "=" in word else ()
    run = run_of(save_folder("llama", tmp_path / "in"), tmp_path / "run", *more)
    to = tmp_path / {"--to there already": "run", "--to too long": "x" * 300}.get(word, "out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PtrainError, match=finding):
        runs = {"no run": tmp_path, "run too long": tmp_path / ("x" * 300)}
        export_checkpoint(runs.get(word, run), to, step=7 if word.startswith("step") else None)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_that_is_not_whole_is_rejected_with_the_fix(
    tmp_path: Path, capsys: Any
) -> None:
    run = run_of(save_folder("llama", tmp_path / "in"), tmp_path / "run")
    (part,) = run.glob("checkpoints/*/*.distcp")
    part.write_bytes(part.read_bytes()[:1000])
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "error: RUN: checkpoint" in error and "has 1000 bytes" in error and "remedy" in error
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_full_is_one_message_and_leaves_nothing(tmp_path: Path) -> None:
    run = run_of(save_folder("llama", tmp_path / "in"), tmp_path / "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(SpecError, match=r"out cannot be written: model.safetensors: "):
            export_checkpoint(run, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name for path in tmp_path.iterdir()} == {"in", "run"}


def test_more_tokens_than_learned_positions_are_rejected(tmp_path: Path) -> None:
    folder = save_folder("gpt2", tmp_path / "in")
    spec = spec_of(folder, "batch.sequence=65")
    with pytest.raises(SpecError, match="it has 64 positions, but a sample has 65 tokens"):
        build_model(spec.model, sequence=65)


def test_a_run_whose_folder_is_gone_is_exported(tmp_path: Path, capsys: Any) -> None:
    folder = save_folder("llama", tmp_path / "in")
    run = run_of(folder, tmp_path / "run")
    before = tensors(folder)
    shutil.rmtree(folder)
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    assert (
        f"without a tokenizer: {folder}, the folder of the pretrained weights"
        in capsys.readouterr().out
    )
    after = tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_training_settings_that_a_config_cannot_express_are_reported(tmp_path: Path) -> None:
    folder = save_folder("mixtral", tmp_path / "in")
    words = ("model.capacity_factor=1.5", "model.document_start=256")
    run = run_of(folder, tmp_path / "run", *words)
    assert export_checkpoint(run, tmp_path / "out").unsaid == ("capacity_factor", "document_start")
