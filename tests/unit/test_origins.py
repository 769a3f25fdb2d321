"""Token files record their tokenizer: token ids of one are not read as ids of another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptrain.cli.main import main
from ptrain.convert.saved import load_vocabulary
from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import require_trainable_data
from ptrain.data.tokenized import origin_path
from ptrain.data.vocabulary import ByteVocabulary, FileVocabulary
from ptrain.errors import SpecError
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.chat_folders import save_tokenizer
from tests.published_folders import save_folder

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its tokenizer, as they are published."""
    folder = save_folder("llama", tmp_path_factory.mktemp("base") / "base", vocab_size=320)
    return save_tokenizer(folder)


def other_tokenizer(base: Path, folder: Path) -> Path:
    """A tokenizer of the same size in which two words have changed places."""
    folder.mkdir()
    content = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    shutil.copy(base / "tokenizer_config.json", folder)
    return folder


def test_the_keys_of_a_training_are_those_of_the_folder(base: Path, tmp_path: Path, capsys: Any):
    tokens(tmp_path, "t", base)
    assert f"train on it with data.path={tmp_path / 't.npy'} model.pretrained={base}\n" in (
        capsys.readouterr().out
    )


def tokens(folder: Path, name: str, tokenizer: Path | None) -> Path:
    (folder / "a.txt").write_text("the red is seven and a b " * 200)
    words = [] if tokenizer is None else ["--tokenizer", str(tokenizer)]
    out = folder / f"{name}.npy"
    assert main(["tokenize", str(folder / "a.txt"), "--out", str(out), *words]) == 0
    return out


def spec_of(**sections: Any) -> Spec:
    return load(
        {
            "name": "of-files",
            "mesh": {"dp_shard": 2},
            "placement": "zero2",
            "batch": {"global": 8, "micro": 2, "sequence": 16},
            **sections,
        }
    ).spec


def test_a_model_accepts_only_tokens_of_its_tokenizer(base: Path, tmp_path: Path):
    made = {"own": base, "other": other_tokenizer(base, tmp_path / "tokenizer"), "bytes": None}
    for name, tokenizer in made.items():
        file = tokens(tmp_path, name, tokenizer)
        spec = spec_of(model={"pretrained": str(base)}, data={"path": str(file)})
        if name == "own":
            require_trainable_data(open_corpus(spec.data), spec)
            continue
        with pytest.raises(SpecError, match=rf"{name}.npy has tokens of .*, but the model has"):
            require_trainable_data(open_corpus(spec.data), spec)
        origin_path(file).unlink()
        require_trainable_data(open_corpus(spec.data), spec)


def test_lengths_with_which_a_tokenizer_was_saved_make_no_other_of_it(base: Path, tmp_path: Path):
    again = tmp_path / "again"
    again.mkdir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.padding_side = "left"
    tokenizer("a", padding="max_length", max_length=9, truncation=True)
    tokenizer.save_pretrained(again)
    names = [folder / "tokenizer.json" for folder in (again, base)]
    assert names[0].read_text() != names[1].read_text()
    file = tokens(tmp_path, "t", again)
    assert np.load(file).tolist() == np.load(tokens(tmp_path, "u", base)).tolist()
    spec = spec_of(model={"pretrained": str(base)}, data={"path": str(file)})
    require_trainable_data(open_corpus(spec.data), spec)


def test_files_of_two_tokenizers_are_not_mixed(base: Path, tmp_path: Path):
    files = [
        tokens(tmp_path, "a", base),
        tokens(tmp_path, "b", other_tokenizer(base, tmp_path / "other")),
    ]
    np.save(tmp_path / "unknown.npy", np.arange(300, dtype=np.uint16))
    model = {"layers": 1, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 320}
    for paths, is_refused in (
        ([*files], True),
        ([tmp_path / "unknown.npy", *files], True),
        ([tmp_path / "unknown.npy", files[1]], False),
    ):
        sources = [{"path": str(path)} for path in paths]
        spec = spec_of(model=model, data={"sources": sources})
        if is_refused:
            with pytest.raises(
                SpecError, match=r"data.sources: .*a.npy has tokens of .*b.npy has tokens of"
            ):
                require_trainable_data(open_corpus(spec.data), spec)
        else:
            require_trainable_data(open_corpus(spec.data), spec)


def test_another_file_at_the_same_path_has_another_origin(base: Path, tmp_path: Path):
    record = origin_path(tokens(tmp_path, "t", base))
    assert json.loads(record.read_text())["tokenizer"] == str(base / "tokenizer.json")
    tokens(tmp_path, "t", None)
    assert json.loads(record.read_text())["tokenizer"] == "bytes"
    for damaged in ("{", "[]", '{"digest": 3, "tokenizer": "a"}', '{"digest": "a"}'):
        record.write_text(damaged)
        data = {"path": str(tmp_path / "t.npy")}
        spec = spec_of(model={"pretrained": str(base)}, data=data)
        require_trainable_data(open_corpus(spec.data), spec)


def test_texts_of_a_model_are_in_the_words_of_its_token_file(base: Path, tmp_path: Path):
    model = {"layers": 1, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 320}
    own, different = tmp_path / "own", other_tokenizer(base, tmp_path / "different")
    shutil.copytree(base, own)
    of_words, of_bytes = tokens(tmp_path, "words", own), tokens(tmp_path, "bytes", None)
    spec = spec_of(model=model, data={"path": str(of_words)})
    words = load_vocabulary(spec, None)
    assert isinstance(words, FileVocabulary) and words.path == own / "tokenizer.json"
    assert load_vocabulary(spec, base).tokens("red") == words.tokens("red")
    with pytest.raises(SpecError, match=r"was trained with tokens of .*own/tokenizer.json"):
        load_vocabulary(spec, different)
    shutil.rmtree(own)
    with pytest.raises(SpecError, match="its tokenizer is unknown"):
        load_vocabulary(spec, None)
    spec = spec_of(model=model, data={"sources": [{"path": str(of_bytes)}]})
    assert isinstance(load_vocabulary(spec, None), ByteVocabulary)
    with pytest.raises(SpecError, match="was trained with tokens of bytes"):
        load_vocabulary(spec, base)
