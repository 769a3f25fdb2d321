"""Which strategy's step has become slower since a commit: two trainings that take turns.

    python benchmarks/steps_against.py COMMIT [SPEC ...] [--pairs N]

COMMIT is checked out into a folder of its own, which is removed at the end. Of each spec both trees
train at the same time, but only one of them runs: all processes of the other are stopped by a
signal until so many steps are done, then they change over. A pair is one turn of either, a fraction
of a second apart, so that what else the machine does weighs on both.

Claim: no strategy's step has become more than 5 % slower; that is, the lower 95 % bound of the
median of the paired ratios is at most 1.05. Prints; writes a result only with --save. All
strategies take an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _machine import ROOT, commit, conclude, environment, header, this_command
from against import LIMIT, Tree, checked_out, is_commit, verdict_of
from step_time import bound

WARM_UP = 3  # steps before the first turn
STEPS = 4  # of a turn; in the first of them the training was stopped, and it does not count
PATIENCE = 300.0  # seconds until a training has done its next steps
SPECS = tuple(sorted(path.stem for path in (ROOT / "specs" / "strategies").glob("*.yaml")))


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of a step in it: by the wall's clock, and of the processors."""

    wall: float
    cpu: float


class Training:
    """A `ptrain train SPEC` of one tree, with all its processes."""

    def __init__(self, tree: Tree, spec: str, folder: Path) -> None:
        self.tree, self.metrics = tree, folder / "runs" / "latest" / "metrics.jsonl"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ptrain", "train", spec, "train.steps=100000"],
            cwd=folder,
            env=environment(tree.root),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def steps(self) -> list[dict[str, Any]]:
        """The steps that are done, as metrics.jsonl has them."""
        if not self.metrics.is_file():
            return []
        text = self.metrics.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last may still be written
        return [row for row in map(json.loads, lines) if "seconds" in row]

    def run_to(self, count: int) -> None:
        """Waits until so many steps are done.

        Raises RuntimeError where the training ends, or takes too long.
        """
        ends = time.monotonic() + PATIENCE
        while len(self.steps()) < count:
            if self.process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"{self.tree.name}: {len(self.steps())} of {count} steps")
            time.sleep(0.02)

    def take_turn(self) -> Turn:
        """What the steps of a turn take; stopped before and after it."""
        before, spent = len(self.steps()), self.cpu_seconds()
        self.send(signal.SIGCONT)
        self.run_to(before + STEPS)
        self.send(signal.SIGSTOP)
        rows = self.steps()[before:]
        wall = statistics.median(row["seconds"] for row in rows[1:STEPS])
        return Turn(wall, (self.cpu_seconds() - spent) / len(rows))

    def cpu_seconds(self) -> float:
        """CPU time, user and system, of all its processes and their threads."""
        ticks = 0
        for pid in family(self.process.pid):
            ticks += sum(int(field) for field in _fields(pid)[11:13])
        return ticks / os.sysconf("SC_CLK_TCK")

    def send(self, number: signal.Signals) -> None:
        """The signal to every process of the training, those nearest the command first."""
        for pid in family(self.process.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # it ended meanwhile
                continue


def family(pid: int) -> list[int]:
    """A process, its children, theirs …"""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _fields(int(folder.name)):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    members = [pid]
    for member in members:
        members += children.get(member, [])
    return members


def _fields(pid: int) -> list[str]:
    """Those of /proc/PID/stat behind the name, from the state on; none where the process ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


@contextmanager
def training(tree: Tree, spec: str) -> Iterator[Training]:
    """A training that is killed, with all its processes, at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        running = Training(tree, spec, Path(folder))
        try:
            yield running
        finally:
            running.send(signal.SIGKILL)
            running.process.wait()


@dataclass(frozen=True, slots=True)
class Pairs:
    """Of two trainings their turns, and the losses of the steps that both did."""

    turns: tuple[list[Turn], list[Turn]]
    losses: tuple[list[float], list[float]]

    def rows(self, spec: str) -> tuple[list[str], list[str]]:
        """The lines of the table, and what has become slower, with its figures."""
        same = "equal" if self.losses[0] == self.losses[1] else "not equal"
        lines, failed = [], []
        for clock in ("wall", "cpu"):
            mine, its = ([getattr(turn, clock) for turn in turns] for turns in self.turns)
            ratios = [a / b for a, b in zip(mine, its, strict=True)]
            low, high = bound(ratios)
            cells = [f"`{spec}`", clock.replace("cpu", "CPU")]
            cells += [f"{1e3 * statistics.median(times):.1f} ms" for times in (mine, its)]
            cells += [f"{statistics.median(ratios):.3f}", f"{low:.3f} – {high:.3f}"]
            cells += [verdict_of(low, high, LIMIT), f"{len(self.losses[0])} {same}"]
            lines.append(f"| {' | '.join(cells)} |")
            if low > LIMIT:
                failed.append(f"{spec}, {clock} time: lower bound {low:.3f}, at most {LIMIT}")
        return lines, failed


def in_turns(trees: Sequence[Tree], spec: str, pairs: int) -> Pairs:
    """Both trees' trainings of a spec; who begins a pair changes."""
    mine, its = trees
    with training(mine, spec) as first, training(its, spec) as second:
        both = (first, second)
        for run in both:
            run.run_to(WARM_UP)
        for run in both:
            run.send(signal.SIGSTOP)
        turns: tuple[list[Turn], list[Turn]] = ([], [])
        for number in range(pairs):
            for place in (0, 1) if number % 2 else (1, 0):
                turns[place].append(both[place].take_turn())
        losses = [[row["loss"] for row in run.steps()] for run in both]
    common = min(map(len, losses))
    return Pairs(turns, (losses[0][:common], losses[1][:common]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", metavar="COMMIT", help="what git knows a commit by")
    parser.add_argument("specs", metavar="SPEC", nargs="*", default=SPECS)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    if not is_commit(args.commit):
        parser.error(f"git knows no commit {args.commit}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the trainings
    lines: list[str] = []
    failed: list[str] = []
    with checked_out(args.commit) as other:
        trees = [Tree(commit(), ROOT), other]
        title = header(f"steps_against: steps against {other.name}", this_command())
        for spec in args.specs:
            rows, slow = in_turns(trees, spec, args.pairs).rows(spec)
            print(*rows, sep="\n", file=sys.stderr, flush=True)
            lines += rows
            failed += slow
    heading = [
        f"Claim: no strategy's step has become more than 5 % slower since {other.name}: the lower "
        f"95 % bound of the median ratio is at most {LIMIT}.",
        "",
        f"{args.pairs} pairs. Both trees train the spec as it stands, at the same time, but only "
        "one runs: all processes of the other are stopped by a signal. A turn is "
        f"{STEPS} steps. *Wall*: by metrics.jsonl, the median of a turn's steps but the first, in "
        "which the training was stopped. *CPU*: user and system of all processes of the training, "
        "a turn's over its steps. A pair is one turn of either, and who begins changes. Times are "
        "medians of the turns; the ratio is the median of the pairs' ratios, this tree over the "
        "commit, with its two-sided 95 % interval by order statistics. *Losses*: of the steps "
        "that both did, as metrics.jsonl prints them.",
        "",
        f"| spec | time | {trees[0].name} | {other.name} | ratio | 95 % | verdict | losses |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return conclude(
        "steps_against",
        [title, *heading, *lines],
        failed=failed,
        not_covered="larger models, in which arithmetic outweighs what a step does beside it, and "
        "GPUs.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
