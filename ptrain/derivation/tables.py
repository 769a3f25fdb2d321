"""The committed tables at a setting's dimensions: sizes in bytes, and events with these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart
from ptrain.derivation.monomials import Monomial, evaluated, merged, monomials
from ptrain.derivation.setting import Setting


@dataclass(frozen=True, slots=True)
class EvaluatedTable:
    """A table and the bytes of each of its sizes."""

    content: Mapping[str, Any]
    sizes: tuple[int, ...]

    def events(self, part: int) -> list[Any]:
        """Return the events of the part with this number."""
        return list(merged(self.content["parts"][part], self.sizes))


def content(part: TablePart, setting: Setting) -> archive.Table:
    """Return a setting's table as it is written. Raises KeyError where there is none."""
    table: archive.Table = archive.table(part, setting.name(part))[setting.way(part)]
    return table


def sizes(part: TablePart, setting: Setting) -> tuple[Monomial, ...]:
    """Return the sizes of a setting's table, as they are written."""
    return _sizes(part, setting.name(part), setting.way(part))


@cache
def _sizes(part: TablePart, name: str, way: str) -> tuple[Monomial, ...]:
    return monomials(archive.table(part, name)[way])


def table(
    part: TablePart, setting: Setting, values: Mapping[str, int] | None = None
) -> EvaluatedTable:
    """Return a setting's table at its dimensions, or at other `values`. Raises KeyError where there
    is none."""
    return EvaluatedTable(
        content(part, setting),
        evaluated(
            sizes(part, setting),
            setting.values if values is None else values,
            setting.compute.itemsize,
            setting.statistics,
        ),
    )
