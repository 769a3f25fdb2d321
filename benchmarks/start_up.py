"""What a command costs beside the imports that none like it does without: ratios of CPU time.

Claim: `ptrain --version` and `ptrain --help` take at most 1.5 times `python -c "import argparse"`;
`ptrain predict` of 70B by ZeRO-3 on 8 devices at most 7 times `python -c "import yaml"`, and of
405B by pp, dp_shard and tp on 4096 at most 15 times. CPU time is user and system, of a process from
start to exit with its byte code written; a command and its measure run one right after the other.
Prints; writes a result only with --save.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from _machine import ROOT, conclude, environment, header, this_command
from snapshot import WIDE

# What the script `ptrain` that pip writes does.
SCRIPT = "import re, sys; from ptrain.cli.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Claim:
    """At most so many times what importing a module takes; `guarded` is what a test holds, which is
    more where the limit is not reached yet."""

    name: str
    words: tuple[str, ...]
    module: str
    limit: float
    guarded: float


CLAIMS = (
    Claim("ptrain --version", ("--version",), "argparse", 1.5, 1.5),
    Claim("ptrain --help", ("--help",), "argparse", 1.5, 1.5),
    Claim("ptrain predict 70b-zero3", ("predict", "70b-zero3"), "yaml", 7, 11.5),
    Claim("ptrain predict 405b-4096", ("predict", *WIDE["405b-4096"]), "yaml", 15, 19),
)


def seconds(command: Sequence[str], root: Path = ROOT) -> tuple[float, float]:
    """Return the CPU seconds of one child with its descendants, and its wall seconds."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=root, env=environment(root), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    return usage.ru_utime + usage.ru_stime, wall


def pairs(claim: Claim) -> Iterator[tuple[float, float]]:
    """Yield CPU seconds of the command and of the import, in turns, after a run that writes byte
    code."""
    own = [sys.executable, "-c", SCRIPT, *claim.words]
    other = [sys.executable, "-c", f"import {claim.module}"]
    seconds(own)
    while True:
        yield seconds(own)[0], seconds(other)[0]


def command_of(spec: str) -> list[str]:
    """Return the command that predicts a spec."""
    return [sys.executable, "-m", "ptrain", "predict", *words_of(spec)]


def words_of(spec: str) -> list[str]:
    """Return its name, or the file of a wide one with its overrides."""
    return WIDE.get(spec, [spec])


@dataclass(frozen=True)
class Run:
    """A training: wall seconds from the command to its first step's line, those of each step in
    metrics.jsonl, and the last loss."""

    first_step: float
    steps: list[float]
    last_loss: float


def run(words: Sequence[str] = (), root: Path = ROOT) -> Run:
    """Run `ptrain train WORDS` in a separate folder with the package in `root`."""
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
        assert process.wait() == 0, f"ended with {process.returncode}"
        text = (Path(folder) / "runs" / "latest" / "metrics.jsonl").read_text(encoding="utf-8")
    rows = map(json.loads, text.splitlines())
    losses = [float(match[1]) for _, line in lines if (match := re.search(r"loss ([\d.]+)", line))]
    return Run(
        first_step=next(at for at, line in lines if line.startswith("step 1/")),
        steps=[row["seconds"] for row in rows if "seconds" in row],
        last_loss=losses[-1],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()

    title = header("start_up: CPU time of commands beside that of imports", this_command())
    taken = {claim: [] for claim in CLAIMS}
    turns = {claim: pairs(claim) for claim in CLAIMS}
    for _ in range(args.rounds):
        for claim, turn in turns.items():
            taken[claim].append(next(turn))
    lines, failed = [], []
    for claim, times in taken.items():
        ratios = sorted(own / other for own, other in times)
        median = statistics.median(ratios)
        own, other = (statistics.median(column) for column in zip(*times, strict=True))
        lines.append(
            f"| `{claim.name}` | {own:.3f} | `import {claim.module}` {other:.3f} | {median:.2f} "
            f"| {ratios[0]:.2f} – {ratios[-1]:.2f} | {claim.limit} "
            f"| {'holds' if median <= claim.limit else 'fails'} |"
        )
        if median > claim.limit:
            failed.append(f"{claim.name}: {median:.2f} times, at most {claim.limit}")
    return conclude(
        "start_up",
        [
            title,
            f"Claim: the median of {args.rounds} ratios is at most the limit. CPU seconds are "
            "medians, user and system, of processes from start to exit.",
            "",
            "| command | CPU seconds | beside | ratio | minimum – maximum | at most | verdict |",
            "|---|---|---|---|---|---|---|",
            *lines,
            f"| `ptrain train`, wall time to its first step | {run().first_step:.2f} | | | | | "
            "no claim |",
        ],
        failed=failed,
        not_covered="the first call after an installation, which also writes byte code, specs with "
        "more layers, axes or ranks, and GPUs.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
