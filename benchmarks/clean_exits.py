"""How often does a training that went well end badly? Starts N of them and counts exit codes.

    python benchmarks/clean_exits.py [--starts 300] [--ranks 2]

Bare gloo processes abort at random in the interpreter's exit handlers ("terminate called without
an active exception"): 7 of 12 in one script. ptrain's ranks destroy their group, flush and leave by
os._exit. The result to show is `300 of 300 ended with status 0`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
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


def start(cwd: Path, spec: str, ranks: int) -> tuple[int, str]:
    """One training of one step; its exit code and what it complained about."""
    axis = "dp_replicate" if spec == "ddp" else "dp_shard"
    ended = subprocess.run(
        [sys.executable, "-m", "ptrain", "train", spec, *SMALL, f"mesh.{axis}={ranks}", "--quiet"],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    codes: Counter[int] = Counter()
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.starts):
            began = time.perf_counter()
            code, complaint = start(Path(folder), ("zero3", "ddp")[number % 2], arguments.ranks)
            seconds.append(time.perf_counter() - began)
            codes[code] += 1
            if code:
                print(f"start {number}: exit code {code}\n{complaint}", flush=True)
    seconds.sort()
    print(
        f"{codes[0]} of {arguments.starts} ended with status 0"
        f" ({arguments.ranks} gloo ranks, zero3 and ddp in turn;"
        f" median {seconds[len(seconds) // 2]:.1f} s from start to exit)"
    )
    return 0 if codes[0] == arguments.starts else 1


if __name__ == "__main__":
    sys.exit(main())
