"""Chats become rows; only answers are learned, and each chat is computed as if it were alone."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from ptrain.cli.main import main
from ptrain.data import tokenized
from ptrain.data.chat_rows import ChatPacking, pack_sizes, tokenize_chats
from ptrain.data.chats import Chat, ChatTemplate
from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import LocalBatch, read_batch, require_trainable_data
from ptrain.data.vocabulary import START, TARGET, mask_path
from ptrain.errors import SpecError
from ptrain.models.cross_entropy import IGNORED
from ptrain.models.initialize import build_model, initialize
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.chat_folders import (
    CHAT,
    END,
    PAD,
    Messages,
    random_chats,
    save_tokenizer,
    write_chats,
)

transformers = pytest.importorskip("transformers")
SEQUENCE = 127


@pytest.mark.parametrize("room", [1, 7, 40])
def test_all_are_packed_once_and_no_row_overflows(room: int):
    generator = np.random.default_rng(room)
    sizes = generator.integers(1, room + 1, 200).tolist()
    packed = pack_sizes(sizes, room)
    assert sorted(number for row in packed for number in row) == list(range(200))
    fill = [sum(sizes[number] for number in row) for row in packed]
    assert max(fill) <= room and len(packed) <= 11 / 9 * sum(sizes) / room + 1 + room / 7
    assert packed == sorted(packed)


def rows_of(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    return np.load(path), np.load(mask_path(path))


def documents_of(tokens: NDArray[Any], marks: NDArray[Any], separator: int) -> list[list[int]]:
    """Return the documents in rows, without what stands between them."""
    documents = []
    for row, kinds in zip(tokens.tolist(), marks.tolist(), strict=True):
        begins = [*(n for n, kind in enumerate(kinds) if kind == START), len(row)]
        for first, behind in pairwise(begins):
            document = row[first:behind]
            while document and document[-1] == separator:
                document.pop()
            documents.append(document)
    return documents


def fitting(chat_tokenizer: Any, chat: Messages) -> list[int] | None:
    """Return the tokens of a chat up to the last answer with which it fits into a row."""
    behind = [n for n, message in enumerate(chat, 1) if n > 1 and message["role"] == "assistant"]
    for number in reversed(behind):
        ids = chat_tokenizer.apply_chat_template(chat[:number], return_dict=True)["input_ids"]
        whole = ids if number == behind[-1] else ids[:-1]  # without the line break behind it
        for tokens in (whole, ids[:-1]):
            if len(tokens) <= SEQUENCE + 1:
                return list(tokens)
    return None


@pytest.mark.parametrize("options", [(), ("--alone",)], ids=["packed", "alone"])
def test_every_chat_is_in_one_row(
    chat_folder: Path, chat_tokenizer: Any, tmp_path: Path, capsys: Any, options: tuple[str, ...]
):
    drawn = random_chats(300, most=5)
    drawn[7] = drawn[7][:1]  # without an answer
    drawn[9] = [{"role": "user", "content": "red " * SEQUENCE}, *CHAT[2:]]  # that fits not
    file, out = write_chats(tmp_path / "a.jsonl", drawn), tmp_path / "rows.npy"
    words = ["--chat", "--tokenizer", str(chat_folder / "tokenizer.json"), "--json"]
    words += ["--sequence", str(SEQUENCE)]
    assert main(["tokenize", str(file), "--out", str(out), *words, *options]) == 0
    record = json.loads(capsys.readouterr().out)
    tokens, marks = rows_of(out)
    separator = chat_tokenizer.convert_tokens_to_ids(PAD)
    assert tokens.shape == marks.shape == (record["rows"], SEQUENCE + 1)
    expected = [ids for ids in (fitting(chat_tokenizer, chat) for chat in drawn) if ids is not None]
    documents = documents_of(tokens, marks, separator)
    assert sorted(documents) == sorted(expected)
    whole = [
        chat_tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in drawn
    ]
    num_cut = sum(len(ids) > SEQUENCE + 1 for ids in whole) - (len(drawn) - len(expected) - 1)
    assert record["cut"] == num_cut > 20 and record["left_out"] == 300 - len(expected) >= 2
    assert (record["unanswered"], record["divided"]) == (1, 0)
    assert record["too_long"] == record["left_out"] - 1
    assert record["chats"] == 300 and record["tokens"] == sum(map(len, expected))
    assert record["targets"] == int((marks == TARGET).sum())
    if options:
        assert record["rows"] == len(expected) and "model.document_end" not in record["keys"]
    else:
        assert record["keys"]["model.document_end"] == separator
        assert record["rows"] < len(expected)


@pytest.fixture(scope="module")
def packed_file(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of rows, in a folder with the chats."""
    place = tmp_path_factory.mktemp("packed")
    file = write_chats(place / "chats.jsonl", random_chats(400, most=2))
    tokenize_to(chat_folder, [file], place / "rows.npy")
    return place / "rows.npy"


def tokenize_to(chat_folder: Path, files: list[Path], out: Path, template: Any = None) -> Any:
    return tokenize_chats(
        files,
        out,
        template or ChatTemplate(chat_folder),
        ChatPacking(sequence=SEQUENCE),
        field="messages",
        tell=lambda _: None,
    )


def spec_of(path: Path, *words: str, end: int = 2) -> Spec:
    return load(
        {
            "name": "chats",
            "model": {"layers": 1, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 320},
            "mesh": {"dp_shard": 2},
            "placement": "zero2",
            "batch": {"global": 8, "micro": 2, "sequence": SEQUENCE},
            "data": {"path": str(path), "loss_mask": str(mask_path(path))},
        },
        [f"model.document_end={end}", *words],
    ).spec


def test_a_training_learns_answers_alone_and_divides_by_their_number(packed_file: Path):
    spec = spec_of(packed_file)
    source = open_corpus(spec.data)
    require_trainable_data(source, spec)
    tokens, marks = rows_of(packed_file)
    num_rows = source.num_samples(SEQUENCE)
    assert num_rows == len(tokens) - len(tokens) // 20
    for step in range(3):
        shares = [
            read_batch(source, spec=spec, step=step, data_index=n, data_degree=2) for n in (0, 1)
        ]
        targets = 0
        for share in shares:
            assert isinstance(share, LocalBatch) and share.labels is not None
            rows = [sample_id % num_rows for sample_id in share.sample_ids]
            assert share.tokens.tolist() == tokens[rows].tolist()
            learned = torch.from_numpy(marks[rows] == TARGET)
            assert torch.equal(share.labels != IGNORED, learned)
            targets += int(learned.sum())
        assert {share.global_tokens for share in shares} == {targets}


def test_a_chat_in_a_row_is_learned_as_if_it_stood_alone(packed_file: Path):
    spec = spec_of(packed_file)
    tokens, marks = rows_of(packed_file)
    row = int(np.argmax((marks == START).sum(1)))
    model = build_model(spec.model, sequence=SEQUENCE, seed=0).double()
    initialize(model, 0)
    model.reset_buffers()

    def losses(own: NDArray[Any], kinds: NDArray[Any]) -> float:
        ids = torch.from_numpy(own.astype(np.int64))
        labels = ids.masked_fill(torch.from_numpy(kinds != TARGET), IGNORED)
        logits = model(ids[None, :-1])[0]
        return F.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=IGNORED).item()

    begins = [*np.flatnonzero(marks[row] == START), SEQUENCE + 1]
    assert len(begins) > 3
    spans = [slice(*span) for span in pairwise(begins)]
    alone = [losses(tokens[row, span], marks[row, span]) for span in spans]
    assert losses(tokens[row], marks[row]) == pytest.approx(sum(alone), rel=1e-12)


class Broken(ChatTemplate):
    """Breaks off at the chat of this number, as a process that is killed."""

    def __init__(self, chat_folder: Path, at: int) -> None:
        super().__init__(chat_folder)
        self.at = at

    def make_samples(self, chat: Chat) -> Any:
        self.at -= 1
        if self.at < 0:
            raise KeyboardInterrupt
        return super().make_samples(chat)


@pytest.mark.parametrize("at", [0, 7, 8, 27, 60])
def test_an_interrupted_conversion_resumes(
    chat_folder: Path, tmp_path: Path, monkeypatch: Any, at: int
):
    monkeypatch.setattr(tokenized, "DOCUMENTS", 8)
    names = [(tmp_path / name, seed) for seed, name in enumerate(("a.jsonl", "b.jsonl"))]
    files = [write_chats(path, random_chats(35, seed)) for path, seed in names]
    done = tokenize_to(chat_folder, files, tmp_path / "whole.npy")
    with pytest.raises(KeyboardInterrupt):
        tokenize_to(chat_folder, files, tmp_path / "rows.npy", Broken(chat_folder, at))
    assert not (tmp_path / "rows.npy").exists()
    assert tokenize_to(chat_folder, files, tmp_path / "rows.npy") == done
    for own, whole in zip(
        *map(rows_of, (tmp_path / "rows.npy", tmp_path / "whole.npy")), strict=True
    ):
        assert own.tolist() == whole.tolist()
    left = {path.name for path in tmp_path.iterdir()} - {path.name for path in files}
    ends = (".npy", ".mask.npy", ".tokenizer.json")
    assert left == {f"{name}{end}" for name in ("rows", "whole") for end in ends}


def fault_of(spec: Spec) -> tuple[str, str, str]:
    with pytest.raises(SpecError) as caught:
        require_trainable_data(open_corpus(spec.data), spec)
    (fault,) = caught.value.faults
    return fault.place, fault.finding, fault.remedy


def test_rows_that_would_be_read_in_another_way_are_rejected(packed_file: Path):
    def place_and_remedy(*words: str, **options: int) -> tuple[str, str]:
        place, _, remedy = fault_of(spec_of(packed_file, *words, **options))
        return place, remedy

    end = "Use `model.document_end=2`."
    assert place_and_remedy("model.document_end=null") == (
        "data.path",
        f"{end} Or write the file with `ptrain tokenize --alone`, one document per row.",
    )
    assert place_and_remedy(end=1) == ("model.document_end", end)
    start = ("model.document_end=null", "model.document_start=1")
    assert place_and_remedy(*start) == (
        "model.document_start",
        f"Remove `model.document_start`. {end}",
    )
    assert place_and_remedy("batch.sequence=64") == (
        "batch.sequence",
        "Use `batch.sequence=127`, or write the file with `ptrain tokenize --sequence 64`.",
    )
    other = packed_file.with_name("other.npy")
    np.save(other, np.roll(np.load(mask_path(packed_file)), 1, axis=0))
    place, remedy = place_and_remedy(f"data.loss_mask={other}")
    assert place == "data.loss_mask" and "the mask that was written with the file" in remedy
    np.save(other, np.zeros_like(np.load(mask_path(packed_file))))
    _, finding, _ = fault_of(spec_of(packed_file, f"data.loss_mask={other}"))
    assert "the mask excludes every token of the train split" in finding
    place, remedy = place_and_remedy("data.loss_mask=null")
    assert place == "data.loss_mask" and "rows.mask.npy" in remedy


def test_a_chat_that_has_the_separator_in_it_is_left_out(chat_folder: Path, tmp_path: Path):
    """Else it would be two documents."""
    drawn = random_chats(3)
    drawn.append([CHAT[1], {"role": "assistant", "content": f"a {PAD} b"}])
    file = write_chats(tmp_path / "a.jsonl", drawn)
    packing = ChatPacking(sequence=SEQUENCE, separator=PAD)
    done = tokenize_chats(
        [file], tmp_path / "t.npy", ChatTemplate(chat_folder), packing, field="messages", tell=print
    )
    assert (done.documents, done.left_out, done.divided) == (4, 1, 1)


def test_a_separator_that_every_chat_contains_is_rejected(
    chat_folder: Path, tmp_path: Path, capsys: Any
):
    file = write_chats(tmp_path / "a.jsonl", random_chats(3))
    call = ["tokenize", str(file), "--chat", "--tokenizer", str(chat_folder), "--sequence", "127"]
    assert main([*call, "--separator", END, "--out", str(tmp_path / "t.npy")]) == 2
    error = capsys.readouterr().err
    assert "--separator: 3 of 3 chats contain the separator" in error
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_separator_must_be_named_if_the_vocabulary_has_no_unused_token(
    tmp_path: Path, capsys: Any
):
    file = write_chats(tmp_path / "a.jsonl", random_chats(3))
    chat_folder = save_tokenizer(tmp_path / "tokenizer", specials=2)
    words = ["--tokenizer", str(chat_folder), "--sequence", "127", "--out", str(tmp_path / "t.npy")]
    call = ["tokenize", str(file), "--chat", *words]
    assert main(call) == 2
    assert "none can separate chats" in capsys.readouterr().err
    assert main([*call, "--separator", "<other>"]) == 2
    assert "has no token '<other>'" in capsys.readouterr().err
    assert main([*call, "--separator", "!"]) == 0 and main([*call, "--alone"]) == 0
