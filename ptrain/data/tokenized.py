"""Turn documents into a token file, batch by batch, so that memory holds one batch and an
interrupted run continues where it stopped.

A text file is one document; JSON lines and Parquet have one document per row.

A record next to the token file names its tokenizer: the same numbers are other words to another
tokenizer, and a file of numbers does not show that.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from ptrain.codec import decode, encode
from ptrain.data.vocabulary import FILE, Vocabulary
from ptrain.errors import Fault, PtrainError, library, refused
from ptrain.models.boundary import boundary
from ptrain.spec.leaf import describe
from ptrain.spec.model import ModelShape, ModelSpec

_UTF8 = "utf-8-sig"  # the mark that some editors put before a text is no part of it
_PARQUET, _LINES = ".parquet", (".jsonl", ".ndjson", ".json")
OF_CHATS = ("messages", "conversations")  # fields that have the messages of a chat
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
_OBJECTS = "Use one JSON object per line."
_OF_A_LIST = f"{_OBJECTS} To convert a list, run `jq -c '.[]'`."


def documents(path: Path, field: str) -> Iterator[str]:
    """Yield the documents of a file; of rows what stands in their `field`. Raises SpecError, with
    the line, for what is no such file."""
    if not has_rows(path):
        yield text_of(path)
        return
    yield from (_of_row(row, field, place) for place, row in rows(path, [field], []))


def text_of(path: Path) -> str:
    """Return what stands in a text. Raises SpecError for a file that is none."""
    try:
        return path.read_text(encoding=_UTF8)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def has_rows(path: Path) -> bool:
    """Return whether a file of this name holds rows, and is no text."""
    return path.suffix.lower() in (_PARQUET, *_LINES)


def rows(path: Path, fields: Sequence[str], others: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield the rows of a file of JSON lines or Parquet, with the place where each stands. Of a row
    of Parquet it is those of `fields`, one of which must be a column, and of `others`."""
    is_parquet = path.suffix.lower() == _PARQUET
    yield from _of_parquet(path, fields, others) if is_parquet else _of_lines(path)


def lacking(row: object, field: str, wanted: str) -> str:
    """Return what a row has whose field is not what is wanted."""
    finding = f"the field {field!r} must be a {wanted}"
    if not isinstance(row, dict):
        return f"{finding}; the row is {describe(row)}"
    if field in row:
        return f"{finding}; got {describe(row[field])}"
    return f"{finding}; the row has {', '.join(map(str, row)) or 'no field'}"


def require_encodable(text: str, place: str) -> None:
    r"""Raises SpecError for a text that there are no bytes for: half a character ("\ud83d" in JSON)
    has none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        finding = "the text contains half a surrogate pair, which has no UTF-8 form"
        raise refused(place, finding, "Correct the text.") from error


def _of_lines(path: Path) -> Iterator[tuple[str, object]]:
    try:
        with path.open(encoding=_UTF8) as lines:
            yield from (
                (f"{path}:{number}", _parsed(line, path, number))
                for number, line in enumerate(lines, 1)
                if line.strip()
            )
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _parsed(line: str, path: Path, number: int) -> object:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        is_list = number == 1 and line.lstrip().startswith("[")
        remedy = _OF_A_LIST if is_list else _OBJECTS
        raise refused(f"{path}:{number}", f"is not valid JSON: {error}", remedy) from error
    if isinstance(row, list):
        raise refused(f"{path}:{number}", "is a list; rows must be objects", _OF_A_LIST)
    return row


def _of_row(row: object, field: str, place: str) -> str:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        remedy = "Add `--field NAME`, the field of the text."
        if isinstance(row, dict) and not set(OF_CHATS).isdisjoint(row):
            remedy += " For chats, add `--chat`."
        raise refused(place, lacking(row, field, "string"), remedy)
    require_encodable(text, place)
    return text


def _of_parquet(
    path: Path, fields: Sequence[str], others: Sequence[str]
) -> Iterator[tuple[str, object]]:
    pyarrow = library("pyarrow.parquet", str(path), "reading Parquet needs pyarrow")
    number = 0
    with boundary(lambda error: _no_parquet(path, error)):
        file: Any = pyarrow.parquet.ParquetFile(path)
        columns = file.schema_arrow.names
    if set(fields).isdisjoint(columns):
        raise refused(
            str(path),
            f"the file has no column {fields[0]!r}; columns: {', '.join(columns)}",
            "Add `--field NAME`.",
        )
    batches = file.iter_batches(columns=[field for field in (*fields, *others) if field in columns])
    while True:
        with boundary(lambda error: _no_parquet(path, error)):
            batch = next(batches, None)
            values = [] if batch is None else batch.to_pylist()
        if batch is None:
            return
        for row in values:
            number += 1
            yield f"{path}, row {number}", row


def _no_parquet(path: Path, error: BaseException) -> Fault:
    return Fault(
        place=str(path), finding=f"is not a valid Parquet file: {error}", remedy="Use another file."
    )


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> PtrainError:
    if isinstance(error, UnicodeDecodeError):
        finding = f"is not UTF-8 text (byte {error.start})"
        is_packed = path.suffix.lower() in _PACKED
        return refused(
            str(path),
            finding,
            "Decompress the file." if is_packed else ("Convert the file to UTF-8."),
        )
    return refused(str(path), error.strerror or str(error), "Use a readable file.")


_BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOrigin:
    """What made the tokens of a file: the `tokenizer` as it was named, or bytes, and a digest of
    the words that its numbers mean."""

    tokenizer: str
    digest: str

    @property
    def is_of_bytes(self) -> bool:
        return self.digest == _BYTES

    @property
    def has_changed(self) -> bool:
        """Whether the tokenizer is gone, or gives other words to the same numbers now."""
        now = origin_of(Path(self.tokenizer))
        return now is None or now.digest != self.digest

    def differs(self, tokenizer: Path) -> bool:
        """Return whether a tokenizer.json is known to give other words to the same numbers."""
        other = origin_of(tokenizer)
        return other is not None and other.digest != self.digest


def origin_of(tokenizer: Path | None) -> TokenOrigin | None:
    """Return the origin of tokens that a tokenizer.json makes, or, of None, bytes; None of a file
    whose words cannot be read."""
    if tokenizer is None:
        return TokenOrigin(tokenizer=_BYTES, digest=_BYTES)
    try:
        digest = _digest(tokenizer, tokenizer.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return TokenOrigin(tokenizer=str(tokenizer), digest=digest)


def record_beside(path: Path) -> Path:
    """Return where the origin of a token file stands."""
    return path.with_suffix(".tokenizer.json")


def write_origin(path: Path, origin: TokenOrigin) -> None:
    record_beside(path).write_text(f"{json.dumps(encode(origin))}\n", encoding="utf-8")


def read_origin(path: Path) -> TokenOrigin | None:
    """Return the origin of a token file; None where nothing beside it says so."""
    try:
        plain = json.loads(record_beside(path).read_text(encoding="utf-8"))
        origin: TokenOrigin = decode(plain, TokenOrigin)
    except (OSError, ValueError):
        return None
    return origin


def require_tokenizer(name: str, origin: TokenOrigin | None, model: ModelSpec) -> None:
    """Raises SpecError where a model begins with a folder whose tokenizer gives other words to the
    numbers in the file of this name."""
    if origin is None or not isinstance(model, ModelShape) or model.pretrained is None:
        return
    own = Path(model.pretrained) / FILE
    if origin.differs(own):
        finding = f"{name} has tokens of {origin.tokenizer}, but the model has the tokenizer {own}"
        remedy = f"Run `ptrain tokenize TEXT... --tokenizer {model.pretrained}` to write it again. "
        remedy += f"If this is intended, remove {record_beside(Path(name))}."
        raise refused("data", finding, remedy)


def require_one_tokenizer(origins: Sequence[tuple[str, TokenOrigin | None]]) -> None:
    """Raises SpecError where two files, each with its name, are of tokenizers that give other words
    to the same numbers."""
    known = [(name, origin) for name, origin in origins if origin is not None]
    for name, origin in known[1:]:
        first, before = known[0]
        if origin.digest != before.digest:
            raise refused(
                "data.sources",
                f"{first} has tokens of {before.tokenizer}, but {name} has tokens of "
                f"{origin.tokenizer}",
                "Write all files with the same `ptrain tokenize --tokenizer FOLDER`.",
            )


@lru_cache(maxsize=4)
def _digest(tokenizer: Path, changed: int) -> str:
    """Return a digest of the words and their numbers, of a file that was `changed` then; how texts
    are split may differ."""
    words = sorted(_words(json.loads(tokenizer.read_text(encoding="utf-8"))).items())
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=8).hexdigest()


def _words(content: Any) -> dict[str, int]:
    """Return the number of each word: of models with probabilities its place in a list."""
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):
        vocab = {word: number for number, (word, _) in enumerate(vocab)}
    added = content.get("added_tokens") or ()
    return {**vocab, **{token["content"]: token["id"] for token in added}}


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
            raise refused(str(out), error.strerror or str(error), "Use another `--out`.") from error
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
    if (end := vocabulary.end) is None:
        raise refused(
            "--end",
            "the end-of-document token is unknown: tokenizer_config.json has no eos_token",
            "Add the token, such as `--end '</s>'`.",
        )
    dtype = token_dtype(vocabulary.size)

    def encoded(done: TokenizingProgress) -> Iterator[Encoded]:
        for batch, after in batches(texts, lambda path: documents(path, field), done):
            tokens = [_ended(ids, end) for ids in vocabulary.batch(batch)]
            added = np.concatenate([np.asarray(ids, dtype=dtype) for ids in tokens])
            number = done.tokens + len(added)
            done = replace(after, tokens=number, entries=number)
            yield (added,), done

    return TokenFiles(
        arrays={out: ((), dtype)},
        request=[*requested(texts, out, vocabulary.path), end, field],
        tokenizer=vocabulary.path,
    ).write(encoded, tell)


def _ended(tokens: list[int], end: int) -> list[int]:
    return tokens if tokens and tokens[-1] == end else [*tokens, end]


def token_dtype(size: int) -> DTypeLike:
    """Return what a token of a vocabulary of this size takes."""
    return np.uint16 if size <= _WORDS else np.uint32


def requested(texts: Sequence[Path], out: Path, tokenizer: Path | None) -> list[Any]:
    """Return what is known of texts and tokenizer before they are read. Raises SpecError for an
    `out` that is no name of a token file."""
    if out.suffix != _SUFFIX or out.is_dir():
        raise refused(
            "--out",
            f"{out} is not the name of a token file",
            f"Use a name that ends with {_SUFFIX}.",
        )
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
            done = replace(done, files=number, in_file=first, documents=done.documents + len(batch))
            yield batch, done
    if not done.documents:
        raise refused(str(texts[0]), "the files contain no documents", "Use files with text.")


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
