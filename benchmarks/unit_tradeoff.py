"""The size of a unit: peak memory against the number of collective calls, predicted and measured.

Claim: for every size of unit (sub-block, block, 2 blocks, 4 blocks, model) the calls and bytes that
a rank sends in a step are the predicted ones, and the peak is within 2 %; and where units are
gathered for use, larger ones take fewer calls and a higher peak.

Two placements: fully_shard on every unit, and a tuple that runs as flat units. One steady step is
metered on gloo ranks. Prints; with --save it writes a table and a picture (extra `report`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import ROOT, header, result_path, save, this_command, verdict, version

if TYPE_CHECKING:  # torch is imported in the ranks
    from ptrain.costs import Estimate
    from tests.ranks import Ranks

RANKS = 4
STEPS, MEASURED_STEP = 5, 3
PEAK_LIMIT = 0.02
UNITS = ("sub-block", "block", "2 blocks", "4 blocks", "model")
LAYERS, SEQUENCE = 8, 64
SPEC = "zero3"
OVERRIDES = (
    "model.preset=llama-tiny", f"model.layers={LAYERS}", "model.hidden=256", "model.heads=4",
    "model.kv_heads=4", "model.ffn=688", f"mesh.dp_shard={RANKS}", f"batch.global={RANKS}",
    "batch.micro=1", f"batch.sequence={SEQUENCE}", "optimizer.lr=1e-3", "optimizer.clip=null",
)  # fmt: skip
PLACEMENTS = {
    "fully_shard, Θ S*, Ω S, G S": (),
    "flat units, Θ S*, Ω R, G S": ("placement.dp_shard.optimizer=R",),
}


@dataclass(frozen=True)
class Figures:
    """Of one step: collective calls and bytes sent by rank 0, and the highest peak of all ranks
    over all phases, in bytes."""

    calls: int
    sent: int
    peak: int


@dataclass(frozen=True)
class Row:
    """One placement with units of one size."""

    placement: str
    unit: str
    num_units: int
    predicted: Figures
    measured: Figures
    loss: float

    @property
    def apart(self) -> float:
        """The peak's relative error."""
        return self.measured.peak / self.predicted.peak - 1

    @property
    def holds(self) -> bool:
        same = (self.predicted.calls, self.predicted.sent) == (
            self.measured.calls,
            self.measured.sent,
        )
        return same and abs(self.apart) <= PEAK_LIMIT


def figures(estimate: Estimate) -> Figures:
    """One step's, without what only the second step sends."""
    from ptrain.costs import Phase

    steady = (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
    traffic = [row for row in estimate.traffic if row.key.phase in steady]
    return Figures(
        calls=sum(row.calls for row in traffic),
        sent=sum(row.sent_bytes for row in traffic),
        peak=max(row.device_bytes for row in estimate.peak),
    )


def overrides_of(placement: str, unit: str) -> tuple[str, ...]:
    """What makes the named spec a row's."""
    return (*OVERRIDES, *PLACEMENTS[placement], f"unit={unit}")


def measure(ranks: Ranks, placement: str, unit: str) -> Row:
    """Trains some steps and meters one of them."""
    from ptrain.algebra.legality import require
    from ptrain.derivation.estimate import derive
    from ptrain.meters.measure import join_estimates
    from ptrain.spec.load import load
    from tests.gloo.runs import train

    spec = require(load(SPEC, overrides_of(placement, unit)))
    derivation = derive(spec)
    reports = ranks.run(RANKS, train, spec, STEPS, MEASURED_STEP)
    trajectory = reports[0].trajectory
    assert trajectory is not None
    return Row(
        placement=placement,
        unit=unit,
        num_units=len(derivation.plan.units),
        predicted=figures(derivation.exact),
        measured=figures(join_estimates([each.measured for each in reports if each.measured])),
        loss=trajectory.losses[-1],
    )


def trades(rows: Sequence[Row]) -> bool:
    """Larger units: fewer calls and no lower peak."""
    return all(
        large.measured.calls < small.measured.calls and large.measured.peak >= small.measured.peak
        for small, large in pairwise(rows)
    )


def table(rows: Sequence[Row]) -> list[str]:
    """A line per row; MB are 10^6 bytes."""
    figures = ("calls", "sent MB", "peak MB")
    pairs = [f"{name}, {side}" for name in figures for side in ("predicted", "measured")]
    head = ("placement", "unit", "units", *pairs, "peak's error", "loss", "verdict")
    lines = [_line(head), "|---" * len(head) + "|"]
    for row in rows:
        predicted, measured = row.predicted, row.measured
        lines.append(
            _line(
                (
                    row.placement,
                    row.unit,
                    str(row.num_units),
                    f"{predicted.calls}",
                    f"{measured.calls}",
                    f"{predicted.sent / 1e6:.6f}",
                    f"{measured.sent / 1e6:.6f}",
                    f"{predicted.peak / 1e6:.6f}",
                    f"{measured.peak / 1e6:.6f}",
                    f"{row.apart:.4%}",
                    f"{row.loss:.6f}",
                    "holds" if row.holds else "fails",
                )
            )
        )
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Peak against calls: lines are predicted, crosses measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
    for color, placement in zip(("tab:blue", "tab:orange"), PLACEMENTS, strict=True):
        own = [row for row in rows if row.placement == placement]
        predicted = [(row.predicted.calls, row.predicted.peak / 1e6) for row in own]
        measured = [(row.measured.calls, row.measured.peak / 1e6) for row in own]
        line = {"color": color, "marker": "o", "markersize": 9, "fillstyle": "none"}
        axes.plot(*zip(*predicted, strict=True), **line, label=f"{placement}: predicted")
        axes.plot(*zip(*measured, strict=True), "x", color=color, label="measured")
        for row, at in zip(own, predicted, strict=True):
            axes.annotate(row.unit, at, xytext=(7, 7), textcoords="offset points", fontsize=9)
    axes.set_xscale("log")
    ticks = [2, 5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, labels=map(str, ticks))
    axes.minorticks_off()
    axes.set_xlim(2, 230)
    axes.set_ylim(0, 1.25 * max(row.predicted.peak for row in rows) / 1e6)
    axes.set_xlabel("collective calls of one rank in a step (log scale)")
    axes.set_ylabel("peak memory of a rank, MB (10⁶ bytes)")
    axes.set_title(f"What a unit's size trades: {LAYERS} blocks on {RANKS} gloo ranks")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="upper right")
    figure.savefig(path, dpi=120)


def failures(rows: Sequence[Row]) -> list[str]:
    """What does not keep the claim, with its figures."""
    failed = [
        f"{row.placement}, {row.unit}: predicted {row.predicted}, measured {row.measured}"
        for row in rows
        if not row.holds
    ]
    for placement in PLACEMENTS:
        own = [row for row in rows if row.placement == placement]
        if not trades(own):
            told = ", ".join(f"{row.measured.calls} ({row.measured.peak:,} bytes)" for row in own)
            failed.append(f"{placement}: calls (and peaks) from small to large units: {told}")
    return failed


def text_of(rows: Sequence[Row], failed: Sequence[str], picture: str) -> str:
    """The result as a page."""
    spread = max(row.loss for row in rows) - min(row.loss for row in rows)
    return "\n".join(
        [
            header("unit_tradeoff: peak against calls by the size of a unit", this_command()),
            f"matplotlib {version('matplotlib')}",
            "",
            "Claim: calls and bytes sent by a rank in a step are the predicted ones, the peak is "
            f"within {PEAK_LIMIT:.0%}; larger units take fewer calls and no lower peak.",
            "",
            f"llama with {LAYERS} blocks, fp32, {RANKS} gloo ranks, one sample of {SEQUENCE} "
            "tokens each. Step "
            f"{MEASURED_STEP} (from 0) of {STEPS} is metered, once: nothing here is a time, and a "
            "repetition gives the same figures. Calls and bytes are rank 0's. The peak is the "
            "highest of all ranks and phases, of tensors only (not the interpreter, not what an "
            "allocator keeps); the measured one may hold 4 bytes more, a loss that the meter's "
            "caller keeps. Loss: the last step's mean over all ranks; all rows train on the same "
            f"samples, and their losses are at most {spread:.1e} apart.",
            "",
            *table(rows),
            "",
            *_commands(),
            "",
            *((f"![peak against calls]({picture})", "") if picture else ()),
            verdict(failed),
            "",
            "Not covered: time, other backends, other placements and models.",
        ]
    )


def _commands() -> list[str]:
    """How a row's figures are seen again."""
    lines = [
        f"Every row is the spec `{SPEC}` with overrides. These commands predict and measure a "
        "placement's rows; UNIT is the row's unit. Calls and bytes are the sums of the command's "
        "lines (those of setup left out), the peak is the largest of its three.",
    ]
    for placement in PLACEMENTS:
        *others, _ = overrides_of(placement, "")
        command = f'ptrain validate {SPEC} {" ".join(others)} unit="UNIT"'
        lines += ["", f"{placement}:", "", f"    {command}"]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--picture", type=Path, help="draw to this file")
    args = parser.parse_args()
    from tests.ranks import Ranks

    pool = Ranks()
    rows = [measure(pool, placement, unit) for placement in PLACEMENTS for unit in UNITS]
    pool.close()
    failed = failures(rows)
    if args.picture:
        draw(rows, args.picture)
    print(text_of(rows, failed, ""))
    if args.save:
        _save(rows, failed)
    return 1 if failed else 0


def _save(rows: Sequence[Row], failed: Sequence[str]) -> None:
    picture = result_path("unit_tradeoff", "png")
    path = save("unit_tradeoff", text_of(rows, failed, picture.name))
    draw(rows, picture)
    print(f"\nwritten: {path.relative_to(ROOT)}, {picture.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
