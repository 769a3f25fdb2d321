"""Attention over the context axis: which kind a spec has, which tokens of a sample a rank has, and
which blocks of scores it computes.

Tokens: the ring's places have contiguous slices or, with zigzag, an early and a late chunk each (of
2R chunks place r has r and 2R - 1 - r), so that all have equal work under a causal mask. The ranks
of a Ulysses group share the tokens of their place, in order.

Blocks: at hop h place p of R has the keys of place (p - h) mod R, and its queries attend to those
that the causal mask of the whole sequence allows. With gathered keys and values there is one hop.
The ranks of a Ulysses group compute the same blocks for their own heads.

The tables of allocations tell ranks apart by the kind of attention and by how many places have
tokens before and after their own. torch's ring template does the same at every hop but the first
ones and the last, so a table holds a few hops, and the numbers of operators grow by a constant with
each more (`traces.work_tables` checks that).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from math import gcd
from typing import NamedTuple, assert_never

from ptrain.axes.candidates import Way, Written, divisors, of_one_axis
from ptrain.facts.parameters import OF_TOKENS
from ptrain.spec.context import ContextAttention, ContextSpec, Hybrid
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import S_STAR, Axis, Factor, Placement, R, S
from ptrain.spec.spec import Spec
from ptrain.steps.step import ContextParallel

Span = tuple[int, int]  # first token, and the one behind the last


def place_spans(sequence: int, ring: int, place: int, *, is_balanced: bool) -> tuple[Span, ...]:
    """Return the tokens of one of the ring's places, in the order in which it has them."""
    if not is_balanced:
        size = sequence // ring
        return ((place * size, (place + 1) * size),)
    size = sequence // (2 * ring)
    late = 2 * ring - 1 - place
    return (place * size, (place + 1) * size), (late * size, (late + 1) * size)


def spans(
    sequence: int, *, ulysses: int, ring: int, index: int, is_balanced: bool
) -> tuple[Span, ...]:
    """Return the tokens of rank `index` of `ulysses * ring`, of which the Ulysses groups are
    neighbours, in the order in which it has them."""
    place, member = divmod(index, ulysses)
    size = sequence // (ulysses * ring)
    whole = place_spans(sequence, ring, place, is_balanced=is_balanced)
    return tuple(_within(whole, member * size, (member + 1) * size))


def _within(whole: tuple[Span, ...], start: int, end: int) -> Iterator[Span]:
    """Yield the tokens from the `start`-th to before the `end`-th of these spans."""
    passed = 0
    for first, behind in whole:
        low, high = max(start - passed, 0), min(end - passed, behind - first)
        if low < high:
            yield first + low, first + high
        passed += behind - first


class MetBlock(NamedTuple):
    """A stretch of queries of one of the ring's places meets a stretch of keys of `source`, behind
    `hop` hops. A block on the diagonal is causal, any other one whole."""

    hop: int
    source: int
    queries: Span
    keys: Span

    @property
    def is_causal(self) -> bool:
        """Whether a mask is within it."""
        return self.queries == self.keys

    @property
    def scores(self) -> int:
        """How many of its scores the mask leaves, of one head."""
        rows = _length(self.queries)
        return rows * (rows + 1) // 2 if self.is_causal else rows * _length(self.keys)


def source_at(step: ContextParallel, place: int, hop: int) -> int:
    """Return whose keys a place of the ring has behind so many hops."""
    return (place - hop) % step.ring


def blocks_of(step: ContextParallel, place: int) -> Iterator[MetBlock]:
    """Yield the blocks that one of the ring's places computes, in their order."""
    for hop in range(step.ring):
        source = source_at(step, place, hop)
        for queries in _spans(step, place):
            for keys in _spans(step, source):
                if keys[0] < queries[1]:
                    number = 0 if step.gathers else hop
                    yield MetBlock(hop=number, source=source, queries=queries, keys=keys)


@lru_cache(maxsize=64)  # the variants of a search have few of them
def multiplied(step: ContextParallel) -> tuple[int, ...]:
    """Return by rank of cp how many scores, masked or not, its kernels compute of each head of the
    model on average: a call for the keys of each place, of those queries and keys of which any
    meet."""
    return tuple(_multiplied(step, index // step.ulysses) for index in range(_ranks(step)))


def _multiplied(step: ContextParallel, place: int) -> int:
    if step.gathers and step.has_documents:  # the mask is given to one call, of all keys
        return _total(set(_spans(step, place))) * step.sequence
    calls: dict[int, tuple[set[Span], set[Span]]] = {}
    for block in blocks_of(step, place):
        queries, keys = calls.setdefault(block.source, (set(), set()))
        queries.add(block.queries)
        keys.add(block.keys)
    return sum(_total(queries) * _total(keys) for queries, keys in calls.values()) // step.ulysses


@lru_cache(maxsize=64)
def balance(step: ContextParallel) -> tuple[float, ...]:
    """Return by rank of cp the scores that the mask leaves it, over the mean of all ranks."""
    scores = [
        sum(block.scores for block in blocks_of(step, index // step.ulysses))
        for index in range(_ranks(step))
    ]
    return tuple(number * len(scores) / sum(scores) for number in scores)


def _ranks(step: ContextParallel) -> int:
    return step.ulysses * step.ring


def _spans(step: ContextParallel, place: int) -> tuple[Span, ...]:
    return place_spans(step.sequence, step.ring, place, is_balanced=step.is_balanced)


def _length(span: Span) -> int:
    first, behind = span
    return behind - first


def _total(spans: set[Span]) -> int:
    return sum(map(_length, spans))


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
            return f"{tokens} tokens split into two chunks on each of {degree} ranks"
        case ContextAttention.RING:
            return f"{tokens} tokens do not split into two chunks on each of {degree} ranks"
        case other:
            raise AssertionError(f"{other} is never a default")


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
    if (factor := factor_of(spec)) is None:
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
        "; the paper leaves context parallelism, which needs a model of communication within "
        "attention, to future work"
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


_TOLD_APART = 3  # hops
_ALIKE = 2  # hops from which on each more computes the same


class ContextKind(StrEnum):
    """The ways in which attention reaches the tokens of other ranks."""

    RING = "ring"
    ZIGZAG = "zigzag"
    GATHER = "gather"
    ULYSSES = "ulysses"
    HYBRID = "hybrid"


EXCHANGING = (ContextKind.ULYSSES, ContextKind.HYBRID)  # tokens for heads


class ContextPart(NamedTuple):
    """The rank at one of the ring's places. `before`: places whose tokens are before its own, or
    whose early chunks are; `behind`: the others. `ulysses` neighbours share its heads."""

    kind: ContextKind
    ulysses: int = 1
    before: int = 0
    behind: int = 0

    @property
    def name(self) -> str:
        """The name of what it allocates in a table."""
        if self.kind is ContextKind.GATHER:
            return self.place
        return "-".join(str(min(hops, _TOLD_APART)) for hops in (self.before, self.behind))

    @property
    def place(self) -> str:
        """The name of what it computes in a table."""
        if self.kind is ContextKind.GATHER:
            return "later" if self.before else "first"
        return "-".join(str(min(hops, _ALIKE)) for hops in (self.before, self.behind))

    @property
    def ring(self) -> int:
        """How many places there are."""
        return self.before + 1 + self.behind

    @property
    def halves(self) -> int:
        """Into how many chunks, equal ones, kernels take a rank's tokens."""
        return 2 if self.kind in (ContextKind.ZIGZAG, ContextKind.HYBRID) else 1

    def values(self, values: dict[str, int]) -> dict[str, int]:
        """Return the value of every symbol of a table, of those of a model on as many tokens."""
        own = {**values, "sequence": values["sequence"] // self.halves}
        if self.kind in EXCHANGING:
            own |= {"kv_heads": own["kv_heads"] // self.ulysses, "ulysses": self.ulysses}
        if self.kind is ContextKind.GATHER:
            own |= {"ring": self.ring, "before": self.before}
        return own


def kind_of(step: ContextParallel) -> ContextKind:
    """Return how a step reaches the tokens of others."""
    if step.gathers:
        return ContextKind.GATHER
    if step.ring == 1:
        return ContextKind.ULYSSES
    if step.ulysses > 1:
        return ContextKind.HYBRID
    return ContextKind.ZIGZAG if step.is_balanced else ContextKind.RING


def part_at(step: ContextParallel, index: int) -> ContextPart:
    """Return what the rank at this place along the axis does."""
    before = index // step.ulysses
    return ContextPart(
        kind=kind_of(step),
        ulysses=step.ulysses,
        before=before,
        behind=step.ring - 1 - before,
    )


def alike_by(step: ContextParallel, index: int) -> tuple[ContextPart, tuple[int, ...]]:
    """Return what ranks along the axis have in common that allocate and compute the same: what they
    do in attention, and how long the stretches are that their tokens are in."""
    lengths = tuple(behind - first for first, behind in spans_at(step, index))
    return part_at(step, index), lengths


def parts_told_apart(kind: ContextKind) -> Iterator[tuple[int, int]]:
    """Yield of each name that a table of a ring has the fewest places before and behind."""
    if kind is ContextKind.ULYSSES:
        yield 0, 0
        return
    for before in range(_TOLD_APART + 1):
        yield from ((before, behind) for behind in range(_TOLD_APART + 1) if before or behind)


# What the context axis offers to a search: degrees that leave a rank a long stretch of a sample,
# and every attention that is legal of so many ranks.
#
# Theta, Omega and G are placed over cp as over the innermost data axis, so that both are one
# group. Of fewer tokens a rank has too little to do while they travel: a search of shorter
# samples is not made longer. A degree that is written is tried whatever it leaves.

LEAST_TOKENS = 2**13  # of a sample, that a rank has
_SLICES, _GATHERED = (
    Placement(parameters=R, optimizer=R, gradients=R, activations=activations)
    for activations in (S, S_STAR)
)


def _sizes(spec: Spec, devices: int, written: Written) -> Iterable[int]:
    tokens = spec.batch.sequence
    offered = (
        size
        for size in divisors(devices)
        if size == 1 or (tokens % size == 0 and tokens // size >= LEAST_TOKENS)
    )
    return written.sizes(Axis.CP, devices, offered)


def _ways(spec: Spec, ranks: int) -> Iterator[Way]:
    for attention in _attentions(spec, ranks):
        is_gathered = attention is ContextAttention.ALL_GATHER
        changes = (("context", ContextSpec(attention=attention)),)
        yield ((_GATHERED if is_gathered else _SLICES,), changes)


def _attentions(spec: Spec, ranks: int) -> Iterator[ContextAttention | Hybrid]:
    """A ring is balanced where the tokens let it be: contiguous it sends as much, and waits."""
    is_even = spec.batch.sequence % (2 * ranks) == 0
    yield ContextAttention.ZIGZAG if is_even else ContextAttention.RING
    yield ContextAttention.ALL_GATHER
    shape = spec.model
    common = gcd(shape.heads, shape.kv_heads) if isinstance(shape, ModelShape) else 1
    for ulysses in divisors(gcd(common, ranks))[1:]:
        hybrid = Hybrid(ulysses=ulysses, ring=ranks // ulysses)
        yield ContextAttention.ULYSSES if ulysses == ranks else hybrid


SPACE = of_one_axis(Axis.CP, _sizes, _ways, (_SLICES, _GATHERED), follows=True)
