"""Reads and writes the committed traces: an archive of tables, read member by member.

A member is named `part/name` without a file extension, because the archive stores each name twice.
A member has one line for each way of its table: the name of the way and its JSON. A prediction
therefore decodes only the ways it needs, about a ninth of a table. `python -m ptrain.traces.write`
writes the archive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any
from zipimport import zipimporter  # fast: to import `zipfile` takes as long as reading ten tables

PATH = Path(__file__).with_name("traces.zip")
_WRITTEN = (1980, 1, 1, 0, 0, 0)  # a constant timestamp, so that equal tables give equal bytes


class TablePart(StrEnum):
    """The kinds of tables in the archive."""

    PASSES = "passes"  # the passes of a full model and of its stages
    BLOCK = "block"  # a block's allocations by activation mode, and its operators
    LOSS = "loss"  # a loss in chunks, and its operators
    CONTEXT = "context"  # a block over cp, and its operators
    KERNEL = "kernel"  # attention kernels on GPUs


Table = dict[str, Any]


def read_table(part: TablePart, name: str) -> Table:
    """Return a full table by way.

    Args:
        part: The kind of table.
        name: The table's name in the archive.

    Returns:
        The decoded JSON of each way.

    Raises:
        KeyError: The archive has no table of this name.
    """
    return {way: read(part, name, way) for way in _lines(part, name)}


@cache
def read(part: TablePart, name: str, way: str) -> Any:
    """Return one way of a table.

    Args:
        part: The kind of table.
        name: The table's name in the archive.
        way: The line of the table, such as the sharding of operators (`Setting.way`).

    Returns:
        The decoded JSON. It is cached and shared, so do not change it.

    Raises:
        KeyError: The table or the way does not exist.
    """
    return json.loads(_lines(part, name)[way])


@cache
def _lines(part: TablePart, name: str) -> dict[str, str]:
    """Return the JSON text of a table by way. Raises KeyError if the table does not exist."""
    try:
        text = zipimporter(str(PATH)).get_data(f"{part}/{name}").decode()
    except OSError:
        raise KeyError(name) from None
    return {way: content for way, _, content in (line.partition(" ") for line in text.splitlines())}


@cache
def table_names(part: TablePart) -> set[str]:
    """Return the names of all tables of a part."""
    return {name for of, name in _list_members() if of == part}


def read_tables() -> dict[tuple[TablePart, str], Table]:
    """Return all tables of the archive by part and name."""
    return {(part, name): read_table(part, name) for part, name in _list_members()}


def write(tables: Mapping[tuple[TablePart, str], Table], path: Path = PATH) -> None:
    """Write these tables, and no others, to an archive.

    The new file replaces `path` only when it is complete.

    Args:
        tables: Each table's content by (part, name).
        path: The archive. Default: the committed archive.
    """
    from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

    new = path.with_suffix(".new")
    with ZipFile(new, "w") as archive:
        for (part, name), of_setting in sorted(tables.items()):
            lines = (
                f"{way} {json.dumps(content, separators=(',', ':'))}"
                for way, content in of_setting.items()
            )
            member = ZipInfo(f"{part}/{name}", date_time=_WRITTEN)
            archive.writestr(member, "\n".join(lines), ZIP_DEFLATED, compresslevel=9)
    # A reader may hold the archive open while tables are written. It never sees a part of a file.
    new.replace(path)


def _list_members() -> list[tuple[TablePart, str]]:
    from zipfile import ZipFile

    with ZipFile(PATH) as archive:
        paths = [name.split("/") for name in archive.namelist()]
    return [(TablePart(part), name) for part, name in paths]
