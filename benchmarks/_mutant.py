"""A mutant: one change of one file. Only the standard library."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file."""

    file: str  # from the root of the repository
    number: int  # among the file's mutants
    function: str  # the outermost function, as `Class.method`; empty outside of functions
    line: int
    statement: tuple[int, int]  # first and last line of the statement; of a block, of its head
    operator: str
    before: str
    after: str
    source: str  # of the whole file with the change

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}#{self.number}"


def is_sound(mutant: Mutant) -> bool:
    """Return True if the mutant parses."""
    try:
        ast.parse(mutant.source)
    except SyntaxError:
        return False
    return True


def changed_lines(root: Path, mutant: Mutant) -> tuple[str, str]:
    """Return the removed and the added lines of the change."""
    old = (root / mutant.file).read_text(encoding="utf-8").splitlines()
    lines = list(difflib.ndiff(old, mutant.source.splitlines()))
    out, put = ([line[2:].strip() for line in lines if line[:2] == sign] for sign in ("- ", "+ "))
    return " ".join(out), " ".join(put)
