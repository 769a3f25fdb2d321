"""The committed tables of the built-in families: what they depend on, and their values at the
dimensions of a model, whole losses and losses in chunks included.

A size is a coefficient times powers of batch, sequence and dimensions; an event is an allocation, a
free, a boundary or a completed gradient. A loss in chunks replaces a whole one: the forward pass is
the same up to the end of the last block, the backward pass from there on, of a whole model and of a
last stage (`traces.work_tables` makes these tables).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple

from ptrain.axes.context.attention import ContextPart
from ptrain.axes.tensor.cost import Cut
from ptrain.cost import Collective
from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart
from ptrain.derivation.attention import Statistics, statistics_of
from ptrain.facts.model import InnerCollective, LayerWork, Operator, PassWork
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.rates import OperatorKind
from ptrain.spec.spec import LossSpec, Spec
from ptrain.timeline import Mark, Run, run

# What the first number of a size says, as flags.
IN_ELEMENTS, IS_STATISTICS = 1, 2

MARKS = {">": Mark.ENTER, "<": Mark.LEAVE, "[": Mark.PRE_BACKWARD, "]": Mark.POST_BACKWARD}

# Ways of a table beside the kinds of cut (`Cut.kind`).
PLAIN, FUSED = "plain", "fused"
GROUPED = "gqa"  # operators of blocks whose keys have fewer heads than their queries
_GATHERED = "-gathered"
_CUT, _SAVED, _NAIVE, _WHOLE = "cut", "saved", "naive", "whole"

_WHOLE_LOSS = LossSpec()
_OF_A_BLOCK = (TablePart.BLOCK, TablePart.CONTEXT)


class Place(StrEnum):
    """What the layers of a table are: all of a model's, or those of a stage."""

    ALONE = "alone"
    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A built-in model and how it runs; `sequence`: the tokens of a sample that a rank has between
    its blocks, or all of them where tp cuts these. Where operators are `cut` it is one rank's part;
    `context`: it attends to the tokens of others. `is_for_cuda`: a GPU drops out; `statistics`:
    what its attention keeps beside its output."""

    shape: ModelShape
    batch: int
    sequence: int
    compute: DType
    cut: Cut | None = None
    context: ContextPart | None = None
    loss: LossSpec = _WHOLE_LOSS
    is_for_cuda: bool = False
    statistics: Statistics | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of all fields, which are many: what is derived of a setting is looked up often."""
        return hash(tuple(getattr(self, of.name) for of in fields(self)))

    @property
    def without_context(self) -> Setting:
        """Return the same where the rank attends to its own tokens."""
        return self if self.context is None else replace(self, context=None)

    @property
    def family(self) -> Family:
        """Whose operators the model's blocks have."""
        assert self.shape.tabulated is not None, "tables tell of families"
        return self.shape.tabulated

    @property
    def is_full(self) -> bool:
        """Whether fp32 and fp64 do the same as its dtype."""
        return self.compute in (DType.FP32, DType.FP64)

    @property
    def operators(self) -> str:
        """Which operators a block has; what dropout keeps is another thing on a GPU."""
        shape = self.shape
        if self.family is Family.LLAMA:
            return "mha" if shape.heads == shape.kv_heads else GROUPED
        if not shape.drops:
            return PLAIN
        return "dropout-cuda" if self.is_for_cuda else "dropout"

    @property
    def values(self) -> dict[str, int]:
        """The value of every dimension that sizes are products of."""
        dimensions_of = self.cut.dimensions if self.cut else dimensions
        values = dimensions_of(self.shape, batch=self.batch, sequence=self.sequence)
        return values if self.context is None else self.context.values(values)

    def name(self, part: TablePart) -> str:
        """Return the name of its table. To a block it is nothing whether embedding and head are
        tied, and to a loss what the blocks do; one sample's targets need no copy."""
        return "-".join(
            (
                self.family.value,
                *(() if part in _OF_A_BLOCK else ("tied" if self.shape.tied else "untied",)),
                *(() if part is TablePart.LOSS else (self.operators,)),
                "full" if self.is_full else "bf16",
                *(("one",) if self.batch == 1 else ()),
                *((self.context.kind,) if self.context and part is TablePart.CONTEXT else ()),
            )
        )

    def way(self, part: TablePart) -> str:
        """Return which way of its table's it is: how operators are cut, as far as the part sees it.
        A block does not see how logits are, and computes the same where a cut is naive, though it
        sends more; what it saves is nothing to the loss."""
        if self.cut is None:
            return FUSED if part is TablePart.LOSS and self.loss.fused else PLAIN
        kind = self.cut.kind
        match part:
            case TablePart.BLOCK:
                return kind.removesuffix(_GATHERED).replace(_NAIVE, _WHOLE)
            case TablePart.LOSS:
                return kind.replace(_SAVED, _CUT)
            case _:
                return kind


class RankCut(NamedTuple):
    """What a rank has of a layer, and of a sample: `tensor` of its operators, `context` of its
    tokens; None of all of them."""

    tensor: Cut | None = None
    context: ContextPart | None = None


def setting_of(spec: Spec, cut: RankCut) -> Setting:
    """Return the setting of a spec's built-in model, on a rank that has so much of it."""
    assert isinstance(spec.model, ModelShape), "a built-in model"
    # by one call of a kernel
    attended = spec.own_tokens * (cut.context.ulysses if cut.context else 1)
    return Setting(
        shape=spec.model,
        batch=spec.batch.micro,
        sequence=spec.own_tokens,
        compute=spec.precision.effective.parameters,
        cut=cut.tensor,
        context=cut.context,
        loss=spec.loss,
        is_for_cuda=spec.is_for_cuda,
        statistics=statistics_of(spec, attended),
    )


class Monomial(NamedTuple):
    """`coefficient · Π symbol^exponent`, in elements of the compute dtype or in bytes.
    `is_statistics`: it is what attention keeps beside its output, which depends on its kernel."""

    in_elements: bool
    coefficient: int
    exponents: tuple[tuple[str, int], ...]
    is_statistics: bool = False

    def bytes(self, values: Mapping[str, int], itemsize: int) -> int:
        """The size at these dimensions, of a CPU's kernels."""
        size = self.coefficient * (itemsize if self.in_elements else 1)
        for symbol, exponent in self.exponents:
            size *= math.prod([values[symbol]] * exponent)
        return size

    def __str__(self) -> str:
        unit = ("e",) if self.in_elements else ()
        powers = (s if e == 1 else f"{s}^{e}" for s, e in self.exponents)
        factors = (*((str(self.coefficient),) if self.coefficient != 1 else ()), *unit, *powers)
        return "·".join(factors) or "1"


def evaluated(
    sizes: Iterable[Monomial],
    values: Mapping[str, int],
    itemsize: int,
    statistics: Statistics | None = None,
) -> tuple[int, ...]:
    """Return the bytes of each size; `statistics` are those of a GPU's attention."""
    plain = ((size, size.bytes(values, itemsize)) for size in sizes)
    return tuple(
        statistics.of(count) if statistics and size.is_statistics else count
        for size, count in plain
    )


def monomials(table: dict[str, Any]) -> tuple[Monomial, ...]:
    """The sizes of a table, in its order."""
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
    """Return the value of every symbol."""
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


def merged(events: Iterable[Any], sizes: Sequence[int]) -> Iterator[Any]:
    """Signed size numbers become runs; marks and completions stay as they are."""
    deltas: list[int] = []
    for event in events:
        if isinstance(event, int):
            deltas.append(sizes[event - 1] if event > 0 else -sizes[-event - 1])
            continue
        if deltas:
            yield from _flush(deltas)
            deltas = []
        if isinstance(event, str):
            yield (MARKS[event[0]], event[1:].replace("*", "blocks.*", 1))
        else:
            name, index, cloned = event
            yield (name, sizes[index], bool(cloned))
    yield from _flush(deltas)


def _flush(deltas: list[int]) -> Iterator[Run]:
    if combined := run(deltas):
        yield combined


Parts = tuple[int, ...]  # numbers of a table's parts, which follow each other


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class EvaluatedTable:
    """A table and the bytes of each of its sizes."""

    content: Mapping[str, Any]
    sizes: tuple[int, ...]
    known: dict[Parts, tuple[Any, ...]] = field(default_factory=dict, compare=False, repr=False)

    def events(self, *parts: int) -> list[Any]:
        """Return the events of the parts with these numbers, one after the other."""
        if parts not in self.known:
            written = self.content["parts"]
            events = (event for part in parts for event in written[part])
            self.known[parts] = tuple(merged(events, self.sizes))
        return [*self.known[parts]]


def content(part: TablePart, setting: Setting) -> archive.Table:
    """Return a setting's table as it is written. Raises KeyError where there is none."""
    table: archive.Table = archive.read(part, setting.name(part), setting.way(part))
    return table


def sizes(part: TablePart, setting: Setting) -> tuple[Monomial, ...]:
    """Return the sizes of a setting's table, as they are written."""
    return _sizes(part, setting.name(part), setting.way(part))


@cache
def _sizes(part: TablePart, name: str, way: str) -> tuple[Monomial, ...]:
    return monomials(archive.read(part, name, way))


def table(
    part: TablePart, setting: Setting, values: Mapping[str, int] | None = None
) -> EvaluatedTable:
    """Return a setting's table at its dimensions, or at other `values`. Raises KeyError where there
    is none."""
    return EvaluatedTable(
        content(part, setting),
        evaluated(
            sizes(part, setting),
            setting.values if values is None else values,
            setting.compute.itemsize,
            setting.statistics,
        ),
    )


_COLLECTIVES = {collective.value for collective in Collective}
_TOKENS = "sequence"


class _Listed(NamedTuple):
    """An operator or a collective as a table has it: `sizes` are numbers; no dtype means that in
    which the model computes; `axis` and `is_whole` as of these."""

    kind: OperatorKind | Collective
    dtype: DType | None
    sizes: tuple[int, ...]
    axis: str = ""
    is_whole: bool = False

    def at(self, sizes: Sequence[int], compute: DType) -> Operator | InnerCollective:
        """Return it where a table's sizes are these."""
        own = tuple([sizes[number] for number in self.sizes])
        if isinstance(self.kind, Collective):
            return InnerCollective(self.kind, own[0], axis=self.axis)
        dimensions = (sum(own),) if self.kind.is_of_bytes else own
        return Operator(self.kind, self.dtype or compute, dimensions, is_whole=self.is_whole)


class WorkTable(NamedTuple):
    """A way of a table; `passes` are lists of operators by their numbers."""

    content: Mapping[str, Any]
    sizes: tuple[Monomial, ...]
    operators: tuple[_Listed, ...]
    passes: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> WorkTable:
        """Return a table as it is written."""
        return cls(
            content,
            monomials(dict(content)),
            tuple(
                _Listed(
                    Collective(name) if name in _COLLECTIVES else OperatorKind(name),
                    DType(dtype) if dtype else None,
                    tuple(sizes),
                    *more,
                )
                for name, dtype, sizes, *more in content["operators"]
            ),
            tuple(map(tuple, content.get("parts", ()))),
        )


@cache
def work_table(part: TablePart, name: str, way: str) -> WorkTable:
    return WorkTable.read(archive.read(part, name, way)["work"])


class EvaluatedWork:
    """A table at a setting's dimensions."""

    def __init__(self, part: TablePart, setting: Setting, values: Mapping[str, int]) -> None:
        self.table = work_table(part, setting.name(part), setting.way(part))
        self._compute, self._sequence = setting.compute, setting.sequence
        self._sizes = [size.bytes(values, self._compute.itemsize) for size in self.table.sizes]
        # Of what is equal at these dimensions one object, so that a look at it is enough.
        self._distinct: dict[Operator | InnerCollective, Operator | InnerCollective] = {}
        self._known: dict[int, Operator | InnerCollective] = {}
        self._repeated: dict[tuple[int, int], Operator | InnerCollective] = {}

    def work(self, numbers: Mapping[str, int]) -> LayerWork:
        """Return the passes with these numbers."""
        return LayerWork(**{name: self.of_pass([number]) for name, number in numbers.items()})

    def of_pass(self, numbers: Iterable[int]) -> PassWork:
        """Return the operators of parts one after the other, equal ones in a row as one."""
        parts = (self.table.passes[number] for number in numbers)
        of_pass = (self.operator(operator) for part in parts for operator in part)
        runs = ([*alike] for _, alike in groupby(of_pass, id))
        return tuple([self._times(run[0], len(run)) for run in runs])

    def of_groups(self, groups: Iterable[Sequence[int]], ranks: int) -> PassWork:
        """Return operators by number, how often each runs in a row and how many behind it run
        before it is awaited; what is sent over an axis is so over so many neighbours."""

        def entry(number: int, times: int, beside: int) -> Operator | InnerCollective:
            what = self.operator(number)
            if isinstance(what, Operator):
                return self._times(what, times)
            own = ranks if what.collective is not Collective.SEND else 0
            return what._replace(times=times, beside=beside, ranks=own)

        return tuple([entry(*group) for group in groups])

    def operators(self, number: int) -> Iterator[Operator | InnerCollective]:
        """Yield what the pass with this number computes and sends, one by one."""
        return map(self.operator, self.table.passes[number])

    def flops(self, number: int, scores: int) -> int:
        """Return the floating-point operations of the pass with this number, where so many `scores`
        stand in the place of all tokens times all tokens."""
        total = 0
        for own, times in Counter(self.table.passes[number]).items():
            flops = operator.flops if isinstance(operator := self.operator(own), Operator) else 0
            if flops and self._powers(own) > 1:
                flops = flops * scores // self._sequence**2
            total += times * flops
        return total

    def _powers(self, operator: int) -> int:
        """How many of an operator's dimensions are the tokens of a sample."""
        sizes = (self.table.sizes[size] for size in self.table.operators[operator].sizes)
        return sum(dict(size.exponents).get(_TOKENS, 0) for size in sizes)

    def operator(self, number: int) -> Operator | InnerCollective:
        """Return the operator with this number: of all in a table few are in a way to keep."""
        if number not in self._known:
            operator = self.table.operators[number].at(self._sizes, self._compute)
            self._known[number] = self._distinct.setdefault(operator, operator)
        return self._known[number]

    def _times(
        self, operator: Operator | InnerCollective, times: int
    ) -> Operator | InnerCollective:
        if times == 1:
            return operator
        key = id(operator), times
        if key not in self._repeated:
            self._repeated[key] = operator._replace(times=times)
        return self._repeated[key]


# Of sizes, in the order in which they are divided by: features; tokens of this rank between the
# blocks, of a chunk and of what is left; the vocabulary, all of it and the rank's part.
SYMBOLS = ("hidden", "tokens", "chunk", "rest", "vocab_all", "vocab", "tp")

_BLOCK = "blocks.*"


class LossHead(NamedTuple):
    """As `tables.merged` gives it: what follows the last block in forward and precedes it in
    backward; `output`, bytes of what a stage hands on."""

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    output: int

    def around(self, phase: str, last: Sequence[Any]) -> list[Any]:
        """The last block's part in `forward` or `backward`, with this behind it or before it."""
        if phase == "forward":
            return [*last[: last.index((Mark.LEAVE, _BLOCK)) + 1], *self.forward]
        return [*self.backward, *last[last.index((Mark.PRE_BACKWARD, _BLOCK)) :]]


class Pieces(NamedTuple):
    """Events of `least` chunks or more: `every` and `later` are there once more for each chunk that
    is more."""

    least: int
    front: list[Any]
    every: list[Any]
    between: list[Any]
    later: list[Any]
    behind: list[Any]

    @property
    def listed(self) -> tuple[list[Any], ...]:
        return self.front, self.every, self.between, self.later, self.behind

    def fewest(self) -> Pieces:
        """The same with the smallest number of chunks that it is true of."""
        shorter = self._shorter()
        return self if shorter is None or self.least == 1 else shorter.fewest()

    def _shorter(self) -> Pieces | None:
        front = _without(self.front, self.every)
        behind = _without(self.behind[::-1], self.later[::-1])
        if front is None or behind is None:
            return None
        return self._replace(least=self.least - 1, front=front, behind=behind[::-1])


def has_own_tables(kind: str) -> bool:
    """Return whether this kind of cut has tables of its own."""
    return not kind.startswith(("saved", "naive"))


def is_known(shape: ModelShape, compute: DType, loss: LossSpec) -> bool:
    """Return whether a table tells what such a loss allocates where its operators are whole.
    torch's fused one goes other ways in fp16, and with fewer words than features."""
    return not loss.fused or (compute is not DType.FP16 and shape.vocab_rows >= shape.hidden)


def chunk_of(setting: Setting) -> int:
    """Return the tokens of a chunk."""
    assert setting.loss.chunk is not None, "a loss in chunks"
    return min(setting.loss.chunk, setting.batch * setting.sequence)


def full_chunks(setting: Setting) -> int:
    """Return how many chunks are full."""
    return setting.batch * setting.sequence // chunk_of(setting)


def values_of(setting: Setting) -> dict[str, int]:
    """Return the values of SYMBOLS, on one rank."""
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
    """Return the passes of a loss in chunks and the size of its output, at the end of a whole model
    or of a last stage; None of a loss of whole logits."""
    if setting.loss.chunk is None:
        return None
    values = values_of(setting)
    evaluated = table(TablePart.LOSS, setting.without_context, values)
    entry = evaluated.content[place]
    of_phase = entry["rest" if values["rest"] else "even"]
    forward, backward = (
        tuple(evaluated.events(*parts_of(of_phase[phase], full_chunks(setting))))
        for phase in ("forward", "backward")
    )
    output = 0 if entry["output"] is None else evaluated.sizes[entry["output"]]
    return LossHead(forward=forward, backward=backward, output=output)


def parts_of(listed: dict[str, list[int]], chunks: int) -> Iterator[int]:
    """Yield the numbers of the parts that so many full chunks are, one after the other."""
    few = listed["few"]
    if chunks <= len(few):
        yield few[chunks - 1]
        return
    front, every, between, later, behind = listed["pieces"]
    more = chunks - 1 - len(few)
    yield from (front, *[every] * more, between, *[later] * more, behind)


def _without(events: list[Any], end: list[Any]) -> list[Any] | None:
    """`events` up to this end of theirs; None where it is another."""
    if not end:
        return events
    return events[: -len(end)] if events[-len(end) :] == end else None
