"""Long sequences over cp by execution on fake ranks, and beside what torchtitan published of them.

Claim: of Llama 3.1 8B with 128k tokens at dp_shard 2 x cp 8, and of every other row, what was
derived is equal to what was executed, to the byte. Of memory beside the published figure nothing is
claimed: those runs were compiled and in float8, so that what lives within a block is another
figure. The page says of each row what an eager step in bf16 holds at its peak, and what is left.

torchtitan's rows are of 8 H100s with full recomputation, a sequence a rank of dp_shard
(benchmarks/llama3_h100_202412_torchtitan.md, its commit 9dec370), memory the allocator's reserved
peak. Kernels are a CPU's here. Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _machine import conclude, header, this_command
from simulate import Row, call, table

GIB = 2**30
EIGHT = (
    "fsdp-mixed",
    "model.preset=llama3.1-8b",
    "activations=M",
    "recompute=full",
    "precision.reduced=fp32",
)


@dataclass(frozen=True, kw_only=True)
class Long:
    """Llama 3.1 8B, a sequence a group of cp; `gib` as published, None where nothing is."""

    dp_shard: int
    cp: int
    sequence: int
    gib: float | None = None

    @property
    def name(self) -> str:
        return f"FSDP {self.dp_shard} x CP {self.cp}, {self.sequence} tokens"

    @property
    def words(self) -> tuple[str, ...]:
        degrees = {"dp_shard": self.dp_shard, "cp": self.cp}
        mesh = ", ".join(f"{axis}: {degree}" for axis, degree in degrees.items() if degree > 1)
        placement = {"dp_shard": "zero3", "cp": "[S*, S, S, S]"}
        placed = ", ".join(f"{axis}: {placement[axis]}" for axis, n in degrees.items() if n > 1)
        ranks = self.dp_shard * self.cp
        return (
            *EIGHT,
            f"mesh={{{mesh}}}",
            f"placement={{{placed}}}",
            f"batch={{global: {self.dp_shard}, micro: 1, sequence: {self.sequence}}}",
            "cluster.preset=h100-8",
            f"cluster.devices={ranks}",
        )


PUBLISHED = (
    Long(dp_shard=8, cp=1, sequence=32768, gib=83.9),
    Long(dp_shard=4, cp=2, sequence=65536, gib=84.2),
    Long(dp_shard=2, cp=4, sequence=131072, gib=84.0),
    Long(dp_shard=1, cp=8, sequence=262144, gib=84.5),
)
CLAIMED = Long(dp_shard=2, cp=8, sequence=131072)


def attribution(rows: dict[Long, Row]) -> list[str]:
    """Peaks by what lives then, beside what was published."""
    lines = []
    for long, row in rows.items():
        sizes: Counter[str] = Counter()
        for living in row.rank["held"]:
            sizes[f"{living['state']}: {living['what']}"] += living["device_bytes"]
        peak = int(row.rank["peak"]["device_bytes"])
        lines += ["", f"{long.name}:", "", "| lives at the peak | GiB |", "|---|---|"]
        lines += [f"| {what} | {size / GIB:.3f} |" for what, size in sizes.most_common(8)]
        lines.append(f"| all | {peak / GIB:.3f} |")
        assert long.gib is not None
        lines += [
            f"| published, reserved | {long.gib:.3f} |",
            f"| not attributed | {long.gib - peak / GIB:+.3f} |",
        ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    lines = [header("simulate: long sequences over cp", this_command())]
    rows = {long: call(long.words) for long in (CLAIMED, *PUBLISHED)}
    lines += table(list(rows.values()), (), [()] * len(rows))
    failed = [f"{long.name}: {name}" for long, row in rows.items() for name in row.differing()]
    lines += attribution({long: row for long, row in rows.items() if long.gib})
    return conclude(
        "simulate_context",
        lines,
        failed=failed,
        not_covered="405B, GPUs' kernels and allocator, float8 and what a compiler fuses",
        is_saved=args.save,
    )


if __name__ == "__main__":
    raise SystemExit(main())
