"""Makes the tables of what a loss in chunks allocates.

Like `traces.model_tables`, of what stands behind the last block in forward and in front of it in
backward, of a whole model and of a last stage. What repeats with each chunk is found by comparing
traces of two numbers of chunks, odd primes which divide nothing else. Sizes are read off by exact
division: dimensions are such that no product of some is one of others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch.distributed.device_mesh import DeviceMesh

from ptrain.derivation.loss_chunks import (
    PLACES,
    SYMBOLS,
    Pieces,
    file_name,
    is_tabulated,
)
from ptrain.spec.model import Family
from ptrain.spec.precision import DType
from ptrain.traces.loss_trace import LossTraceSetting, Tokens, tokens_of, trace
from ptrain.traces.model_tables import DTYPES, Make
from ptrain.traces.table_format import Coded, TableWriter, coded, course
from ptrain.traces.tensor_tables import KINDS

SEVERAL = 2  # samples, where they are not one
CHUNKS = (5, 7)  # from so many what repeats is learnt


@dataclass(frozen=True, slots=True)
class Encoded:
    """Forward and backward as JSON, and the number of the output's size."""

    phases: tuple[Coded, Coded]
    output: int | None


class LossTableBuilder:
    """One file in the making: sizes and parts are numbered as they come."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.writer = TableWriter(SYMBOLS)

    def build(self, settings: Sequence[LossTraceSetting]) -> dict[str, object]:
        """Return the tables as JSON."""
        ways = {
            setting.name: {place: self._place(setting, place) for place in PLACES}
            for setting in settings
        }
        return self.writer.table(**ways)

    def _place(self, setting: LossTraceSetting, place: str) -> dict[str, object]:
        table: dict[str, object] = {}
        for has_rest in (False, True):
            coded = partial(self._coded, setting, place, has_rest=has_rest)
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

    def _coded(
        self, setting: LossTraceSetting, place: str, number: int, *, has_rest: bool
    ) -> Encoded:
        """Of a trace with so many chunks."""
        tokens = tokens_of(setting.samples, number, has_rest=has_rest)
        first, *others = (
            trace(setting, tokens, dtype, self.mesh, place) for dtype in DTYPES[setting.precision]
        )
        for other in others:
            assert course(first.forward) == course(other.forward)
            assert course(first.backward) == course(other.backward)
        values = values_of(setting, tokens)

        def size(number: int) -> int:
            bytes_ = first.sizes[number]
            doubled = bool(others) and others[0].sizes[number] == 2 * bytes_ > 0
            return self.writer.size(bytes_, values, follows=doubled)

        forward, backward = (
            coded(events, size, first.units) for events in (first.forward, first.backward)
        )
        output = None if first.output is None else size(first.output)
        return Encoded((forward, backward), output)


def values_of(setting: LossTraceSetting, tokens: Tokens) -> dict[str, int]:
    """Return the values of the symbols that exceed 1."""
    shape, degree = setting.shape, setting.degree
    values = {
        "tokens": tokens.number // setting.slices,
        "hidden": shape.hidden,
        "chunk": tokens.chunk,
        "rest": tokens.rest,
        "vocab_all": shape.vocab,
        "vocab": -(-shape.vocab // degree),
        "tp": degree,
    }
    return {symbol: values[symbol] for symbol in SYMBOLS if values[symbol] > 1}


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


def settings() -> Iterator[tuple[str, list[LossTraceSetting]]]:
    """Name of the file, and every way in it."""
    for family, tied, precision, samples in itertools.product(
        Family, (False, True), DTYPES, (SEVERAL, 1)
    ):
        alone = LossTraceSetting(family=family, tied=tied, precision=precision, samples=samples)
        cut = [replace(alone, kind=kind) for kind in KINDS if is_tabulated(kind.name)]
        dtype = DType.FP32 if precision == "full" else DType.BF16
        title = file_name(alone.shape, dtype, samples)
        yield title, [alone, replace(alone, is_fused=True), *cut]


def tables(mesh: DeviceMesh | None) -> Iterator[tuple[str, Make]]:
    """Yield the name of every table and what makes it."""
    for title, ways in settings():
        yield title, partial(LossTableBuilder(mesh).build, ways)
