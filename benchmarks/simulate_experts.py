"""Models with experts on up to 2048 fake ranks: what is executed is what was derived.

Claim: of Mixtral 8x7B on 16 ranks, Qwen3-30B-A3B on 32, DeepSeek-V3 with its own attention, groups
and biases on 2048 (pp 16, dp_shard 2, ep 64), all layers of each, and of specs/experts/5d.yaml with
its axes stretched to 2048 ranks (pp 4, dp_shard 16, cp 4, ep 4, tp 2), no figure of the first rank,
of one in between where there are stages, or of the last differs from what was derived: bytes by
state, peaks, calls and bytes sent. With a capacity both are whatever is routed; without one (5d, a
row of Mixtral) both are of tokens that fall evenly on the experts. Kernels are a CPU's here. --only
has the rows of one model. Prints; writes a result only with --save. Some ten minutes, if quiet.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _machine import conclude, header, this_command
from _scaled import SECONDS, words
from simulate import GB, Row, call, table

TOKENS = 4096  # of a sample
CAPACITY = 1.25
FIVE = (
    "5d",
    "mesh={pp: 4, dp_shard: 16, cp: 4, ep: 4, tp: 2}",
    "batch.global=1024",
    "cluster.devices=2048",
    f"timeout.init={SECONDS}",
)


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """A model with experts on these ranks, so many samples of each that has samples of its own."""

    preset: str
    degrees: Mapping[str, int]
    samples: int = 1
    has_capacity: bool = True

    @property
    def words(self) -> tuple[str, ...]:
        capacity = (f"model.capacity_factor={CAPACITY}",) if self.has_capacity else ()
        data = math.prod(self.degrees.get(axis, 1) for axis in ("dp_shard", "ep"))
        model = (f"model.preset={self.preset}", *capacity)
        return words(self.degrees, model, samples=data * self.samples, sequence=TOKENS)


MIXTRAL = {"dp_shard": 2, "ep": 8}
DEEPSEEK = Sparse(preset="deepseek-v3", degrees={"pp": 16, "dp_shard": 2, "ep": 64}, samples=16)
# By model: what is called, and of which ranks.
ROWS: Mapping[str, tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]] = {
    "mixtral": (
        (Sparse(preset="mixtral-8x7b", degrees=MIXTRAL).words, (0, 15)),
        (Sparse(preset="mixtral-8x7b", degrees=MIXTRAL, has_capacity=False).words, (0,)),
    ),
    "qwen": ((Sparse(preset="qwen3-30b-a3b", degrees={"dp_shard": 4, "ep": 8}).words, (0, 31)),),
    "deepseek": ((DEEPSEEK.words, (0, 1024, 2047)),),
    "5d": ((FIVE, (0, 1024, 2047)),),
}


def figures(row: Row) -> tuple[str, str]:
    """Return model state and what is sent in a step, in GB."""
    return f"{row.state_bytes() / GB:.4g}", f"{row.sent_bytes() / GB:.4g}"


def differing(row: Row) -> list[str]:
    """Return what differs, peaks included."""
    spec = " ".join(row.arguments)
    return [
        f"{spec}: {figure['name']}: exact {figure['exact']}, simulated {figure['simulated']}"
        for figure in row.rank["differing"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*ROWS], help="the rows of one model")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    rows = [
        call(arguments, rank=rank)
        for name, calls in ROWS.items()
        if args.only in (None, name)
        for arguments, ranks in calls
        for rank in ranks
    ]
    return conclude(
        f"simulate_experts_{args.only}" if args.only else "simulate_experts",
        [
            header("simulate: experts on ranks of their own", this_command()),
            *table(rows, ("Θ + Ω + G GB", "sent GB"), [figures(row) for row in rows]),
        ],
        failed=[line for row in rows for line in differing(row)],
        not_covered="GPUs' kernels and allocator; tokens that fall otherwise than evenly, where "
        "there is no capacity",
        is_saved=args.save,
    )


if __name__ == "__main__":
    raise SystemExit(main())
