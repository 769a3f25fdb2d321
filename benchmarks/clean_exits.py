"""How often does a training that went well end badly?

Claim: N of N starts end with status 0. Bare gloo processes abort at random in the interpreter's
exit handlers ("terminate called without an active exception"); ptrain's ranks destroy their group,
flush and leave by os._exit. Each start is `ptrain train` of one step of a small model on two ranks,
zero3 and ddp in turn. Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from _machine import conclude, environment, header, this_command

STRATEGIES = ("zero3", "ddp")
SMALL = (
    "model.layers=1",
    "model.hidden=32",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=64",
    "batch.sequence=32",
    "batch.global=8",
    "batch.micro=1",
    "train.steps=1",
)


def start(cwd: Path, spec: str) -> tuple[int, str]:
    """One training of one step; its exit code and what it complained about."""
    ended = subprocess.run(
        [sys.executable, "-m", "ptrain", "train", spec, *SMALL, "--quiet"],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=300)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    codes: Counter[int] = Counter()
    seconds = []
    head = header(f"clean_exits: how {args.starts} trainings that went well ended", this_command())
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.starts):
            began = time.perf_counter()
            code, complaint = start(Path(folder), STRATEGIES[number % len(STRATEGIES)])
            seconds.append(time.perf_counter() - began)
            codes[code] += 1
            if code:
                print(f"start {number}: exit code {code}\n{complaint}", flush=True)
    wrong = args.starts - codes[0]
    lines = [
        head,
        f"Claim: {args.starts} of {args.starts} starts end with status 0.",
        "",
        "| exit code | starts |",
        "|---|---|",
        *(f"| {code} | {count} |" for code, count in sorted(codes.items())),
        "",
        f"Wall time from start to exit: median {statistics.median(seconds):.1f} s, "
        f"{min(seconds):.1f} to {max(seconds):.1f}.",
    ]
    return conclude(
        "clean_exits",
        lines,
        failed=[f"{wrong} of {args.starts} starts ended with another status"] if wrong else [],
        not_covered="trainings that fail or are interrupted, GPUs, and more than one machine.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
