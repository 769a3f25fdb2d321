"""An exported folder has the tokenizer of its training, or the command reports that it has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import ptrain
from ptrain.cli.main import main
from ptrain.data.tokenized import tokenizer_origin, write_origin
from tests.chat_folders import save_tokenizer
from tests.models_frozen import lora
from tests.unit.test_pretrained import run_of_spec

pytest.importorskip("transformers")
FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
SMALL = ("mesh.dp_shard=1", "batch.global=1", "batch.micro=1", "batch.sequence=16")


def export_files(run: Path, *words: str) -> set[str]:
    """Return the names of the files in the folder that `ptrain export` writes."""
    folder = run.with_name("out")
    assert main(["export", str(run), "--to", str(folder), "--allow-import", *words]) == 0
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("how", ["merged", "alone"])
@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_adapters_bring_the_tokenizer_of_the_folder_of_their_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_tokenizer: bool, how: str
) -> None:
    pytest.importorskip("peft")
    base = lora().model
    assert isinstance(base, nn.Module)
    for layer in base.model.layers:  # type: ignore[union-attr]
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, getattr(layer.self_attn, name).base_layer)
    base.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    if has_tokenizer:
        save_tokenizer(tmp_path / "base")
    arguments = f"{{folder: {tmp_path / 'base'}}}"
    model = f"model={{target: tests.models_frozen:lora, arguments: {arguments}}}"
    run = run_of_spec(ptrain.load("zero3", [model, *SMALL]).spec, tmp_path / "run")
    files = export_files(run, "--adapters", how)
    assert FILES & files == (FILES if has_tokenizer else set())
    report = f"without a tokenizer: {tmp_path / 'base'}, the source of the pretrained weights"
    assert (report in capsys.readouterr().out) is not has_tokenizer


@pytest.mark.parametrize("has_changed", [False, True])
def test_a_drawn_model_brings_the_tokenizer_of_its_token_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_changed: bool
) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"
    origin = tokenizer_origin(tokenizer)
    assert origin is not None
    write_origin(tmp_path / "tokens.npy", origin)
    if has_changed:
        tokenizer.unlink()
    data = [f"data.path={tmp_path / 'tokens.npy'}", "model.vocab=320", "model.layers=1"]
    run = run_of_spec(ptrain.load("zero3", [*data, *SMALL]).spec, tmp_path / "run")
    assert FILES & export_files(run) == (set() if has_changed else FILES)
    report = "without a tokenizer: the spec of the run has no folder with tokenizer files"
    assert (report in capsys.readouterr().out) is has_changed
