"""Documents become a token file, once: a batch of them after the other, so that no more is in
memory, and one that was broken off goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from ptrain.data.documents import documents
from ptrain.data.vocabulary import Vocabulary
from ptrain.errors import PtrainError, refused

DOCUMENTS = 1024  # encoded at once
_WORDS = 2**16  # of which two bytes tell one


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizingProgress:
    """How far it is: files that are done, documents of the next one and of all, and tokens."""

    files: int = 0
    in_file: int = 0
    documents: int = 0
    tokens: int = 0


def tokenize(
    texts: Sequence[Path],
    out: Path,
    vocabulary: Vocabulary,
    *,
    field: str,
    tell: Callable[[TokenizingProgress], None],
) -> TokenizingProgress:
    """Write the tokens of all documents to `out`, behind each the token that ends a text; return
    how many there are. What is there of a call that was broken off stands in `out`.part, and
    is gone on with if nothing else was asked. Raises SpecError for what cannot be read or written,
    and for a vocabulary that says no end."""
    if vocabulary.end is None:
        finding = "where a document ends nobody says: its tokenizer_config.json has no eos_token"
        raise refused("--end", finding, "name the token: --end '</s>'")
    part, notes = (out.with_name(f"{out.name}{end}") for end in (".part", ".part.json"))
    request = _request(texts, vocabulary, field)
    try:
        done = _begun(notes, request) if part.exists() else TokenizingProgress()
        with part.open("r+b" if done.tokens else "w+b") as file:
            writer = TokenWriter(file, np.uint16 if vocabulary.size <= _WORDS else np.uint32)
            writer.begin(done)
            for batch, after in _batches(texts, field, done):
                done = writer.add(vocabulary.batch(batch), vocabulary.end, after)
                notes.write_text(json.dumps({"request": request, "done": asdict(done)}))
                tell(done)
        if not done.documents:
            raise refused(str(texts[0]), "there is no document", "give files that have some")
        os.replace(part, out)
    except OSError as error:
        remedy = "choose another --out"
        raise refused(str(out), error.strerror or str(error), remedy) from error
    except PtrainError:  # other texts will be given: nothing of these can be gone on with
        part.unlink(missing_ok=True)
        notes.unlink(missing_ok=True)
        raise
    notes.unlink(missing_ok=True)
    return done


def _request(texts: Sequence[Path], vocabulary: Vocabulary, field: str) -> list[Any]:
    """Return what another call has to have in common to go on with this one."""
    there = [(text, text.stat() if text.exists() else None) for text in texts]
    files = [[str(text), *([s.st_size, s.st_mtime_ns] if s else [])] for text, s in there]
    return [files, vocabulary.size, vocabulary.end, field]


def _begun(notes: Path, request: list[Any]) -> TokenizingProgress:
    """Return how far a call came that was asked the same."""
    try:
        said = json.loads(notes.read_text(encoding="utf-8"))
        done = said["done"] if said["request"] == request else {}
        return TokenizingProgress(**done)
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole
        return TokenizingProgress()


def _batches(
    texts: Sequence[Path], field: str, done: TokenizingProgress
) -> Iterator[tuple[list[str], TokenizingProgress]]:
    """Yield documents that are not done, and how far it is behind them, but for tokens."""
    for number, text in enumerate(texts):
        if number < done.files:
            continue
        first = done.in_file if number == done.files else 0
        remaining = islice(documents(text, field), first, None)
        while batch := [*islice(remaining, DOCUMENTS)]:
            first += len(batch)
            yield batch, TokenizingProgress(files=number, in_file=first)


class TokenWriter:
    """A one-dimensional .npy file that grows."""

    def __init__(self, file: BinaryIO, dtype: type[np.unsignedinteger[Any]]) -> None:
        self._file, self._dtype = file, np.dtype(dtype)
        self._done = TokenizingProgress()

    def begin(self, done: TokenizingProgress) -> None:
        """Go on behind so many tokens."""
        self._done = done
        self._write_header()
        self._file.truncate(self._file.tell() + done.tokens * self._dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def add(
        self, encoded: Sequence[Sequence[int]], end: int, after: TokenizingProgress
    ) -> TokenizingProgress:
        """Write documents, an end behind each that has none; all of it is on the disk then."""
        whole = [ids if ids and ids[-1] == end else [*ids, end] for ids in encoded]
        tokens = np.concatenate([np.asarray(ids, dtype=self._dtype) for ids in whole])
        tokens.tofile(self._file)
        before = self._done
        self._done = TokenizingProgress(
            files=after.files,
            in_file=after.in_file,
            documents=before.documents + len(encoded),
            tokens=before.tokens + len(tokens),
        )
        self._write_header()
        self._file.seek(0, os.SEEK_END)
        return self._done

    def _write_header(self) -> None:
        """numpy leaves room in a header for a first dimension of any size."""
        self._file.seek(0)
        said = {
            "descr": npy.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._done.tokens,),
        }
        npy.write_array_header_1_0(self._file, said)
        self._file.flush()
