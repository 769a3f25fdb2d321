"""Bytes on the wire against the prediction: what the kernel counted on the ranks' own sockets.

Claim: predicted sent bytes times gloo's factor (its reduce-scatter is an all-reduce; everything
else sends what the ring model says) agree with the kernel's counters within 0.1 %, axis by axis,
in a step whose tensors are larger than 1 MiB. The rest is gloo's headers, 48 bytes a message.
The figures do not depend on how busy the machine is. Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import conclude, header, this_command

from ptrain.derivation.wire import TOLERANCE, WireRow
from tests.ranks import Ranks

STEADY = 2  # counted from 0
OVERRIDES = (
    "model.preset=llama-tiny", "model.layers=4", "model.hidden=256", "model.heads=4",
    "model.ffn=1024", "model.vocab=4096", "batch.micro=1", "batch.sequence=32",
)  # fmt: skip
STRATEGIES = {
    "ddp": ("dp_replicate",),
    "zero1": ("dp_shard",),
    "zero2": ("dp_shard",),
    "zero3": ("dp_shard",),
    "hsdp": ("dp_replicate", "dp_shard"),
}
VIAS = ("native", "all_to_all")


def cases() -> Iterator[tuple[str, int, str]]:
    """Strategy, ranks, how reduce-scatters are executed."""
    for size in (2, 4):
        for strategy, axes in STRATEGIES.items():
            for via in VIAS if "dp_shard" in axes else VIAS[:1]:
                if len(axes) == 1 or size == 4:
                    yield strategy, size, via


def rows(pool: Ranks, strategy: str, size: int, via: str) -> tuple[WireRow, ...]:
    """One steady step of this strategy in a pool of ranks."""
    from ptrain.algebra.legality import require
    from ptrain.derivation.estimate import derive
    from ptrain.derivation.wire import wire_rows
    from ptrain.meters.measure import join_estimates
    from ptrain.models.facts import facts_of
    from ptrain.spec.load import load
    from tests.gloo.runs import train

    axes = STRATEGIES[strategy]
    degree = size if len(axes) == 1 else size // 2
    mesh = [f"mesh.{axis}={degree}" for axis in axes]
    spec = require(
        load(strategy, (*OVERRIDES, *mesh, f"batch.global={size}", f"reduce_scatter={via}"))
    )
    reports = pool.run(size, train, spec, STEADY + 1, STEADY, timeout=600)
    measured = join_estimates([report.measured for report in reports if report.measured])
    assert not measured.undefined, measured.undefined
    return wire_rows(derive(spec, facts_of(spec)).exact, measured)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    lines = [header("wire: predicted bytes against the kernel's counters", this_command())]
    all_hold, pool = True, Ranks()
    lines += [
        f"Claim: measured / predicted - 1 is at most {TOLERANCE:.1%}, axis by axis.",
        f"{' '.join(OVERRIDES)}, one steady step, bytes that one rank sends (mean over the ranks). "
        "`true` reduce-scatters are executed as all-to-all and a local sum.",
        "",
        "| strategy | N | reduce-scatter | axis | predicted bytes | measured bytes | apart "
        "| factor | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for strategy, size, via in cases():
        for row in rows(pool, strategy, size, via):
            apart = row.measured_bytes / row.predicted_bytes - 1
            holds = 0 <= apart <= TOLERANCE
            all_hold &= holds
            lines.append(
                f"| {strategy} | {size} | {'stock' if via == 'native' else 'true'} "
                f"| {'+'.join(row.axes)} | {row.predicted_bytes:,} | {row.measured_bytes:,} "
                f"| {apart:.4%} | {row.factor} | {'holds' if holds else 'fails'} |"
            )
    return conclude("wire", lines, holds=all_hold, is_saved=args.save)


if __name__ == "__main__":
    sys.exit(main())
