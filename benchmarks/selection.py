"""`ptrain select`: how long a search takes, and whether its closed forms order as `exact` does.

Claims: 64 devices are scored in 1 s of CPU time and 4096 in 5 s, the whole process takes 10 s
there; over candidates drawn from all of them Spearman's correlation of closed-form and exact step
time, and of peaks, is at least 0.98; each of the best hundred is legal, fits, and is to the byte
what `predict` says of its spec; an exhaustive search by `exact` on 8 devices finds nothing better.
(The file has another name than the command: Python's own `select` is imported by that.)
Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from _machine import conclude, header, this_command
from predict_time import seconds as process_seconds

from ptrain.algebra.legality import check, executed
from ptrain.derivation.estimate import derive
from ptrain.selection.choose import Chooser
from ptrain.selection.figures import Ranked
from ptrain.selection.job import SearchedJob, searched_job
from ptrain.selection.task import Scored
from ptrain.selection.words import words_of
from ptrain.spec.load import load

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

    def job(self) -> SearchedJob:
        return searched_job(self.model, self.words, cluster=self.cluster, devices=self.devices)

    @property
    def command(self) -> list[str]:
        """The process that is timed."""
        words = [self.model, *self.words, "--cluster", self.cluster, "--devices", str(self.devices)]
        return [sys.executable, "-m", "ptrain", "select", *words, "--json"]


WIDE = ("cluster.devices=4096", *_LONG)
CASES = (
    Case("llama3-70b", "h100-64", 64, _LONG, scoring=1.0),
    Case("llama3-70b", "h100-1024", 4096, WIDE, process=10.0),
    Case("llama3-405b", "h100-1024", 4096, WIDE, process=10.0),
)
# Of a model that fits eight devices in every way, in a batch that few micro-batches divide.
SMALL = Case("gpt3-125m", "h100-8", 8, ("batch.sequence=1024", "batch.global=16"))


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the correlation of ranks; of equal values the mean of theirs."""
    pairs = list(zip(_ranks(left), _ranks(right), strict=True))
    mean = (len(pairs) - 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in pairs)
    spread = sum((a - mean) ** 2 for a, _ in pairs) * sum((b - mean) ** 2 for _, b in pairs)
    return float(covariance / spread**0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] != values[order[start]]:
            for index in order[start:end]:
                ranks[index] = (start + end - 1) / 2
            start = end
    return ranks


def drawn(chooser: Chooser, number: int, seed: int) -> Iterator[Ranked]:
    """Yield so many candidates that fit and whose time is known, from all blocks alike."""
    draw, search = random.Random(seed), chooser.search
    pool: list[Scored] = []
    for block in search.blocks():
        if len(block.rows):
            pool += [block.scored(draw.randrange(len(block.rows))) for _ in range(3)]
    draw.shuffle(pool)
    for scored in pool:
        row = chooser.exactly(scored) if scored.seconds < float("inf") else None
        if row is not None and row.seconds is not None:
            yield row
            number -= 1
        if not number:
            return


def of_time(case: Case, *, with_process: bool) -> tuple[str, list[str]]:
    """Return the row of a case's times, and what of it fails."""
    chooser = Chooser(case.job())
    began = time.process_time()
    result = chooser.search.run(case.job().where)
    scoring = time.process_time() - began
    failed = []
    if scoring > case.scoring:
        failed.append(f"{case.name}: scored in {scoring:.2f} s, at most {case.scoring} s")
    cpu = wall = None
    if with_process:
        cpu, wall = process_seconds(case.command)
        if case.process is not None and wall > case.process:
            failed.append(f"{case.name}: {wall:.1f} s as a process, at most {case.process} s")
    process = "–" if cpu is None else f"{wall:.1f} / {cpu:.1f}"
    counts = result.counts
    return (
        f"| {case.name} | {counts.scored} | {counts.fitting} | {scoring:.2f} | {process} |",
        failed,
    )


def of_order(case: Case, number: int) -> tuple[str, list[str]]:
    """Return the row of a case's correlations over drawn candidates, and what of it fails."""
    rows = list(drawn(Chooser(case.job()), number, seed=1))
    time_ = spearman([row.closed.seconds for row in rows], [row.seconds or 0.0 for row in rows])
    peak = spearman([row.closed.peak for row in rows], [float(row.peak_bytes) for row in rows])
    off = sorted(abs(row.closed.seconds / (row.seconds or 1.0) - 1) for row in rows)
    wide = sorted(abs(row.closed.peak / row.peak_bytes - 1) for row in rows)
    middle = len(rows) // 2
    line = (
        f"| {case.name} | {len(rows)} | {time_:.4f} | {off[middle]:.1%} | {peak:.4f} | "
        f"{wide[middle]:.1%} |"
    )
    failed = [
        f"{case.name}: ρ of {what} {value:.4f}, at least {RHO}"
        for what, value in (("time", time_), ("peak", peak))
        if value < RHO
    ]
    return line, failed


def of_best(case: Case, count: int) -> tuple[str, list[str]]:
    """Return the row of a case's best, and which of them are illegal, do not fit, or are something
    else when their spec is written and read."""
    chooser = Chooser(case.job(), count=count)
    ranking = chooser.choose()
    failed = []
    for number, row in enumerate(ranking.ranking, 1):
        source, *words = words_of(ranking.job, row.spec)
        spec = load(source, words).spec
        exact = derive(spec).exact
        seconds = None if exact.step is None else exact.step.seconds
        if check(spec) or executed(spec):
            failed.append(f"{case.name}, number {number}: not legal")
        elif not row.memory.fits:
            failed.append(f"{case.name}, number {number}: does not fit")
        elif (exact.peak_bytes(), seconds) != (row.peak_bytes, row.seconds):
            failed.append(f"{case.name}, number {number}: its spec predicts something else")
    best = ranking.best
    time_ = "–" if best is None or best.seconds is None else f"{best.seconds:.4g} s"
    return f"| {case.name} | {len(ranking.ranking)} | {ranking.derived} | {time_} |", failed


def exhaustive(case: Case, most: int | None) -> tuple[list[str], list[str]]:
    """Derive every candidate; return what is said of it, and what fails."""
    chooser = Chooser(case.job())
    best = chooser.choose().best
    assert best is not None and best.seconds is not None, "a small model fits, and has rates"
    fastest: Ranked | None = None
    number = 0
    everything = Chooser(case.job())
    candidates = (
        block.scored(place)
        for block in everything.search.blocks()
        for place in range(len(block.rows))
    )
    for scored in candidates:
        if number == most:
            break
        number += 1
        row = everything.exactly(scored)
        if row is None or row.seconds is None or not row.memory.fits:
            continue
        if fastest is None or row.seconds < (fastest.seconds or 0.0):
            fastest = row
    assert fastest is not None and fastest.seconds is not None, "something fits"
    lines = [
        f"Exhaustive: {number} candidates of {case.name} derived; the fastest takes "
        f"{fastest.seconds * 1e3:.4f} ms, the search's best {best.seconds * 1e3:.4f} ms."
    ]
    worse = best.seconds > fastest.seconds * (1 + 1e-12)
    failed = [f"{case.name}: the search's best is not the fastest"] if worse else []
    return lines, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drawn", type=int, default=300, help="candidates of a correlation")
    parser.add_argument("--best", type=int, default=100, help="of the ranking that are checked")
    parser.add_argument("--most", type=int, help="at most so many of the exhaustive search")
    parser.add_argument("--quick", action="store_true", help="64 devices only, and no process")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()

    cases = CASES[:1] if args.quick else CASES
    times = [of_time(case, with_process=not args.quick) for case in cases]
    orders = [of_order(case, args.drawn) for case in (*cases, SMALL)]
    bests = [of_best(case, args.best) for case in cases]
    said, unbeaten = exhaustive(SMALL, args.most)
    lines = [
        header("select: a search over placements", this_command()),
        "CPU seconds of scoring every legal candidate in closed form, on one core; seconds of the "
        "process, wall and CPU, the best hundred derived exactly.",
        "",
        "| job | candidates | fit | scoring | process, wall / CPU |",
        "|---|---|---|---|---|",
        *(line for line, _ in times),
        "",
        "Spearman's ρ of closed form and `exact` over candidates drawn from all blocks that fit, "
        "and the median of how far they are apart.",
        "",
        "| job | drawn | ρ time | apart | ρ peak | apart |",
        "|---|---|---|---|---|---|",
        *(line for line, _ in orders),
        "",
        "The best, each written as overrides, read again and predicted.",
        "",
        "| job | ranked | derived | fastest |",
        "|---|---|---|---|",
        *(line for line, _ in bests),
        "",
        *said,
    ]
    failures = [*times, *orders, *bests, ("", unbeaten)]
    return conclude(
        "selection",
        lines,
        failed=[text for _, failed in failures for text in failed],
        not_covered="models that are not built in, and clusters without rates, whose time is "
        "unknown.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
