"""The price of tensor parallelism: the naive plan against pairs of operators, and slices of tokens.

naive: every column operator takes its input by itself, and sums its gradient by itself. pairs: what
the column operators of a sub-block share is made whole once (Megatron-LM). slices: the same, and
between sub-blocks a rank has its tokens only (sequence parallelism). slices, saved: operators save
their slice, and gather it again in the backward pass.

Claim: a block and micro-batch take over tp, forward + backward: naive 2 + 5 all-reduces; pairs
2 + 2, and 4/7 of the bytes; slices 4 + 4 halves of one (all-gathers and reduce-scatters) and the
bytes of pairs; saved 2 all-gathers more, and 5/4 of the bytes. Calls and bytes of all plans are the
predicted ones, the peak is within 2 %. Times are shown, and nothing is claimed of them.

Calls and peak: one steady step of each plan is metered, with some blocks and with one more; what
that adds is a block's. Times: all plans live in the same gloo ranks and take a step each in turn,
in an order that rotates; a ratio is of two steps of one round, a step's time its slower rank's.
Wall-clock figures: they need a machine that does nothing else. Prints; writes a result only with
--save. 60 rounds take about 5 minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import conclude, header, this_command
from _turns import WARM_UP, in_turns
from step_time import RANKS, bound, different

if TYPE_CHECKING:  # torch is imported in the ranks
    from ptrain.costs import Estimate, Traffic
    from ptrain.spec.spec import Spec
    from tests.ranks import Ranks

PLANS = {"naive": "tp-naive", "pairs": "tp", "slices": "tp-sp", "slices, saved": "tp-saved"}
BASE = "pairs"
OVERRIDES = (
    "model.preset=llama-10m", f"mesh.tp={RANKS}", "batch.global=4", "batch.micro=2",
    "batch.sequence=256", "optimizer.lr=3e-4",
)  # fmt: skip
LAYERS = 6
METERED_STEPS, METERED = 4, 3
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
PHASES = ("forward", "backward")
Counts = Mapping[tuple[str, str], float]  # (kind of call, phase) -> calls

VOLUMES = {"naive": 7 / 4, "pairs": 1.0, "slices": 1.0, "slices, saved": 5 / 4}  # of pairs
# Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, sections 4.2.1 and 4.2.2
CLAIMED: dict[str, Counts] = {
    "naive": {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 5},
    "pairs": {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2},
    "slices": {(kind, phase): 2 for kind in KINDS[1:] for phase in PHASES},
    "slices, saved": {
        **{(kind, phase): 2 for kind in KINDS[1:] for phase in PHASES},
        ("all_gather", "backward"): 4,
    },
}


@dataclass(frozen=True)
class Account:
    """What a step costs: calls and bytes of activations in a block and micro-batch, calls of all,
    bytes sent by rank 0, and the highest peak of all ranks and phases."""

    of_block: Counts
    sent_of_block: float
    calls: int
    sent: int
    peak: int


@dataclass
class Plan:
    """One plan's figures. `wrong` names checks of the metered steps that do not hold."""

    predicted: Account
    measured: Account
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def spec_of(plan: str, layers: int = LAYERS) -> Spec:
    from ptrain.algebra.legality import require
    from ptrain.spec.load import load

    return require(load(PLANS[plan], (*OVERRIDES, f"model.layers={layers}")))


def counts(estimate: Estimate) -> Counts:
    """Calls that move activations, by kind and phase."""
    calls: dict[tuple[str, str], float] = {}
    for row in of_activations(estimate):
        key = (str(row.key.collective), str(row.key.phase))
        calls[key] = calls.get(key, 0) + row.calls
    return calls


def of_activations(estimate: Estimate) -> list[Traffic]:
    return [row for row in estimate.traffic if row.key.state == "activations"]


def account(estimate: Estimate, larger: Estimate, micro_batches: int) -> Account:
    """Of the first; the second has one block more."""
    fewer, more = counts(estimate), counts(larger)
    of_block = {key: (more[key] - fewer.get(key, 0)) / micro_batches for key in more}
    sent, sent_more = (sum(r.sent_bytes for r in of_activations(e)) for e in (estimate, larger))
    return Account(
        of_block={key: number for key, number in of_block.items() if number},
        sent_of_block=(sent_more - sent) / micro_batches,
        calls=sum(row.calls for row in estimate.traffic),
        sent=sum(row.sent_bytes for row in estimate.traffic),
        peak=max(row.device_bytes for row in estimate.peak),
    )


def meter(ranks: Ranks, plan: str) -> Plan:
    """Trains some steps at both depths with the meters on one of them."""
    from ptrain.derivation.estimate import derive
    from ptrain.meters.measure import join_estimates
    from ptrain.report.record import compare
    from tests.gloo.runs import train

    predicted, measured, wrong = [], [], []
    specs = [spec_of(plan, layers) for layers in (LAYERS, LAYERS + 1)]
    for spec in specs:
        reports = ranks.run(RANKS, train, spec, METERED_STEPS, METERED)
        metered = join_estimates([rank.measured for rank in reports if rank.measured])
        exact = derive(spec).exact
        predicted.append(exact)
        measured.append(metered)
        wrong += [
            f"{plan}: {check.name}: predicted {check.predicted}, measured {check.measured}"
            for check in compare(exact, metered)
            if not check.holds
        ]
    times = specs[0].batch.accumulate
    return Plan(
        predicted=account(predicted[0], predicted[1], times),
        measured=account(measured[0], measured[1], times),
        wrong=wrong,
    )


def run(rounds: int) -> dict[str, Plan]:
    """All plans: metered one by one, then on the clock in turns."""
    from tests.ranks import Ranks

    pool = Ranks()
    plans = {name: meter(pool, name) for name in PLANS}
    specs = {name: spec_of(name) for name in PLANS}
    ranks = pool.run(RANKS, in_turns, specs, rounds, timeout=3600)
    pool.close()
    for name, plan in plans.items():
        both = [rank[name][0] for rank in ranks]
        plan.seconds = [max(of_ranks) for of_ranks in zip(*both, strict=True)]
        plan.losses = ranks[0][name][1]
    return plans


def failures(plans: Mapping[str, Plan]) -> list[str]:
    """What does not keep the claim, with its figures."""
    return [failure for name in plans for failure in failures_of(name, plans)]


def failures_of(name: str, plans: Mapping[str, Plan]) -> list[str]:
    """Of one plan."""
    plan, base = plans[name], plans[BASE]
    failed, calls = list(plan.wrong), plan.measured.of_block
    if calls != CLAIMED[name]:
        failed.append(f"{name}: a block takes {in_words(calls)}, not {in_words(CLAIMED[name])}")
    volume = plan.measured.sent_of_block / base.measured.sent_of_block
    if volume != VOLUMES[name]:
        failed.append(f"{name}: {volume:.4f} × the bytes of pairs, not {VOLUMES[name]:g}")
    losses = zip(plan.losses, base.losses, strict=True)
    return failed + different(name, max(abs(mine / theirs - 1) for mine, theirs in losses))


def in_words(counts: Counts) -> str:
    """`2 + 5 all_reduce`: forward + backward."""
    kinds = [kind for kind in KINDS if any(key[0] == kind for key in counts)]
    calls = (
        f"{' + '.join(f'{counts.get((kind, phase), 0):g}' for phase in PHASES)} {kind}"
        for kind in kinds
    )
    return ", ".join(calls) or "none"


def ratios(own: Plan, other: Plan) -> list[float]:
    return [mine / theirs for mine, theirs in zip(own.seconds, other.seconds, strict=True)]


def counted(plans: Mapping[str, Plan]) -> list[str]:
    """A line per plan, measured beside predicted; MB are 10^6 bytes."""
    figures = ("in a block and micro-batch", "MB of it", "calls of a step", "sent MB", "peak MB")
    pairs = [f"{name}{side}" for name in figures for side in ("", ", predicted")]
    lines = _head(("plan", "spec", *pairs, "verdict"))
    for name, plan in plans.items():
        both = zip(_cells(plan.measured), _cells(plan.predicted), strict=True)
        verdict = "fails" if failures_of(name, plans) else "holds"
        cells = (cell for pair in both for cell in pair)
        lines.append(_line((name, f"`{PLANS[name]}`", *cells, verdict)))
    return lines


def _cells(account: Account) -> tuple[str, ...]:
    return (
        in_words(account.of_block),
        f"{account.sent_of_block / 1e6:.6f}",
        f"{account.calls}",
        f"{account.sent / 1e6:.6f}",
        f"{account.peak / 1e6:.6f}",
    )


def timed(plans: Mapping[str, Plan]) -> list[str]:
    """A line per plan, of which nothing is claimed."""
    lines = _head(("plan", "step s", "min – max", "ratio to naive", "95 %", "loss", "verdict"))
    for name, plan in plans.items():
        of_pairs = ratios(plan, plans["naive"])
        low, high = bound(of_pairs)
        cells = (
            name,
            f"{statistics.median(plan.seconds):.4f}",
            f"{min(plan.seconds):.4f} – {max(plan.seconds):.4f}",
            f"{statistics.median(of_pairs):.3f}",
            f"{low:.3f} – {high:.3f}",
            f"{plan.losses[-1]:.6f}",
            "no claim",
        )
        lines.append(_line(cells))
    return lines


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), "|---" * len(names) + "|"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(plans: Mapping[str, Plan], rounds: int) -> list[str]:
    """The result, but for its verdict."""
    claimed = "; ".join(
        f"{name} {in_words(calls)} and {VOLUMES[name]:g} × the bytes of pairs"
        for name, calls in CLAIMED.items()
    )
    return [
        header("tensor_plans: what tensor parallelism sends, naive and in pairs", this_command()),
        f"Claim: a block and micro-batch take over tp, forward + backward: {claimed}. Calls and "
        "bytes of every plan are the predicted ones, and the peak is within 2 %.",
        f"llama-10m, fp32, {RANKS} gloo ranks with one thread each, {' '.join(OVERRIDES[2:])}. "
        f"Step {METERED} (from 0) of {METERED_STEPS} is metered, once, with {LAYERS} and with "
        f"{LAYERS + 1} blocks: what a block takes is the difference, by micro-batch; calls, bytes "
        f"(rank 0's) and the peak (the highest of all ranks and phases, of tensors only) are of "
        f"{LAYERS}. Calls and bytes are all of a step: also the loss's, the embedding's, the "
        "norms' gradients where a rank has its tokens only, and the gradient norm's. Bytes are "
        "logical ones, at the API; gloo carries a reduce-scatter as an all-reduce (`wire`), so "
        "slices cost more there than they send. Seconds are wall time of the slower rank, of "
        f"{rounds} rounds, medians; {WARM_UP} rounds before them are left out. Ratios are medians "
        "of the rounds' ratios, the interval is two-sided by order statistics. The loss is the "
        "last step's; all plans train on the same samples.",
        "",
        *counted(plans),
        "",
        *timed(plans),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    plans = run(args.rounds)
    return conclude(
        "tensor_plans",
        page(plans, args.rounds),
        failed=failures(plans),
        not_covered="GPUs, where a half can be hidden behind a product (asynchronous tensor "
        "parallelism), links between machines, more ranks, and time (shown, not claimed).",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
