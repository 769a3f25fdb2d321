"""Pipes, devices and files of a terabyte are rejected soon, and with little memory."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ptrain.cli.main import main
from ptrain.data.tokenized import read_text
from ptrain.data.vocabulary import open_tokens
from ptrain.errors import SpecError
from ptrain.spec.names import list_files
from tests.chat_folders import CHAT, save_tokenizer, write_chats

HUGE = 2**40


def make_file(kind: str, path: Path) -> Path:
    """Create a file of this kind."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, HUGE)
    return path


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Check the memory and the CPU time of a test."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


KINDS = ("pipe", "device", "sparse")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("spec.yaml", "predict {}"),
        ("spec.toml", "predict {}"),
        ("plan.csv", "predict pp-1f1b mesh.pp.schedule={}"),
        ("a.txt", "tokenize {} --tokenizer bytes --out out.npy"),
        ("a.jsonl", "tokenize {} --tokenizer bytes --out out.npy"),
        ("a.parquet", "tokenize {} --tokenizer bytes --out out.npy"),
        ("tokenizer.json", "tokenize text.txt --tokenizer {} --out out.npy"),
    ],
)
def test_a_file_that_does_not_end_is_rejected(
    name: str, words: str, kind: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("text")
    file = make_file(kind, tmp_path / name)
    assert main([word.format(file) for word in words.split()]) == 2
    error = capsys.readouterr().err
    assert "error" in error and "Traceback" not in error
    assert not Path("out.npy").exists()


LONG = "a" * 300


@pytest.mark.parametrize(
    "words",
    [
        f"predict {LONG}.yaml",
        f"predict zero3 model.pretrained={LONG}",
        f"train zero3 --run-dir {LONG}",
        f"train zero3 --resume {LONG}",
        f"tokenize {LONG}.txt --tokenizer bytes --out a.npy",
        f"tokenize text.txt --tokenizer {LONG} --out a.npy",
        f"export {LONG} --to out",
        f"verify {LONG}",
        f"compare {LONG} zero3",
    ],
    ids=lambda words: words.replace(LONG, "LONG"),
)
def test_a_path_of_300_letters_gives_a_message(
    words: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("text")
    assert main(words.split()) == 2
    assert "error" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("key", ["data.path", "model.pretrained"])
def test_a_path_with_a_zero_byte_gives_a_message(key: str, tmp_path: Path, capsys: Any) -> None:
    section, _, name = key.partition(".")
    text = read_text(list_files("strategies")["zero3"])
    lines = [line for line in text.splitlines() if not line.startswith(f"{section}:")]
    (tmp_path / "a.yaml").write_text("\n".join([*lines, f'{section}: {{{name}: "a\\0b"}}', ""]))
    assert main(["train", str(tmp_path / "a.yaml"), "--run-dir", str(tmp_path / "run")]) == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_file_that_does_not_end_is_rejected(kind: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"pipe or a device|not a complete"):
        open_tokens(make_file(kind, tmp_path / "tokens.npy"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_a_model_folder_with_such_a_file_is_rejected(
    name: str, kind: str, tmp_path: Path, capsys: Any
) -> None:
    make_file(kind, tmp_path / name)
    words = ["predict", "zero3", f"model.pretrained={tmp_path}"]
    assert main(words) == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"]
)
def test_a_tokenizer_folder_with_such_a_file_is_rejected(
    name: str, kind: str, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("transformers")
    folder = save_tokenizer(tmp_path / "tokenizer")
    (folder / name).unlink(missing_ok=True)
    make_file(kind, folder / name)
    chats = write_chats(tmp_path / "a.jsonl", [CHAT])
    words = ["tokenize", str(chats), "--chat", "--sequence", "64", "--tokenizer", str(folder)]
    assert main([*words, "--out", str(tmp_path / "out.npy")]) == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["manifest.json", "checkpoints", "env.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_folder_with_such_a_file_is_rejected(
    name: str, kind: str, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    step = run / "checkpoints" / "step-00000001"
    if name == "checkpoints":
        run.mkdir()
        make_file(kind, run / "checkpoints")
    elif name == "manifest.json":
        step.mkdir(parents=True)
        make_file(kind, step / name)
    else:
        run.mkdir()
        make_file(kind, run / name)
    assert main(["train", "zero3", "--resume", str(run), "--run-dir", str(run)]) == 2
    assert "error" in capsys.readouterr().err
