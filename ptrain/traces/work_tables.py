"""Make the tables of a chunked loss after the last block (of a full model and of a last stage), and
of a block over the context axis.

Events that repeat with each chunk are found by comparing traces of two numbers of chunks, which are
odd primes that divide no other dimension. Sizes are found by exact division, since no product of
some dimensions is one of others.

Tables over the context axis hold the allocations and computation of a rank at each place of the
ring, by the way in which attention reaches other ranks' tokens. A block is the same at every place,
except between some of its boundaries, where a table has one entry per place. Comparing traces shows
which entries differ, and that places with more neighbours before or after them add nothing else.
Computation is a list with one more hop for each place before and after, and every trace is checked
against it.

A separate process plays these ranks one after the other, since torch has one world per process.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ptrain.axes.context.attention import EXCHANGING, ContextKind, ContextPart, parts_told_apart
from ptrain.derivation.archive import Table, TablePart
from ptrain.derivation.blocks import OVER_CONTEXT
from ptrain.derivation.tables import SYMBOLS, Pieces, Place, Setting
from ptrain.derivation.work import unroll_hops
from ptrain.models.work import VIEW
from ptrain.spec.activations import ActivationMode
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import LossSpec
from ptrain.timeline import Boundary, Mark
from ptrain.traces.block_tables import (
    CodedTrace,
    common_entry,
    frees_input,
    trace_model,
    trace_stage,
    works_by_layer,
)
from ptrain.traces.layer_works import Computed, group_work, views_last
from ptrain.traces.settings import (
    DTYPES,
    KINDS,
    SEQUENCE,
    TP,
    UNEVEN,
    VOCAB,
    Coded,
    CutKind,
    Make,
    TableWriter,
    WorkWriter,
    of_shape,
    shape_of,
    symbols,
)

SEVERAL = 2  # samples of a batch that has several: one sample has fewer copies in the loss
# Numbers of chunks whose traces are compared: primes, so that a number of repetitions is not also a
# dimension, and large enough that the first and last chunks do not meet.
CHUNKS = (5, 7)
HEAD_DIM, FFN = 34, 5
_PLACES = (Place.ALONE, Place.LAST)
_PRIMES = (97, 89, 83, 79, 73, 71, 61, 59, 53, 47, 43, 41, 37, 31, 29, 19, 13)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a micro-batch: full chunks and a rest."""

    chunks: int
    chunk: int
    rest: int

    @property
    def number(self) -> int:
        return self.chunks * self.chunk + self.rest


def tokens_of(samples: int, chunks: int, *, has_rest: bool) -> Tokens:
    """Return a number of tokens with a unique factorization, divisible by samples and ranks.

    Args:
        samples: Samples of the micro-batch.
        chunks: Full chunks of tokens.
        has_rest: True to add a partial chunk, smaller than the others.
    """
    unit = samples * TP
    if not has_rest:
        return Tokens(chunks, unit * _PRIMES[-1], 0)
    return next(
        Tokens(chunks, chunk, rest)
        for chunk, prime in itertools.combinations(_PRIMES, 2)
        for rest in (prime, 2 * prime, 3 * prime)  # of 2 and 3 chunks, divisible by 2 and by 3
        if rest < chunk and (chunks * chunk + rest) % unit == 0
    )


@dataclass(frozen=True, slots=True)
class CodedHead:
    """The encoded loss: events of both passes, number of the output's size, and computation."""

    events: dict[str, Coded]
    output: int | None
    computed: Mapping[str, Computed]
    values: Mapping[str, int]


class LossTable:
    """A table of a chunked loss under construction; the setting's tokens and chunks are
    replaced."""

    def __init__(self, setting: Setting, mesh: DeviceMesh | None = None) -> None:
        self.setting, self.mesh = setting, mesh
        self.writer, self.works = TableWriter(SYMBOLS), WorkWriter(setting, SYMBOLS)

    def build(self) -> dict[str, object]:
        """Return the table as JSON.

        A fused loss has no computation, because its operators are not visible. Tied heads and last
        stages compute the same as an untied full model.
        """
        content, work = self._place(Place.ALONE)
        others, _ = self._place(Place.LAST)
        has_work = not (self.setting.loss.fused or self.setting.shape.tied)
        return self.writer.table(
            **{Place.ALONE: content, Place.LAST: others},
            **({"work": self.works.table(**work)} if has_work else {}),
        )

    def _place(self, place: Place) -> tuple[dict[str, object], dict[str, object]]:
        """Return events and computation for one place, with and without a rest."""
        table: dict[str, object] = {}
        work: dict[str, object] = {}
        for name in ("even", "rest"):
            coded = partial(self._coded, place, has_rest=name == "rest")
            less, more = map(coded, CHUNKS)
            events = {of: repeating(code, more.events[of]) for of, code in less.events.items()}
            works = self._pieces(less, more)
            least, of_works = (
                max((of.least for of in p.values()), default=1) for p in (events, works)
            )
            few = [coded(number) for number in range(1, max(least, of_works))]
            table["output"] = less.output
            table[name] = _listed(self.writer, events, [head.events for head in few])
            coded_works = [self._works(head) for head in few[: of_works - 1]]
            work[name] = _listed(self.works.writer, works, coded_works)
        return table, work

    def _works(self, head: CodedHead) -> dict[str, Coded]:
        self.works.values = head.values
        return {
            name: self.works.encode_operators(views_last(ran))
            for name, ran in head.computed.items()
        }

    def _pieces(self, less: CodedHead, more: CodedHead) -> dict[str, Pieces]:
        """Return the repeating pieces of the computation, by pass."""
        own, longer = self._works(less), self._works(more)
        (view,) = self.works.encode_operators([VIEW]) if own else (None,)
        return {name: _pieces(code, longer[name], view) for name, code in own.items()}

    def _coded(self, place: Place, chunks: int, *, has_rest: bool) -> CodedHead:
        """Encode the trace with this number of chunks."""
        trace = self.trace(place, chunks, has_rest=has_rest)
        recording = trace.recording
        units = [unit for (unit,) in trace.units]
        last = max(units.index(unit) for unit in units if unit.count(".") == 1)
        forward, backward = recording.passes["forward"], recording.passes["backward"]
        behind = forward[forward.index(Boundary(Mark.LEAVE, last)) + 1 :]
        before = backward[: backward.index(Boundary(Mark.PRE_BACKWARD, last))]
        output = None if recording.output is None else trace.size(recording.output)
        events = {"forward": trace.in_full(behind), "backward": trace.in_full(before)}
        computed = works_by_layer(trace).behind if place is Place.ALONE else {}
        return CodedHead(events, output, computed, trace.values)

    def trace(self, place: Place, chunks: int, *, has_rest: bool) -> CodedTrace:
        """Return the trace of a full model or of a last stage.

        Args:
            place: `ALONE` for the full model, else the last stage.
            chunks: Full chunks of tokens.
            has_rest: True to add a partial chunk.
        """
        tokens = tokens_of(self.setting.batch, chunks, has_rest=has_rest)
        setting = replace(
            self.setting,
            sequence=tokens.number // self.setting.batch,
            loss=replace(self.setting.loss, chunk=tokens.chunk),
        )
        if place is Place.ALONE:
            return trace_model(setting, self.writer, self.mesh)
        (trace,) = trace_stage(setting, self.writer, self.mesh, place, 1, in_halves=False)
        return trace


def loss_settings() -> Iterator[Setting]:
    """Yield every setting of a chunked loss: unsharded, fused, and with every kind of sharding."""
    for family, tied, compute, samples in itertools.product(
        Family, (False, True), DTYPES, (SEVERAL, 1)
    ):
        for kind in (None, *KINDS):
            shape = _shape(family, kind, tied=tied)
            setting = of_shape(shape, kind, compute=compute, batch=samples, sequence=1)
            if setting.cut is None:
                yield setting
                yield replace(setting, loss=LossSpec(fused=True))
            # Plans of these kinds have no other tables.
            elif not setting.cut.table_name.startswith(("saved", "naive")):
                yield setting


def _shape(family: Family, kind: CutKind | None, *, tied: bool) -> ModelShape:
    degree = TP if kind else 1
    is_uneven = kind is None or kind.loss_parallel  # and larger than hidden
    return ModelShape(
        family=family,
        layers=1,
        hidden=degree * HEAD_DIM,
        heads=degree,
        kv_heads=degree,
        ffn=degree * FFN,
        vocab=UNEVEN if is_uneven else degree * VOCAB,
        tied=tied,
    )


def repeating(less: Coded, more: Coded) -> Pieces:
    """Return the pieces that occur once and the pieces per chunk, for as few chunks as possible.

    Args:
        less: Encoded events of the loss with `CHUNKS[0]` chunks.
        more: Encoded events of the loss with `CHUNKS[1]` chunks.
    """
    split = next(_splits(less, more, CHUNKS[1] - CHUNKS[0]), None)
    assert split is not None, "the chunks do not repeat"
    assert not any(isinstance(e, str | list) for e in (*split.every, *split.later)), "a boundary"
    return split.shortest()


def _splits(less: Coded, more: Coded, times: int) -> Iterator[Pieces]:
    """Yield the ways to make the longer list by at most two insertions of `times` equal pieces."""
    start = _common(less, more)
    rear = min(_common(less[::-1], more[::-1]), len(less) - start)
    inserted = len(more) - len(less)
    middle, behind = less[start : len(less) - rear], less[len(less) - rear :]
    # A chunk may add events in two places: where it is computed, and where its tensors are freed.
    # All divisions of the inserted events between the two are tried.
    for size in range(inserted, -1, -times):
        first = more[start : start + size]
        between = more[start + size : start + size + len(middle)]
        second = more[start + size + len(middle) : len(more) - rear]
        x, y = first[: size // times], second[: (inserted - size) // times]
        if between == middle and x * times == first and y * times == second:
            yield Pieces(CHUNKS[0], less[:start], x, middle, y, behind)


def _common(one: Coded, other: Coded) -> int:
    """Return the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _listed(
    writer: TableWriter, pieces: Mapping[str, Pieces], few: Sequence[Mapping[str, Coded]]
) -> dict[str, object]:
    """Return the part numbers for few chunks and of the pieces, by pass."""
    return {
        name: {
            "few": [writer.part(code[name]) for code in few[: of.least - 1]],
            "pieces": [writer.part(piece) for piece in of.all_pieces],
        }
        for name, of in pieces.items()
    }


def _pieces(less: Coded, more: Coded, view: object) -> Pieces:
    """Return the repeating pieces of a pass; views are counted separately."""
    computing = [[number for number in code if number != view] for code in (less, more)]
    pieces = repeating(*computing)
    # With sharded chunks, one chunk of six or more has an additional view.
    of_chunk = (more.count(view) - less.count(view)) // (CHUNKS[1] - CHUNKS[0])
    once = less.count(view) - of_chunk * (CHUNKS[0] - pieces.least)
    front, every = pieces.front + [view] * once, pieces.every + [view] * of_chunk
    return pieces._replace(front=front, every=every)


ULYSSES = 3  # ranks that exchange heads: a prime that is no dimension of these settings
_OF_HEADS = ("hidden", "heads", "kv_heads")
_LAYERS = 3  # the first, one that repeats, and the last
_BEFORE, _BEHIND = 29, 1  # ranks before and after; their sum plus one is a prime too
# (before, after) with more neighbours, which must add nothing new
_FURTHER = ((4, 0), (0, 4), (4, 4))

Segments = list[Coded]  # a boundary or a completed gradient, and the following events
# An operator's index, its repetitions, the number of overlapping operators.
Groups = list[list[int]]
Ran = tuple[Groups, int]  # groups, and the number of views
Trace = tuple[dict[str, Segments], dict[str, Ran]]  # by pass, events and operators


def context_settings() -> Iterator[Setting]:
    """Yield a setting for each table: one sample of a Llama model in 16 bits, as used for long
    samples."""
    for kind, is_grouped in itertools.product(ContextKind, (False, True)):
        shape = shape_of(Family.LLAMA, None, tied=False, special=is_grouped)
        own = parts_of(kind)[0]
        heads = {name: own.ulysses * getattr(shape, name) for name in _OF_HEADS}
        setting = of_shape(
            replace(shape, layers=_LAYERS, **heads),
            None,
            compute=DType.BF16,
            batch=1,
            sequence=own.num_chunks * SEQUENCE,
        )
        yield replace(setting, context=own)


def parts_of(kind: ContextKind) -> list[ContextPart]:
    """Return the parts to trace; the first one of each name goes into the table."""
    if kind is ContextKind.GATHER:
        places = [(0, _BEFORE + _BEHIND), (_BEFORE, _BEHIND)]
    else:
        places = [*parts_told_apart(kind), *(() if kind is ContextKind.ULYSSES else _FURTHER)]
    ulysses = ULYSSES if kind in EXCHANGING else 1
    return [
        ContextPart(kind=kind, ulysses=ulysses, before=before, behind=behind)
        for before, behind in places
    ]


class ContextTable:
    """A table over the context axis under construction."""

    def __init__(self, setting: Setting) -> None:
        assert setting.context is not None, "there is no context axis"
        self.setting, self.kind = setting, setting.context.kind
        self.parts = parts_of(self.kind)
        names = tuple(symbols(replace(setting, context=self.parts[-1])))
        self.writer = TableWriter(names)
        self.works = WorkWriter(setting, names)

    def build(self) -> dict[str, object]:
        """Return the table as JSON."""
        content = {name: self._variant(kept) for name, kept in OVER_CONTEXT}
        return self.writer.table(
            **{name: entry for name, (entry, _) in content.items()},
            work=self.works.table(**{name: work for name, (_, work) in content.items()}),
        )

    def _variant(self, kept: ActivationMode) -> tuple[dict[str, object], dict[str, object]]:
        """Return events and computation for one way to keep activations."""
        traces = [self._trace(part, kept) for part in self.parts]
        base, _ = traces[0]
        by_name: dict[str, dict[str, dict[str, int]]] = {}
        for part, (events, _) in zip(self.parts, traces, strict=True):
            differing = {name: self._differing(base[name], events[name]) for name in events}
            known = by_name.setdefault(part.name, differing)
            assert known == differing, f"{self.kind}: {part} differs from {part.name}"
        entry: dict[str, object] = {
            name: [self.writer.part(segment) for segment in segments]
            for name, segments in base.items()
        }
        entry |= {"places": by_name, "frees_input": self.frees_input}
        return entry, self._work([operators for _, operators in traces])

    def _differing(self, base: Segments, own: Segments) -> dict[str, int]:
        """Return the segments that replace segments of the base, by index."""
        assert [of[0] for of in base] == [of[0] for of in own], "the gradients of a block differ"
        pairs = enumerate(zip(base, own, strict=True))
        return {str(n): self.writer.part(mine) for n, (of_base, mine) in pairs if mine != of_base}

    def _work(self, traced: list[dict[str, Ran]]) -> dict[str, object]:
        """Return the computation by pass and place."""
        places = [part.table_place for part in self.parts]
        return {
            name: {
                place: self._often(
                    {
                        (part.before, part.behind): ran[name]
                        for part, ran in zip(self.parts, traced, strict=True)
                        if part.table_place == place
                    }
                )
                for place in dict.fromkeys(places)
            }
            for name in ("forward", "backward")
        }

    def _often(self, traced: dict[tuple[int, int], Ran]) -> dict[str, object]:
        """Return the computation for the fewest neighbours, and the insertions for each further
        one.

        `traced` holds the computation by number of places before and after the rank. All entries
        are checked against the result.
        """
        least = min(traced)
        base, views = traced[least]
        nexts = (least[0] + 1, least[1]), (least[0], least[1] + 1)
        ran, looked = zip(*(traced.get(places, traced[least]) for places in nexts), strict=True)
        written = {
            "least": list(least),
            "base": base,
            "before": _put_in(base, ran[0]),
            "behind": _put_in(base, ran[1]),
            "views": [self.works.number(VIEW), views, *(more - views for more in looked)],
        }
        for places, (own, own_views) in traced.items():
            part = ContextPart(kind=self.kind, before=places[0], behind=places[1])
            *expected, (_, times, _) = unroll_hops(written, part)
            assert (own, own_views) == (expected, times), (
                f"{self.kind} {places} runs other operators"
            )
        return written

    def _trace(self, part: ContextPart, kept: ActivationMode) -> Trace:
        """Return events and computation of a rank's block."""
        trace = trace_model(replace(self.setting, context=part), self.writer, kept=kept)
        self.frees_input = frees_input(trace)  # the same for all parts, since their segments are
        events = {
            name: _segments(common_entry(trace.layers(name)[1:-1]))
            for name in ("forward", "backward")
        }
        self.works.values = trace.values
        _, middle, _ = works_by_layer(trace).layers
        return events, {name: self._ran(computed) for name, computed in middle.items()}

    def _ran(self, computed: Computed) -> Ran:
        """Return the groups of operators, and the number of views."""
        groups = group_work(computed)
        views = sum(group.times for group in groups if group.what == VIEW)
        others = [group for group in groups if group.what != VIEW]
        return [[self.works.number(g.what), g.times, g.beside] for g in others], views


def _put_in(base: Groups, longer: Groups) -> list[list[Any]]:
    """Return the insertions, as index and groups, that turn `base` into `longer`."""
    keys, other = ([tuple(group) for group in groups] for groups in (base, longer))
    put = []
    for what, at, _, first, last in SequenceMatcher(
        None, keys, other, autojunk=False
    ).get_opcodes():
        assert what in ("equal", "insert"), "a further place removes operators"
        if what == "insert":
            put.append([at, longer[first:last]])
    return put


def _segments(events: Coded) -> Segments:
    """Split events at boundaries and completed gradients."""
    segments: Segments = []
    for event in events:
        if not isinstance(event, int):
            segments.append([])
        segments[-1].append(event)
    return segments


def tables() -> Iterator[tuple[str, Make]]:
    """Yield every table's name and the function that makes it."""
    for setting in context_settings():
        yield setting.name(TablePart.CONTEXT), partial(_of_process, setting)


def _of_process(setting: Setting) -> Table:
    """Return the table of a setting, from a subprocess."""
    words = [sys.executable, "-m", __name__, setting.name(TablePart.CONTEXT)]
    answer = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    table: Table = json.loads(answer.stdout)
    return table


def main(name: str) -> None:
    """Print the table of this name as JSON."""
    torch.set_num_threads(1)
    (setting,) = (own for own in context_settings() if own.name(TablePart.CONTEXT) == name)
    print(json.dumps({setting.way(TablePart.CONTEXT): ContextTable(setting).build()}))


if __name__ == "__main__":
    main(sys.argv[1])
