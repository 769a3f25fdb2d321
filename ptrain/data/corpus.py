"""Corpora that need no network: text every CPython ships, and a seeded one of made-up words.

A corpus is two arrays of token ids, one to train on and one held out. Text is split by document,
so that nothing held out was seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from numpy.typing import NDArray

from ptrain.data.sampler import LocalBatch
from ptrain.data.source import SampleSource, Split
from ptrain.data.tokenizer import VOCAB, encode
from ptrain.data.tokens import open_tokens
from ptrain.data.user_samples import UserSamples
from ptrain.errors import refused
from ptrain.spec.job import DataSpec
from ptrain.spec.model import ExternalModel
from ptrain.spec.spec import Spec

_HELD_OUT_EVERY = 10  # every tenth document is held out
_HELD_OUT_OF_FILE = 20  # the last twentieth of a token file is

Tokens = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Token ids by split; a token file stays on disk, mapped into memory. `vocab` is the size of
    the tokenizer, None where only the file knows."""

    name: str
    train: Tokens
    held_out: Tokens
    vocab: int | None

    def split(self, split: Split) -> Tokens:
        return self.train if split is Split.TRAIN else self.held_out

    def num_samples(self, sequence: int, split: Split = Split.TRAIN) -> int:
        """Return the windows of an epoch; raises SpecError where the split is too short for one."""
        num_tokens = len(self.split(split))
        windows = (num_tokens - 1) // sequence
        if windows < 1:
            finding = (
                f"the {split.value} split of {self.name} has {num_tokens} tokens, one sample takes "
                f"{sequence + 1}"
            )
            raise refused("data", finding, "lower batch.sequence or give more text")
        return windows

    def read(
        self, places: Sequence[int], sample_ids: tuple[int, ...], spec: Spec, split: Split
    ) -> LocalBatch:
        """Return the windows at these places."""
        tokens, sequence = self.split(split), spec.batch.sequence
        starts = (sequence * place for place in places)
        rows = np.stack([tokens[start : start + sequence + 1] for start in starts])
        self._require_vocab(spec, int(rows.max()))
        return LocalBatch(
            tokens=torch.from_numpy(rows.astype(np.int64)),
            global_tokens=spec.batch.global_samples * sequence,
            sample_ids=sample_ids,
        )

    def require_known(self, spec: Spec, logits: int | None) -> None:
        """Raises SpecError for tokens that are not in the model's vocabulary."""
        largest = self.vocab - 1 if self.vocab else int(self.train[: 2**20].max())
        self._require_vocab(spec, largest)
        if logits is not None and largest >= logits:
            name = spec.model.target if isinstance(spec.model, ExternalModel) else "the model"
            finding = f"{self.name} holds token {largest}, but {name} gives each {logits} logits"
            remedy = f"let it have a vocabulary of {self.vocab or largest + 1} or more"
            raise refused("data", finding, remedy)

    def _require_vocab(self, spec: Spec, largest: int) -> None:
        size, key = spec.model.vocabulary
        if size is not None and largest >= size:
            raise refused(
                "data",
                f"{self.name} holds token {largest}, but {key} is {size}",
                f"write {key}={self.vocab or largest + 1} or more",
            )

    def digest(self) -> str | None:
        """Return a digest of what was trained on, for the run folder: python-docs differs between
        Python versions. A token file has its name, and may be too large to read."""
        if self.vocab is None:
            return None
        digest = hashlib.blake2b(digest_size=8)
        for tokens in (self.train, self.held_out):
            digest.update(np.ascontiguousarray(tokens).data)
        return digest.hexdigest()


def corpus(data: DataSpec) -> SampleSource:
    """Open what a spec's `data` names."""
    if data.function is not None:
        return UserSamples(data.function)
    return tokens_of(data)


def tokens_of(data: DataSpec) -> Corpus:
    """Open a corpus, or a file of tokens."""
    if data.path is not None:
        tokens = open_tokens(Path(data.path))
        num_train = len(tokens) - len(tokens) // _HELD_OUT_OF_FILE
        return Corpus(
            name=data.path, train=tokens[:num_train], held_out=tokens[num_train:], vocab=None
        )
    if data.tokenizer != "bytes":
        raise refused("data.tokenizer", f"{data.tokenizer!r} is not known", "write bytes")
    match data.corpus:
        case "python-docs":
            return _from_documents("python-docs", _python_docs())
        case "synthetic":
            return _from_documents("synthetic", _synthetic())
        case name:
            remedy = "choose python-docs or synthetic, or give path: FILE, a token file"
            raise refused("data.corpus", f"{name!r} is not known", remedy)


def _from_documents(name: str, documents: Iterable[str]) -> Corpus:
    encoded = [encode(document) for document in documents]
    held_out = encoded[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    train = [tokens for i, tokens in enumerate(encoded, 1) if i % _HELD_OUT_EVERY]
    return Corpus(
        name=name,
        train=np.concatenate(train),
        held_out=np.concatenate(held_out),
        vocab=VOCAB,
    )


def _python_docs() -> list[str]:
    """The language reference as `help()` shows it; topics with the same text count once."""
    return list(dict.fromkeys(topics[name] for name in sorted(topics)))


def _synthetic(num_documents: int = 200, words_per_document: int = 500) -> Iterator[str]:
    """Made-up words, frequent ones first, from SHAKE-256: the same text on every machine."""
    stream = hashlib.shake_256(b"ptrain synthetic corpus").digest(2**19)
    words = [_word(stream[8 * i : 8 * i + 8]) for i in range(256)]
    cursor = 8 * len(words)
    for _ in range(num_documents):
        drawn = stream[cursor : cursor + 2 * words_per_document]
        cursor += 2 * words_per_document
        ranks = (first * second >> 8 for first, second in zip(drawn[::2], drawn[1::2], strict=True))
        yield " ".join(words[rank] for rank in ranks) + "."


def _word(drawn: bytes) -> str:
    length = 2 + drawn[0] % 6
    return "".join("etaoinshrdlucmfw"[byte % 16] for byte in drawn[1 : 1 + length])
