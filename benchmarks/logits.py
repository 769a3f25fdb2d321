"""Logits that are never whole: the peak of a step by how the loss is computed, predicted and
measured.

Claim: with the loss of all tokens at once, in chunks of several sizes, and fused, the peak is
within 2 % of the predicted, bytes of activations and operations are the predicted ones, and the
losses are equal to rounding; chunks and the fused loss have a lower peak than the whole one.

One device; and two gloo ranks that cut the vocabulary, whose operations are not counted. A steady
step is metered. The time of a step on one device is shown, wall time that needs a machine which
does nothing else, and nothing is claimed of it. Prints; writes a result only with --save. Some
2 minutes.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import conclude, header, this_command
from _one_device import Account, Contender, figures, in_turns, spread, unequal
from step_time import different

from ptrain.algebra.legality import require
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

if TYPE_CHECKING:  # torch is imported in the ranks
    from tests.ranks import Ranks

VOCAB, TOKENS, QUICK = 32000, 1024, (4000, 512)
ROUNDS = 7
ONE, CUT, RANKS = "one device", "tp, 2 ranks", 2
MESHES = {ONE: ("ddp", "mesh.dp_replicate=1"), CUT: ("tp", f"mesh.tp={RANKS}")}
OVERRIDES = (
    "model.preset=llama-tiny", "model.layers=2", "model.hidden=128", "model.heads=4",
    "model.kv_heads=4", "model.ffn=352", "optimizer.lr=1e-3", "optimizer.clip=null",
)  # fmt: skip
BASE, FUSED = "whole", "fused"
CHUNKS = {"1/2": 2, "1/4": 4, "1/8": 8, "1/16": 16}  # of the tokens
OF_RANKS = (BASE, "1/8")
METERED_STEPS, METERED = 4, 3


def overrides_of(mesh: str, loss: str, size: tuple[int, int]) -> tuple[str, ...]:
    """What makes the mesh's named spec a row's, at (words, tokens)."""
    vocab, tokens = size
    batch = f"batch={{global: 1, micro: 1, sequence: {tokens}}}"
    more = {
        BASE: (),
        FUSED: (f"loss={{chunk: {tokens // 8}, fused: true}}",),
        **{name: (f"loss={{chunk: {tokens // parts}}}",) for name, parts in CHUNKS.items()},
    }
    return (MESHES[mesh][1], *OVERRIDES, f"model.vocab={vocab}", batch, *more[loss])


def spec_of(mesh: str, loss: str, size: tuple[int, int]) -> Spec:
    return require(load(MESHES[mesh][0], overrides_of(mesh, loss, size)))


def losses() -> tuple[str, ...]:
    """Those that this torch has."""
    from ptrain.models.chunked import can_fuse

    return (BASE, *CHUNKS, *((FUSED,) if can_fuse() else ()))


def contender(mesh: str, loss: str, size: tuple[int, int]) -> Contender:
    from ptrain.traces.facts import facts_of

    spec = spec_of(mesh, loss, size)
    return Contender(f"{mesh}, {loss}", spec, facts_of(spec))


def on_ranks(pool: Ranks, loss: str, size: tuple[int, int]) -> Account:
    """Trains some steps with the meters on one of them."""
    from ptrain.meters.measure import join_estimates
    from tests.gloo.runs import train

    found = contender(CUT, loss, size)
    reports = pool.run(RANKS, train, found.spec, METERED_STEPS, METERED, timeout=300)
    measured = join_estimates([each.measured for each in reports if each.measured])
    account, trajectory = found.account, reports[0].trajectory
    account.measured = figures(measured, account.predicted.forward, account.predicted.backward)
    account.wrong = unequal(found.name, found.exact, measured)
    account.losses = [*trajectory.losses] if trajectory else []
    return account


Found = Mapping[tuple[str, str], Account]


def run(size: tuple[int, int], rounds: int) -> Found:
    """By mesh and loss."""
    from tests.ranks import Ranks

    alone = {loss: contender(ONE, loss, size) for loss in losses()}
    in_turns(alone, rounds)
    found = {(ONE, loss): each.account for loss, each in alone.items()}
    pool = Ranks()
    found |= {(CUT, loss): on_ranks(pool, loss, size) for loss in OF_RANKS}
    pool.close()
    return found


def failures(found: Found) -> list[str]:
    """What does not keep the claim, with its figures."""
    failed = [each for account in found.values() for each in account.wrong]
    for (mesh, loss), account in found.items():
        base = found[mesh, BASE].losses
        apart = [abs(mine / theirs - 1) for mine, theirs in zip(account.losses, base, strict=True)]
        failed += different(f"{mesh}, {loss}", max(apart))
    for mesh in MESHES:
        peaks = [(loss, peak(each)) for (own, loss), each in found.items() if own == mesh]
        failed += [
            f"{mesh}: {loss} takes {size:,} bytes, {BASE} {peaks[0][1]:,}"
            for loss, size in peaks[1:]
            if not size < peaks[0][1]
        ]
    return failed


def peak(account: Account) -> int:
    assert account.measured is not None, "all of them run"
    return account.measured.peak


def table(found: Found) -> list[str]:
    """A line per mesh and loss; MB are 10^6 bytes."""
    columns = (
        "mesh", "loss", "peak MB, predicted", "measured", "its error", "saved MB, predicted",
        "measured", "activations, difference in bytes", "GFLOP, predicted", "of it again",
        "counted − predicted", "step s", "from – to", "loss of the last step", "verdict",
    )  # fmt: skip
    lines = [_line(columns), "|---" * len(columns) + "|"]
    for (mesh, loss), account in found.items():
        own, measured, base = account.predicted, account.measured, found[mesh, BASE]
        assert measured is not None, "all of them run"
        counted = f"{measured.operations - own.operations:+d}" if mesh == ONE else "–"
        cells = (
            mesh,
            loss,
            f"{own.peak / 1e6:.6f}",
            f"{measured.peak / 1e6:.6f}",
            f"{measured.peak / own.peak - 1:.4%}",
            f"{(base.predicted.peak - own.peak) / 1e6:.6f}",
            f"{(peak(base) - measured.peak) / 1e6:.6f}",
            f"{measured.activations - own.activations:+d}",
            f"{own.operations / 1e9:.3f}",
            f"{account.again / 1e9:.3f}",
            counted,
            *spread(account.seconds),
            f"{account.losses[-1]:.6f}",
            account.told,
        )
        lines.append(_line(cells))
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(found: Found, size: tuple[int, int], rounds: int) -> list[str]:
    """The result, but for its verdict."""
    vocab, tokens = size
    lines = [
        header("logits: the peak of a step by how its loss is computed", this_command()),
        "Claim: with the loss of all tokens at once, in chunks, and fused, the peak is within 2 % "
        "of the predicted, bytes of activations and operations are the predicted ones, losses are "
        "equal to rounding; chunks and the fused loss have a lower peak than the whole "
        "one.",
        "",
        f"llama with 2 blocks of width 128 and {vocab} words, fp32, a sample of {tokens} tokens a "
        f"step: all logits are {vocab * tokens * 4 / 1e6:.1f} MB. A chunk is that part of the "
        "tokens, the fused loss has chunks of 1/8. One thread a rank. One device: a step is "
        "counted by torch's FlopCounterMode (which was told of the products inside "
        "linear_cross_entropy), the next is metered, the others are on the clock in turns: wall "
        f"time, the median of {rounds} rounds with the smallest and the largest. Two ranks cut the "
        f"head over the vocabulary: step {METERED} (from 0) of {METERED_STEPS} is metered; figures "
        "of the rank with most. The peak is of tensors only, over all phases; a metered step gives "
        "the same bytes in a repetition. Beside the logits a smaller chunk leaves what chunks cost "
        "in backward: the head's gradient of a chunk, and that of those before it.",
        "",
        *table(found),
        "",
        "Every row is a spec with overrides, which these commands predict and measure:",
    ]
    for mesh, (spec, _) in MESHES.items():
        lines += [
            "",
            f"    ptrain validate {spec} {shlex.join(overrides_of(mesh, BASE, size))} LOSS",
        ]
    lines.append("")
    for loss in (*CHUNKS, FUSED):
        lines.append(f"- {loss}: LOSS is `{shlex.quote(overrides_of(ONE, loss, size)[-1])}`")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="a small head, a round of each")
    args = parser.parse_args()
    size, rounds = (QUICK, 1) if args.quick else ((VOCAB, TOKENS), ROUNDS)
    found = run(size, rounds)
    return conclude(
        "logits",
        page(found, size, rounds),
        failed=failures(found),
        not_covered="time as such, GPUs and their kernels, other models, pipelines.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
