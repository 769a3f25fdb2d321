"""What a blog and the lecture say of tp, sp, activations, micro-batches and bubbles. Each claim is
worked out from predictions and schedules; nothing is run, and seconds are not judged here."""

from __future__ import annotations

from _claims import Said, claim
from _paper_composition import most_held, part
from _paper_context import section as long_sequences
from _paper_digest import NEAR, exact, is_near, states
from _paper_experts import section as experts

from ptrain.algebra.legality import require_runnable
from ptrain.axes.pipeline.catalogue import make_schedule
from ptrain.axes.pipeline.schedule import PipelineShape
from ptrain.axes.pipeline.simulate import Simulation, simulate
from ptrain.cost import Collective, Estimate, Phase, State
from ptrain.spec.load import load
from ptrain.spec.pipeline import ScheduleName

RANKS = 8
_ONE = ("8b-tp", "mesh={}", "placement={}")
_TP, _SP = ("8b-tp",), ("8b-tp-sp",)


def activations(estimate: Estimate) -> int:
    """Return the activations of the rank with the most."""
    return estimate.bytes_of(State.ACTIVATIONS)


def peak(estimate: Estimate) -> int:
    """Return the highest peak."""
    largest = estimate.peak_bytes()
    assert largest is not None, "the claims are about built-in models"
    return largest


def sent_over(estimate: Estimate, axis: str) -> int:
    """Return the traffic over one axis of the rank that sends the most in a step."""
    return max(
        sum(
            row.sent_bytes
            for row in rows
            if row.key.axes == (axis,) and row.key.phase is not Phase.SETUP
        )
        for rows in estimate.by_rank()
    )


def _states_of_7b5() -> Said:
    held = states(exact("7b5-dp"))
    return is_near(held, 120e9), f"{held / 1e9:.4g} GB for the ZeRO paper's 7.5B"


def _sums_of_a_layer() -> Said:
    """Return the calls of a layer and micro-batch of an 8B model on tp 8, and the size of each."""
    spec = require_runnable(load("8b-tp"))
    layers, times = spec.model.layers, spec.batch.accumulate  # type: ignore[union-attr]
    rows = [row for row in exact("8b-tp").traffic if row.key.state is State.ACTIVATIONS]
    sums = [row for row in rows if row.key.collective is Collective.ALL_REDUCE]
    by_phase = {
        phase: sum(row.calls for row in sums if row.key.phase is phase) / layers / times
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    calls = sum(row.calls for row in sums)
    size = 2 * spec.batch.micro * spec.batch.sequence * spec.model.hidden  # type: ignore[union-attr]
    text = (
        f"{by_phase[Phase.FORWARD]:.2f} forward, {by_phase[Phase.BACKWARD]:.2f} backward a layer "
        f"and micro-batch, the embedding's and the head's among them; {calls / layers:.0f} a layer "
        f"and step of {times} micro-batches, of {size / 1e6:.1f} MB at most"
    )
    return calls / layers < 4.5, text


def _sp_sends_the_same() -> Said:
    plain, sliced = exact(*_TP).sent_bytes(), exact(*_SP).sent_bytes()
    kinds = sorted(
        {str(row.key.collective) for row in exact(*_SP).traffic if row.sent_bytes > 10**9}
    )
    text = f"{sliced / plain:.4f}× of what tp alone sends, by {' and '.join(kinds)}"
    return is_near(sliced, plain), text


def _tp_cuts_activations() -> Said:
    whole = activations(exact(*_ONE))
    plain, sliced = whole / activations(exact(*_TP)), whole / activations(exact(*_SP))
    return plain > RANKS * (1 - NEAR), f"{plain:.2f}× less on tp {RANKS}, {sliced:.2f}× with sp"


def _sp_cuts_more() -> Said:
    plain, sliced = activations(exact(*_TP)), activations(exact(*_SP))
    return sliced < plain, f"{plain / 1e9:.3g} GB on tp {RANKS}, {sliced / 1e9:.3g} GB with sp"


def _grows(kind: str) -> tuple[float, float]:
    """Return the activations with twice the samples, and with twice the tokens per sample."""
    words = (f"attention={kind}", "batch.sequence=4096")
    once = activations(exact("8b-zero3", *words))
    wide = activations(exact("8b-zero3", *words, "batch.micro=2"))
    long = activations(exact("8b-zero3", words[0], "batch.sequence=8192"))
    return wide / once, long / once


def _linear_activations() -> Said:
    figures = {kind: _grows(kind) for kind in ("sdpa", "eager")}
    text = ", ".join(
        f"{kind}: {wide:.2f}× and {long:.2f}×" for kind, (wide, long) in figures.items()
    )
    right = all(is_near(figure, 2) for pair in figures.values() for figure in pair)
    return right, f"twice the samples and twice the sequence, {text}"


def _one_more_forward() -> Said:
    row = exact("8b-zero3", "activations=M").operations[0]
    less = activations(exact("8b-zero3")) / activations(exact("8b-zero3", "activations=M"))
    again = row.again / row.forward
    text = f"{again:.0%} of the forward pass's products again, for {less:.2g}× less activations"
    return is_near(again, 1), text


def _selective() -> Said:
    words = ("activations=M", "recompute=selective")
    row, less = exact("8b-zero3", *words).operations[0], activations(exact("8b-zero3"))
    kept = activations(exact("8b-zero3", *words))
    full = activations(exact("8b-zero3", "activations=M"))
    text = (
        f"{row.again / row.forward:.0%} of the products again for {less / kept:.2g}× less, where "
        f"whole blocks take {less / full:.2g}×"
    )
    return row.again == 0 and kept < less, text


def _accumulation_is_free() -> Said:
    """Return the peak with 8 micro-batches per step and with 1, by the placement of accumulated
    gradients."""
    cases = {
        "DP": ("8b-ddp",),
        "ZeRO-2": ("8b-zero2",),
        "ZeRO-3": ("8b-zero3",),
        "ZeRO-3 reduced once": ("8b-zero3", "sync.gradients=last"),
    }
    ratios = {
        label: peak(exact(*name, "batch.global=64")) / peak(exact(*name, "batch.global=8"))
        for label, name in cases.items()
    }
    text = ", ".join(f"{label} {ratio - 1:+.1%}" for label, ratio in ratios.items())
    return all(ratio < 1.001 for ratio in ratios.values()), f"peak with 8 against 1: {text}"


def _one_reduction() -> Said:
    calls = {
        times: sum(
            row.calls
            for row in exact("70b-zero3", f"batch.global={8 * times}").traffic
            if row.key.collective is Collective.REDUCE_SCATTER
        )
        for times in (1, 4)
    }
    return calls[1] == 1, f"{calls[1]} a step, one a unit; {calls[4]} with 4 micro-batches"


def _idle(name: ScheduleName, ranks: int, microbatches: int, stages: int = 1) -> Simulation:
    size = PipelineShape(ranks=ranks, microbatches=microbatches, stages_per_rank=stages)
    return simulate(make_schedule(name, size))


def _idle_of_eight_stages() -> Said:
    """Check the blog's two examples as printed: about 18 % and over 60 %."""
    many, few = (_idle(ScheduleName.GPIPE, RANKS, number).bubble_fraction for number in (32, 4))
    text = f"{many:.1%} with 32 micro-batches, {few:.1%} with 4"
    return round(many, 2) == 0.18 and few > 0.6, text


def _interleaving() -> Said:
    """Return the bubble and the sends of a micro-batch for two stages per rank and for one."""
    one = _idle(ScheduleName.ONE_F_ONE_B, RANKS, 32)
    two = _idle(ScheduleName.INTERLEAVED, RANKS, 32, 2)
    plain, more = (
        sent_over(exact("70b-3d", f"pipeline.schedule={name}"), "pp")
        for name in ("1f1b", "interleaved")
    )
    text = (
        f"{one.bubble_fraction:.1%} become {two.bubble_fraction:.1%} on {RANKS} ranks; over pp "
        f"70b-3d sends {more / plain:.2f}×"
    )
    return two.bubble_fraction < one.bubble_fraction and more > plain, text


def _near_zero() -> Said:
    names = {
        "zero-bubble": (ScheduleName.ZERO_BUBBLE, 1),
        "zbv": (ScheduleName.ZBV, 2),
        "dualpipev": (ScheduleName.DUALPIPEV, 2),
    }
    idle = {
        label: _idle(name, RANKS, 32, stages).bubble_fraction
        for label, (name, stages) in names.items()
    }
    text = ", ".join(f"{label} {share:.1%}" for label, share in idle.items())
    return all(share < 0.02 for share in idle.values()), f"{RANKS} ranks, 32 micro-batches: {text}"


def _caps_activations() -> Said:
    held = {
        name: most_held(make_schedule(name, PipelineShape(ranks=RANKS, microbatches=32)))
        for name in (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B)
    }
    words = ("batch.global=128",)  # 32 micro-batches on 4 stages
    all_first = peak(exact("70b-3d", *words, "pipeline.schedule=gpipe"))
    in_turn = peak(exact("70b-3d", *words))
    text = (
        f"{' and '.join(map(str, held.values()))} of 32 micro-batches on the first of {RANKS} "
        f"stages; 70b-3d with 32 peaks at {all_first / 1e9:.4g} GB and {in_turn / 1e9:.4g} GB"
    )
    return list(held.values()) == [32, RANKS] and in_turn < all_first, text


def _small_payloads() -> Said:
    sent = {axis: sent_over(exact("70b-3d"), axis) for axis in ("pp", "dp_shard", "tp")}
    text = ", ".join(f"{axis} {size / 1e9:.3g} GB" for axis, size in sent.items())
    return sent["pp"] * 10 < min(sent["dp_shard"], sent["tp"]), f"70b-3d sends {text} a step"


LECTURES = (
    claim("A 7.5B model needs 120 GB of states", find=_states_of_7b5),
    claim("Four sums a layer and step on tp", find=_sums_of_a_layer),
    claim("sp sends what tp sends", find=_sp_sends_the_same),
    claim("tp shards the activations", find=_tp_cuts_activations),
    claim("sp saves activations beyond tp", find=_sp_cuts_more),
    claim("Activations grow linearly with batch and sequence", find=_linear_activations),
    claim("Recomputation costs one more forward pass", find=_one_more_forward),
    claim("Selective recomputation is cheap to redo and memory-heavy to keep", find=_selective),
    claim("Accumulation takes no more memory", find=_accumulation_is_free),
    claim("One reduction a step for FSDP", find=_one_reduction),
    claim("A pipeline's messages are small", find=_small_payloads),
    claim("Eight stages idle about 18 % and over 60 %", find=_idle_of_eight_stages),
    claim("1F1B caps activations at the stages' number", find=_caps_activations),
    claim("Interleaving shrinks the bubble for more traffic", find=_interleaving),
    claim("ZeroBubble and DualPipe idle near zero", find=_near_zero),
)


def section() -> str:
    """Return the page's parts about the blog and the lecture, then long sequences and experts."""
    return "\n\n".join([part("lectures", LECTURES), long_sequences(), experts()])
