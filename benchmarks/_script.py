"""Shared parts of the benchmarks: texts from scripts.yaml, command line, page and exit code."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from _machine import conclude, header, this_command

_TEXTS = yaml.safe_load(Path(__file__).with_name("scripts.yaml").read_text(encoding="utf-8"))


def table(columns: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """Return a table in Markdown; an empty cell becomes a dash."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell or '–' for cell in line)} |\n" for line in lines)


class Script:
    """A benchmark: its name, which begins the names of its pages, and the figures in its texts."""

    def __init__(self, name: str, **figures: object) -> None:
        self.name, self.figures, self.texts = name, figures, _TEXTS[name]

    def text(self, key: str, **more: object) -> str:
        return str(self.texts.get(key, "")).format(**self.figures, **more).strip()

    def parser(self, *, has_page: bool = True) -> argparse.ArgumentParser:
        """Return its command line, whose help is what it does and claims."""
        claim = f"\n\nClaim: {self.text('claim')}" if "claim" in self.texts else ""
        parser = argparse.ArgumentParser(
            description=self.text("about") + claim,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if has_page:
            parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
        return parser

    def head(self, title: str = "", **more: object) -> list[str]:
        """Return the lines that begin a page: title, machine, claim. Called before a measurement,
        as the machine's load is in it."""
        title = title or self.text("title", **more)
        claim = ["Claim: " + self.text("claim"), ""] if "claim" in self.texts else []
        return [header(f"{self.name}: {title}", this_command()), *claim]

    def method(self, **more: object) -> list[str]:
        """Return the lines that say how it was measured."""
        return [self.text("method", **more), ""]

    def conclude(
        self,
        lines: Sequence[str],
        failed: Sequence[str],
        options: argparse.Namespace,
        not_covered: str = "",
        *,
        unproven: Sequence[str] = (),
    ) -> int:
        """Print the page with its verdict, save it where `options` say so; the exit code."""
        parts = (self.text("not_covered"), not_covered)
        return conclude(
            self.name,
            lines,
            failed=failed,
            not_covered="; ".join(part for part in parts if part) + ".",
            is_saved=options.save,
            unproven=unproven,
        )


def table_row(*cells: object) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def table_head(*names: object) -> Iterator[str]:
    """Yield the head of a table in Markdown."""
    yield table_row(*names)
    yield "|" + "---|" * len(names)
