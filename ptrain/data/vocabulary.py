"""Texts as the tokens of a model: the bytes of ptrain's corpora, or what a tokenizer.json says; and
token files.

A token file is a memory-mapped `.npy` array of token ids: one dimension, cut into samples anywhere,
or two, one sample per row. The byte tokenizer turns a document into its UTF-8 bytes between BOS and
EOS, 259 ids in all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ptrain.errors import Fault, library, refused
from ptrain.models.boundary import boundary

BOS, EOS, PAD = 256, 257, 258
VOCAB = 259


def encode(text: str) -> NDArray[np.uint16]:
    body = np.frombuffer(text.encode(), dtype=np.uint8)
    return np.concatenate(([BOS], body, [EOS])).astype(np.uint16)


def decode(tokens: Iterable[int]) -> str:
    """The text of these ids, specials left out; a character that was cut shows as U+FFFD."""
    return bytes(token for token in tokens if token < BOS).decode(errors="replace")


INPUT, TARGET, START = 0, 1, 2  # what a token of a row is: START, with which a document begins
_MAKE = "Run `ptrain tokenize TEXT... --out FILE.npy` to write a token file."


def open_tokens(path: Path, place: str = "data.path") -> NDArray[np.unsignedinteger]:
    """Map a token file, which stands at a `place` of the spec. Its ids are compared with the
    vocabulary batch by batch."""
    tokens = _mapped(path, place, _MAKE)
    if tokens.ndim not in (1, 2) or tokens.dtype not in (np.uint8, np.uint16, np.uint32):
        raise refused(
            place,
            f"{path} contains {tokens.dtype} of shape {tokens.shape}; token ids must be "
            "uint16 or uint32 with one or two dimensions",
            "Write them with `numpy.save(path, ids.astype(numpy.uint16))`.",
        )
    return tokens


def open_mask(path: Path, tokens: NDArray[Any], place: str) -> NDArray[Any]:
    """Map the file that says which of these tokens are targets."""
    remedy = "Write it with `numpy.save(path, mask.astype(bool))`, one value per token."
    mask = _mapped(path, place, remedy)
    is_alike = mask.shape == tokens.shape
    if mask.dtype not in (np.bool_, np.uint8) or (mask.size == tokens.size and not is_alike):
        finding = f"{path} contains {mask.dtype} of shape {mask.shape}; a mask must be bool"
        raise refused(place, f"{finding} with the shape of its tokens", remedy)
    if not is_alike:
        raise refused(place, f"{path} has {mask.size} values for {tokens.size} tokens", remedy)
    return mask


def mask_beside(path: Path) -> Path:
    """Return where `ptrain tokenize` writes what the tokens of a file of rows are."""
    return path.with_suffix(f".mask{path.suffix}")


def _mapped(path: Path, place: str, remedy: str) -> NDArray[Any]:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or "not a readable file"
        raise refused(place, f"{path}: {reason}", remedy) from error
    except (ValueError, EOFError) as error:
        raise refused(place, f"{path} is not a complete .npy array", remedy) from error
    if not isinstance(values, np.ndarray):  # an .npz archive loads as a mapping
        raise refused(place, f"{path} is an archive, not a .npy array", remedy)
    return values


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
        use = f"reading {path} needs the tokenizers library"
        tokenizers = library("tokenizers", _PLACE, use)
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
