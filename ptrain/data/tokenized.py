"""Conversion of documents to a token file, in batches.

Memory holds one batch at a time, and an interrupted call continues after its last complete batch. A
text file is one document; JSON lines and Parquet have one document per row.

A record next to the token file names its tokenizer. The same ids mean different words with another
tokenizer, which the ids alone do not show.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from ptrain.codec import decode, encode
from ptrain.data.vocabulary import FILE, MOST_TOKENIZER, Vocabulary, vocabulary_digest
from ptrain.errors import Fault, PtrainError, input_error, library
from ptrain.models.boundary import convert_exceptions
from ptrain.spec.leaf import describe
from ptrain.spec.model import ModelShape, ModelSpec
from ptrain.spec.text import require_file

_UTF8 = "utf-8-sig"  # skips the byte order mark that some editors write
_PARQUET, _LINES = ".parquet", (".jsonl", ".ndjson", ".json")
OF_CHATS = ("messages", "conversations")  # fields with the messages of a chat, as tried in order
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
_MOST_TEXT = 2 * 2**30  # bytes of a document, which is held in memory
_MOST_LINE = 32 * 2**20  # characters of a row
_OBJECTS = "Use one JSON object per line."
_OF_A_LIST = f"{_OBJECTS} To convert a list, run `jq -c '.[]'`."


def read_documents(path: Path, field: str) -> Iterator[str]:
    """Yield the documents of a file: the text, or the field `field` of each row.

    Raises:
        SpecError: The file cannot be read, or a row lacks the field. The error names the line.
    """
    if not has_rows(path):
        yield read_text(path)
        return
    yield from (_document_text(row, field, place) for place, row in read_rows(path, [field], []))


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 text file. Raises SpecError if it cannot be read."""
    try:
        require_file(path, _MOST_TEXT)
        return path.read_text(encoding=_UTF8)
    except (OSError, UnicodeDecodeError) as error:
        raise _read_error(path, error) from error


def has_rows(path: Path) -> bool:
    """Return True if a file with this name holds rows (JSON lines or Parquet) instead of a text."""
    return path.suffix.lower() in (_PARQUET, *_LINES)


def read_rows(
    path: Path, fields: Sequence[str], others: Sequence[str]
) -> Iterator[tuple[str, object]]:
    """Yield the rows of a file of JSON lines or Parquet, each with its place for messages.

    Args:
        path: The file.
        fields: The columns of a Parquet file to read; at least one must exist. JSON lines are read
            in full.
        others: Optional columns to read.

    Raises:
        SpecError: The file cannot be read.
    """
    is_parquet = path.suffix.lower() == _PARQUET
    yield from _read_parquet(path, fields, others) if is_parquet else _read_lines(path)


def missing_field_finding(row: object, field: str, wanted: str) -> str:
    """Return the finding for a row whose field is missing or is no `wanted`."""
    finding = f"the field {field!r} must be a {wanted}"
    if not isinstance(row, dict):
        return f"{finding}; the row is {describe(row)}"
    if field in row:
        return f"{finding}; got {describe(row[field])}"
    return f"{finding}; the row has {', '.join(map(str, row)) or 'no field'}"


def require_encodable(text: str, place: str) -> None:
    """Raise SpecError if a text has no UTF-8 form.

    JSON can contain half of a surrogate pair (a high surrogate without a low one).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        finding = "the text contains half a surrogate pair, which has no UTF-8 form"
        raise input_error(place, finding, "Correct the text.") from error


def _read_lines(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the place and the row of each line that is not blank."""
    try:
        require_file(path)
        with path.open(encoding=_UTF8) as lines:
            # Not `for line in lines`, which reads a line of any length.
            for number, line in enumerate(iter(partial(lines.readline, _MOST_LINE), ""), 1):
                if len(line) == _MOST_LINE:
                    finding = f"the line has {_MOST_LINE} characters or more"
                    raise input_error(f"{path}:{number}", finding, _OBJECTS)
                if line.strip():
                    yield f"{path}:{number}", _parse_line(line, path, number)
    except (OSError, UnicodeDecodeError) as error:
        raise _read_error(path, error) from error


def _parse_line(line: str, path: Path, number: int) -> object:
    """Parse one line. Raises SpecError if it is invalid JSON or a list."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        is_list = number == 1 and line.lstrip().startswith("[")
        remedy = _OF_A_LIST if is_list else _OBJECTS
        raise input_error(f"{path}:{number}", f"is not valid JSON: {error}", remedy) from error
    if isinstance(row, list):
        raise input_error(f"{path}:{number}", "is a list; rows must be objects", _OF_A_LIST)
    return row


def _document_text(row: object, field: str, place: str) -> str:
    """Return the text of a row. Raises SpecError if the field holds no string."""
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        remedy = "Add `--field NAME`, the field of the text."
        if isinstance(row, dict) and not set(OF_CHATS).isdisjoint(row):
            remedy += " For chats, add `--chat`."
        raise input_error(place, missing_field_finding(row, field, "string"), remedy)
    require_encodable(text, place)
    return text


def _read_parquet(
    path: Path, fields: Sequence[str], others: Sequence[str]
) -> Iterator[tuple[str, object]]:
    """Yield the place and the row of each row of a Parquet file."""
    pyarrow = library("pyarrow.parquet", str(path), "reading Parquet needs pyarrow")
    number = 0
    with convert_exceptions(lambda error: _parquet_fault(path, error)):
        require_file(path)
        file: Any = pyarrow.parquet.ParquetFile(path)
        columns = file.schema_arrow.names
    if set(fields).isdisjoint(columns):
        raise input_error(
            str(path),
            f"the file has no column {fields[0]!r}; columns: {', '.join(columns)}",
            "Add `--field NAME`.",
        )
    batches = file.iter_batches(columns=[field for field in (*fields, *others) if field in columns])
    while True:
        with convert_exceptions(lambda error: _parquet_fault(path, error)):
            batch = next(batches, None)
            values = [] if batch is None else batch.to_pylist()
        if batch is None:
            return
        for row in values:
            number += 1
            yield f"{path}, row {number}", row


def _parquet_fault(path: Path, error: BaseException) -> Fault:
    """Return the fault of a file that pyarrow cannot read."""
    return Fault(
        place=str(path), finding=f"is not a valid Parquet file: {error}", remedy="Use another file."
    )


def _read_error(path: Path, error: OSError | UnicodeDecodeError) -> PtrainError:
    """Return the error of a file that cannot be read or is not UTF-8."""
    if isinstance(error, UnicodeDecodeError):
        finding = f"is not UTF-8 text (byte {error.start})"
        is_packed = path.suffix.lower() in _PACKED
        return input_error(
            str(path),
            finding,
            "Decompress the file." if is_packed else ("Convert the file to UTF-8."),
        )
    return input_error(str(path), error.strerror or str(error), "Use a readable file.")


_BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOrigin:
    """The tokenizer of a token file.

    Attributes:
        tokenizer: The tokenizer.json as it was named, or "bytes".
        digest: A digest of its words and ids, or "bytes".
    """

    tokenizer: str
    digest: str

    @property
    def is_of_bytes(self) -> bool:
        """True for the byte tokenizer."""
        return self.digest == _BYTES

    @property
    def has_changed(self) -> bool:
        """True if the tokenizer is missing or unreadable, or now maps other words to the ids."""
        now = tokenizer_origin(Path(self.tokenizer))
        return now is None or now.digest != self.digest

    def differs(self, tokenizer: Path) -> bool:
        """Return True if a readable tokenizer.json maps other words to the ids."""
        other = tokenizer_origin(tokenizer)
        return other is not None and other.digest != self.digest


def tokenizer_origin(tokenizer: Path | None) -> TokenOrigin | None:
    """Return the origin of the tokens of a tokenizer.json, None if it cannot be read.

    Args:
        tokenizer: The file. None: the byte tokenizer.
    """
    if tokenizer is None:
        return TokenOrigin(tokenizer=_BYTES, digest=_BYTES)
    try:
        digest = vocabulary_digest(tokenizer, tokenizer.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return TokenOrigin(tokenizer=str(tokenizer), digest=digest)


def origin_path(path: Path) -> Path:
    """Return the path of the record of a token file's origin."""
    return path.with_suffix(".tokenizer.json")


def write_origin(path: Path, origin: TokenOrigin) -> None:
    """Write the origin of a token file next to it."""
    origin_path(path).write_text(f"{json.dumps(encode(origin))}\n", encoding="utf-8")


def read_origin(path: Path) -> TokenOrigin | None:
    """Return the recorded origin of a token file, None without a readable record."""
    try:
        require_file(origin_path(path), MOST_TOKENIZER)
        plain = json.loads(origin_path(path).read_text(encoding="utf-8"))
        origin: TokenOrigin = decode(plain, TokenOrigin)
    except (OSError, ValueError):
        return None
    return origin


def require_tokenizer(name: str, origin: TokenOrigin | None, model: ModelSpec) -> None:
    """Raise SpecError if a token file and the pretrained model have different tokenizers.

    Args:
        name: The name of the token file.
        origin: Its origin. None: unknown, which passes.
        model: The model. Models without a pretrained folder pass.
    """
    if origin is None or not isinstance(model, ModelShape) or model.pretrained is None:
        return
    own = Path(model.pretrained) / FILE
    if origin.differs(own):
        finding = f"{name} has tokens of {origin.tokenizer}, but the model has the tokenizer {own}"
        remedy = f"Run `ptrain tokenize TEXT... --tokenizer {model.pretrained}` to write it again. "
        remedy += f"If this is intended, remove {origin_path(Path(name))}."
        raise input_error("data", finding, remedy)


def require_one_tokenizer(origins: Sequence[tuple[str, TokenOrigin | None]]) -> None:
    """Raise SpecError if two token files have different tokenizers.

    Args:
        origins: The name and origin of each file. Files with an unknown origin are skipped.
    """
    known = [(name, origin) for name, origin in origins if origin is not None]
    for name, origin in known[1:]:
        first, before = known[0]
        if origin.digest != before.digest:
            raise input_error(
                "data.sources",
                f"{first} has tokens of {before.tokenizer}, but {name} has tokens of "
                f"{origin.tokenizer}",
                "Write all files with the same `ptrain tokenize --tokenizer FOLDER`.",
            )


DOCUMENTS = 1024  # documents per batch
_WORDS = 2**16  # the largest vocabulary whose ids fit into uint16
_SUFFIX = ".npy"

Document = TypeVar("Document")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizingProgress:
    """The progress of a call.

    Attributes:
        files: Files that are done.
        in_file: Documents of the next file that are done.
        documents: Documents that are done.
        tokens: Tokens that were written.
        entries: Entries of the arrays.
        targets: Tokens of chats that are targets.
        cut: Chats that were truncated after an answer.
        unanswered: Chats that were left out because they have no answer.
        too_long: Chats that were left out because no answer fits into a row.
        divided: Chats that were left out because they contain the separator.
        separator: The token between two chats. None: not chosen yet.
    """

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
        """The number of chats that are in no row."""
        return self.unanswered + self.too_long + self.divided


Tell = Callable[[TokenizingProgress], None]
# The entries that a batch adds to each array, and the progress after it.
Encoded = tuple[Sequence[NDArray[Any]], TokenizingProgress]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFiles:
    """A group of arrays that are written together.

    Attributes:
        arrays: The shape of an entry and the dtype of each array. The first holds the tokens.
        request: The arguments of the call; an interrupted call continues only with equal ones.
        tokenizer: The tokenizer.json of the tokens. None: bytes.
    """

    arrays: Mapping[Path, tuple[tuple[int, ...], DTypeLike]]
    request: list[Any]
    tokenizer: Path | None

    def write(
        self, encoded: Callable[[TokenizingProgress], Iterator[Encoded]], tell: Tell
    ) -> TokenizingProgress:
        """Write all batches, continuing an interrupted call with an equal request.

        An unfinished call leaves files that end with `.part`. They are renamed at the end.

        Args:
            encoded: Yields the entries to add and the progress after them, from a given progress
                on.
            tell: Called with the progress, at the start and after each batch.

        Returns:
            The final progress.

        Raises:
            SpecError: A document is unusable, or a file cannot be written.
        """
        out = next(iter(self.arrays))
        notes = _append_suffix(out, ".part.json")
        parts = [_append_suffix(path, ".part") for path in self.arrays]
        try:
            done = self._resume_point(notes, parts)
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
            origin_path(out).unlink(missing_ok=True)  # of an earlier file with this name
            for part, path in zip(parts, self.arrays, strict=True):
                os.replace(part, path)
            if origin := tokenizer_origin(self.tokenizer):
                write_origin(out, origin)
        except OSError as error:
            raise input_error(
                str(out), error.strerror or str(error), "Use another `--out`."
            ) from error
        except PtrainError:  # the texts will be corrected, so this call cannot be continued
            for path in (*parts, notes):
                path.unlink(missing_ok=True)
            raise
        notes.unlink(missing_ok=True)
        return done

    def _resume_point(self, notes: Path, parts: Sequence[Path]) -> TokenizingProgress:
        """Return the progress of an interrupted call with an equal request; zero without one."""
        try:
            content = json.loads(notes.read_text(encoding="utf-8"))
            done = decode(
                content["done"] if content["request"] == self.request else {}, TokenizingProgress
            )
            sizes = [part.stat().st_size for part in parts]
        except (OSError, ValueError, KeyError, TypeError):  # missing, or incomplete
            return TokenizingProgress()
        whole = [done.entries * _entry_bytes(*form) for form in self.arrays.values()]
        is_there = all(size >= least for size, least in zip(sizes, whole, strict=True))
        return done if is_there else TokenizingProgress()


def tokenize(
    texts: Sequence[Path], out: Path, vocabulary: Vocabulary, *, field: str, tell: Tell
) -> TokenizingProgress:
    """Write the tokens of all documents to `out`, with the end token after each document.

    Args:
        texts: The files of documents.
        out: The token file to write.
        vocabulary: The tokenizer.
        field: The field of the text, for files of rows.
        tell: Called with the progress, at the start and after each batch.

    Returns:
        The final progress.

    Raises:
        SpecError: A file cannot be read or written, or the tokenizer has no known end token.
    """
    if (end := vocabulary.end) is None:
        raise input_error(
            "--end",
            "the end-of-document token is unknown: tokenizer_config.json has no eos_token",
            "Add the token, such as `--end '</s>'`.",
        )
    dtype = token_dtype(vocabulary.size)

    def encoded(done: TokenizingProgress) -> Iterator[Encoded]:
        for batch, after in batch_documents(texts, lambda path: read_documents(path, field), done):
            tokens = [_append_end(ids, end) for ids in vocabulary.batch(batch)]
            added = np.concatenate([np.asarray(ids, dtype=dtype) for ids in tokens])
            number = done.tokens + len(added)
            done = replace(after, tokens=number, entries=number)
            yield (added,), done

    return TokenFiles(
        arrays={out: ((), dtype)},
        request=[*request_identity(texts, out, vocabulary.path), end, field],
        tokenizer=vocabulary.path,
    ).write(encoded, tell)


def _append_end(tokens: list[int], end: int) -> list[int]:
    """Append the end token, unless the tokenizer added it."""
    return tokens if tokens and tokens[-1] == end else [*tokens, end]


def token_dtype(size: int) -> DTypeLike:
    """Return the smallest supported dtype for a vocabulary of this size."""
    return np.uint16 if size <= _WORDS else np.uint32


def request_identity(texts: Sequence[Path], out: Path, tokenizer: Path | None) -> list[Any]:
    """Return the identity of the input files: names, sizes and modification times.

    Raises:
        SpecError: `out` is not the name of a token file.
    """
    if out.suffix != _SUFFIX or out.is_dir():
        raise input_error(
            "--out",
            f"{out} is not the name of a token file",
            f"Use a name that ends with {_SUFFIX}.",
        )
    files = [*texts, *([] if tokenizer is None else [tokenizer])]
    there = [(file, file.stat() if file.exists() else None) for file in files]
    return [[str(text), *([s.st_size, s.st_mtime_ns] if s else [])] for text, s in there]


def batch_documents(
    texts: Sequence[Path],
    read: Callable[[Path], Iterable[Document]],
    done: TokenizingProgress,
) -> Iterator[tuple[list[Document], TokenizingProgress]]:
    """Yield batches of documents, each with the progress after it.

    The progress counts files and documents; the caller adds tokens and entries.

    Args:
        texts: The files.
        read: Returns the documents of a file.
        done: The progress to continue from.

    Raises:
        SpecError: The files contain no documents.
    """
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
        raise input_error(str(texts[0]), "the files contain no documents", "Use files with text.")


class GrowingArray:
    """A `.npy` file that grows by entries of one shape.

    Its header is valid after each call: numpy pads headers so that the first dimension can grow in
    place.
    """

    def __init__(self, file: BinaryIO, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self._file, self._shape, self._dtype = file, shape, np.dtype(dtype)
        self._entries = 0

    def begin(self, entries: int) -> None:
        """Truncate the file to this number of entries, and continue after them."""
        self._entries = entries
        self._write_header()
        # An interrupted call may have written entries after the last progress that it noted.
        size = entries * _entry_bytes(self._shape, self._dtype)
        self._file.truncate(self._file.tell() + size)
        self._file.seek(0, os.SEEK_END)

    def add(self, entries: NDArray[Any]) -> None:
        """Append entries."""
        self._file.write(entries.astype(self._dtype, copy=False).tobytes())
        self._entries += len(entries)
        self._write_header()
        self._file.seek(0, os.SEEK_END)

    def _write_header(self) -> None:
        """Write the header with the current number of entries.

        `numpy.lib.format` reserves space in version 1.0 headers for a first dimension of any size.
        """
        self._file.seek(0)
        content = {
            "descr": npy.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._entries, *self._shape),
        }
        npy.write_array_header_1_0(self._file, content)  # the same length each time
        self._file.flush()


def _entry_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Return the bytes of one entry."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def _append_suffix(path: Path, ending: str) -> Path:
    """Return a path with an ending appended to its name."""
    return path.with_name(f"{path.name}{ending}")


def _write_notes(notes: Path, content: Mapping[str, Any]) -> None:
    """Write the notes in one move: a process that is killed here leaves the previous ones."""
    unfinished = _append_suffix(notes, ".new")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    os.replace(unfinished, notes)
