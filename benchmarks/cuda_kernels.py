"""CUDA's kernels against a CPU's: what blocks of all families keep and need, without a GPU.

Claim: none of equality. A table of what differs between a CPU's kernels and those that torch takes
on GPUs of compute capability 80, 90 and 100, with each kind of storage that is of another size at
the peak. `exact`, whose tables are a CPU's with a GPU's masks of dropout, is off by what the table
says on these GPUs, if torch allocates there as it says. Resident parameters, gradients and
optimizer state, and all that is sent, are the same (checked).

`ptrain simulate` of two blocks' training on fake tensors, on fake CUDA; needs a CUDA build of
torch, a C compiler and no GPU. Prints; writes a result only with --save. About three minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from _machine import conclude, header, this_command

from ptrain.rooms import pretence

CAPABILITIES = (80, 90, 100)
LLAMA = (
    "model={family: llama, layers: 2, hidden: 1024, heads: 8, kv_heads: 2, ffn: 2816, vocab: 512}"
)
GPT = "model={family: gpt, layers: 2, hidden: 1024, heads: 8, vocab: 512%s}"
DROPS = ", dropout: 0.1"
COMMON = ("ddp", "mesh.dp_replicate=2", "batch={global: 4, micro: 2, sequence: 1024}")
CASES = {
    "llama bf16": (LLAMA, "precision.layout=bf16"),
    "llama fp32": (LLAMA, "precision.layout=fp32"),
    "gpt bf16": (GPT % "", "precision.layout=bf16"),
    "gpt fp32": (GPT % "", "precision.layout=fp32"),
    "gpt bf16, dropout": (GPT % DROPS, "precision.layout=bf16"),
    "gpt fp32, dropout": (GPT % DROPS, "precision.layout=fp32"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank holds at its peak, by kind of storage, what of it `exact` does not say, and
    which kernels it ran."""

    kernels: str
    peak: int
    held: dict[str, int]
    beyond_exact: int
    differing: tuple[str, ...]


def simulated(*words: str) -> Measured:
    ended = subprocess.run(
        [sys.executable, "-m", "ptrain", "simulate", *COMMON, *words, "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rank: dict[str, Any] = json.loads(ended.stdout)["simulation"]["ranks"][0]
    held: dict[str, int] = {}
    for row in rank["held"]:
        held[row["what"]] = held.get(row["what"], 0) + row["device_bytes"]
    phase = f"peak {rank['peak']['phase']} rank {rank['rank']}"
    at_peak = [row for row in rank["differing"] if row["name"] == phase]
    return Measured(
        beyond_exact=sum(row["simulated"] - row["exact"] for row in at_peak),
        kernels=(rank["kernels"] or "").rpartition(": ")[2],
        peak=rank["peak"]["device_bytes"],
        held=held,
        differing=tuple(row["name"] for row in rank["differing"]),
    )


def differences(mine: Measured, cpu: Measured) -> str:
    """Return the kinds of storage at the peak that have other sizes than on a CPU."""
    kinds = dict.fromkeys((*cpu.held, *mine.held))
    more = {kind: mine.held.get(kind, 0) - cpu.held.get(kind, 0) for kind in kinds}
    return ", ".join(f"{kind} {size:+,}" for kind, size in more.items() if size) or "–"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    if why := pretence.lacking():
        print(f"CUDA's kernels cannot be asked: {why}", file=sys.stderr)
        return 2
    head = header("CUDA's kernels against a CPU's", this_command())
    lines = [
        "| model | sm | attention | peak, bytes | beside `exact` | beside a CPU | of it |",
        "|---|---|---|---|---|---|---|",
    ]
    failed: list[str] = []
    for name, words in CASES.items():
        cpu = simulated(*words, "device=cpu")
        for sm in CAPABILITIES:
            there = simulated(*words, f"cluster={{preset: h100-8, sm: {sm}}}")
            failed += [
                f"{name}, sm {sm}: {figure}"
                for figure in there.differing
                if not figure.startswith(("memory activations", "peak "))
            ]
            cells = (
                name, sm, there.kernels.replace("_", " "), f"{there.peak:,}",
                f"{there.beyond_exact:+,}", f"{there.peak - cpu.peak:+,}",
                differences(there, cpu),
            )  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
            print(lines[-1], flush=True)
    return conclude(
        "cuda_kernels",
        [head, *lines],
        failed=failed,
        not_covered="a GPU; what kernels take within themselves; layers cut by tp",
        is_saved=args.save,
    )


if __name__ == "__main__":
    raise SystemExit(main())
