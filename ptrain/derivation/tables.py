"""The committed tables of the built-in families: their settings, and their values at the dimensions
of a model, including losses of full logits and losses in chunks.

A size is a coefficient times powers of batch, sequence and dimensions. An event is an allocation, a
free, a boundary or a completed gradient. A loss in chunks replaces the loss of full logits: forward
is equal up to the end of the last block, backward from there on, for a full model and for a last
stage. `traces.work_tables` makes these tables.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple

from ptrain.axes.context.attention import ContextPart
from ptrain.axes.tensor.cost import TensorRank
from ptrain.cost import Collective
from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart
from ptrain.derivation.kernels import Statistics, statistics_of
from ptrain.facts.model import InnerCollective, LayerWork, Operator, PassWork
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import LossSpec, Spec
from ptrain.timeline import Mark, Run, run

# Flags in the first number of a size.
IN_ELEMENTS, IS_STATISTICS = 1, 2

MARKS = {">": Mark.ENTER, "<": Mark.LEAVE, "[": Mark.PRE_BACKWARD, "]": Mark.POST_BACKWARD}

# Ways of a table other than the kinds of sharded operators (`TensorRank.kind`).
PLAIN, FUSED = "plain", "fused"
GROUPED = "gqa"  # operators of blocks with fewer heads of keys than of queries
_GATHERED = "-gathered"
_CUT, _SAVED, _NAIVE, _WHOLE = "cut", "saved", "naive", "whole"

_WHOLE_LOSS = LossSpec()
_OF_A_BLOCK = (TablePart.BLOCK, TablePart.CONTEXT)


class Place(StrEnum):
    """The position of a table's layers: a full model, or one of its stages."""

    ALONE = "alone"
    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A built-in model and the properties of a run that its tables depend on. `sequence` is the
    number of tokens of a sample that a rank has between blocks, before tp shards them. `cut`
    describes one rank's part of sharded operators, `context` attention to the tokens of other
    ranks. `is_for_cuda` selects the dropout of GPUs. `statistics` is what attention keeps in
    addition to its output."""

    shape: ModelShape
    batch: int
    sequence: int
    compute: DType
    cut: TensorRank | None = None
    context: ContextPart | None = None
    loss: LossSpec = _WHOLE_LOSS
    is_for_cuda: bool = False
    statistics: Statistics | None = None

    # The generated hash would hash all fields, the model's shape included, at each of a search's
    # many thousand lookups.
    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash of all fields, cached because settings are often used as keys."""
        return hash(tuple(getattr(self, of.name) for of in fields(self)))

    @property
    def without_context(self) -> Setting:
        """The setting of a rank that attends only to its tokens."""
        return self if self.context is None else replace(self, context=None)

    @property
    def family(self) -> Family:
        """The family whose operators the model's blocks have."""
        assert self.shape.tabulated is not None, "tables tell of families"
        return self.shape.tabulated

    @property
    def operators(self) -> str:
        """The name of a block's operators. Dropout on a GPU keeps other tensors than on a CPU."""
        shape = self.shape
        if self.family is Family.LLAMA:
            return "mha" if shape.heads == shape.kv_heads else GROUPED
        if not shape.has_dropout:
            return PLAIN
        return "dropout-cuda" if self.is_for_cuda else "dropout"

    @property
    def values(self) -> dict[str, int]:
        """The value of every dimension that occurs in sizes."""
        dimensions_of = self.cut.dimensions if self.cut else dimensions
        values = dimensions_of(self.shape, batch=self.batch, sequence=self.sequence)
        return values if self.context is None else self.context.symbol_values(values)

    def name(self, part: TablePart) -> str:
        """Return the name of the setting's table. A block does not depend on whether embedding and
        head are tied, and a loss does not depend on the blocks. The targets of a single sample need
        no copy."""
        return "-".join(
            (
                self.family.value,
                *(() if part in _OF_A_BLOCK else ("tied" if self.shape.tied else "untied",)),
                *(() if part is TablePart.LOSS else (self.operators,)),
                # fp32 and fp64 have equal operators
                "full" if self.compute in (DType.FP32, DType.FP64) else "bf16",
                *(("one",) if self.batch == 1 else ()),
                *((self.context.kind,) if self.context and part is TablePart.CONTEXT else ()),
            )
        )

    def way(self, part: TablePart) -> str:
        """Return the setting's way of the table: how operators are sharded, as far as it affects
        the part. A block is independent of sharded logits, and computes the same with a naive plan,
        although it communicates more. A loss is independent of how activations are saved."""
        if self.cut is None:
            return FUSED if part is TablePart.LOSS and self.loss.fused else PLAIN
        kind = self.cut.table_name
        match part:
            case TablePart.BLOCK:
                return kind.removesuffix(_GATHERED).replace(_NAIVE, _WHOLE)
            case TablePart.LOSS:
                return kind.replace(_SAVED, _CUT)
            case _:
                return kind


class RankCut(NamedTuple):
    """A rank's part of a layer's operators (`tensor`) and of a sample (`context`). None is all."""

    tensor: TensorRank | None = None
    context: ContextPart | None = None


def setting_of(spec: Spec, cut: RankCut) -> Setting:
    """Return the setting of a spec's built-in model on a rank with this part of it."""
    assert isinstance(spec.model, ModelShape), "a built-in model"
    # tokens that one kernel call attends to: Ulysses exchanges heads for all tokens of its group
    attended = spec.own_tokens * (cut.context.ulysses if cut.context else 1)
    return Setting(
        shape=spec.model,
        batch=spec.batch.micro,
        sequence=spec.own_tokens,
        compute=spec.precision.effective_layout.parameters,
        cut=cut.tensor,
        context=cut.context,
        loss=spec.loss,
        is_for_cuda=spec.is_for_cuda,
        statistics=statistics_of(spec, attended),
    )


class Monomial(NamedTuple):
    """A size `coefficient · Π symbol^exponent`, in elements of the compute dtype or in bytes.
    `is_statistics` marks the statistics of attention, which depend on its kernel."""

    in_elements: bool
    coefficient: int
    exponents: tuple[tuple[str, int], ...]
    is_statistics: bool = False

    def bytes(self, values: Mapping[str, int], itemsize: int) -> int:
        """Return the bytes at these dimensions, for CPU kernels.

        Args:
            values: The value of each symbol on one rank.
            itemsize: Bytes of an element of the compute dtype. Not used by sizes that do not depend
                on the dtype.
        """
        size = self.coefficient * (itemsize if self.in_elements else 1)
        for symbol, exponent in self.exponents:
            size *= math.prod([values[symbol]] * exponent)
        return size


def evaluate_sizes(
    sizes: Iterable[Monomial],
    values: Mapping[str, int],
    itemsize: int,
    statistics: Statistics | None = None,
) -> tuple[int, ...]:
    """Return the bytes of each size.

    Args:
        sizes: The sizes of a table, as products of dimensions.
        values: The value of each symbol on one rank.
        itemsize: Bytes of an element of the compute dtype.
        statistics: Replaces the sizes of attention statistics with the sizes of a GPU kernel. None
            keeps the sizes of the CPU kernel.
    """
    plain = ((size, size.bytes(values, itemsize)) for size in sizes)
    return tuple(
        statistics.gpu_bytes(count) if statistics and size.is_statistics else count
        for size, count in plain
    )


def monomials(table: dict[str, Any]) -> tuple[Monomial, ...]:
    """Return the sizes of a table, in order."""
    return tuple(
        Monomial(
            in_elements=bool(kind & IN_ELEMENTS),
            is_statistics=bool(kind & IS_STATISTICS),
            coefficient=coefficient,
            exponents=tuple((s, e) for s, e in zip(table["symbols"], exponents, strict=True) if e),
        )
        for kind, coefficient, exponents in table["sizes"]
    )


def dimensions(shape: ModelShape, *, batch: int, sequence: int) -> dict[str, int]:
    """Return the value of every symbol for a model without sharded operators.

    Args:
        shape: The shape of the model.
        batch: Samples of a micro-batch.
        sequence: Tokens of a sample.
    """
    return {
        "batch": batch,
        "sequence": sequence,
        "heads": shape.heads,
        "repeats": shape.heads // shape.kv_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "pairs": shape.head_dim // 2,
        "ffn": shape.ffn,
        "vocab": shape.vocab_rows,
    }


def merge_events(events: Iterable[Any], sizes: Sequence[int]) -> Iterator[Any]:
    """Yield events with consecutive allocations and frees merged into runs.

    Args:
        events: Integers for allocations (`n` for size `n - 1`) and frees (negative), strings for
            marks, and (name, size number, is cloned) for completed gradients.
        sizes: Bytes of each size by number.

    Yields:
        Runs in bytes, (mark, module) pairs, and (name, bytes, is cloned) of gradients.
    """
    deltas: list[int] = []
    for event in events:
        if isinstance(event, int):
            deltas.append(sizes[event - 1] if event > 0 else -sizes[-event - 1])
            continue
        if deltas:
            yield from _merge_run(deltas)
            deltas = []
        if isinstance(event, str):
            # A table abbreviates the name of the block to `*`, which occurs in every event.
            yield (MARKS[event[0]], event[1:].replace("*", "blocks.*", 1))
        else:
            name, index, cloned = event
            yield (name, sizes[index], bool(cloned))
    yield from _merge_run(deltas)


def _merge_run(deltas: list[int]) -> Iterator[Run]:
    if combined := run(deltas):
        yield combined


Parts = tuple[int, ...]  # numbers of a table's parts, in order
DecodedTable = tuple[Mapping[str, Any], tuple[Monomial, ...]]  # its JSON, and its sizes
_COLLECTIVES = {collective.value for collective in Collective}
_TOKENS = "sequence"


@cache
def _decode_table(part: TablePart, name: str, way: str, *, is_work: bool) -> DecodedTable:
    content = archive.read(part, name, way)
    content = content["work"] if is_work else content
    return content, monomials(content)


class EvaluatedTable:
    """The parts of a table at a setting's dimensions. A part is a list of events, or, in the table
    of operators (`is_work`), a list of the numbers of operators."""

    def __init__(self, part: TablePart, setting: Setting, *, is_work: bool) -> None:
        key = part, setting.name(part), setting.way(part)
        self.content, self._monomials = _decode_table(*key, is_work=is_work)
        values = values_of(setting) if part is TablePart.LOSS else setting.values
        self._compute, self._sequence = setting.compute, setting.sequence
        self.sizes = evaluate_sizes(
            self._monomials, values, self._compute.itemsize, setting.statistics
        )
        self._events: dict[Parts, tuple[Any, ...]] = {}
        self._operators: dict[int, Operator | InnerCollective] = {}
        # Equal operators are one object, so that they can be compared by identity.
        self._distinct: dict[Operator | InnerCollective, Operator | InnerCollective] = {}

    def events(self, *parts: int) -> list[Any]:
        """Return the concatenated events of the parts with these numbers."""
        if parts not in self._events:
            events = itertools.chain.from_iterable(self.content["parts"][part] for part in parts)
            self._events[parts] = tuple(merge_events(events, self.sizes))
        return [*self._events[parts]]

    def layer_work(self, numbers: Mapping[str, int]) -> LayerWork:
        """Return a layer's work from the part numbers of its passes by name."""
        return LayerWork(**{name: self.pass_work(number) for name, number in numbers.items()})

    def pass_work(self, *parts: int) -> PassWork:
        """Return the concatenated operators of the parts, with equal consecutive ones merged."""
        runs = ([*alike] for _, alike in groupby(self.operators(*parts), id))
        return tuple([self._repeat(run[0], len(run)) for run in runs])

    def group_work(self, groups: Iterable[Sequence[int]], ranks: int) -> PassWork:
        """Return a pass from groups of operators.

        Args:
            groups: (operator number, repetitions, number of operators that run before the
                collective is awaited). The third number is 0 for operators and for collectives that
                are awaited at once.
            ranks: Neighbours over which collectives run. Sends go to one rank.
        """

        def entry(number: int, times: int, beside: int) -> Operator | InnerCollective:
            what = self.operator(number)
            if isinstance(what, Operator):
                return self._repeat(what, times)
            # A hop of a ring goes to the next rank, whatever the number of ranks is.
            own = ranks if what.collective is not Collective.SEND else 0
            return what._replace(times=times, beside=beside, ranks=own)

        return tuple([entry(*group) for group in groups])

    def operators(self, *parts: int) -> Iterator[Operator | InnerCollective]:
        """Yield the operators and collectives of the parts with these numbers."""
        return (self.operator(number) for part in parts for number in self.content["parts"][part])

    def flops(self, part: int, scores: int) -> int:
        """Return the floating-point operations of a pass.

        Args:
            part: The number of the pass in the table.
            scores: Attention scores of one sample and head. Replaces the square of the tokens in
                products that are quadratic in them.
        """
        total = 0
        for own, times in Counter(self.content["parts"][part]).items():
            flops = operator.flops if isinstance(operator := self.operator(own), Operator) else 0
            # Only attention's products are quadratic in the tokens. A kernel computes fewer scores
            # than the square if it skips masked blocks or has other ranks' tokens.
            if flops and self._token_powers(own) > 1:
                flops = flops * scores // self._sequence**2
            total += times * flops
        return total

    def _token_powers(self, operator: int) -> int:
        """Return the exponent of the tokens of a sample in an operator's dimensions."""
        sizes = (self._monomials[size] for size in self.content["operators"][operator][2])
        return sum(dict(size.exponents).get(_TOKENS, 0) for size in sizes)

    def operator(self, number: int) -> Operator | InnerCollective:
        """Return the operator or collective with this number. A way uses few of a table's."""
        if number not in self._operators:
            # `more` is empty, [axis] or ["", is_whole], as in `InnerCollective` and `Operator`.
            name, dtype, numbers, *more = self.content["operators"][number]
            sizes = tuple([self.sizes[size] for size in numbers])
            what: Operator | InnerCollective
            if name in _COLLECTIVES:
                what = InnerCollective(Collective(name), sizes[0], 1, *more)
            else:
                kind, own = OperatorKind(name), DType(dtype) if dtype else self._compute
                shape = (sum(sizes),) if kind.is_of_bytes else sizes
                what = Operator(kind, own, shape, 1, *more[1:])
            self._operators[number] = self._distinct.setdefault(what, what)
        return self._operators[number]

    def _repeat(
        self, operator: Operator | InnerCollective, times: int
    ) -> Operator | InnerCollective:
        repeated = operator if times == 1 else operator._replace(times=times)
        return self._distinct.setdefault(repeated, repeated)


@cache
def evaluate_table(part: TablePart, setting: Setting, *, is_work: bool = False) -> EvaluatedTable:
    """Return a setting's table at its dimensions.

    Args:
        part: The kind of table.
        setting: Selects the table and gives its dimensions.
        is_work: True for the table of operators, False for the table of events.

    Returns:
        The table. It is cached and shared.

    Raises:
        KeyError: There is no table for the setting.
    """
    return EvaluatedTable(part, setting, is_work=is_work)


# Symbols of sizes, in the order of division: features; the rank's tokens between blocks, tokens of
# a chunk and of the last, partial chunk; the full vocabulary, and the rank's shard of it.
SYMBOLS = ("hidden", "tokens", "chunk", "rest", "vocab_all", "vocab", "tp")

_BLOCK = "blocks.*"


class LossHead(NamedTuple):
    """A loss in chunks as events: `forward` follows the last block, `backward` precedes it.
    `output` is the bytes of the stage's output."""

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    output: int

    def wrap_last_block(self, phase: str, last: Sequence[Any]) -> list[Any]:
        """Return the last block's `forward` or `backward` events with those of the loss."""
        if phase == "forward":
            return [*last[: last.index((Mark.LEAVE, _BLOCK)) + 1], *self.forward]
        return [*self.backward, *last[last.index((Mark.PRE_BACKWARD, _BLOCK)) :]]


class Pieces(NamedTuple):
    """The events of a loss with at least `least` chunks. `every` and `later` occur once more for
    each further chunk."""

    least: int
    front: list[Any]
    every: list[Any]
    between: list[Any]
    later: list[Any]
    behind: list[Any]

    @property
    def all_pieces(self) -> tuple[list[Any], ...]:
        return self.front, self.every, self.between, self.later, self.behind

    def shortest(self) -> Pieces:
        """Return the equivalent pieces with the smallest `least`."""
        shorter = self._shorten()
        return self if shorter is None or self.least == 1 else shorter.shortest()

    def _shorten(self) -> Pieces | None:
        # The front of a long loss may end with a repeated piece. Moving it into the repetition
        # makes the table valid for fewer chunks, so that fewer of them are stored one by one.
        front = _strip_end(self.front, self.every)
        behind = _strip_end(self.behind[::-1], self.later[::-1])
        if front is None or behind is None:
            return None
        return self._replace(least=self.least - 1, front=front, behind=behind[::-1])


def is_known(shape: ModelShape, compute: DType, loss: LossSpec) -> bool:
    """Return True if a table has the allocations of such a loss with unsharded operators.

    torch's fused loss takes another path in fp16, and if the vocabulary is smaller than the
    features.

    Args:
        shape: The shape of the model, for its vocabulary and its features.
        compute: The dtype in which the loss is computed.
        loss: The loss. Only fused losses may be unknown.
    """
    return not loss.fused or (compute is not DType.FP16 and shape.vocab_rows >= shape.hidden)


def chunk_of(setting: Setting) -> int:
    """Return the number of tokens in a chunk."""
    assert setting.loss.chunk is not None, "a loss in chunks"
    # A chunk with more tokens than the micro-batch would be a table with zero full chunks, which
    # traces do not have.
    return min(setting.loss.chunk, setting.batch * setting.sequence)


def full_chunks(setting: Setting) -> int:
    """Return the number of full chunks."""
    return setting.batch * setting.sequence // chunk_of(setting)


def values_of(setting: Setting) -> dict[str, int]:
    """Return the values of SYMBOLS on one rank."""
    shape, cut = setting.shape, setting.cut
    tokens = setting.batch * setting.sequence
    return {
        "hidden": shape.hidden,
        "tokens": tokens // (cut.degree if cut and cut.step.is_sequence else 1),
        "chunk": chunk_of(setting),
        "rest": tokens % chunk_of(setting),
        "vocab_all": shape.vocab_rows,
        "vocab": cut.slice_of(shape.vocab_rows) if cut else shape.vocab_rows,
        "tp": cut.degree if cut else 1,
    }


def head_of(setting: Setting, place: Place) -> LossHead | None:
    """Return the events of a loss in chunks at the end of a full model or a last stage.

    Args:
        setting: The setting, whose loss has the number of tokens in a chunk.
        place: `ALONE` for the full model, `LAST` for a last stage.

    Returns:
        The events, with sizes in bytes. None for a loss of full logits.

    Raises:
        KeyError: No table has the loss.
    """
    if setting.loss.chunk is None:
        return None
    values = values_of(setting)
    evaluated = evaluate_table(TablePart.LOSS, setting.without_context)
    entry = evaluated.content[place]
    of_phase = entry["rest" if values["rest"] else "even"]
    forward, backward = (
        tuple(evaluated.events(*parts_of(of_phase[phase], full_chunks(setting))))
        for phase in ("forward", "backward")
    )
    output = 0 if entry["output"] is None else evaluated.sizes[entry["output"]]
    return LossHead(forward=forward, backward=backward, output=output)


def parts_of(listed: dict[str, list[int]], chunks: int) -> Iterator[int]:
    """Yield the numbers of the parts that describe a loss with this number of full chunks.

    Args:
        listed: Part numbers of a pass: one part for each small number of chunks (`few`), and the
            parts that repeat for more chunks (`pieces`).
        chunks: Full chunks of tokens, at least 1.
    """
    few = listed["few"]
    if chunks <= len(few):
        yield few[chunks - 1]
        return
    front, every, between, later, behind = listed["pieces"]
    more = chunks - 1 - len(few)
    yield from (front, *[every] * more, between, *[later] * more, behind)


def _strip_end(events: list[Any], end: list[Any]) -> list[Any] | None:
    """Return events without this ending, or None if they end otherwise."""
    if not end:
        return events
    return events[: -len(end)] if events[-len(end) :] == end else None
