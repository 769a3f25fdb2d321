"""In which a host issues a micro-batch to its device (`derivation.launches`), as a search adds it
up."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.derivation.clock import Clock
from ptrain.facts.model import LayerWork, ModelWork
from ptrain.rates.pace import around
from ptrain.spec.activations import PLAIN, Kept
from ptrain.timeline import Kind

_WHOLE, _HALVES = (Kind.BACKWARD,), (Kind.INPUT, Kind.WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueSeconds:
    """Of a host's, forward and backward: in front of the blocks, of a block, and behind them."""

    front: tuple[float, float]
    block: tuple[float, float]
    behind: tuple[float, float]


def issue_seconds(clock: Clock, work: ModelWork, kept: Kept) -> tuple[IssueSeconds, IssueSeconds]:
    """Return the seconds of backward passes that are whole, and of such in halves, which are whole
    in front of the blocks: nobody waits for gradients of tokens."""
    middle = work.layers[len(work.layers) // 2]
    front = _both(clock, work.front, PLAIN, _WHOLE)
    whole, halves = (
        IssueSeconds(
            front=front,
            block=_both(clock, middle, kept, kinds),
            behind=_both(clock, work.behind, PLAIN, kinds),
        )
        for kinds in (_WHOLE, _HALVES)
    )
    return whole, halves


def _both(
    clock: Clock, work: LayerWork, kept: Kept, kinds: tuple[Kind, ...]
) -> tuple[float, float]:
    passes = {
        Kind.FORWARD: work.forward,
        Kind.BACKWARD: work.backward,
        Kind.INPUT: work.inputs,
        Kind.WEIGHT: work.weights,
    }
    forward, *backward = (
        clock.pass_seconds(passes[kind], around(kept, kind)).on_host
        for kind in (Kind.FORWARD, *kinds)
    )
    return forward, sum(backward)
