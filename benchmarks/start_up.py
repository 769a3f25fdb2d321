"""Where the time of `ptrain train` goes: wall time from the command to each thing that it says.

Claim: the built-in training (two ranks, 50 steps on real text, predicted / measured table) takes
less than 20 s on two cores, median of 5. Every line that the command prints is stamped as it
arrives, so nothing in ptrain is instrumented. Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _machine import ROOT, conclude, environment, header, this_command

LIMIT = 20.0  # seconds
MARKS = (  # what is done when the first line that matches arrives
    ("spec checked, ranks started, torch imported, ranks met, model built", re.compile(r"\w+ · ")),
    ("first step", re.compile(r"step 1/")),
    ("the other steps, two of them measured", re.compile(r"step (\d+)/\1\b")),
    ("figures of all ranks gathered, table and verdict", re.compile(r"verdict:")),
)
LEAVING = "ranks left, process ended"
PARTS = (  # processes of their own, to compare with
    ("a bare interpreter", "pass"),
    ("the command's own imports", "import ptrain.cli.train"),
    ("torch", "import torch"),
    ("torch and what a rank uses of ptrain", "import ptrain.train.session"),
)


@dataclass(frozen=True)
class Run:
    """Seconds by phase in order, the sum of them, CPU seconds of all processes, and the seconds of
    each step by metrics.jsonl."""

    phases: dict[str, float]
    wall: float
    cpu: float
    steps: list[float]
    first_loss: float
    last_loss: float
    verdict: str

    @property
    def first_step(self) -> float:
        """Seconds from the command to the line of the first step."""
        return sum(list(self.phases.values())[:2])


def run(words: Sequence[str] = (), root: Path = ROOT) -> Run:
    """One `ptrain train WORDS` in a folder of its own, by the package in `root`."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "ptrain", "train", *words],
            cwd=folder,
            env=environment(root),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        lines = [(time.perf_counter() - began, line) for line in process.stdout]
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        steps = _steps(Path(folder) / "runs" / "latest" / "metrics.jsonl")
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"ended with {process.returncode}"
    losses = [float(found[1]) for _, line in lines if (found := re.search(r"loss ([\d.]+)", line))]
    verdict = next(line for _, line in lines if line.startswith("verdict:"))
    return Run(
        phases=_phases(lines, wall),
        wall=wall,
        cpu=usage.ru_utime + usage.ru_stime,
        steps=steps,
        first_loss=losses[0],
        last_loss=losses[-1],
        verdict=verdict.partition("·")[0].strip(),
    )


def _phases(lines: list[tuple[float, str]], wall: float) -> dict[str, float]:
    phases, before = {}, 0.0
    for name, pattern in MARKS:
        at = next(seconds for seconds, line in lines if pattern.match(line))
        phases[name], before = at - before, at
    phases[LEAVING] = wall - before
    return phases


def _steps(metrics: Path) -> list[float]:
    rows = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [row["seconds"] for row in rows if "seconds" in row]


def part(code: str) -> float:
    """Wall time of a process that runs `code`, median of 3."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, check=True)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()

    title = header("start_up: where the time of `ptrain train` goes", this_command())
    found = [run() for _ in range(args.runs)]
    walls = sorted(each.wall for each in found)
    median = statistics.median(walls)
    falls = all(each.last_loss < each.first_loss for each in found)
    failed = [f"the median of the wall time is {median:.2f} s"] if median >= LIMIT else []
    failed += [] if falls else ["the loss does not fall in every run"]
    lines = [
        title,
        f"Claim: `ptrain train` takes less than {LIMIT:.0f} s (wall time, median of {args.runs}), "
        "and the loss falls.",
        "",
        "| phase | seconds (median) | of the whole |",
        "|---|---|---|",
        *(
            f"| {name} | {seconds:.2f} | {seconds / median:.0%} |"
            for name in found[0].phases
            if (seconds := statistics.median(each.phases[name] for each in found)) is not None
        ),
        f"| **all** | **{median:.2f}** | minimum {walls[0]:.2f}, maximum {walls[-1]:.2f} |",
        f"| CPU seconds of all processes | {statistics.median(e.cpu for e in found):.2f} | |",
        "",
        "| to compare: a process that only imports | seconds |",
        "|---|---|",
        *(f"| {name} | {part(code):.2f} |" for name, code in PARTS),
        "",
        f"Loss {found[0].first_loss} at step 1, {found[0].last_loss} at the end; "
        f"{found[0].verdict}.",
    ]
    return conclude(
        "start_up",
        lines,
        failed=failed,
        not_covered="the first start after an installation, which also writes byte code, other "
        "specs and more ranks, and GPUs.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
