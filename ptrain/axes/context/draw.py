"""The context axis as text: its step, the tokens of each rank, and their balance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from ptrain.axes.context.attention import Span, all_spans, explain_attention, relative_scores
from ptrain.spec.spec import Spec
from ptrain.steps.step import ContextParallel

_FEW_RANKS = 8


def step_text(step: ContextParallel) -> str:
    """Return a plan's line about the step."""
    is_alone = step.is_balanced and step.ulysses == 1
    kind = "an early and a late chunk" if is_alone else "one slice"
    return (
        f"shard every sample's tokens over {step.axis}: "
        f"{step.sequence // (step.ulysses * step.ring)} of {step.sequence} per rank, {kind}; "
        f"{_exchange_text(step)}"
    )


def _exchange_text(step: ContextParallel) -> str:
    ways = []
    if step.ulysses > 1:
        ways.append(f"{step.ulysses} neighbours exchange tokens for heads (Ulysses)")
    if step.gathers:
        ways.append("keys and values are all-gathered and kept until backward")
    elif step.ring > 1:
        groups = "such groups" if step.ulysses > 1 else "ranks"
        of = ", each with early and late chunks" if step.ulysses > 1 and step.is_balanced else ""
        ways.append(f"keys and values circulate in a ring of {step.ring} {groups}{of}")
    return ", ".join(ways)


def token_lines(spec: Spec, step: ContextParallel) -> Iterator[str]:
    """Yield the kind of attention with its reason, the tokens of each rank of cp, and the balance
    of work."""
    yield f"context  {kind_text(step)}: {explain_attention(spec)}"
    for index, own in enumerate(islice(all_spans(step), _FEW_RANKS)):
        yield f"tokens   {step.axis} {index}: {spans_text(own)}"
    if step.ulysses * step.ring > _FEW_RANKS:
        yield f"tokens   … {step.ulysses * step.ring} ranks of {step.axis}"
    yield f"balance  {balance_text(step)}"


def balance_text(step: ContextParallel) -> str:
    """Return a sentence about the ranks with the most and the fewest attention scores, as multiples
    of the mean."""
    of_mean = relative_scores(step)
    most, least = max(of_mean), min(of_mean)
    if most == least:
        return f"all ranks of {step.axis} compute the same number of causal attention scores"
    first, last = of_mean.index(most), of_mean.index(least)
    return (
        f"under the causal mask {step.axis} {first} computes {float(most):.3g} times the mean "
        f"number of scores, {step.axis} {last} {float(least):.3g} times"
    )


def balance_rows(step: ContextParallel) -> list[dict[str, object]]:
    """Return the scores of each rank over the mean, as plain data."""
    axis = str(step.axis)
    return [
        {"axis": axis, "place": place, "scores_over_mean": float(share)}
        for place, share in enumerate(relative_scores(step))
    ]


def kind_text(step: ContextParallel) -> str:
    """Return the name of the kind of attention."""
    if step.ulysses > 1:
        return "Ulysses and ring" if step.ring > 1 else "Ulysses"
    return _ring_name(step)


def _ring_name(step: ContextParallel) -> str:
    if step.gathers:
        return "all-gather"
    return "zigzag" if step.is_balanced else "ring"


def spans_text(spans: Sequence[Span]) -> str:
    """Return tokens as text, for example `0-3, 12-15`."""
    return ", ".join(map(_span_text, spans))


def _span_text(span: Span) -> str:
    first, behind = span
    return f"{first}-{behind - 1}" if behind - first > 1 else str(first)
