"""CPU time of `ptrain predict` of large specs, as a process from start to exit.

Claim: at most 0.3 s (median) for 70B by ZeRO-3 on 8 devices, 0.5 s for pp, dp_shard and tp on 128,
and 0.6 s for 405B by these on 4096.
Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from _machine import ROOT, conclude, environment, header, this_command
from snapshot import WIDE

LIMITS = {"70b-zero3": 0.3, "70b-3d": 0.5, "405b-4096": 0.6}  # seconds of CPU time


def seconds(command: list[str], root: Path = ROOT) -> tuple[float, float]:
    """CPU seconds (user and system) of one child, its own children included, and wall seconds."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=root, env=environment(root), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    return usage.ru_utime + usage.ru_stime, wall


def cpu_seconds(command: list[str]) -> float:
    return seconds(command)[0]


def command_of(spec: str) -> list[str]:
    return [sys.executable, "-m", "ptrain", "predict", *words_of(spec)]


def words_of(spec: str) -> list[str]:
    """Its name, or the file of a wide one and what overrides it."""
    return WIDE.get(spec, [spec])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()

    commands = {spec: command_of(spec) for spec in LIMITS}
    for command in commands.values():
        cpu_seconds(command)  # writes the byte code
    times: dict[str, list[float]] = {spec: [] for spec in commands}
    bare = []
    for _ in range(args.runs):  # in turns
        for spec, command in commands.items():
            times[spec].append(cpu_seconds(command))
        bare.append(cpu_seconds([sys.executable, "-c", "pass"]))
    medians = {spec: statistics.median(found) for spec, found in times.items()}
    claimed = ", ".join(f"{limit} s of {spec}" for spec, limit in LIMITS.items())
    lines = [
        header("predict_time: CPU time of `ptrain predict`", this_command()),
        f"Claim: the median of the process's CPU time (user + system) is at most {claimed}. "
        f"{args.runs} runs of each, in turns, whole tables printed; of it the bare interpreter "
        f"takes {statistics.median(bare):.3f} s (median).",
        "",
        "| spec | median, CPU seconds | minimum – maximum | at most | verdict |",
        "|---|---|---|---|---|",
        *(
            f"| `{spec}` | {medians[spec]:.3f} | {min(found):.3f} – {max(found):.3f} "
            f"| {LIMITS[spec]} | {'holds' if medians[spec] <= LIMITS[spec] else 'fails'} |"
            for spec, found in times.items()
        ),
    ]
    return conclude(
        "predict_time",
        lines,
        failed=[
            f"{spec}: median {median:.3f} s, at most {LIMITS[spec]} s"
            for spec, median in medians.items()
            if median > LIMITS[spec]
        ],
        not_covered="the first call after an installation, which also writes byte code, and specs "
        "with more layers, axes or ranks.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
