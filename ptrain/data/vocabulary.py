"""Tokenizers and token files: conversion of texts to token ids, and the arrays that hold them.

A tokenizer is either the byte tokenizer of the built-in corpora or a tokenizer.json. The byte
tokenizer turns a document into its UTF-8 bytes between BOS and EOS, 259 ids in all.

A token file is a memory-mapped `.npy` array of token ids. With one dimension it can be split into
samples at any position; with two it holds one sample per row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ptrain.errors import Fault, input_error, library
from ptrain.models.boundary import convert_exceptions
from ptrain.spec.text import require_file

BOS, EOS, PAD = 256, 257, 258  # after the 256 values of a byte
VOCAB = 259


def encode(text: str) -> NDArray[np.uint16]:
    """Return the ids [bytes + 2] of a document: its UTF-8 bytes between BOS and EOS."""
    body = np.frombuffer(text.encode(), dtype=np.uint8)
    return np.concatenate(([BOS], body, [EOS])).astype(np.uint16)


def decode(tokens: Iterable[int]) -> str:
    """Return the text of these ids without special tokens; incomplete characters become U+FFFD.

    Args:
        tokens: Byte values (below 256) and special tokens, which are dropped.
    """
    return bytes(token for token in tokens if token < BOS).decode(errors="replace")


# Marks of the tokens of a row: an input only, a target, and the first token of a document.
INPUT, TARGET, START = 0, 1, 2
_MAKE = "Run `ptrain tokenize TEXT... --out FILE.npy` to write a token file."


def open_tokens(path: Path, place: str = "data.path") -> NDArray[np.unsignedinteger]:
    """Map a token file into memory. Its ids are compared with the vocabulary batch by batch.

    Args:
        path: The `.npy` file.
        place: The key of the spec that names the file.

    Raises:
        SpecError: The file is not a complete array of token ids with one or two dimensions.
    """
    tokens = _map_array(path, place, _MAKE)
    if tokens.ndim not in (1, 2) or tokens.dtype not in (np.uint8, np.uint16, np.uint32):
        raise input_error(
            place,
            f"{path} contains {tokens.dtype} of shape {tokens.shape}; token ids must be "
            "uint16 or uint32 with one or two dimensions",
            "Write them with `numpy.save(path, ids.astype(numpy.uint16))`.",
        )
    return tokens


def open_mask(path: Path, tokens: NDArray[Any], place: str) -> NDArray[Any]:
    """Map the loss mask of a token file into memory.

    Args:
        path: The `.npy` file, bool or uint8.
        tokens: The token file, whose shape the mask must have.
        place: The key of the spec that names the mask.

    Raises:
        SpecError: The file is not a complete array of that type and shape.
    """
    remedy = "Write it with `numpy.save(path, mask.astype(bool))`, one value per token."
    mask = _map_array(path, place, remedy)
    has_shape = mask.shape == tokens.shape
    if mask.dtype not in (np.bool_, np.uint8) or (mask.size == tokens.size and not has_shape):
        finding = f"{path} contains {mask.dtype} of shape {mask.shape}; a mask must be bool"
        raise input_error(place, f"{finding} with the shape of its tokens", remedy)
    if not has_shape:
        raise input_error(place, f"{path} has {mask.size} values for {tokens.size} tokens", remedy)
    return mask


def mask_path(path: Path) -> Path:
    """Return the path to which `ptrain tokenize` writes the mask of a token file."""
    return path.with_suffix(f".mask{path.suffix}")


def _map_array(path: Path, place: str, remedy: str) -> NDArray[Any]:
    """Map an array into memory. Raises SpecError if the file is not a complete `.npy` array."""
    try:
        require_file(path)
        values = np.load(path, mmap_mode="r", allow_pickle=False)  # unpickling could run code
    except OSError as error:
        reason = error.strerror or "not a readable file"
        raise input_error(place, f"{path}: {reason}", remedy) from error
    except (ValueError, EOFError) as error:
        raise input_error(place, f"{path} is not a complete .npy array", remedy) from error
    if not isinstance(values, np.ndarray):  # an .npz archive loads as a mapping
        raise input_error(place, f"{path} is an archive, not a .npy array", remedy)
    return values


FILE, BESIDE = "tokenizer.json", "tokenizer_config.json"
MOST_TOKENIZER = 128 * 2**20  # bytes; the largest published ones have 35 MB
_PLACE = "--tokenizer"


class Vocabulary(Protocol):
    """A tokenizer.

    Attributes:
        size: The number of ids, counting unused ids below the largest one.
        path: The file of the tokenizer. None: bytes.
        end: The token that ends a text. None: unknown.
    """

    size: int
    path: Path | None
    end: int | None

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, without the end token."""
        ...

    def batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        ...

    def text(self, tokens: Iterable[int]) -> str: ...


class ByteVocabulary:
    """The byte tokenizer: a text is BOS, followed by its UTF-8 bytes."""

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
    """A tokenizer.json, read by the tokenizers library.

    Args:
        path: The file, or the folder that contains it.
        end: The token that ends a text. None: `eos_token` of the tokenizer_config.json in the same
            folder, if there is one.

    Raises:
        SpecError: The file is not a tokenizer, or lacks the token `end`, or the tokenizers library
            is not installed.
    """

    def __init__(self, path: Path, end: str | None = None) -> None:
        use = f"reading {path} needs the tokenizers library"
        tokenizers = library("tokenizers", _PLACE, use)
        path = tokenizer_file(path)
        self.path: Path | None = path
        with convert_exceptions(
            lambda error: _tokenizer_fault(path, error)
        ):  # the library raises plain Exceptions
            require_file(path, MOST_TOKENIZER)
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        # tokenizer.json keeps the truncation and padding that were set when it was saved.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.size: int = vocabulary_size(self._tokenizer.get_vocab())
        word = end if end is not None else _configured_end(path)
        self.end: int | None = None if word is None else self._tokenizer.token_to_id(word)
        if end is not None and self.end is None:
            raise input_error(
                "--end", f"{path} has no token {end!r}", "Use a token of this tokenizer."
            )

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text).ids
        return tokens

    def batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch([*texts])]

    def text(self, tokens: Iterable[int]) -> str:
        text: str = self._tokenizer.decode([*tokens])
        return text


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json of a folder; any other path unchanged."""
    return path / FILE if path.is_dir() else path


def vocabulary_size(words: Mapping[str, int]) -> int:
    """Return the largest id plus one. Smaller ids may be unused."""
    return 1 + max(words.values(), default=-1)


def _tokenizer_fault(path: Path, error: BaseException) -> Fault:
    """Return the fault of a file that the tokenizers library cannot read."""
    return Fault(
        place=_PLACE, finding=f"{path} is not a tokenizer: {error}", remedy=f"Use a {FILE}."
    )


def _configured_end(path: Path) -> str | None:
    """Return `eos_token` of the tokenizer_config.json in the same folder, None without one."""
    config: Any = None
    with suppress(OSError, ValueError, RecursionError):
        require_file(path.parent / BESIDE, MOST_TOKENIZER)
        config = json.loads((path.parent / BESIDE).read_text(encoding="utf-8"))
    word = config.get("eos_token") if isinstance(config, dict) else None
    word = word.get("content") if isinstance(word, dict) else word
    return word if isinstance(word, str) else None


@lru_cache(maxsize=4)
def vocabulary_digest(tokenizer: Path, changed: int) -> str:
    """Return a digest of the words and ids of a tokenizer.json.

    It ignores the rules that split texts. `changed` is the modification time of the file, which
    makes the cache notice changes.
    """
    require_file(tokenizer, MOST_TOKENIZER)
    words = sorted(_token_ids(json.loads(tokenizer.read_text(encoding="utf-8"))).items())
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=8).hexdigest()


def _token_ids(content: Any) -> dict[str, int]:
    """Return the id of each word. Unigram models list words in the order of their ids."""
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):
        vocab = {word: number for number, (word, _) in enumerate(vocab)}
    added = content.get("added_tokens") or ()
    return {**vocab, **{token["content"]: token["id"] for token in added}}
