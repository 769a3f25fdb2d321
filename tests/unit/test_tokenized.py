"""Documents become token files: of texts, rows of JSON and of Parquet, by bytes or a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptrain.cli.main import main
from ptrain.data import tokenized
from ptrain.data.tokenized import read_documents
from ptrain.data.vocabulary import (
    ByteVocabulary,
    FileVocabulary,
    decode,
    encode,
    open_tokens,
)

TEXTS = ["one", "zwölf", "", "a longer text, with\nlines"]


def lines(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def tokenizer(folder: Path, *, end: str | None = "</s>", words: int = 5) -> Path:
    """A tokenizer of words, beside what says its end."""
    tokenizers = pytest.importorskip("tokenizers")
    known = {"[UNK]": 0, "</s>": 1, **{f"w{n}": n for n in range(2, words)}}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole.save(str(folder / "tokenizer.json"))
    if end is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": end}}))
    return folder / "tokenizer.json"


def test_texts_rows_of_json_and_of_parquet_become_one_token_file(tmp_path: Path, capsys: Any):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.txt").write_text(TEXTS[1], encoding="utf-8")
    rows = lines(tmp_path / "b.jsonl", [{"text": text, "more": 1} for text in TEXTS])
    parquet.write_table(arrow.table({"text": TEXTS, "n": [1, 2, 3, 4]}), tmp_path / "c.parquet")
    files = [tmp_path / "a.txt", rows, tmp_path / "c.parquet"]
    out = tmp_path / "tokens.npy"
    assert main(["tokenize", *map(str, files), "--out", str(out)]) == 0
    expected = [TEXTS[1], *TEXTS, *TEXTS]
    tokens = [*chain.from_iterable(encode(text).tolist() for text in expected)]
    assert open_tokens(out).tolist() == tokens
    assert f"9 documents, {len(tokens)} tokens of 259" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*(file.name for file in files), "tokens.npy", "tokens.tokenizer.json"]
    )


def test_tokens_equal_the_tokenizers_with_an_end_token_after_each_document(tmp_path: Path):
    rows = lines(tmp_path / "a.jsonl", [{"said": "w2 w3"}, {"said": "w4 other"}, {"said": ""}])
    words = ["--tokenizer", str(tokenizer(tmp_path)), "--field", "said", "--json"]
    assert main(["tokenize", str(rows), "--out", str(tmp_path / "t.npy"), *words]) == 0
    tokens = open_tokens(tmp_path / "t.npy")
    assert tokens.tolist() == [2, 3, 1, 4, 0, 1, 1] and tokens.dtype == np.uint16


def test_numbers_of_no_word_between_those_of_others_count(tmp_path: Path, capsys: Any):
    path = tokenizer(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace('"w4": 4', '"w4": 70000'))
    (tmp_path / "a.txt").write_text("w4 w2")
    words = ["--tokenizer", str(path), "--out", str(tmp_path / "t.npy")]
    assert main(["tokenize", str(tmp_path / "a.txt"), *words]) == 0
    assert open_tokens(tmp_path / "t.npy").tolist() == [70_000, 2, 1]
    assert "model.vocab=70001" in capsys.readouterr().out


def test_more_than_65536_words_take_four_bytes(tmp_path: Path):
    (tmp_path / "a.txt").write_text("w69999 w2")
    words = ["--tokenizer", str(tokenizer(tmp_path, words=70_000)), "--end", "w7"]
    out = tmp_path / "t.npy"
    assert main(["tokenize", str(tmp_path / "a.txt"), "--out", str(out), *words]) == 0
    assert open_tokens(out).tolist() == [69_999, 2, 7] and open_tokens(out).dtype == np.uint32


class Broken(ByteVocabulary):
    """Breaks off at the batch of this number, as a process that is killed."""

    def __init__(self, at: int) -> None:
        self.at = at

    def batch(self, texts: Any) -> list[list[int]]:
        self.at -= 1
        if self.at < 0:
            raise KeyboardInterrupt
        return super().batch(texts)


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("has_changed", [False, True])
def test_an_interrupted_conversion_resumes(
    tmp_path: Path, monkeypatch: Any, at: int, has_changed: bool
):
    monkeypatch.setattr(tokenized, "DOCUMENTS", 2)
    files = [lines(tmp_path / f"{n}.jsonl", [{"text": f"{n}.{k}"} for k in range(5)]) for n in "ab"]
    out, encoded = tmp_path / "t.npy", []
    with pytest.raises(KeyboardInterrupt):
        tokenized.tokenize(files, out, Broken(at), field="text", tell=lambda _: None)
    assert not out.exists()
    if has_changed:
        lines(files[1], [{"text": "other"}] * 7)

    class Counting(ByteVocabulary):
        def batch(self, texts: Any) -> list[list[int]]:
            encoded.extend(texts)
            return super().batch(texts)

    done = tokenized.tokenize(files, out, Counting(), field="text", tell=lambda _: None)
    expected = [text for file in files for text in read_documents(file, "text")]
    begun = 0 if has_changed else [0, 2, 4, 5, 7, 9][at]
    assert encoded == expected[begun:] and done.documents == len(expected)
    assert decode(open_tokens(out).tolist()) == "".join(expected)
    assert sorted(path.name for path in tmp_path.glob("t.npy*")) == ["t.npy"]


@pytest.mark.parametrize(
    ("name", "content", "finding"),
    [
        ("a.txt", None, "a.txt: No such file"),
        ("a.txt", b"\xff\xfe", "a.txt: is not UTF-8 text (byte 0)"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', "a.jsonl:2: is not valid JSON"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"body": "b"}\n',
            "a.jsonl:2: the field 'text' must be a string",
        ),
        ("a.jsonl", b'{"messages": []}\n', "For chats, add `--chat`"),
        ("a.jsonl", b'{"text": 3}\n', "the field 'text' must be a string; got the number 3"),
        ("a.jsonl", b"3\n", "the field 'text' must be a string; the row is the number 3"),
        ("a.json", b'[{"text": "a"}]', "is a list; rows must be objects"),
        ("a.json", b'[\n{"text": "a"}]', "run `jq -c '.[]'`"),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', "the text contains half a surrogate pair"),
        ("a.txt.gz", b"\x1f\x8b\x08", "remedy: Decompress the file"),
        ("a.jsonl", b"", "the files contain no documents"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: is not valid JSON"),
        ("a.parquet", b"PAR1", "a.parquet: is not a valid Parquet file"),
    ],
)
def test_an_unreadable_input_gives_one_message_and_leaves_no_file(
    tmp_path: Path, capsys: Any, name: str, content: bytes | None, finding: str
):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["tokenize", str(tmp_path / name), "--out", str(tmp_path / "t.npy")]) == 2
    error = capsys.readouterr().err
    assert finding in error and "remedy" in error
    assert not [*tmp_path.glob("t.npy*")]


def test_a_vocabulary_without_an_end_is_rejected(tmp_path: Path, capsys: Any):
    (tmp_path / "a.txt").write_text("w2")
    path = tokenizer(tmp_path, end=None)
    words = ["tokenize", str(tmp_path / "a.txt"), "--out", str(tmp_path / "t.npy")]
    assert main([*words, "--tokenizer", str(path)]) == 2
    assert "the end-of-document token is unknown" in capsys.readouterr().err
    assert main([*words, "--tokenizer", str(path), "--end", "<end>"]) == 2
    assert "has no token '<end>'" in capsys.readouterr().err
    assert main([*words, "--end", "</s>"]) == 2
    assert "needs a tokenizer; byte tokens have a fixed end" in capsys.readouterr().err
    assert FileVocabulary(path, "</s>").end == 1


def test_a_name_that_is_no_token_file_is_rejected_and_nothing_is_overwritten(
    tmp_path: Path, capsys: Any
):
    text = tmp_path / "a.txt"
    text.write_text("once")
    (tmp_path / "d.npy").mkdir()
    for out in (text, tmp_path / "d.npy"):
        assert main(["tokenize", str(text), "--out", str(out)]) == 2
        assert f"{out} is not the name of a token file" in capsys.readouterr().err
    assert text.read_text() == "once" and [*tmp_path.glob("*.part*")] == []


def test_the_folder_of_a_tokenizer_is_its_name_too(tmp_path: Path):
    (tmp_path / "a.txt").write_text("w2")
    tokenizer(tmp_path)
    words = ["--tokenizer", str(tmp_path), "--out", str(tmp_path / "t.npy")]
    assert main(["tokenize", str(tmp_path / "a.txt"), *words]) == 0
    assert open_tokens(tmp_path / "t.npy").tolist() == [2, 1]


def test_a_column_that_breaks_off_is_one_message(tmp_path: Path, capsys: Any):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": TEXTS * 50}), path, compression="none")
    whole = path.read_bytes()
    path.write_bytes(b"PAR1" + bytes(len(whole) // 2 - 4) + whole[len(whole) // 2 :])
    assert main(["tokenize", str(path), "--out", str(tmp_path / "t.npy")]) == 2
    assert "is not a valid Parquet file" in capsys.readouterr().err
    assert not [*tmp_path.glob("t.npy*")]


class BrokenFile(FileVocabulary):
    """Breaks off at the second batch."""

    done = False

    def batch(self, texts: Any) -> list[list[int]]:
        if self.done:
            raise KeyboardInterrupt
        self.done = True
        return super().batch(texts)


def test_another_tokenizer_starts_again(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(tokenized, "DOCUMENTS", 2)
    rows = lines(tmp_path / "a.jsonl", [{"text": "w2 w3"}] * 6)
    path, out = tokenizer(tmp_path), tmp_path / "t.npy"
    with pytest.raises(KeyboardInterrupt):
        tokenized.tokenize([rows], out, BrokenFile(path), field="text", tell=lambda _: None)
    words = path.read_text(encoding="utf-8")
    path.write_text(words.replace('"w2": 2', '"w2": 4').replace('"w4": 4', '"w4": 2'))
    tokenized.tokenize([rows], out, FileVocabulary(path), field="text", tell=lambda _: None)
    assert open_tokens(out).tolist() == [4, 3, 1] * 6
