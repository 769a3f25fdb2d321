"""Makes the tables of what a loss in chunks allocates: what stands behind the last block in forward
and in front of it in backward, of a whole model and of a last stage.

What repeats with each chunk is found by comparing traces of two numbers of chunks, odd primes which
divide nothing else. Sizes are read off by exact division: dimensions are such that no product of
some is one of others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from ptrain.derivation.loss_chunks import SYMBOLS, Pieces, has_own_tables, values_of
from ptrain.derivation.tables import Place, Setting
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.spec import LossSpec
from ptrain.timeline import Boundary, Mark
from ptrain.traces.coded import CodedTrace
from ptrain.traces.settings import (
    DTYPES,
    KINDS,
    TP,
    UNEVEN,
    VOCAB,
    CutKind,
    cuts_of,
    model_of,
    of_shape,
    part_of,
    smallest_units,
)
from ptrain.traces.table_format import Coded, TableWriter

SEVERAL = 2  # samples, where they are not one
CHUNKS = (5, 7)  # from so many what repeats is learnt
HEAD_DIM, FFN = 34, 5
_PLACES = (Place.ALONE, Place.LAST)
_PRIMES = (97, 89, 83, 79, 73, 71, 61, 59, 53, 47, 43, 41, 37, 31, 29, 19, 13)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a micro-batch: so many chunks, and what is left."""

    chunks: int
    chunk: int
    rest: int

    @property
    def number(self) -> int:
        return self.chunks * self.chunk + self.rest


def tokens_of(samples: int, chunks: int, *, has_rest: bool) -> Tokens:
    """Divisible among samples and ranks."""
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
    """Forward and backward as JSON, and the number of the output's size."""

    phases: tuple[Coded, Coded]
    output: int | None


class LossTable:
    """One table in the making, from models in these `dtypes`. The setting's tokens and chunks are
    no matter."""

    def __init__(
        self,
        setting: Setting,
        mesh: DeviceMesh | None = None,
        *,
        dtypes: Sequence[torch.dtype] = (),
    ) -> None:
        self.setting, self.mesh = setting, mesh
        self.dtypes = dtypes or DTYPES[setting.compute]
        self.writer = TableWriter(SYMBOLS)

    def build(self) -> dict[str, object]:
        """Return the table as JSON."""
        return self.writer.table(**{place: self._place(place) for place in _PLACES})

    def _place(self, place: Place) -> dict[str, object]:
        table: dict[str, object] = {}
        for has_rest in (False, True):
            coded = partial(self._coded, place, has_rest=has_rest)
            less, more = map(coded, CHUNKS)
            pieces = [*map(repeating, less.phases, more.phases)]
            few = [coded(number) for number in range(1, max(split.least for split in pieces))]
            table["rest" if has_rest else "even"] = {
                name: {
                    "few": [
                        self.writer.part(code.phases[phase])
                        for code in few[: pieces[phase].least - 1]
                    ],
                    "pieces": [self.writer.part(piece) for piece in pieces[phase].listed],
                }
                for phase, name in enumerate(("forward", "backward"))
            }
            table["output"] = less.output
        return table

    def _coded(self, place: Place, chunks: int, *, has_rest: bool) -> CodedHead:
        """Of a trace with so many chunks."""
        trace = self.trace(place, chunks, has_rest=has_rest)
        recording = trace.recording
        units = [unit for (unit,) in trace.units]
        last = max(units.index(unit) for unit in units if unit.count(".") == 1)
        forward, backward = recording.passes["forward"], recording.passes["backward"]
        behind = forward[forward.index(Boundary(Mark.LEAVE, last)) + 1 :]
        before = backward[: backward.index(Boundary(Mark.PRE_BACKWARD, last))]
        output = None if recording.output is None else trace.size(recording.output)
        return CodedHead((trace.in_full(behind), trace.in_full(before)), output)

    def trace(self, place: Place, chunks: int, *, has_rest: bool) -> CodedTrace:
        """Return the trace of a model, or of a last stage, with so many full chunks."""
        tokens = tokens_of(self.setting.batch, chunks, has_rest=has_rest)
        setting = replace(
            self.setting,
            sequence=tokens.number // self.setting.batch,
            loss=replace(self.setting.loss, chunk=tokens.chunk),
        )
        values = {symbol: value for symbol, value in values_of(setting).items() if value > 1}
        return self._trace(setting, place, values)

    def _trace(self, setting: Setting, place: Place, values: dict[str, int]) -> CodedTrace:
        counts = (1,) if place is Place.ALONE else (1, 1)  # a stage has one in front of it
        setting = replace(setting, shape=replace(setting.shape, layers=len(counts)))
        part = part_of(setting, self.mesh)
        models = (model_of(setting, dtype) for dtype in self.dtypes)
        if place is Place.ALONE:
            units = smallest_units(setting)
            recordings = [part.trace(model, units) for model in models]
        else:
            cuts = cuts_of(setting, counts)
            units = smallest_units(setting, cuts.stages[1])
            recordings = [
                recording
                for model in models
                for recording in part.trace_stage(model, units, cuts, 1, in_halves=False)
            ]
        return CodedTrace(recordings, units, values, self.writer)


def settings() -> Iterator[Setting]:
    """Yield every setting of a loss in chunks, whole, fused, and with every kind of cut."""
    for family, tied, compute, samples in itertools.product(
        Family, (False, True), DTYPES, (SEVERAL, 1)
    ):
        for kind in (None, *KINDS):
            shape = _shape(family, kind, tied=tied)
            setting = of_shape(shape, kind, compute=compute, batch=samples, sequence=1)
            if setting.cut is None:
                yield setting
                yield replace(setting, loss=LossSpec(fused=True))
            elif has_own_tables(setting.cut.kind):
                yield setting


def settings_of_operators() -> Iterator[Setting]:
    """Yield those whose loss shows its operators: a fused one is a single one, of which nobody sees
    what it computes."""
    return (setting for setting in settings() if not setting.loss.fused)


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
    """Return what is there once, and what for each chunk, of as few chunks as it is true of."""
    split = next(_splits(less, more, CHUNKS[1] - CHUNKS[0]), None)
    assert split is not None, "the chunks do not repeat"
    assert not any(isinstance(e, str | list) for e in (*split.every, *split.later)), "a boundary"
    return split.fewest()


def _splits(less: Coded, more: Coded, times: int) -> Iterator[Pieces]:
    """Ways to make the longer one of the shorter one by at most two insertions of that which is
    `times` the same."""
    start = _common(less, more)
    rear = min(_common(less[::-1], more[::-1]), len(less) - start)
    inserted = len(more) - len(less)
    middle, behind = less[start : len(less) - rear], less[len(less) - rear :]
    for size in range(inserted, -1, -times):
        first = more[start : start + size]
        between = more[start + size : start + size + len(middle)]
        second = more[start + size + len(middle) : len(more) - rear]
        x, y = first[: size // times], second[: (inserted - size) // times]
        if between == middle and x * times == first and y * times == second:
            yield Pieces(CHUNKS[0], less[:start], x, middle, y, behind)


def _common(one: Coded, other: Coded) -> int:
    """Events in front that are the same."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
