"""Long sequences over cp by execution on fake ranks, and beside what torchtitan published of them.

Claim: of Llama 3.1 8B with 128k tokens at dp_shard 2 x cp 8, with --model 405b of Llama 3.1 405B
with 128k tokens at tp 8 x cp 16, and of every other row, what was derived is equal to what was
executed, to the byte. Of memory beside the published figure nothing is
claimed: those runs were compiled and in float8, so that what lives within a block is another
figure. The page says of each row what an eager step in bf16 holds at its peak, and what is left.

torchtitan's rows are of 8 H100s with full recomputation, a sequence a rank of dp_shard, and of 512
with tp 8 and pp 8 by 1f1b, eight sequences a rank of dp_shard, each a micro-batch here
(benchmarks/llama3_h100_202412_torchtitan.md, its commit 9dec370; what else it ran of 405B,
simulate_published.py says), memory the allocator's reserved peak. Kernels are a CPU's here. Prints;
writes a result only with --save.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _machine import conclude, header, this_command
from _scaled import words
from simulate import Row, call, table

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Long:
    """A model of Llama 3.1, `samples` sequences a group of cp, each a micro-batch; `gib` as
    published, None where nothing is."""

    dp_shard: int
    cp: int
    sequence: int
    gib: float | None = None
    model: str = "8b"
    tp: int = 1
    pp: int = 1
    samples: int = 1
    rank: int = 0

    @property
    def name(self) -> str:
        more = "".join(f" x {a} {n}" for a, n in (("TP", self.tp), ("PP", self.pp)) if n > 1)
        return f"FSDP {self.dp_shard} x CP {self.cp}{more}, {self.sequence} tokens"

    @property
    def words(self) -> tuple[str, ...]:
        degrees = {"pp": self.pp, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}
        return words(
            degrees,
            (f"model.preset=llama3.1-{self.model}",),
            samples=self.dp_shard * self.samples,
            sequence=self.sequence,
        )


def giant(
    *, dp_shard: int, cp: int, pp: int, samples: int, gib: float | None = None, rank: int = 0
) -> Long:
    """Return a row of 405B with tp 8: of what is published 32768 tokens a rank of cp."""
    sequence = 32768 * cp if gib else 131072
    return Long(
        model="405b",
        dp_shard=dp_shard,
        cp=cp,
        tp=8,
        pp=pp,
        samples=samples,
        sequence=sequence,
        gib=gib,
        rank=rank,
    )


PUBLISHED = (
    Long(dp_shard=8, cp=1, sequence=32768, gib=83.9),
    Long(dp_shard=4, cp=2, sequence=65536, gib=84.2),
    Long(dp_shard=2, cp=4, sequence=131072, gib=84.0),
    Long(dp_shard=1, cp=8, sequence=262144, gib=84.5),
)
CLAIMED = Long(dp_shard=2, cp=8, sequence=131072)
GIANTS_PUBLISHED = (
    giant(dp_shard=8, cp=1, pp=8, samples=8, gib=75.3),
    giant(dp_shard=4, cp=2, pp=8, samples=8, gib=75.9),
    giant(dp_shard=2, cp=4, pp=8, samples=8, gib=77.1),
    giant(dp_shard=1, cp=8, pp=8, samples=8, gib=84.9),
)
GIANTS_CLAIMED = (
    giant(dp_shard=8, cp=16, pp=1, samples=1),
    giant(dp_shard=8, cp=16, pp=1, samples=1, rank=1023),
)
ROWS = {"8b": (CLAIMED, *PUBLISHED), "405b": (*GIANTS_PUBLISHED, *GIANTS_CLAIMED)}
THEMES = {"8b": "simulate_context", "405b": "simulate_context_405b"}


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
    parser.add_argument("--model", choices=[*ROWS], default="8b")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    lines = [header("simulate: long sequences over cp", this_command())]
    rows = {long: call(long.words, rank=long.rank) for long in ROWS[args.model]}
    lines += table(list(rows.values()), (), [()] * len(rows))
    failed = [f"{long.name}: {name}" for long, row in rows.items() for name in row.differing()]
    lines += attribution({long: row for long, row in rows.items() if long.gib})
    return conclude(
        THEMES[args.model],
        lines,
        failed=failed,
        not_covered="GPUs' kernels and allocator, float8 and what a compiler fuses",
        is_saved=args.save,
    )


if __name__ == "__main__":
    raise SystemExit(main())
