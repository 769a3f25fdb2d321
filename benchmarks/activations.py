"""What a block leaves for its backward pass, by mode and length of the sequence: bytes, operations
and the time of a step, predicted and measured.

Claim: in every mode, at every length and with both kinds of attention, the bytes of activations
that stay on the device, and of those that leave it, are the predicted ones, the peak is within 2 %,
a step has the operations that are predicted, those that run again included, and the losses of all
modes are equal bit by bit. Of time nothing is claimed: the ratio to R stands beside the ratio of
operations.

One device. All modes of a length take a step each in turn, in an order that rotates; their first
step is counted (torch's FlopCounterMode), the second metered, the others are on the clock: figures
of wall time, which need a machine that does nothing else. Prints; with --save it writes a table and
a picture (extra `report`). Some 5 minutes; with --long, which runs eager attention at 8192 tokens
too and does not time it, 9.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _machine import ROOT, header, result_path, save, this_command, verdict, version

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from _one_device import Account, Contender, in_turns, spread

from ptrain.algebra.legality import require
from ptrain.report.record import PEAK_TOLERANCE
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.units import parse_bytes

if TYPE_CHECKING:  # an extra
    from matplotlib.axes import Axes

LAYERS, HIDDEN = 4, 64
SPEC = "ddp"
OVERRIDES = (
    "mesh.dp_replicate=1", "model.preset=llama-tiny", f"model.layers={LAYERS}",
    f"model.hidden={HIDDEN}", "model.heads=2", "model.kv_heads=2", "model.ffn=176",
    "optimizer.lr=1e-3", "optimizer.clip=null",
)  # fmt: skip
BASE = "R"
MODES: Mapping[str, tuple[str, ...]] = {
    BASE: (),
    "O": ("activations=O",),
    "M full": ("activations=M",),
    "M selective": ("activations=M", "recompute=selective"),
    "M attention": ("activations=M", "recompute=attention"),
    "M every 2nd": ("activations=M", "recompute={every: 2}"),
    "M@host": ("activations=M@host",),
}
ATTENTIONS = ("sdpa", "eager")
TOKENS = (256, 512, 1024, 2048, 4096, 8192)
QUICK = (64, 128)
LIMIT = parse_bytes("8 GiB")  # of a predicted peak: what is above is not run
# Rounds on the clock, by the longest sequence; those of long sequences take seconds each.
ROUNDS = {"sdpa": {2048: 7, 8192: 3}, "eager": {1024: 7, 2048: 5, 4096: 3, 8192: 0}}


@dataclass(frozen=True)
class Row:
    """One mode at one length."""

    attention: str
    tokens: int
    mode: str
    account: Account

    @property
    def name(self) -> str:
        return name_of(self.attention, self.tokens, self.mode)


def name_of(attention: str, tokens: int, mode: str) -> str:
    return f"{attention}, {tokens} tokens, {mode}"


def overrides_of(attention: str, tokens: int | str, mode: str) -> tuple[str, ...]:
    """What makes the named spec a row's."""
    batch = f"batch={{global: 1, micro: 1, sequence: {tokens}}}"
    return (*OVERRIDES, batch, f"attention={attention}", *MODES[mode])


def spec_of(attention: str, tokens: int, mode: str) -> Spec:
    return require(load(SPEC, overrides_of(attention, tokens, mode)))


def run(attention: str, tokens: int, rounds: int, *, limit: int) -> list[Row]:
    """All modes at one length; those whose predicted peak is above `limit` bytes are predicted
    only."""
    found = {
        mode: Contender(name_of(attention, tokens, mode), spec_of(attention, tokens, mode))
        for mode in MODES
    }
    fits = {mode: each for mode, each in found.items() if each.account.predicted.peak <= limit}
    in_turns(fits, rounds)
    return [Row(attention, tokens, mode, each.account) for mode, each in found.items()]


def rounds_of(attention: str, tokens: int) -> int:
    return next(rounds for longest, rounds in ROUNDS[attention].items() if tokens <= longest)


def failures(rows: Sequence[Row]) -> list[str]:
    """What does not keep the claim, with its figures."""
    failed = [each for row in rows for each in row.account.wrong]
    for row in rows:
        pairs = zip(row.account.losses, base_of(row, rows).losses, strict=False)
        apart = [mine - theirs for mine, theirs in pairs if mine != theirs]
        if apart:
            failed.append(f"{row.name}: losses {apart[0]:.1e} from those of {BASE}")
    return failed


def base_of(row: Row, rows: Sequence[Row]) -> Account:
    """R of the same attention and length."""
    key = (row.attention, row.tokens, BASE)
    return next(each.account for each in rows if (each.attention, each.tokens, each.mode) == key)


def held(rows: Sequence[Row]) -> list[str]:
    """A line per row: bytes, measured beside predicted; MB are 10^6 bytes."""
    columns = (
        "attention", "tokens", "mode", "activations MB, predicted", "measured", "difference, bytes",
        "off the device MB, predicted", "measured", "peak MB, predicted", "measured", "its error",
        "verdict",
    )  # fmt: skip
    lines = _head(columns)
    for row in rows:
        own, found = row.account.predicted, row.account.measured
        measured = ("–",) * 5
        if found is not None:
            measured = (
                _megabytes(found.activations),
                f"{found.activations - own.activations + found.off - own.off:+d}",
                _megabytes(found.off),
                _megabytes(found.peak),
                f"{found.peak / own.peak - 1:.4%}",
            )
        cells = (
            row.attention, str(row.tokens), row.mode, _megabytes(own.activations), *measured[:2],
            _megabytes(own.off), measured[2], _megabytes(own.peak), *measured[3:],
            row.account.told,
        )  # fmt: skip
        lines.append(_line(cells))
    return lines


def worked(rows: Sequence[Row]) -> list[str]:
    """A line per row: operations, and the time of a step beside them."""
    columns = (
        "attention", "tokens", "mode", "GFLOP forward", "backward", "of it again",
        "counted − predicted", "operations / R", "step s", "from – to", "time / R", "from – to",
        "last loss",
    )  # fmt: skip
    lines = _head(columns)
    for row in rows:
        own, found, base = row.account.predicted, row.account.measured, base_of(row, rows)
        counted = "–"
        if found is not None:
            counted = f"{found.forward - own.forward + found.backward - own.backward:+d}"
        cells = (
            row.attention, str(row.tokens), row.mode, f"{own.forward / 1e9:.3f}",
            f"{own.backward / 1e9:.3f}", f"{row.account.again / 1e9:.3f}", counted,
            f"{own.operations / base.predicted.operations:.3f}", *spread(row.account.seconds),
            *spread(ratios(row.account, base), 3), _last(row.account.losses),
        )  # fmt: skip
        lines.append(_line(cells))
    return lines


def ratios(own: Account, base: Account) -> list[float]:
    """Of two steps of one round each."""
    return [mine / theirs for mine, theirs in zip(own.seconds, base.seconds, strict=False)]


def _last(losses: Sequence[float]) -> str:
    return repr(losses[-1]) if losses else "–"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.6f}"


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), "|---" * len(names) + "|"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def text_of(rows: Sequence[Row], failed: Sequence[str], picture: str) -> str:
    """The result as a page."""
    left = sum(row.account.measured is None for row in rows)
    return "\n".join(
        [
            header("activations: bytes and time of a step by mode and length", this_command()),
            f"matplotlib {version('matplotlib')}",
            "",
            "Claim: in every mode, at every length and with both kinds of attention, bytes of "
            "activations on the device and off it are the predicted ones, the peak is within "
            f"{PEAK_TOLERANCE:.0%}, a step has the predicted operations, those that run again "
            "included, and the losses of all modes are equal bit by bit. Of time nothing is "
            "claimed.",
            "",
            f"llama with {LAYERS} blocks of width {HIDDEN}, fp32, one device with one thread, "
            "a sample a step. The first step is counted, by torch's FlopCounterMode, to which the "
            "fused attention of CPUs was made known; the second is metered, once: bytes and "
            "operations are the same in a repetition. Activations are those at the end of "
            "forward. The peak is of tensors only, over all phases. Operations are those of "
            "matrix products, two for each multiplication, attention's without its mask, which "
            "the fused kernel skips: so its time at long sequences is less than they say. The "
            "other steps are on the clock, modes in turns: seconds are wall time, "
            f"medians of {_rounds_text()} rounds with the "
            "smallest and the largest, ratios those of the rounds' ratios. "
            f"{left} rows are predicted only: those whose predicted peak is above "
            f"{LIMIT / 2**30:g} GiB, and without --long eager attention "
            "at 8192 tokens, where a step takes 15 s, and which is never timed.",
            "",
            *held(rows),
            "",
            *worked(rows),
            "",
            "Every row is a spec with overrides, whose bytes this command predicts and measures:",
            "",
            f"    {_command()}",
            "",
            *((f"![activations and time against length]({picture})", "") if picture else ()),
            verdict(failed),
            "",
            "Not covered: time as such, GPUs, where copies to the host overlap; several devices "
            "(tests compare the bytes there); other models.",
        ]
    )


def _rounds_text() -> str:
    fewest = min(number for each in ROUNDS.values() for number in each.values() if number)
    return f"{fewest} to {max(number for each in ROUNDS.values() for number in each.values())}"


def _command() -> str:
    """How a row's figures are seen again."""
    own = " ".join(OVERRIDES)
    batch = "'batch={global: 1, micro: 1, sequence: TOKENS}'"
    modes = " | ".join(" ".join(f"'{each}'" for each in mode) for mode in MODES.values() if mode)
    return f"ptrain validate {SPEC} {own} {batch} attention=ATTENTION [{modes}]"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Lines are predicted, crosses measured; predicted time is R's by the ratio of operations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 9), layout="constrained", sharex=True)
    for (memory, clock), attention in zip(axes.T, ATTENTIONS, strict=True):
        for number, mode in enumerate(MODES):
            own = [row for row in rows if (row.attention, row.mode) == (attention, mode)]
            look = {"color": f"C{number}", "linewidth": 4 - 0.5 * number}  # some lie on others
            _draw_bytes(memory, own, label=mode, **look)
            _draw_seconds(clock, own, rows, **look)
        memory.set_title(f"attention: {attention}")
        memory.set_ylabel("activations on the device, MB (10⁶ bytes)")
        clock.set_ylabel("a step, s (line: that of R × predicted operations)")
        clock.set_xlabel("tokens of a sequence")
        for each in (memory, clock):
            each.set_xscale("log", base=2)
            each.set_yscale("log")
            ticks = sorted({row.tokens for row in rows})
            each.set_xticks(ticks, labels=map(str, ticks))
            each.grid(alpha=0.3)
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(MODES))
    figure.suptitle("Lines are predicted, crosses measured")
    figure.savefig(path, dpi=120)


def _draw_bytes(axes: Axes, own: Sequence[Row], **look: Any) -> None:
    sizes = [row.account.predicted.activations / 1e6 for row in own]
    axes.plot([row.tokens for row in own], sizes, **look)
    for row in own:
        if row.account.measured is not None:
            axes.plot(row.tokens, row.account.measured.activations / 1e6, "kx", zorder=3)


def _draw_seconds(axes: Axes, own: Sequence[Row], rows: Sequence[Row], **look: Any) -> None:
    timed = [(row, base_of(row, rows)) for row in own if row.account.seconds]
    expected = [
        statistics.median(base.seconds)
        * (row.account.predicted.operations / base.predicted.operations)
        for row, base in timed
    ]
    at = [row.tokens for row, _ in timed]
    axes.plot(at, expected, **look)
    axes.plot(
        at, [statistics.median(row.account.seconds) for row, _ in timed], "x", color=look["color"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--picture", type=Path, help="draw to this file")
    parser.add_argument("--quick", action="store_true", help="short sequences, a round of each")
    parser.add_argument("--long", action="store_true", help="eager attention at 8192 tokens too")
    args = parser.parse_args()
    rows = []
    for attention in ATTENTIONS:
        for tokens in QUICK if args.quick else TOKENS:
            rounds = 1 if args.quick else rounds_of(attention, tokens)
            limit = LIMIT if rounds or args.long else 0
            rows += run(attention, tokens, rounds, limit=limit)
    failed = failures(rows)
    if args.picture:
        draw(rows, args.picture)
    print(text_of(rows, failed, ""))
    if args.save:
        _save(rows, failed)
    return 1 if failed else 0


def _save(rows: Sequence[Row], failed: Sequence[str]) -> None:
    picture = result_path("activations", "png")
    path = save("activations", text_of(rows, failed, picture.name))
    draw(rows, picture)
    print(f"\nwritten: {path.relative_to(ROOT)}, {picture.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
