"""CPU time of `ptrain predict` of a 70B spec, as a process from start to exit.

Claim: at most 0.3 s (median). Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from _machine import ROOT, conclude, environment, header, this_command

LIMIT = 0.3  # seconds of CPU time
SPEC = "70b-zero3"


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one child, its own children included."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--spec", default=SPEC)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()

    command = [sys.executable, "-m", "ptrain", "predict", args.spec]
    bare = [sys.executable, "-c", "pass"]
    cpu_seconds(command)  # writes the byte code
    times = sorted(cpu_seconds(command) for _ in range(args.runs))
    floor = statistics.median(cpu_seconds(bare) for _ in range(args.runs))
    median = statistics.median(times)
    lines = [
        header(f"predict_time: CPU time of `ptrain predict {args.spec}`", this_command()),
        f"Claim: the median of the process's CPU time (user + system) is at most {LIMIT} s.",
        "",
        "| | CPU seconds |",
        "|---|---|",
        f"| median of {args.runs} | {median:.3f} |",
        f"| minimum, maximum | {times[0]:.3f}, {times[-1]:.3f} |",
        f"| of it the bare interpreter | {floor:.3f} |",
    ]
    return conclude(
        "predict_time",
        lines,
        failed=[] if median <= LIMIT else [f"median {median:.3f} s, at most {LIMIT} s"],
        not_covered="the first call after an installation, which also writes byte code, and specs "
        "with more axes or ranks.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
