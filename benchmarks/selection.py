"""`ptrain select`: how long a search takes, whether its estimates order as `exact` does, and if
a neighbour or an exhaustive search finds something better.

The file has another name than the command: Python's own `select` is imported by that.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from unittest import mock

from _machine import commit
from _script import Script, table_head, table_row
from _steps import spearman
from start_up import seconds as process_seconds

from ptrain.selection import choose
from ptrain.selection import search as searching
from ptrain.selection.choose import Chooser, neighbours
from ptrain.selection.job import searched_job
from ptrain.selection.ranking import SLACK, TIME_SLACK, Ranked, Scored

RHO, NEAR = 0.98, 1e-3
_LONG = ("batch.sequence=8192", "batch.global=2048")
_WIDE = ("cluster.devices=4096", *_LONG)


@dataclass(frozen=True)
class Case:
    """A job, and the limit of its process's CPU seconds."""

    model: str
    cluster: str
    devices: int
    words: tuple[str, ...] = ()
    process: float = float("inf")
    where: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model} on {self.devices}"

    def chooser(self) -> Chooser:
        job = searched_job(
            self.model, self.words, cluster=self.cluster, devices=self.devices, where=self.where
        )
        return Chooser(job)

    @cached_property
    def searched(self) -> tuple[Chooser, Ranked]:
        """Return the search and its best, without the comparison with well-known choices."""
        with mock.patch.object(choose, "KNOWN", {}):
            best = (chooser := self.chooser()).choose().best
        assert best is not None and best.seconds is not None, "a job that fits, and has rates"
        return chooser, best

    @property
    def command(self) -> list[str]:
        """Return the command of the timed process."""
        words = [self.model, *self.words, "--cluster", self.cluster, "--devices", str(self.devices)]
        return [sys.executable, "-m", "ptrain", "select", *words, "--json"]


_SMALL = ("batch.sequence=1024", "batch.global=16")
CASES = {
    "64": Case("llama3-70b", "h100-64", 64, _LONG, process=10),
    "4096": Case("llama3-70b", "h100-1024", 4096, _WIDE, process=25),
    "405b": Case("llama3-405b", "h100-1024", 4096, _WIDE, process=25),
    "8": Case("llama3-8b", "h100-8", 8),
    "experts": Case("mixtral-8x7b", "h100-64", 64, process=10),
    "data": Case(
        "gpt3-125m", "h100-8", 2, _SMALL, where=("micro>=4", "pp==1", "cp==1", "recompute=none")
    ),
    "stages": Case(
        "gpt3-125m",
        "h100-8",
        4,
        _SMALL,
        where=("micro==2", "pp==2", "tp==1", "cp==1", "dp_replicate=2", "recompute=none"),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The output of a part, and its failures."""

    lines: list[str]
    failed: list[str]


def of_time(case: Case) -> Outcome:
    """Return the row of a case's process."""
    cpu, wall = process_seconds(case.command)
    failed = []
    if cpu > case.process:
        failed.append(f"{case.name}: {cpu:.1f} s of CPU, at most {case.process} s")
    most = f"{case.process:g}" if case.process < float("inf") else "–"
    return Outcome([table_row(case.name, f"{cpu:.1f}", most, f"{wall:.0f}")], failed)


def of_neighbours(case: Case) -> Outcome:
    """Return the row of the candidates around a case's best."""
    chooser, best = case.searched
    assert best.seconds is not None, "a job with rates"
    chooser.search.run(chooser.job.where)
    around = list(neighbours(chooser.search, best.closed.candidate))
    rows = [chooser.exactly(chooser.search.score(candidate)) for candidate in around]
    others = [row.seconds for row in rows if row and row.memory.fits and row.seconds]
    gain = best.seconds / min(others, default=best.seconds) - 1
    failed = [f"{case.name}: a neighbour is {gain:.2%} faster"] if gain > NEAR else []
    placed = " ".join(f"{f.axis}={f.degree} ({f.placement})" for f in best.spec.factors)
    cells = case.name, f"{best.seconds:.5g}", placed, len(others), f"{gain:+.3%}"
    return Outcome([table_row(*cells)], failed)


def drawn(chooser: Chooser, number: int, seed: int) -> Iterator[Ranked]:
    """Yield so many candidates that fit and whose time is known, from each schedule, number of
    stages and way to keep activations alike."""
    draw, search = random.Random(seed), chooser.search
    pools: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for block in search.blocks():
        rows = [row for row in block.rows if block.peak(row) <= search.job.room]
        if rows:
            kind = block.flow.schedule, block.flow.per_rank, block.kept
            pools[kind].append(block.scored(draw.choice(rows)))
    for pool in pools.values():
        draw.shuffle(pool)
    while number and any(pools.values()):
        for pool in pools.values():
            row = chooser.exactly(pool.pop()) if pool and number else None
            if row is not None and row.seconds is not None:
                yield row
                number -= 1


def of_order(case: Case, number: int) -> Outcome:
    """Return the row of a case's correlations over random candidates."""
    rows = list(drawn(case.chooser(), number, seed=1))
    times = [(row.closed.seconds, row.seconds or 0.0) for row in rows]
    peaks = [(row.closed.peak, float(row.peak_bytes)) for row in rows]
    cells, failed = [], []
    for what, pairs, slack in (("time", times, TIME_SLACK), ("peak", peaks, SLACK)):
        rho = spearman(*zip(*pairs, strict=True))
        apart = sorted(estimate / exact - 1 for estimate, exact in pairs)
        median = sorted(map(abs, apart))[len(apart) // 2]
        cells += [f"{rho:.4f}", f"{median:.1%}", f"{apart[0]:+.1%}", f"{apart[-1]:+.1%}"]
        if what == "time" and rho < RHO:
            failed.append(f"{case.name}: ρ of {what} {rho:.4f}, at least {RHO}")
        if apart[-1] > slack - 1:
            failed.append(f"{case.name}: a {what} {apart[-1]:.1%} above, at most {slack - 1:.0%}")
    return Outcome([table_row(case.name, len(rows), *cells)], failed)


def exhaustive(case: Case) -> Outcome:
    """Derive every candidate of a small case, with every unit and overlap."""
    _, best = case.searched
    chooser, seconds = case.chooser(), []
    assert best.seconds is not None, "a job with rates"
    with mock.patch.object(searching, "representatives", list):
        for block in chooser.search.blocks():
            for row in map(chooser.exactly, map(block.scored, block.rows)):
                if row is not None and row.memory.fits and row.seconds is not None:
                    seconds.append(row.seconds)
    gain = best.seconds / min(seconds) - 1
    failed = [f"{case.name}: a candidate is {gain:.2%} faster"] if gain > NEAR else []
    cells = case.name, len(seconds), f"{min(seconds):.6g}", f"{best.seconds:.6g}", f"{gain:+.3%}"
    return Outcome([table_row(*cells)], failed)


_APART = ("apart", "below", "above")
_COLUMNS = {
    "time": ("job", "CPU s", "at most", "wall s"),
    "neighbours": ("job", "best, s", "placement", "neighbours", "gain"),
    "order": ("job", "drawn", "ρ time", *_APART, "ρ peak", *_APART),
    "exhaustive": ("job", "derived", "fastest, s", "search's best, s", "gain"),
}
_OF_PART = {
    "time": ("64", "4096", "405b", "8", "experts"),
    "neighbours": ("64", "4096", "405b", "8", "data", "stages"),
    "order": ("64", "8"),
    "exhaustive": ("data", "stages"),
}
SCRIPT = Script("selection", of_peaks=f"{SLACK - 1:.0%}", of_seconds=f"{TIME_SLACK - 1:.0%}")


def page(known: dict[str, dict[str, list[str]]]) -> list[str]:
    """Return the lines of all available parts in their order."""
    commits = sorted({line for rows in known.values() for line in rows["commit"]})
    lines = SCRIPT.head()
    if commits != [commit()]:
        lines += [f"Rows of commit {', '.join(commits)}.", ""]
    for part, words in _OF_PART.items():
        keys = [f"{part} {word}" for word in words]
        rows = [line for key in keys if key in known for line in known[key]["lines"]]
        if rows:
            lines += [SCRIPT.text(part), "", *table_head(*_COLUMNS[part]), *rows, ""]
    return lines


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--drawn", type=int, default=300, help="candidates of a correlation")
    parser.add_argument("--part", choices=_COLUMNS, help="this part only")
    parser.add_argument("--case", choices=CASES, help="this case only")
    parser.add_argument("--into", type=Path, metavar="FILE", help="add what is measured to a file")
    parser.add_argument("--from", dest="known", type=Path, metavar="FILE", help="measure nothing")
    args = parser.parse_args()

    measures: dict[str, Callable[[Case], Outcome]] = {
        "time": of_time,
        "neighbours": of_neighbours,
        "order": partial(of_order, number=args.drawn),
        "exhaustive": exhaustive,
    }
    source = args.known or args.into
    known = json.loads(source.read_text()) if source and source.exists() else {}
    every = [(part, word) for part, words in _OF_PART.items() for word in words]
    for part, word in () if args.known else every:
        if args.part in (None, part) and args.case in (None, word):
            outcome = measures[part](CASES[word])
            own = {"lines": outcome.lines, "failed": outcome.failed, "commit": [commit()]}
            known[f"{part} {word}"] = own
            if args.into:
                args.into.write_text(json.dumps(known, ensure_ascii=False, indent=1))
    failed = [text for rows in known.values() for text in rows["failed"]]
    missing = ", ".join(f"{p} of {w}" for p, w in every if f"{p} {w}" not in known)
    return SCRIPT.conclude(page(known), failed, args, f"not run: {missing}" if missing else "")


if __name__ == "__main__":
    sys.exit(main())
