"""Documents become a token file, once: a batch of them after the other, so that no more is in
memory, and one that was broken off goes on where it stopped."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from ptrain.codec import decode, encode
from ptrain.data.documents import documents
from ptrain.data.origin import origin_of, record_beside, write_origin
from ptrain.data.vocabulary import Vocabulary
from ptrain.errors import PtrainError, refused

DOCUMENTS = 1024  # encoded at once
_WORDS = 2**16  # of which two bytes tell one
_SUFFIX = ".npy"

Document = TypeVar("Document")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizingProgress:
    """How far it is: files that are done, documents of the next one and of all, tokens, and how
    many entries the arrays have. Of chats besides: tokens that are learned, chats that were cut
    behind an answer, the token that stands between two, and those that were left out, which have no
    answer, none that fits, or that token within them."""

    files: int = 0
    in_file: int = 0
    documents: int = 0
    tokens: int = 0
    entries: int = 0
    targets: int = 0
    cut: int = 0
    unanswered: int = 0
    too_long: int = 0
    divided: int = 0
    separator: int | None = None

    @property
    def left_out(self) -> int:
        """Chats of which nothing is in any row."""
        return self.unanswered + self.too_long + self.divided


Tell = Callable[[TokenizingProgress], None]
Encoded = tuple[Sequence[NDArray[Any]], TokenizingProgress]  # what a batch adds, how far it is then


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFiles:
    """Arrays that are written together: for each the shape of an entry and its dtype. `request`:
    what another call has to have in common to go on with this one. `tokenizer`: the file that says
    what the numbers of the first mean, None of bytes."""

    arrays: Mapping[Path, tuple[tuple[int, ...], DTypeLike]]
    request: list[Any]
    tokenizer: Path | None

    def write(
        self, encoded: Callable[[TokenizingProgress], Iterator[Encoded]], tell: Tell
    ) -> TokenizingProgress:
        """Write what is `encoded` behind what is done; return how much there is. What is there of a
        call that was broken off stands in files that end with .part, and is gone on with. Raises
        SpecError for what cannot be written."""
        out = next(iter(self.arrays))
        notes = _beside(out, ".part.json")
        parts = [_beside(path, ".part") for path in self.arrays]
        try:
            done = self._begun(notes, parts)
            tell(done)
            with ExitStack() as files:
                how = "r+b" if done.entries else "w+b"
                opened: list[Any] = [files.enter_context(part.open(how)) for part in parts]
                both = zip(opened, self.arrays.values(), strict=True)
                arrays = [GrowingArray(file, *form) for file, form in both]
                for array in arrays:
                    array.begin(done.entries)
                for added, reached in encoded(done):
                    for array, entries in zip(arrays, added, strict=True):
                        array.add(entries)
                    _write_notes(notes, {"request": self.request, "done": encode(reached)})
                    tell(reached)
                    done = reached
            record_beside(out).unlink(missing_ok=True)
            for part, path in zip(parts, self.arrays, strict=True):
                os.replace(part, path)
            if origin := origin_of(self.tokenizer):
                write_origin(out, origin)
        except OSError as error:
            remedy = "choose another --out"
            raise refused(str(out), error.strerror or str(error), remedy) from error
        except PtrainError:  # other texts will be given: nothing of these can be gone on with
            for path in (*parts, notes):
                path.unlink(missing_ok=True)
            raise
        notes.unlink(missing_ok=True)
        return done

    def _begun(self, notes: Path, parts: Sequence[Path]) -> TokenizingProgress:
        """Return how far a call came that was asked the same."""
        try:
            said = json.loads(notes.read_text(encoding="utf-8"))
            done = decode(
                said["done"] if said["request"] == self.request else {}, TokenizingProgress
            )
            sizes = [part.stat().st_size for part in parts]
        except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole
            return TokenizingProgress()
        whole = [done.entries * _entry_bytes(*form) for form in self.arrays.values()]
        is_there = all(size >= least for size, least in zip(sizes, whole, strict=True))
        return done if is_there else TokenizingProgress()


def tokenize(
    texts: Sequence[Path], out: Path, vocabulary: Vocabulary, *, field: str, tell: Tell
) -> TokenizingProgress:
    """Write the tokens of all documents to `out`, behind each the token that ends a text; return
    how many there are. Raises SpecError for what cannot be read or written, and for a vocabulary
    that says no end."""
    end = vocabulary.end
    if end is None:
        finding = "where a document ends nobody says: its tokenizer_config.json has no eos_token"
        raise refused("--end", finding, "name the token: --end '</s>'")
    dtype = token_dtype(vocabulary.size)

    def encoded(done: TokenizingProgress) -> Iterator[Encoded]:
        for batch, after in batches(texts, lambda path: documents(path, field), done):
            tokens = [_ended(ids, end) for ids in vocabulary.batch(batch)]
            added = np.concatenate([np.asarray(ids, dtype=dtype) for ids in tokens])
            number = done.tokens + len(added)
            done = replace(after, tokens=number, entries=number)
            yield (added,), done

    files = TokenFiles(
        arrays={out: ((), dtype)},
        request=[*requested(texts, out, vocabulary.path), end, field],
        tokenizer=vocabulary.path,
    )
    return files.write(encoded, tell)


def _ended(tokens: list[int], end: int) -> list[int]:
    return tokens if tokens and tokens[-1] == end else [*tokens, end]


def token_dtype(size: int) -> DTypeLike:
    """Return what a token of a vocabulary of this size takes."""
    return np.uint16 if size <= _WORDS else np.uint32


def requested(texts: Sequence[Path], out: Path, tokenizer: Path | None) -> list[Any]:
    """Return what is known of texts and tokenizer before they are read. Raises SpecError for an
    `out` that is no name of a token file."""
    if out.suffix != _SUFFIX or out.is_dir():
        raise refused("--out", f"{out} is no name of a token file", f"name a FILE{_SUFFIX}")
    files = [*texts, *([] if tokenizer is None else [tokenizer])]
    there = [(file, file.stat() if file.exists() else None) for file in files]
    return [[str(text), *([s.st_size, s.st_mtime_ns] if s else [])] for text, s in there]


def batches(
    texts: Sequence[Path],
    read: Callable[[Path], Iterable[Document]],
    done: TokenizingProgress,
) -> Iterator[tuple[list[Document], TokenizingProgress]]:
    """Yield documents that are not done, and how far it is behind them: what is counted of them is
    not. Raises SpecError where there is none in all files."""
    for number, text in enumerate(texts):
        if number < done.files:
            continue
        first = done.in_file if number == done.files else 0
        remaining = islice(read(text), first, None)
        while batch := [*islice(remaining, DOCUMENTS)]:
            first += len(batch)
            documents_done = done.documents + len(batch)
            done = replace(done, files=number, in_file=first, documents=documents_done)
            yield batch, done
    if not done.documents:
        raise refused(str(texts[0]), "there is no document", "give files that have some")


class GrowingArray:
    """An .npy file that grows, entry by entry of one `shape`."""

    def __init__(self, file: BinaryIO, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self._file, self._shape, self._dtype = file, shape, np.dtype(dtype)
        self._entries = 0

    def begin(self, entries: int) -> None:
        """Go on behind so many entries."""
        self._entries = entries
        self._write_header()
        size = entries * _entry_bytes(self._shape, self._dtype)
        self._file.truncate(self._file.tell() + size)
        self._file.seek(0, os.SEEK_END)

    def add(self, entries: NDArray[Any]) -> None:
        """Write entries behind those that are there."""
        self._file.write(entries.astype(self._dtype, copy=False).tobytes())
        self._entries += len(entries)
        self._write_header()
        self._file.seek(0, os.SEEK_END)

    def _write_header(self) -> None:
        """numpy leaves room in a header for a first dimension of any size."""
        self._file.seek(0)
        said = {
            "descr": npy.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._entries, *self._shape),
        }
        npy.write_array_header_1_0(self._file, said)
        self._file.flush()


def _entry_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}{ending}")


def _write_notes(notes: Path, content: Mapping[str, Any]) -> None:
    """Whoever is killed here leaves the ones before."""
    unfinished = _beside(notes, ".new")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    os.replace(unfinished, notes)
