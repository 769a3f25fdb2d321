"""The corpora that need no network, the byte tokenizer, and token files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import Split
from ptrain.data.vocabulary import BOS, EOS, PAD, VOCAB, decode, encode, open_tokens
from ptrain.errors import PtrainError
from ptrain.spec.job import DataSpec

CORPORA = ["python-docs", "synthetic"]


@given(st.text())
def test_text_survives_the_byte_tokenizer(text):
    assert decode(encode(text).tolist()) == text


def test_the_byte_tokenizer_has_259_ids_with_its_specials_last():
    assert (BOS, EOS, PAD) == (256, 257, 258)
    assert PAD == VOCAB - 1
    assert encode("é").tolist() == [BOS, 0xC3, 0xA9, EOS]


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_is_the_same_every_time(name):
    first, second = open_corpus(DataSpec(corpus=name)), open_corpus(DataSpec(corpus=name))
    assert np.array_equal(first.train, second.train)
    assert first.digest() == second.digest()
    assert first.vocab == VOCAB


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("split", Split)
def test_each_split_holds_whole_documents(name, split):
    tokens = open_corpus(DataSpec(corpus=name)).split(split)
    assert tokens[0] == BOS and tokens[-1] == EOS
    assert np.count_nonzero(tokens == BOS) == np.count_nonzero(tokens == EOS)
    assert tokens.max() == EOS


@pytest.mark.parametrize("name", CORPORA)
def test_no_held_out_document_is_trained_on(name):
    source = open_corpus(DataSpec(corpus=name))
    train, held_out = (documents(source.split(split)) for split in Split)
    assert held_out and not held_out & train
    assert 0.02 < len(source.held_out) / len(source.train) < 0.2


def documents(tokens: np.ndarray) -> set[bytes]:
    starts = np.flatnonzero(tokens == BOS)
    return {part.tobytes() for part in np.split(tokens, starts[1:])}


def test_the_python_docs_are_english_prose_of_some_length():
    source = open_corpus(DataSpec(corpus="python-docs"))
    text = decode(source.train.tolist())
    assert len(text) > 300_000
    assert text.count(" the ") > 2000


def test_the_synthetic_corpus_is_the_same_on_every_machine():
    assert open_corpus(DataSpec(corpus="synthetic")).digest() == "a269472f073c1957"


def test_the_synthetic_corpus_can_be_learned():
    """Its bytes have fewer than 4.5 bits each: a model gains over log2(259) = 8 at once."""
    counts = np.bincount(open_corpus(DataSpec(corpus="synthetic")).train, minlength=VOCAB)
    shares = counts[counts > 0] / counts.sum()
    assert -(shares * np.log2(shares)).sum() < 4.5


@pytest.mark.parametrize(
    ("data", "finding"),
    [
        (DataSpec(corpus="pile"), "unknown corpus 'pile'\n  remedy: Use python-docs or synthetic"),
        (DataSpec(corpus=None), "set `data.path=FILE`"),
        (
            DataSpec(tokenizer="bpe"),
            "unknown tokenizer 'bpe'\n  remedy: Use `data.tokenizer=bytes`",
        ),
    ],
)
def test_an_unknown_corpus_is_rejected_with_the_known_ones(data, finding):
    with pytest.raises(PtrainError, match=finding):
        open_corpus(data)


def test_a_token_file_is_mapped_and_its_end_is_held_out(tmp_path):
    path = save(tmp_path, np.arange(1000, dtype=np.uint16))
    source = open_corpus(DataSpec(corpus=None, path=str(path)))
    assert isinstance(source.train, np.memmap)
    assert (len(source.train), len(source.held_out)) == (950, 50)
    assert np.array_equal(np.concatenate((source.train, source.held_out)), np.arange(1000))


def save(folder: Path, tokens: np.ndarray, name: str = "tokens.npy") -> Path:
    np.save(folder / name, tokens)
    return folder / name


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_token_ids_may_have_any_unsigned_width(tmp_path, dtype):
    assert open_tokens(save(tmp_path, np.arange(9, dtype=dtype))).tolist() == list(range(9))


@pytest.mark.parametrize(
    "tokens", [np.zeros((2, 3, 4), np.uint16), np.zeros(3, np.float32), np.zeros(3, np.int64)]
)
def test_an_array_that_holds_no_token_ids_is_rejected(tmp_path, tokens):
    with pytest.raises(PtrainError, match=r"must be uint16 or uint32 .*\n.*numpy.save"):
        open_tokens(save(tmp_path, tokens))


def test_a_missing_token_file_is_rejected_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(
        PtrainError,
        match=r"^error: data.path: .*: No such file.*\n  remedy: .*ptrain tokenize",
    ):
        open_corpus(DataSpec(corpus=None, path=str(tmp_path / "nowhere.npy")))


@pytest.mark.parametrize("content", [b"", b"plain text", b"\x00\xff" * 99, b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_no_array_is_rejected(tmp_path, content):
    path = tmp_path / "tokens.npy"
    path.write_bytes(content)
    with pytest.raises(PtrainError, match=r"is not a complete .npy array"):
        open_tokens(path)


def test_a_cut_token_file_is_rejected(tmp_path):
    path = save(tmp_path, np.arange(1000, dtype=np.uint16))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(PtrainError, match=r"is not a complete .npy array"):
        open_tokens(path)


def test_a_pickle_is_never_loaded(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.array([print, len], dtype=object), allow_pickle=True)
    with pytest.raises(PtrainError):
        open_tokens(path)


def test_a_folder_and_an_archive_are_rejected(tmp_path):
    with pytest.raises(PtrainError, match="directory"):
        open_tokens(tmp_path)
    np.savez(tmp_path / "tokens.npz", tokens=np.arange(3, dtype=np.uint16))
    with pytest.raises(PtrainError, match="is an archive"):
        open_tokens(tmp_path / "tokens.npz")
