"""The table of all keys of a spec, as its grammar declares them."""

from __future__ import annotations

from collections.abc import Sequence

from _tables import table

from ptrain.spec.reference import KeyRow, reference


def keys() -> str:
    """Every key of a spec by its dotted name: what it takes, its default, and what it means."""
    return table(["key", "takes", "default", "meaning"], map(_row, reference()))


def _row(row: KeyRow) -> Sequence[str]:
    return f"`{row.place}`", _text(row.takes), _text(row.default), _text(row.about)


def _text(text: str) -> str:
    """Without what Markdown would take for marks of its own."""
    return text.replace("|", r"\|").replace("*", r"\*")


TABLES = {"keys": keys}
