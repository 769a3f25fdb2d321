"""Documents in files: of a text one, of JSON lines and of Parquet one a row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ptrain.errors import Fault, PtrainError, refused
from ptrain.models.boundary import boundary
from ptrain.spec.leaf import describe

_UTF8 = "utf-8-sig"  # the mark that some editors put before a text is no part of it
_PARQUET, _LINES = ".parquet", (".jsonl", ".ndjson", ".json")
OF_CHATS = ("messages", "conversations")  # fields that have the messages of a chat
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
_OBJECTS = "give a JSON object on every line"
_OF_A_LIST = f"{_OBJECTS}, as jq -c '.[]' makes them of a list"


def documents(path: Path, field: str) -> Iterator[str]:
    """Yield the documents of a file; of rows what stands in their `field`. Raises SpecError, with
    the line, for what is no such file."""
    if not has_rows(path):
        yield text_of(path)
        return
    for place, row in rows(path, [field], []):
        yield _of_row(row, field, place)


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
    finding = f"there is no {wanted} in the field {field!r}"
    if not isinstance(row, dict):
        return f"{finding}: the row is {describe(row)}"
    if field in row:
        return f"{finding}, but {describe(row[field])}"
    return f"{finding}; the row has {', '.join(map(str, row)) or 'no field'}"


def is_encodable(text: str) -> bool:
    r"""Return whether there are bytes for a text: half a character ("\ud83d" in JSON) has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _of_lines(path: Path) -> Iterator[tuple[str, object]]:
    try:
        with path.open(encoding=_UTF8) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", _parsed(line, path, number)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _parsed(line: str, path: Path, number: int) -> object:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        is_list = number == 1 and line.lstrip().startswith("[")
        remedy = _OF_A_LIST if is_list else _OBJECTS
        raise refused(f"{path}:{number}", f"is no JSON: {error}", remedy) from error
    if isinstance(row, list):
        raise refused(f"{path}:{number}", "is a list, and rows are objects", _OF_A_LIST)
    return row


def _of_row(row: object, field: str, place: str) -> str:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        remedy = "name the field that has the text: --field NAME"
        if isinstance(row, dict) and not set(OF_CHATS).isdisjoint(row):
            remedy += ", or, of chats, write --chat"
        raise refused(place, lacking(row, field, "text"), remedy)
    if not is_encodable(text):
        raise refused(place, "the text has half a character, which UTF-8 has not", "mend it")
    return text


def _of_parquet(
    path: Path, fields: Sequence[str], others: Sequence[str]
) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        finding = "Parquet is read by pyarrow, which is not installed"
        raise refused(str(path), finding, "pip install pyarrow") from error
    number = 0
    with boundary(lambda error: _no_parquet(path, error)):
        file: Any = parquet.ParquetFile(path)
        columns = file.schema_arrow.names
    if set(fields).isdisjoint(columns):
        finding = f"there is no column {fields[0]!r}; it has {', '.join(columns)}"
        raise refused(str(path), finding, "name the one that is meant: --field NAME")
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
    finding = f"is no sound Parquet file: {error}"
    return Fault(place=str(path), finding=finding, remedy="give another")


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> PtrainError:
    if isinstance(error, UnicodeDecodeError):
        finding = f"is not UTF-8 text (byte {error.start})"
        is_packed = path.suffix.lower() in _PACKED
        return refused(str(path), finding, "unpack it" if is_packed else "convert it to UTF-8")
    return refused(str(path), error.strerror or str(error), "give a file that can be read")
