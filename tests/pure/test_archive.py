"""The archive of committed traces: small, and equal tables are equal bytes."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart

MOST_BYTES = 420_000
TABLES = {(TablePart.PASSES, "b"): {"sizes": [[1, 2]]}, (TablePart.LOSS, "a"): {"torch": "2.13.0"}}


def test_the_archive_is_small() -> None:
    assert archive.PATH.stat().st_size <= MOST_BYTES


def test_there_are_tables_of_every_part() -> None:
    assert all(archive.table_names(part) for part in TablePart)
    assert len(archive.read_tables()) == sum(len(archive.table_names(part)) for part in TablePart)


def test_traces_are_read_in_any_order(tmp_path: Path, monkeypatch) -> None:
    one, other = tmp_path / "one.zip", tmp_path / "other.zip"
    archive.write(TABLES, one)
    archive.write(dict(reversed(TABLES.items())), other)
    assert one.read_bytes() == other.read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".new"] == []
    monkeypatch.setattr(archive, "PATH", one)
    monkeypatch.setattr(archive, "read", archive.read.__wrapped__)
    monkeypatch.setattr(archive, "_lines", archive._lines.__wrapped__)
    assert archive.read_tables() == TABLES


def test_the_same_tables_are_the_same_members_in_the_same_order(tmp_path: Path) -> None:
    """Another zlib version may compress them differently, and reads the same tables."""
    archive.write(archive.read_tables(), tmp_path / "again.zip")
    with zipfile.ZipFile(tmp_path / "again.zip") as again, zipfile.ZipFile(archive.PATH) as stored:
        assert again.namelist() == stored.namelist()
        assert all(again.read(name) == stored.read(name) for name in stored.namelist())


def test_a_table_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        archive.read_table(TablePart.PASSES, "llama-of-nothing")
