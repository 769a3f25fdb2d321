"""The table of a news digest of the text: how much less memory and how much more communication each
strategy takes. Each factor is worked out from predictions of the text's 70B; nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from _claims import Said, claim
from _paper_composition import part

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Estimate, State
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
    """Return the column `exact` of a named spec."""
    return derive(require_runnable(load(name, overrides))).exact


def replicas(ranks: int) -> Estimate:
    """Return plain data parallelism of the same model on equally many devices, one sample each."""
    words = (f"mesh.dp_replicate={ranks}", f"batch.global={ranks}", f"cluster.devices={ranks}")
    return exact("70b-dp", *words)


def states(estimate: Estimate) -> int:
    """Return parameters, optimizer state and gradients, each of the rank with the most."""
    kinds = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
    return sum(estimate.bytes_of(kind) for kind in kinds)


def is_near(figure: float, claimed: float) -> bool:
    return abs(figure / claimed - 1) <= NEAR


# The digest's table


def _saves(claimed: float, name: tuple[str, ...], axis: str = "") -> Callable[[], Said]:
    """Return the factor by which the states are smaller than in plain data parallelism on equally
    many devices, and the device counts for which the claim holds, if that depends on them
    (`axis`)."""

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
    """Return the device counts from 2 to 16 for which a claimed saving holds."""
    right = []
    for ranks in range(2, 17):
        more = (f"mesh.{axis}={ranks}", f"batch.global={ranks}", f"cluster.devices={ranks}")
        if is_near(states(replicas(ranks)) / states(exact(*name, *more)), claimed):
            right.append(ranks)
    return f"{right[0]} to {right[-1]}" if len(right) > 1 else str(*right) or "none of 2 to 16"


def _sends(claimed: float, *names: tuple[str, ...]) -> Callable[[], Said]:
    """Return the traffic relative to plain data parallelism on equally many devices."""

    def find() -> Said:
        figures = []
        for name in names:
            estimate = exact(*name)
            figures.append(estimate.sent_bytes() / replicas(estimate.world_size).sent_bytes())
        return is_near(figures[0], claimed), " · ".join(f"{figure:.3g}×" for figure in figures)

    return find


def _sends_by_tokens(claimed: float, name: tuple[str, ...]) -> Callable[[], Said]:
    """Return the relative traffic if it depends on the micro-batches and their tokens."""

    def find() -> Said:
        figures = []
        for sequence in (1024, 4096, 16384):
            words = (f"batch.sequence={sequence}",)
            ours, base = exact(*name, *words), replicas(2).sent_bytes()
            figures.append(f"{ours.sent_bytes() / base:.3g}× with {2 * sequence} tokens")
        return False, f"{', '.join(figures)} a step; {claimed:g}× is none of them"

    return find


DIGEST = (
    claim("ZeRO-1 takes ~2× less memory", find=_saves(2, _ZERO1, "dp_shard")),
    claim("ZeRO-1 sends ~1.2×", find=_sends(1.2, _ZERO1)),
    claim("ZeRO-2 takes ~4× less memory", find=_saves(4, _ZERO2, "dp_shard")),
    claim("ZeRO-2 sends ~1.4×", find=_sends(1.4, _ZERO2)),
    claim("ZeRO-3 sends 1.5×", find=_sends(1.5, _ZERO3)),
    claim("FSDP takes ~6× less memory", find=_saves(6, _ZERO3, "dp_shard")),
    claim("FSDP sends ~1.3×", find=_sends(1.3, _ZERO3, (*_ZERO3, "reshard=non-root"))),
    claim("tp 2 takes ~2× less memory", find=_saves(2, _TP2)),
    claim("tp 2 sends ~1.1×", find=_sends_by_tokens(1.1, _TP2)),
    claim("pp 2 takes ~1.5× less memory", find=_saves(1.5, _PP2)),
    claim("pp 2 sends ~1.0×", find=_sends_by_tokens(1.0, _PP2)),
    claim("ZeRO-3 with tp 4 takes ~32× less memory", find=_saves(32, _ZERO3_TP4)),
    claim("ZeRO-3 with tp 4 sends ~1.65×", find=_sends(1.65, _ZERO3_TP4)),
)


def section() -> str:
    """Return the page's part about the digest."""
    return part("digest", DIGEST, near=NEAR)
