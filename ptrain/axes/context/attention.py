"""Which attention over cp a spec asks for, or which follows where it says nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import assert_never

from ptrain.axes.context.tokens import Span, spans
from ptrain.facts.parameters import OF_TOKENS
from ptrain.spec.axis import Axis, Factor
from ptrain.spec.context import ContextAttention, Hybrid
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import S_STAR
from ptrain.spec.spec import Spec
from ptrain.steps.step import ContextParallel


def factor_of(spec: Spec) -> Factor | None:
    """The factor of cp; None where it has no two ranks."""
    return next((f for f in spec.factors if f.axis is Axis.CP and f.degree > 1), None)


def attention_of(spec: Spec) -> ContextAttention | Hybrid:
    """Return what is written. Else keys and values are gathered where A is S*, and where it is S
    they go round, balanced if the tokens fall into two chunks a rank."""
    if spec.context is not None:
        return spec.context.attention
    factor = factor_of(spec)
    if factor is not None and factor.placement.activations == S_STAR:
        return ContextAttention.ALL_GATHER
    is_even = spec.batch.sequence % (2 * spec.degree(Axis.CP)) == 0
    return ContextAttention.ZIGZAG if is_even else ContextAttention.RING


def why(spec: Spec) -> str:
    """Return why it is this attention."""
    if spec.context is not None:
        return "as written"
    tokens, degree = spec.batch.sequence, spec.degree(Axis.CP)
    match attention_of(spec):
        case ContextAttention.ALL_GATHER:
            return "activations on cp are S*"
        case ContextAttention.ZIGZAG:
            return f"{tokens} tokens fall into two chunks on each of {degree} ranks"
        case ContextAttention.RING:
            return f"{tokens} tokens do not fall into two chunks on each of {degree} ranks"
        case other:
            raise AssertionError(f"{other} is only ever written")


def degrees(attention: ContextAttention | Hybrid, ranks: int) -> tuple[int, int]:
    """Return the degrees of Ulysses and of the ring on so many ranks of cp."""
    match attention:
        case Hybrid():
            return attention.ulysses, attention.ring
        case ContextAttention.ULYSSES:
            return ranks, 1
        case ContextAttention.RING | ContextAttention.ZIGZAG | ContextAttention.ALL_GATHER:
            return 1, ranks
        case _:
            assert_never(attention)


def repeats(ulysses: int, kv_heads: int) -> int:
    """Return how often the ranks of a Ulysses group need each of so many heads of keys and values
    (those that tp leaves a rank), so that all have as many: once where they divide them."""
    return ulysses // gcd(ulysses, kv_heads)


def context_of(spec: Spec) -> ContextParallel | None:
    """Return the step that gives ranks of cp their tokens; None where cp has no two ranks."""
    factor = factor_of(spec)
    if factor is None:
        return None
    attention, shape = attention_of(spec), spec.model
    ulysses, ring = degrees(attention, factor.degree)
    return ContextParallel(
        axis=factor.axis,
        ulysses=ulysses,
        ring=ring,
        sequence=spec.batch.sequence,
        is_balanced=attention.is_balanced,
        gathers=attention is ContextAttention.ALL_GATHER,
        has_documents=isinstance(shape, ModelShape) and shape.has_documents,
    )


def spans_at(step: ContextParallel, index: int) -> tuple[Span, ...]:
    """Return the tokens of the rank at this place along cp, in the order in which it has them."""
    return spans(
        step.sequence,
        ulysses=step.ulysses,
        ring=step.ring,
        index=index,
        is_balanced=step.is_balanced,
    )


def all_spans(step: ContextParallel) -> Iterator[tuple[Span, ...]]:
    """Yield those of every rank, in their order along cp."""
    return (spans_at(step, index) for index in range(step.ulysses * step.ring))


def is_partition(step: ContextParallel) -> bool:
    """Return whether the ranks' tokens are disjoint and cover the sample."""
    spans = sorted(span for own in all_spans(step) for span in own)
    edges = [0, *(behind for _, behind in spans)]
    return edges == [*(first for first, _ in spans), step.sequence]


# What a spec says of the context axis.


def written_attention(spec: Spec) -> ContextAttention | Hybrid | None:
    """Return the attention that a spec writes; None where it writes none, or no two ranks obey
    it."""
    return spec.context.attention if spec.context and spec.degree(Axis.CP) > 1 else None


def left_to_others(spec: Spec) -> str:
    """Return why the paper has no figure for what is sent over cp, behind a sentence that says that
    it has none; nothing without cp."""
    if spec.degree(Axis.CP) == 1:
        return ""
    return (
        "; it has no context axis: context parallelism, it says, takes a model of what is sent "
        "within the attention operator, which it leaves to future work"
    )


def held_tokens(spec: Spec) -> int:
    """Return how many tokens of a sample a rank holds: inputs and targets, which overlap but for
    one where they are a whole sample's and all count."""
    degree, sequence = spec.degree(Axis.CP), spec.batch.sequence
    if degree > 1:
        return 2 * (sequence // degree)
    return (sequence + 1) * (2 if spec.ignores_targets else 1)


def held_buffers(spec: Spec, buffers: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of what a rank holds of a model's buffers: of a built-in one's tables of
    angles the rows of its tokens."""
    is_built_in = isinstance(spec.model, ModelShape)
    for name, size in buffers:
        is_cut = is_built_in and name.endswith(OF_TOKENS)
        yield name, size // spec.degree(Axis.CP) if is_cut else size
