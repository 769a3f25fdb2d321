"""Texts as the tokens of a model: the bytes that ptrain's own corpora are made of, or what a
tokenizer.json says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ptrain.data.tokens import BOS, EOS, VOCAB, decode, encode
from ptrain.errors import Fault, refused
from ptrain.models.boundary import boundary

FILE, BESIDE = "tokenizer.json", "tokenizer_config.json"
_PLACE = "--tokenizer"


class Vocabulary(Protocol):
    """`size`: of how many tokens. `end` is the token behind a text, None where nothing says
    which; `path` the file that says all this, None of bytes."""

    size: int
    path: Path | None
    end: int | None

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text that may go on."""
        ...

    def batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the same of each of several."""
        ...

    def text(self, tokens: Iterable[int]) -> str: ...


class ByteVocabulary:
    """Bytes, behind the sign with which a text begins."""

    size: int = VOCAB
    path: Path | None = None
    end: int | None = EOS

    def tokens(self, text: str) -> list[int]:
        return [BOS, *(int(token) for token in encode(text)[1:-1])]

    def batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokens(text) for text in texts]

    def text(self, tokens: Iterable[int]) -> str:
        return decode(tokens)


class FileVocabulary:
    """What a tokenizer.json says, or that of a folder, by the library tokenizers. A text ends with
    the token `end`; None: with the one that tokenizer_config.json beside it calls so. Raises
    SpecError for a file that is no tokenizer, and for an `end` that it does not know."""

    def __init__(self, path: Path, end: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise refused(
                _PLACE,
                f"reading {path} needs the tokenizers library, which is not installed",
                "Run `pip install tokenizers`.",
            ) from error
        path = file_of(path)
        self.path: Path | None = path
        with boundary(lambda error: _unread(path, error)):  # the library raises plain Exceptions
            self._of_file: Any = tokenizers.Tokenizer.from_file(str(path))
        self._of_file.no_truncation()  # a file keeps those of the call before it was saved
        self._of_file.no_padding()
        self.size: int = size_of(self._of_file.get_vocab())
        word = end if end is not None else _end_beside(path)
        self.end: int | None = None if word is None else self._of_file.token_to_id(word)
        if end is not None and self.end is None:
            raise refused("--end", f"{path} has no token {end!r}", "Use a token of this tokenizer.")

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._of_file.encode(text).ids
        return tokens

    def batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._of_file.encode_batch([*texts])]

    def text(self, tokens: Iterable[int]) -> str:
        text: str = self._of_file.decode([*tokens])
        return text


def file_of(path: Path) -> Path:
    """Return the tokenizer.json that is named, or that of a folder."""
    return path / FILE if path.is_dir() else path


def size_of(words: Mapping[str, int]) -> int:
    """Return how many tokens there are up to the last one: numbers between may be of no word."""
    return 1 + max(words.values(), default=-1)


def _unread(path: Path, error: BaseException) -> Fault:
    return Fault(
        place=_PLACE, finding=f"{path} is not a tokenizer: {error}", remedy=f"Use a {FILE}."
    )


def _end_beside(path: Path) -> str | None:
    """Return the token that ends a text, by the file that transformers keeps beside it."""
    config: Any = None
    with suppress(OSError, ValueError):
        config = json.loads((path.parent / BESIDE).read_text(encoding="utf-8"))
    word = config.get("eos_token") if isinstance(config, dict) else None
    word = word.get("content") if isinstance(word, dict) else word
    return word if isinstance(word, str) else None
