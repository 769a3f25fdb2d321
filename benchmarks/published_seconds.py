"""Predicted seconds of a step beside what others published of theirs, row by row."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import yaml
from _script import Script, table_head, table_row
from _steps import spearman

from ptrain.derivation.estimate import derive
from ptrain.errors import PtrainError
from ptrain.spec.load import load

RANKED = 0.9
SCRIPT = Script("published_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published step. `tokens` per second and GPU; `words` load the spec that is predicted."""

    family: str
    name: str
    kind: str  # eager, or how it ran otherwise
    tokens: float
    words: tuple[str, ...]
    source: str


def published() -> Iterator[Row]:
    """Yield the rows of published_steps.yaml."""
    file = Path(__file__).with_name("published_steps.yaml")
    for family in yaml.safe_load(file.read_text(encoding="utf-8")):
        for row in family["rows"]:
            yield Row(
                family=family["family"],
                name=row["name"],
                kind=row["kind"],
                tokens=row["tokens"],
                words=(*family["words"], *row["words"]),
                source=family["source"],
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A row with the tokens per second and GPU that are predicted; None with why not."""

    row: Row
    tokens: float | None
    why: str = ""

    @property
    def off(self) -> float:
        """Of the seconds of a step, which is what is predicted."""
        assert self.tokens is not None
        return self.row.tokens / self.tokens - 1


def judged(row: Row) -> Judged:
    """Predict a row."""
    try:
        spec = load(row.words[0], row.words[1:]).spec
        exact = derive(spec).exact
    except PtrainError as error:  # a row that cannot be said is one of the page's rows
        return Judged(row=row, tokens=None, why=str(error).splitlines()[0])
    if exact.step is None:
        return Judged(row=row, tokens=None, why=exact.undefined.get("step_seconds", "unknown"))
    tokens = spec.batch.global_samples * spec.batch.sequence
    return Judged(row=row, tokens=tokens / exact.step.seconds / spec.world_size)


def table(rows: Sequence[Judged]) -> Iterator[str]:
    """Yield the lines of every row, by family."""
    for family, group in groupby(rows, lambda judgement: judgement.row.family):
        of_family = list(group)
        yield from ("", f"## {family} ({of_family[0].row.source})", "")
        yield from table_head("row", "ran", "published tok/s/GPU", "predicted", "seconds off")
        for judgement in of_family:
            row = judgement.row
            cells = [row.name, row.kind, f"{row.tokens:,.0f}"]
            if judgement.tokens is None:
                cells += ["–", judgement.why]
            else:
                cells += [f"{judgement.tokens:,.0f}", f"{judgement.off:+.1%}"]
            yield table_row(*cells)


def correlation(rows: Sequence[Judged]) -> float:
    """Return Spearman's rank correlation of published and predicted tokens."""
    published = [judgement.row.tokens for judgement in rows]
    return spearman(published, [judgement.tokens or 0.0 for judgement in rows])


def alike(rows: Sequence[Judged]) -> dict[tuple[str, str], list[Judged]]:
    """Return the rows of each family that ran alike."""
    groups: dict[tuple[str, str], list[Judged]] = {}
    for row in rows:
        groups.setdefault((row.row.family, row.row.kind), []).append(row)
    return groups


def verdict(rows: Sequence[Judged]) -> tuple[list[str], list[str]]:
    """Return the lines of the summary, and what of the claim fails."""
    eager = [row for row in rows if row.row.kind == "eager" and row.tokens is not None]
    median = statistics.median(abs(row.off) for row in eager)
    lines = [
        "",
        f"Eager rows: {len(eager)}, median of |seconds off| {median:.1%}; beside it vTrain 8.4 %, "
        "Calculon 3.7 %, SimAI 1.9 %.",
    ]
    failed = [f"{row.row.name}: not predicted: {row.why}" for row in rows if row.tokens is None]
    names = ("family", "ran", "rows", "median of seconds off", "rank correlation")
    lines += ["", *table_head(*names)]
    for (family, kind), group in alike(rows).items():
        known = [row for row in group if row.tokens is not None]
        if not known:
            continue
        middle = statistics.median(row.off for row in known)
        ranked = correlation(known) if len(known) > 2 else None
        shown = "–" if ranked is None else f"{ranked:.3f}"
        lines.append(table_row(family, kind, len(known), f"{middle:+.1%}", shown))
        if ranked is not None and ranked < RANKED:
            failed.append(f"{family}, {kind}: the order's rank correlation is {ranked:.3f}")
    return lines, failed


def main(arguments: Sequence[str]) -> int:
    parser = SCRIPT.parser()
    options = parser.parse_args(arguments)
    head = SCRIPT.head()
    rows = [judged(row) for row in published()]
    lines, failed = verdict(rows)
    return SCRIPT.conclude([*head, *table(rows), *lines], failed, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
