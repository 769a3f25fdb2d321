"""The table of a news digest of the text: how much less memory and how much more communication each
strategy takes. Each factor is worked out from predictions of the text's 70B; nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from _paper_composition import Claim, Said, table

from ptrain.algebra.legality import require
from ptrain.costs import Estimate, State
from ptrain.derivation.estimate import derive
from ptrain.spec.load import load

NEAR = 0.1  # of `~2×`: a figure that is off by a tenth at most is what was meant

_ZERO1 = ("70b-zero1",)
_ZERO2 = ("70b-zero2",)
_ZERO3 = ("70b-zero3",)
_TP2 = ("70b-zero3-tp4", "mesh={tp: 2}", "placement={tp: tp}", "batch.global=2")
_PP2 = ("70b-3d", "mesh={pp: 2}", "placement={pp: [S,S,S,R]}", "batch.global=2")
_ZERO3_TP4 = ("70b-zero3-tp4",)


@cache
def exact(name: str, *overrides: str) -> Estimate:
    """The column `exact` of a named spec."""
    return derive(require(load(name, overrides))).exact


def replicas(ranks: int) -> Estimate:
    """Plain data parallelism of the same model on as many devices, one sample each."""
    words = (f"mesh.dp_replicate={ranks}", f"batch.global={ranks}", f"cluster.devices={ranks}")
    return exact("70b-dp", *words)


def states(estimate: Estimate) -> int:
    """Θ, Ω and G of the rank that has most of each."""
    kinds = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
    return sum(estimate.bytes_of(kind) for kind in kinds)


def is_near(figure: float, claimed: float) -> bool:
    return abs(figure / claimed - 1) <= NEAR


# The digest's table


def _saves(claimed: float, name: tuple[str, ...], axis: str = "") -> Callable[[], Said]:
    """How many times less the states take than in plain data parallelism on as many devices; and on
    how many it is what is claimed, where that depends on it (`axis`)."""

    def find() -> Said:
        estimate = exact(*name)
        ranks = estimate.world_size
        figure = states(replicas(ranks)) / states(estimate)
        text = f"{figure:.3g}× on {ranks} devices"
        if axis:
            text += f"; ~{claimed:g}× on {_devices(claimed, name, axis)}"
        return is_near(figure, claimed), text

    return find


def _devices(claimed: float, name: tuple[str, ...], axis: str) -> str:
    """On how many devices, of 2 to 16, a saving is what is claimed."""
    right = []
    for ranks in range(2, 17):
        more = (f"mesh.{axis}={ranks}", f"batch.global={ranks}", f"cluster.devices={ranks}")
        if is_near(states(replicas(ranks)) / states(exact(*name, *more)), claimed):
            right.append(ranks)
    return f"{right[0]} to {right[-1]}" if len(right) > 1 else str(*right) or "none of 2 to 16"


def _sends(claimed: float, *names: tuple[str, ...]) -> Callable[[], Said]:
    """How many times more is sent than in plain data parallelism on as many devices."""

    def find() -> Said:
        figures = []
        for name in names:
            estimate = exact(*name)
            figures.append(estimate.sent_bytes() / replicas(estimate.world_size).sent_bytes())
        return is_near(figures[0], claimed), " · ".join(f"{figure:.3g}×" for figure in figures)

    return find


def _sends_by_tokens(claimed: float, name: tuple[str, ...]) -> Callable[[], Said]:
    """The same where it follows from the tokens of a micro-batch and their number."""

    def find() -> Said:
        figures = []
        for sequence in (1024, 4096, 16384):
            words = (f"batch.sequence={sequence}",)
            ours, base = exact(*name, *words), replicas(2).sent_bytes()
            figures.append(f"{ours.sent_bytes() / base:.3g}× with {2 * sequence} tokens")
        return False, f"{', '.join(figures)} a step; {claimed:g}× is none of them"

    return find


DIGEST = (
    Claim(
        title="ZeRO-1 takes ~2× less memory",
        where="digest",
        printed="ZeRO-1: memory ~2× less than plain data parallelism",
        find=_saves(2, _ZERO1, "dp_shard"),
        why="16P become 4P + 12P/N, 4× less at most. The digest names no number of devices.",
    ),
    Claim(
        title="ZeRO-1 sends ~1.2×",
        where="digest",
        printed="ZeRO-1: communication ~1.2×",
        find=_sends(1.2, _ZERO1),
        why="A reduce-scatter and an all-gather are an all-reduce: 1×, as its paper has it; 1.5× "
        "by torch's ZeroRedundancyOptimizer, which all-reduces and broadcasts. 1.2 is neither.",
    ),
    Claim(
        title="ZeRO-2 takes ~4× less memory",
        where="digest",
        printed="ZeRO-2: memory ~4× less",
        find=_saves(4, _ZERO2, "dp_shard"),
        why="16P become 2P + 14P/N, 8× less at most. On as many devices ZeRO-1 is not near 2×.",
    ),
    Claim(
        title="ZeRO-2 sends ~1.4×",
        where="digest",
        printed="ZeRO-2: communication ~1.4×",
        find=_sends(1.4, _ZERO2),
        why="As ZeRO-1: 1×. The text's theorem would say 0.5×, which forgets a gather; nobody 1.4.",
    ),
    Claim(
        title="ZeRO-3 sends 1.5×",
        where="digest",
        printed="ZeRO-3: 1.5×, as in the text",
        find=_sends(1.5, _ZERO3),
        why="Two gathers and a reduce-scatter against an all-reduce. The row has one figure for "
        "two columns; 8×, which stands elsewhere in the digest, is the saving on 8 devices.",
    ),
    Claim(
        title="FSDP takes ~6× less memory",
        where="digest",
        printed="FSDP (all sharded): memory ~6× less",
        find=_saves(6, _ZERO3, "dp_shard"),
        why="FSDP is the tuple (S*, S, S, R), the one of the row above it: as many times less as "
        "there are devices. No number of devices gives 2×, 4× and 6× of the three rows at once.",
    ),
    Claim(
        title="FSDP sends ~1.3×",
        where="digest",
        printed="FSDP: communication ~1.3×",
        find=_sends(1.3, _ZERO3, (*_ZERO3, "reshard=non-root")),
        why="The same tuple sends the same 1.5×; with fully_shard's own default, by which the root "
        "stays gathered after forward (the second figure), a little less.",
    ),
    Claim(
        title="tp 2 takes ~2× less memory",
        where="digest",
        printed="tensor parallelism, 2-way: memory ~2× less",
        find=_saves(2, _TP2),
        why="Of the states; norms are whole on both ranks. Activations are not halved (below).",
    ),
    Claim(
        title="tp 2 sends ~1.1×",
        where="digest",
        printed="tensor parallelism, 2-way: communication ~1.1×",
        find=_sends_by_tokens(1.1, _TP2),
        otherwise="undefined: it names no number of tokens",
        why="Data parallelism sends parameters, whatever the tokens; tp sends activations, in "
        "proportion to them. A ratio of the two is one of a batch.",
    ),
    Claim(
        title="pp 2 takes ~1.5× less memory",
        where="digest",
        printed="pipeline, 2 stages: memory ~1.5× less",
        find=_saves(1.5, _PP2),
        why="States are halved where stages are balanced by parameters, as they are here.",
    ),
    Claim(
        title="pp 2 sends ~1.0×",
        where="digest",
        printed="pipeline, 2 stages: communication ~1.0×, no additional all-reduce",
        find=_sends_by_tokens(1.0, _PP2),
        why="There is no all-reduce at all: a boundary's activations and their gradients, a "
        "thousandth of what data parallelism sends.",
    ),
    Claim(
        title="ZeRO-3 with tp 4 takes ~32× less memory",
        where="digest",
        printed="ZeRO-3 with 4-way tensor parallelism: memory ~32× less",
        find=_saves(32, _ZERO3_TP4),
        why="8 × 4: savings of states multiply (Definition 5).",
    ),
    Claim(
        title="ZeRO-3 with tp 4 sends ~1.65×",
        where="digest",
        printed="communication is predictable: 1.5× + 1.1× make 1.65×",
        find=_sends(1.65, _ZERO3_TP4),
        why="1.5 + 1.1 are 2.6, and 1.5 · 1.1 are 1.65: neither is a sum of volumes. tp cuts what "
        "ZeRO-3 gathers by 4 and adds sums of activations, so that less is sent than by plain data "
        "parallelism on as many devices.",
    ),
)


def section() -> str:
    """The page's part about the digest: a table, then why."""
    lines = [
        "## The digest's table of overheads",
        "",
        "A news digest of the text prints factors against plain data parallelism that stand in no "
        "source, with no number of devices or tokens. Here: the text's 70B on 8 devices (tp and pp "
        "on 2, against 2), one sample of 4096 tokens each; a figure is what was meant if it is off "
        f"by {NEAR:.0%} at most.",
        "",
        *table(DIGEST),
    ]
    return "\n".join(lines)
