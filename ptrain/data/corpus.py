"""Corpora that need no network: text every CPython ships, and a seeded one of made-up words.

A corpus is two arrays of token ids, one to train on and one held out. Text is split by document,
so that nothing held out was seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from ptrain.data.mixture import Mixture, of_all
from ptrain.data.origin import read_origin
from ptrain.data.source import SampleSource
from ptrain.data.token_corpus import HELD_OUT_OF_FILE, Corpus
from ptrain.data.tokenizer import VOCAB, encode
from ptrain.data.tokens import mask_beside, open_mask, open_tokens
from ptrain.data.user_samples import UserSamples
from ptrain.errors import refused
from ptrain.spec.job import DataSpec
from ptrain.spec.sources import DataSource, quotas

_HELD_OUT_EVERY = 10  # every tenth document is held out


def corpus(data: DataSpec) -> SampleSource:
    """Open what a spec's `data` names."""
    if data.function is not None:
        return UserSamples(data.function)
    return _tokens_of(data)


def _tokens_of(data: DataSpec) -> Corpus | Mixture:
    """Open a corpus, a file of tokens, or several."""
    if data.path is not None:
        file = DataSource(path=data.path, loss_mask=data.loss_mask)
        return _from_file(file, "data.path", has_ignored=data.ignored is not None)
    if data.sources is not None:
        opened = partial(_from_file, place="data.sources", has_ignored=data.ignored is not None)
        files = of_all([partial(opened, source) for source in data.sources])
        weights = [source.weight for source in data.sources]
        return Mixture(files=tuple(files), quotas=quotas(weights))
    if data.tokenizer != "bytes":
        raise refused("data.tokenizer", f"{data.tokenizer!r} is not known", "write bytes")
    match data.corpus:
        case "python-docs":
            return _from_documents("python-docs", _python_docs())
        case "synthetic":
            return _from_documents("synthetic", _synthetic())
        case name:
            remedy = "choose python-docs or synthetic, or give data.path=FILE, a token file"
            raise refused("data.corpus", f"{name!r} is not known", remedy)


def _from_file(source: DataSource, place: str, *, has_ignored: bool) -> Corpus:
    """Open a file of tokens. Raises SpecError where what stands beside it of its tokens would not
    be read, though nothing says that all of them are learned."""
    tokens, masks = open_tokens(Path(source.path), place), None
    num_train = len(tokens) - len(tokens) // HELD_OUT_OF_FILE
    beside = mask_beside(Path(source.path))
    of_mask = "data.loss_mask" if place == "data.path" else place
    if source.loss_mask is not None:
        mask = open_mask(Path(source.loss_mask), tokens, of_mask)
        masks = mask[:num_train], mask[num_train:]
    elif not has_ignored and beside.is_file():
        finding = f"{beside} says which tokens of {source.path} are learned, and nobody reads it"
        remedy = f"write data.loss_mask={beside}; or data.ignored=[], where all of them are"
        raise refused(of_mask, finding, remedy)
    return Corpus(
        name=source.path,
        train=tokens[:num_train],
        held_out=tokens[num_train:],
        vocab=None,
        masks=masks,
        origin=read_origin(Path(source.path)),
    )


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
