"""Attention over the context axis: its kind, the tokens of each rank, and the blocks of scores that
a rank computes.

Tokens: a place of the ring has a contiguous range. With zigzag it has an early and a late chunk (of
2R chunks, place r has r and 2R - 1 - r), so that all places have equal work under a causal mask.
The ranks of a Ulysses group share the tokens of their place, in order.

Blocks: at hop h, place p of R has the keys of place (p - h) mod R. Its queries attend to the keys
that the causal mask of the full sequence allows. All-gathered keys and values take one hop. The
ranks of a Ulysses group compute the same blocks for different heads.

The tables of allocations distinguish ranks by the kind of attention and by the number of places
with earlier and later tokens. torch's ring template does the same at all hops except the first ones
and the last. A table therefore has a few hops, and the operators grow by a constant for each
further hop (`traces.work_tables` checks that).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from math import gcd
from typing import NamedTuple, assert_never

from ptrain.axes.candidates import AxisOption, FixedChoices, divisors, single_axis_space
from ptrain.facts.parameters import OF_TOKENS
from ptrain.spec.batch import ContextAttention, ContextSpec, Hybrid
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import S_STAR, Axis, Factor, Placement, R, S
from ptrain.spec.spec import Spec
from ptrain.steps.step import ContextParallel

Span = tuple[int, int]  # first token, and the end (exclusive)


def place_spans(sequence: int, ring: int, place: int, *, is_balanced: bool) -> tuple[Span, ...]:
    """Return the tokens of one of the ring's places, in the place's order.

    Args:
        sequence: Tokens of a sample.
        ring: Places of the ring.
        place: The place.
        is_balanced: The place has an early and a late chunk (zigzag).
    """
    if not is_balanced:
        size = sequence // ring
        return ((place * size, (place + 1) * size),)
    size = sequence // (2 * ring)
    late = 2 * ring - 1 - place
    return (place * size, (place + 1) * size), (late * size, (late + 1) * size)


def token_spans(
    sequence: int, *, ulysses: int, ring: int, index: int, is_balanced: bool
) -> tuple[Span, ...]:
    """Return the tokens of rank `index` of `ulysses * ring` ranks, in the rank's order.

    Consecutive ranks form a Ulysses group.

    Args:
        sequence: Tokens of a sample.
        ulysses: Ranks of a Ulysses group.
        ring: Places of the ring.
        index: The rank's place along cp.
        is_balanced: Each place has an early and a late chunk (zigzag).
    """
    place, member = divmod(index, ulysses)
    size = sequence // (ulysses * ring)
    whole = place_spans(sequence, ring, place, is_balanced=is_balanced)
    return tuple(_sub_spans(whole, member * size, (member + 1) * size))


def _sub_spans(whole: tuple[Span, ...], start: int, end: int) -> Iterator[Span]:
    """Yield the ranges of tokens at positions `start` to `end` (exclusive) of these spans."""
    passed = 0
    for first, behind in whole:
        low, high = max(start - passed, 0), min(end - passed, behind - first)
        if low < high:
            yield first + low, first + high
        passed += behind - first


class ScoreBlock(NamedTuple):
    """A block of scores: a range of queries of a place, and a range of keys of the place `source`,
    which arrive after `hop` hops. Diagonal blocks are causal, all others are full."""

    hop: int
    source: int
    queries: Span
    keys: Span

    @property
    def is_causal(self) -> bool:
        """True if the causal mask applies within the block."""
        return self.queries == self.keys

    @property
    def num_scores(self) -> int:
        """The number of scores of one head that the mask leaves."""
        rows = _span_length(self.queries)
        return rows * (rows + 1) // 2 if self.is_causal else rows * _span_length(self.keys)


def source_at(step: ContextParallel, place: int, hop: int) -> int:
    """Return the place whose keys a place of the ring has after some hops.

    Args:
        step: The context parallelism of the plan.
        place: The place in the ring, from 0.
        hop: The number of hops, from 0; after none, a place has its local keys.
    """
    return (place - hop) % step.ring


def blocks_of(step: ContextParallel, place: int) -> Iterator[ScoreBlock]:
    """Yield the blocks that one of the ring's places computes, in order."""
    for hop in range(step.ring):
        source = source_at(step, place, hop)
        for queries in _spans_of_place(step, place):
            for keys in _spans_of_place(step, source):
                if keys[0] < queries[1]:
                    number = 0 if step.gathers else hop
                    yield ScoreBlock(hop=number, source=source, queries=queries, keys=keys)


@lru_cache(maxsize=64)  # the candidates of a search have few distinct steps
def computed_scores(step: ContextParallel) -> tuple[int, ...]:
    """Return the attention scores that each rank of cp computes.

    A kernel is called for the keys of each place, with all queries and keys that occur in any
    block.

    Args:
        step: The context parallelism of the plan.

    Returns:
        The number of scores by rank of cp, masked or not, as a mean over the model's heads.
    """
    return tuple(_computed_scores(step, index // step.ulysses) for index in range(_num_ranks(step)))


def _computed_scores(step: ContextParallel, place: int) -> int:
    if step.gathers and step.has_documents:  # one masked call on all keys
        return _total_length(set(_spans_of_place(step, place))) * step.sequence
    calls: dict[int, tuple[set[Span], set[Span]]] = {}
    for block in blocks_of(step, place):
        queries, keys = calls.setdefault(block.source, (set(), set()))
        queries.add(block.queries)
        keys.add(block.keys)
    return (
        sum(_total_length(queries) * _total_length(keys) for queries, keys in calls.values())
        // step.ulysses
    )


@lru_cache(maxsize=64)
def relative_scores(step: ContextParallel) -> tuple[float, ...]:
    """Return each cp rank's unmasked scores, relative to the mean of all ranks."""
    scores = [
        sum(block.num_scores for block in blocks_of(step, index // step.ulysses))
        for index in range(_num_ranks(step))
    ]
    return tuple(number * len(scores) / sum(scores) for number in scores)


def _num_ranks(step: ContextParallel) -> int:
    return step.ulysses * step.ring


def _spans_of_place(step: ContextParallel, place: int) -> tuple[Span, ...]:
    return place_spans(step.sequence, step.ring, place, is_balanced=step.is_balanced)


def _span_length(span: Span) -> int:
    first, behind = span
    return behind - first


def _total_length(spans: set[Span]) -> int:
    return sum(map(_span_length, spans))


def factor_of(spec: Spec) -> Factor | None:
    """Return the factor of cp, or None if it has fewer than two ranks."""
    return next((f for f in spec.factors if f.axis is Axis.CP and f.degree > 1), None)


def has_ring(spec: Spec) -> bool:
    """Return True if several ranks of cp pass keys and values along a ring, or gather them."""
    factor = factor_of(spec)
    return factor is not None and split_degree(attention_of(spec), factor.degree)[1] > 1


def attention_of(spec: Spec) -> ContextAttention | Hybrid:
    """Return the attention of a spec.

    The default is all-gather for activations S*, and a ring for S, which is zigzag if the tokens
    divide into two chunks per rank.
    """
    if spec.context is not None:
        return spec.context.attention
    factor = factor_of(spec)
    if factor is not None and factor.placement.activations == S_STAR:
        return ContextAttention.ALL_GATHER
    is_even = spec.batch.sequence % (2 * spec.degree(Axis.CP)) == 0
    return ContextAttention.ZIGZAG if is_even else ContextAttention.RING


def explain_attention(spec: Spec) -> str:
    """Return the reason for the attention of a spec, for a plan."""
    if spec.context is not None:
        return "as written"
    tokens, degree = spec.batch.sequence, spec.degree(Axis.CP)
    match attention_of(spec):
        case ContextAttention.ALL_GATHER:
            return "activations on cp are S*"
        case ContextAttention.ZIGZAG:
            return f"{tokens} tokens split into two chunks on each of {degree} ranks"
        case ContextAttention.RING:
            return f"{tokens} tokens do not split into two chunks on each of {degree} ranks"
        case other:
            raise AssertionError(f"{other} is never a default")


def split_degree(attention: ContextAttention | Hybrid, ranks: int) -> tuple[int, int]:
    """Return the degrees of Ulysses and of the ring.

    Args:
        attention: The kind of attention, or the degrees of a hybrid.
        ranks: The degree of cp. A hybrid ignores it.
    """
    match attention:
        case Hybrid():
            return attention.ulysses, attention.ring
        case ContextAttention.ULYSSES:
            return ranks, 1
        case ContextAttention.RING | ContextAttention.ZIGZAG | ContextAttention.ALL_GATHER:
            return 1, ranks
        case _:
            assert_never(attention)


def kv_repeats(ulysses: int, kv_heads: int) -> int:
    """Return the number of repetitions of key-value heads that gives all ranks equal numbers.

    Args:
        ulysses: The degree of Ulysses.
        kv_heads: The number of key-value heads on a rank of tp.

    Returns:
        The smallest number of repetitions; 1 if the degree divides the heads.
    """
    # The least number of repetitions for which the degree divides the heads.
    return ulysses // gcd(ulysses, kv_heads)


def context_of(spec: Spec) -> ContextParallel | None:
    """Return the step that shards tokens over cp, or None if cp has fewer than two ranks."""
    if (factor := factor_of(spec)) is None:
        return None
    attention, shape = attention_of(spec), spec.model
    ulysses, ring = split_degree(attention, factor.degree)
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
    """Return the token ranges of a rank of cp.

    Args:
        step: The context parallelism of the plan.
        index: The rank's place along cp, from 0.

    Returns:
        The ranges (first, end), end exclusive, in the order in which the rank stores them.
    """
    return token_spans(
        step.sequence,
        ulysses=step.ulysses,
        ring=step.ring,
        index=index,
        is_balanced=step.is_balanced,
    )


def all_spans(step: ContextParallel) -> Iterator[tuple[Span, ...]]:
    """Yield the tokens of every rank, in order along cp."""
    return (spans_at(step, index) for index in range(step.ulysses * step.ring))


def is_partition(step: ContextParallel) -> bool:
    """Return True if the ranks' tokens are disjoint and cover the sample."""
    spans = sorted(span for own in all_spans(step) for span in own)
    edges = [0, *(behind for _, behind in spans)]
    return edges == [*(first for first, _ in spans), step.sequence]


# The context axis of a spec.


def written_attention(spec: Spec) -> ContextAttention | Hybrid | None:
    """Return the attention that a spec states. None if it states none, or if cp has fewer than two
    ranks."""
    return spec.context.attention if spec.context and spec.degree(Axis.CP) > 1 else None


def left_to_others(spec: Spec) -> str:
    """Return a clause that explains why the paper has no volume for cp. Empty without cp."""
    if spec.degree(Axis.CP) == 1:
        return ""
    return (
        "; the paper leaves context parallelism, which needs a model of communication within "
        "attention, to future work"
    )


def held_tokens(spec: Spec) -> int:
    """Return the number of tokens of a sample that a rank stores, of inputs and targets together.

    A rank with all tokens stores both as views of sequence + 1 tokens, unless some targets are
    ignored.
    """
    degree, sequence = spec.degree(Axis.CP), spec.batch.sequence
    if degree > 1:
        return 2 * (sequence // degree)
    return (sequence + 1) * (2 if spec.ignores_targets else 1)


def held_buffers(spec: Spec, buffers: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the name and bytes of each buffer on a rank. Tables of rotary angles of built-in models
    have only the rows of the rank's tokens."""
    is_built_in = isinstance(spec.model, ModelShape)
    for name, size in buffers:
        is_cut = is_built_in and name.endswith(OF_TOKENS)
        yield name, size // spec.degree(Axis.CP) if is_cut else size


_TOLD_APART = 3  # hops with distinct allocations; further hops equal the last of them
_ALIKE = 2  # hops with distinct operators; further hops equal the last of them


class ContextKind(StrEnum):
    """The ways in which attention reaches the tokens of other ranks."""

    RING = "ring"
    ZIGZAG = "zigzag"
    GATHER = "gather"
    ULYSSES = "ulysses"
    HYBRID = "hybrid"


EXCHANGING = (ContextKind.ULYSSES, ContextKind.HYBRID)  # these exchange tokens for heads


class ContextPart(NamedTuple):
    """The attention of the rank at one of the ring's places.

    Attributes:
        kind: The kind of attention.
        ulysses: Ranks that share the heads of a place.
        before: Places whose tokens, or whose early chunks, come before the rank's.
        behind: All other places.
    """

    kind: ContextKind
    ulysses: int = 1
    before: int = 0
    behind: int = 0

    @property
    def name(self) -> str:
        """The name of its allocations in a table."""
        if self.kind is ContextKind.GATHER:
            return self.table_place
        return "-".join(str(min(hops, _TOLD_APART)) for hops in (self.before, self.behind))

    @property
    def table_place(self) -> str:
        """The name of its operators in a table."""
        if self.kind is ContextKind.GATHER:
            return "later" if self.before else "first"
        return "-".join(str(min(hops, _ALIKE)) for hops in (self.before, self.behind))

    @property
    def ring_degree(self) -> int:
        """The number of places."""
        return self.before + 1 + self.behind

    @property
    def num_chunks(self) -> int:
        """The number of equal chunks in which kernels process a rank's tokens."""
        return 2 if self.kind in (ContextKind.ZIGZAG, ContextKind.HYBRID) else 1

    def symbol_values(self, values: dict[str, int]) -> dict[str, int]:
        """Return the value of every symbol of a table, from the values of a model on the rank's
        tokens."""
        own = {**values, "sequence": values["sequence"] // self.num_chunks}
        if self.kind in EXCHANGING:
            own |= {"kv_heads": own["kv_heads"] // self.ulysses, "ulysses": self.ulysses}
        if self.kind is ContextKind.GATHER:
            own |= {"ring": self.ring_degree, "before": self.before}
        return own


def kind_of(step: ContextParallel) -> ContextKind:
    """Return the kind of attention of a step."""
    if step.gathers:
        return ContextKind.GATHER
    if step.ring == 1:
        return ContextKind.ULYSSES
    if step.ulysses > 1:
        return ContextKind.HYBRID
    return ContextKind.ZIGZAG if step.is_balanced else ContextKind.RING


def part_at(step: ContextParallel, index: int) -> ContextPart:
    """Return the attention of the rank at this place along the axis."""
    before = index // step.ulysses
    return ContextPart(
        kind=kind_of(step),
        ulysses=step.ulysses,
        before=before,
        behind=step.ring - 1 - before,
    )


def alike_by(step: ContextParallel, index: int) -> tuple[ContextPart, tuple[int, ...]]:
    """Return a key that is equal for ranks with equal allocations and compute: their part of
    attention, and the lengths of their contiguous ranges of tokens."""
    lengths = tuple(behind - first for first, behind in spans_at(step, index))
    return part_at(step, index), lengths


def parts_told_apart(kind: ContextKind) -> Iterator[tuple[int, int]]:
    """Yield (before, behind) for each distinct name in a table of a ring, with the fewest
    places."""
    if kind is ContextKind.ULYSSES:
        yield 0, 0
        return
    for before in range(_TOLD_APART + 1):
        yield from ((before, behind) for behind in range(_TOLD_APART + 1) if before or behind)


# Candidates of a search: degrees that leave a rank many tokens of a sample, with every legal
# attention.
#
# Parameters, optimizer state and gradients have the same placement on cp as on the innermost data
# axis, so that both axes form one group. With fewer tokens, compute cannot overlap the transit of
# keys and values, so searches over short samples omit cp. Degrees in the spec are always tried.

LEAST_TOKENS = 2**13  # tokens of a sample on a rank
_SLICES, _GATHERED = (
    Placement(parameters=R, optimizer=R, gradients=R, activations=activations)
    for activations in (S, S_STAR)
)


def _degrees_to_search(spec: Spec, devices: int, written: FixedChoices) -> Iterable[int]:
    tokens = spec.batch.sequence
    offered = (
        size
        for size in divisors(devices)
        if size == 1 or (tokens % size == 0 and tokens // size >= LEAST_TOKENS)
    )
    return written.degrees_to_try(Axis.CP, devices, offered)


def _iter_options(spec: Spec, ranks: int) -> Iterator[AxisOption]:
    for attention in _iter_attentions(spec, ranks):
        is_gathered = attention is ContextAttention.ALL_GATHER
        changes = (("context", ContextSpec(attention=attention)),)
        yield ((_GATHERED if is_gathered else _SLICES,), changes)


def _iter_attentions(spec: Spec, ranks: int) -> Iterator[ContextAttention | Hybrid]:
    """Yield the attentions to search. A ring is zigzag if the tokens divide: a contiguous ring has
    the same traffic and waits longer."""
    is_even = spec.batch.sequence % (2 * ranks) == 0
    yield ContextAttention.ZIGZAG if is_even else ContextAttention.RING
    yield ContextAttention.ALL_GATHER
    shape = spec.model
    common = gcd(shape.heads, shape.kv_heads) if isinstance(shape, ModelShape) else 1
    for ulysses in divisors(gcd(common, ranks))[1:]:
        hybrid = Hybrid(ulysses=ulysses, ring=ranks // ulysses)
        yield ContextAttention.ULYSSES if ulysses == ranks else hybrid


SPACE = single_axis_space(
    Axis.CP, _degrees_to_search, _iter_options, (_SLICES, _GATHERED), follows=True
)
