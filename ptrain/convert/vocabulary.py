"""Texts as the tokens of a model: the bytes that ptrain's own corpora are made of, or what a
tokenizer.json says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ptrain.data.tokenizer import BOS, EOS, decode, encode
from ptrain.errors import Fault, refused
from ptrain.models.boundary import boundary
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

FILE = "tokenizer.json"


class Vocabulary(Protocol):
    """`end` is the token behind a text, None where nothing says which."""

    end: int | None

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text that may go on."""
        ...

    def text(self, tokens: Iterable[int]) -> str: ...


class ByteVocabulary:
    """Bytes, behind the sign with which a text begins."""

    end: int | None = EOS

    def tokens(self, text: str) -> list[int]:
        return [BOS, *(int(token) for token in encode(text)[1:-1])]

    def text(self, tokens: Iterable[int]) -> str:
        return decode(tokens)


class FileVocabulary:
    """What a tokenizer.json says, by the library tokenizers."""

    end: int | None = None

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            finding = f"{path} is read by the library tokenizers, which is not installed"
            raise refused("--tokenizer", finding, "pip install tokenizers") from error
        with boundary(lambda error: _unread(path, error)):  # the library raises plain Exceptions
            self._of_file: Any = tokenizers.Tokenizer.from_file(str(path))

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._of_file.encode(text).ids
        return tokens

    def text(self, tokens: Iterable[int]) -> str:
        text: str = self._of_file.decode([*tokens])
        return text


def _unread(path: Path, error: BaseException) -> Fault:
    finding = f"{path} is no tokenizer: {error}"
    return Fault(place="--tokenizer", finding=finding, remedy=f"name a {FILE}")


def vocabulary_of(spec: Spec, named: Path | None) -> Vocabulary:
    """Return the vocabulary that a model was trained on: the one that is `named`, that of the
    folder it began with, or bytes. Raises SpecError where nobody says what its tokens mean."""
    if named is not None:
        return FileVocabulary(named)
    model, data = spec.model, spec.data
    if isinstance(model, ModelShape) and model.pretrained:
        beside = Path(model.pretrained) / FILE
        if beside.is_file():
            return FileVocabulary(beside)
    if data.path is None and data.function is None:
        return ByteVocabulary()
    finding = "the model was trained on tokens of a file, and nobody says what they mean"
    raise refused("--tokenizer", finding, f"name a {FILE}")


def windows(tokens: Sequence[int], length: int) -> Iterable[Sequence[int]]:
    """Yield stretches of at most `length` tokens and the one behind them, each token but the first
    being a target once."""
    for first in range(0, len(tokens) - 1, length):
        yield tokens[first : first + length + 1]
