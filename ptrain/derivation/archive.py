"""The committed traces: one archive of tables, of which a prediction reads what it needs.

A member is named `part/name`: an ending would stand in the archive twice for each of them. It has
a line for each way of its table, the way's name and JSON: a prediction decodes a ninth of it.
`python -m ptrain.traces.write` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any
from zipimport import zipimporter  # of every interpreter; `zipfile` takes as long as ten tables

PATH = Path(__file__).with_name("traces.zip")
_WRITTEN = (1980, 1, 1, 0, 0, 0)  # every time, so that equal tables are equal bytes


class TablePart(StrEnum):
    """What tables are of."""

    PASSES = "passes"  # of a whole model and of its stages
    BLOCK = "block"  # by how its activations are kept, and what it computes
    LOSS = "loss"  # in chunks, and what is computed for it
    CONTEXT = "context"  # of a block over cp, and what it computes there
    KERNEL = "kernel"  # of attention, on GPUs


Table = dict[str, Any]


def table(part: TablePart, name: str) -> Table:
    """Return the table of this name, by way. Raises KeyError where there is none."""
    return {way: read(part, name, way) for way in _lines(part, name)}


@cache
def read(part: TablePart, name: str, way: str) -> Any:
    """Return one way of a table. Raises KeyError where there is none."""
    return json.loads(_lines(part, name)[way])


@cache
def _lines(part: TablePart, name: str) -> dict[str, str]:
    """Return the ways of a table as they are written. Raises KeyError where there is none."""
    try:
        text = zipimporter(str(PATH)).get_data(f"{part}/{name}").decode()
    except OSError:
        raise KeyError(name) from None
    return {way: content for way, _, content in (line.partition(" ") for line in text.splitlines())}


@cache
def names(part: TablePart) -> set[str]:
    """Return the names of all tables of a part."""
    return {name for of, name in _members() if of == part}


def tables() -> dict[tuple[TablePart, str], Table]:
    """Return all that there is."""
    return {(part, name): table(part, name) for part, name in _members()}


def write(tables: Mapping[tuple[TablePart, str], Table], path: Path = PATH) -> None:
    """Put these tables, and no others, into an archive: whole, or not at all."""
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
    new.replace(path)


def _members() -> list[tuple[TablePart, str]]:
    from zipfile import ZipFile

    with ZipFile(PATH) as archive:
        paths = [name.split("/") for name in archive.namelist()]
    return [(TablePart(part), name) for part, name in paths]
