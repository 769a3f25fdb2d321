"""Documents in files: of a text one, of JSON lines and of Parquet one a row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ptrain.errors import Fault, PtrainError, refused
from ptrain.models.boundary import boundary


def documents(path: Path, field: str) -> Iterator[str]:
    """Yield the documents of a file; of rows what stands in their `field`. Raises SpecError, with
    the line, for what is no such file."""
    match path.suffix.lower():
        case ".parquet":
            yield from _of_parquet(path, field)
        case ".jsonl" | ".ndjson" | ".json":
            yield from _of_lines(path, field)
        case _:
            yield _text(path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _of_lines(path: Path, field: str) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _of_row(_parsed(line, path, number), field, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _parsed(line: str, path: Path, number: int) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        finding = f"is no JSON: {error}"
        raise refused(f"{path}:{number}", finding, "give a JSON object on every line") from error


def _of_row(row: object, field: str, place: str) -> str:
    text = row.get(field) if isinstance(row, dict) else None
    if isinstance(text, str):
        return text
    has = f"it has {', '.join(map(str, row))}" if isinstance(row, dict) and row else "it is none"
    remedy = "name the field that has the text: --field NAME"
    raise refused(place, f"there is no text in the field {field!r}; {has}", remedy)


def _of_parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        finding = "Parquet is read by pyarrow, which is not installed"
        raise refused(str(path), finding, "pip install pyarrow") from error
    with boundary(lambda error: _no_parquet(path, error)):
        file: Any = parquet.ParquetFile(path)
        columns = file.schema_arrow.names
    if field not in columns:
        finding = f"there is no column {field!r}; it has {', '.join(columns)}"
        raise refused(str(path), finding, "name the one that has the text: --field NAME")
    row = 0
    for batch in file.iter_batches(columns=[field]):
        for text in batch.column(0).to_pylist():
            row += 1
            yield _of_row({field: text}, field, f"{path}, row {row}")


def _no_parquet(path: Path, error: BaseException) -> Fault:
    return Fault(place=str(path), finding=f"is no Parquet file: {error}", remedy="give another")


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> PtrainError:
    if isinstance(error, UnicodeDecodeError):
        finding = f"is not UTF-8 text (byte {error.start})"
        return refused(str(path), finding, "convert it to UTF-8")
    return refused(str(path), error.strerror or str(error), "give a file that can be read")
