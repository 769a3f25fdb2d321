"""`ptrain select`: how long a search takes, and whether its estimates order as `exact` does.

The file has another name than the command: Python's own `select` is imported by that.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

from _machine import commit
from _script import Script, table_head
from _step_floor import StepFloor
from _steps import spearman
from start_up import seconds as process_seconds

from ptrain.selection import search as searching
from ptrain.selection.choose import Chooser
from ptrain.selection.job import SearchedJob, searched_job
from ptrain.selection.task import SLACK, TIME_SLACK, Ranked, Scored

RHO = 0.98
_LONG = ("batch.sequence=8192", "batch.global=2048")


@dataclass(frozen=True)
class Case:
    """A job, and at most how many CPU seconds its scoring and its process may take."""

    model: str
    cluster: str
    devices: int
    words: tuple[str, ...] = ()
    scoring: float = 5.0
    process: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model} on {self.devices}"

    @property
    def word(self) -> str:
        """What names it on the command line."""
        return f"{self.model.rpartition('-')[2]}-{self.devices}"

    def job(self) -> SearchedJob:
        return searched_job(self.model, self.words, cluster=self.cluster, devices=self.devices)

    @property
    def command(self) -> list[str]:
        """The process that is timed."""
        words = [self.model, *self.words, "--cluster", self.cluster, "--devices", str(self.devices)]
        return [sys.executable, "-m", "ptrain", "select", *words, "--json"]


WIDE = ("cluster.devices=4096", *_LONG)
CASES = (
    Case("llama3-70b", "h100-64", 64, _LONG, scoring=2.0, process=10.0),
    Case("llama3-70b", "h100-1024", 4096, WIDE, process=25.0),
    Case("llama3-405b", "h100-1024", 4096, WIDE, process=25.0),
)
# Of a model that fits eight devices in every way, in a batch that few micro-batches divide.
SMALL = Case("gpt3-125m", "h100-8", 8, ("batch.sequence=1024", "batch.global=16"))


def drawn(chooser: Chooser, number: int, seed: int) -> Iterator[Ranked]:
    """Yield so many candidates that fit and whose time is known, from each schedule, number of
    stages and way to keep activations alike."""
    draw, search = random.Random(seed), chooser.search
    pools: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for block in search.blocks():
        rows, room = enumerate(block.table.rows), search.task.room
        places = [place for place, row in rows if block.peaks[row.memory] <= room]
        if places:
            kind = block.flow.schedule, block.flow.per_rank, block.kept
            pools[kind].append(block.scored(draw.choice(places)))
    for pool in pools.values():
        draw.shuffle(pool)
    while number and any(pools.values()):
        for pool in pools.values():
            scored = pool.pop() if pool and number else None
            if scored is None or scored.seconds == float("inf"):
                continue
            row = chooser.exactly(scored)
            if row is not None and row.seconds is not None:
                yield row
                number -= 1


@dataclass(frozen=True)
class Outcome:
    """What a part says, and what of it fails."""

    lines: list[str]
    failed: list[str]


def of_time(case: Case, *, with_process: bool) -> Outcome:
    """Return the row of a case's times."""
    chooser = Chooser(case.job())
    gc.disable()  # as the command does
    began = time.process_time()
    result = chooser.search.run(case.job().where)
    scoring = time.process_time() - began
    gc.enable()
    failed = []
    if scoring > case.scoring:
        failed.append(f"{case.name}: scored in {scoring:.2f} s, at most {case.scoring} s")
    cpu = wall = None
    if with_process:
        cpu, wall = process_seconds(case.command)
        if case.process is not None and cpu > case.process:
            failed.append(f"{case.name}: {cpu:.1f} s of CPU as a process, at most {case.process} s")
    process = "–" if cpu is None else f"{wall:.1f} / {cpu:.1f}"
    counts = result.counts
    line = f"| {case.name} | {counts.scored} | {counts.fitting} | {scoring:.2f} | {process} |"
    return Outcome([line], failed)


def of_order(case: Case, number: int) -> Outcome:
    """Return the row of a case's correlations over drawn candidates."""
    rows = list(drawn(Chooser(case.job()), number, seed=1))
    times = [(row.closed.seconds, row.seconds or 0.0) for row in rows]
    peaks = [(row.closed.peak, float(row.peak_bytes)) for row in rows]
    cells, failed = [], []
    for what, pairs, slack in (("time", times, TIME_SLACK), ("peak", peaks, SLACK)):
        rho = spearman(*zip(*pairs, strict=True))
        apart = sorted(max(closed / exact, exact / closed) - 1 for closed, exact in pairs)
        above = max(closed / exact for closed, exact in pairs) - 1
        cells += [f"{rho:.4f}", f"{apart[len(apart) // 2]:.1%}", f"{apart[-1]:.1%}", f"{above:.1%}"]
        if rho < RHO:
            failed.append(f"{case.name}: ρ of {what} {rho:.4f}, at least {RHO}")
        if above > slack - 1:
            failed.append(
                f"{case.name}: a {what} {above:.1%} above, and a search leaves {slack - 1:.0%}"
            )
    return Outcome([f"| {case.name} | {len(rows)} | {' | '.join(cells)} |"], failed)


def exhaustive(case: Case, number: int) -> Outcome:
    """Derive every candidate that may be faster than the search's best, and so many drawn of those
    that may not; return what is said of it, and what fails."""
    best = Chooser(case.job()).choose().best
    assert best is not None and best.seconds is not None, "a small model fits, and has rates"
    chooser, draw = Chooser(case.job()), random.Random(1)
    floor, base = StepFloor(chooser), chooser.job.base
    with mock.patch.object(searching, "representatives", list):  # every unit and overlap
        floors = [
            (floor.of(scored.candidate.spec(base)), scored)
            for block in chooser.search.blocks()
            for scored in map(block.scored, range(len(block)))
        ]
    may_be = [pair for pair in floors if pair[0] <= best.seconds]
    slower = [pair for pair in floors if pair[0] > best.seconds]
    fastest, below, closest = float("inf"), 0, 0.0
    for least, scored in (*may_be, *draw.sample(slower, min(number, len(slower)))):
        row = chooser.exactly(scored)
        if row is None or row.seconds is None:
            continue
        below += row.seconds < least
        closest = max(closest, least / row.seconds)
        if row.memory.fits:
            fastest = min(fastest, row.seconds)
    line = (
        f"Of {len(floors)} candidates of {case.name} {len(slower)} take longer than the search's "
        f"best by what they compute alone, the other {len(may_be)} are derived; the fastest takes "
        f"{fastest * 1e3:.4f} ms, the search's best {best.seconds * 1e3:.4f} ms. Of those derived, "
        f"and of {min(number, len(slower))} drawn of the others, {below} take less than what they "
        f"compute, and that is at most {closest:.1%} of what one takes."
    )
    failed = []
    if best.seconds > fastest * (1 + 1e-12):
        failed.append(f"{case.name}: the search's best is not the fastest")
    if below:
        failed.append(f"{case.name}: {below} candidates take less than they compute at least")
    return Outcome([line], failed)


PARTS = ("time", "order", "exhaustive")
_APART = ("apart", "at most", "above")
_COLUMNS = {
    "time": ("job", "candidates", "fit", "scoring", "process, wall / CPU"),
    "order": ("job", "drawn", "ρ time", *_APART, "ρ peak", *_APART),
}
SCRIPT = Script("selection", of_peaks=f"{SLACK - 1:.0%}", of_seconds=f"{TIME_SLACK - 1:.0%}")


def _about(part: str) -> list[str]:
    """Return what a part's figures are, and the head of its table, where it has one."""
    if part not in _COLUMNS:
        return []
    return [SCRIPT.text(part), "", *table_head(*_COLUMNS[part])]


def of_parts(cases: tuple[Case, ...]) -> dict[str, tuple[Case, ...]]:
    """Return the cases that a part is about."""
    return {"time": cases, "order": (*cases, SMALL), "exhaustive": (SMALL,)}


def parts(args: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[], Outcome]]]:
    """Yield the parts that are asked for: which it is, of which case, and what gives its rows."""
    of_part = {
        "time": partial(of_time, with_process=not args.quick),
        "order": partial(of_order, number=args.drawn),
        "exhaustive": partial(exhaustive, number=args.beyond),
    }
    cases = CASES[:1] if args.quick else CASES
    of_cases = of_parts(cases)
    for part, measure in of_part.items():
        for case in of_cases[part]:
            if args.part in (None, part) and args.case in (None, case.word):
                yield part, case.word, partial(measure, case)


def missing(known: dict[str, dict[str, list[str]]]) -> str:
    """Return which parts, and of which cases, were not run."""
    lacking: dict[str, list[str]] = defaultdict(list)
    for part, cases in of_parts(CASES).items():
        lacking[part] += [case.word for case in cases if f"{part} {case.word}" not in known]
    texts = [f"{part} of {', '.join(words)}" for part, words in lacking.items() if words]
    return f"not run: {'; '.join(texts)}" if texts else ""


def page(known: dict[str, dict[str, list[str]]]) -> list[str]:
    """Return the lines of all parts that are known, in their order."""
    commits = sorted({line for rows in known.values() for line in rows["commit"]})
    lines = SCRIPT.head()
    if commits != [commit()]:
        lines += [f"Rows of commit {', '.join(commits)}.", ""]
    for part in PARTS:
        keys = [f"{part} {case.word}" for case in (*CASES, SMALL)]
        rows = [line for key in keys if key in known for line in known[key]["lines"]]
        if rows:
            lines += [*_about(part), *rows, ""]
    return lines


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--drawn", type=int, default=300, help="candidates of a correlation")
    parser.add_argument(
        "--beyond", type=int, default=1000, help="derived of what cannot be the fastest"
    )
    parser.add_argument("--quick", action="store_true", help="64 devices only, and no process")
    parser.add_argument("--part", choices=PARTS, help="this part only")
    words = [case.word for case in (*CASES, SMALL)]
    parser.add_argument("--case", choices=words, help="this case only")
    parser.add_argument("--into", type=Path, metavar="FILE", help="add what is measured to a file")
    parser.add_argument("--from", dest="known", type=Path, metavar="FILE", help="measure nothing")
    args = parser.parse_args()

    source = args.known or args.into
    known = json.loads(source.read_text()) if source and source.exists() else {}
    for part, word, measure in () if args.known else parts(args):
        outcome = measure()
        known[f"{part} {word}"] = {
            "lines": outcome.lines,
            "failed": outcome.failed,
            "commit": [commit()],
        }
    if args.into:
        args.into.write_text(json.dumps(known, ensure_ascii=False, indent=1))
    failed = [text for rows in known.values() for text in rows["failed"]]
    return SCRIPT.conclude(page(known), failed, args, missing(known))


if __name__ == "__main__":
    sys.exit(main())
