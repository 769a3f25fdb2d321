"""Makes the committed tables of the built-in families, as whole models.

Each table is a trace at a shape whose dimensions are distinct primes, so that the factors of every
size in bytes read off as one product of dimensions times a coefficient. Full precision is traced
in fp32 and in fp64: a size that doubles counts in elements of the compute dtype. The block's part
is checked to repeat, and to be the same for one, two and four layers. Boundaries are those of the
smallest units, so that a table serves units of any size: `>*` enters a block, `>*.mlp` its mlp.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from ptrain.models.build import build
from ptrain.models.initialize import cast
from ptrain.models.kernels import kernels_of
from ptrain.models.loss import token_loss_sum
from ptrain.models.trace import Born, Event, Recording, record
from ptrain.models.units import Units, unit_modules
from ptrain.spec.dials import UnitKind, UnitSize
from ptrain.spec.model import Family, ModelShape
from ptrain.timeline import Boundary, Mark
from ptrain.traces.table_format import TableWriter, coded, course

BATCH, SEQUENCE = 11, 13
PRIMES = {
    Family.LLAMA: {"repeats": 3, "kv_heads": 5, "pairs": 7},
    Family.GPT: {"heads": 5, "head_dim": 7},
}
COMMON = {"batch": BATCH, "sequence": SEQUENCE, "ffn": 17, "vocab": 19}
LAYERS = 4
SMALLEST = UnitSize(kind=UnitKind.SUB_BLOCK)
DTYPES = {"full": (torch.float32, torch.float64), "bf16": (torch.bfloat16,)}


def trace(
    shape: ModelShape,
    dtype: torch.dtype,
    unit: UnitSize | None = None,
    *,
    batch: int = BATCH,
    sequence: int = SEQUENCE,
    is_for_cuda: bool = False,
) -> Recording:
    """One micro-batch of a built-in model, with the boundaries of units of this size; its weights
    are arbitrary, no size depends on them. `is_for_cuda`: with what dropout keeps on a GPU."""
    model = build(shape, sequence=sequence)
    cast(model, dtype)
    tokens = torch.zeros(batch, sequence + 1, dtype=torch.int64)
    with kernels_of(is_for_cuda=is_for_cuda):
        return record(
            model,
            unit_modules(model, unit),
            lambda: token_loss_sum(model(tokens[:, :-1]), tokens[:, 1:]) / (batch * sequence),
            tokens,
        )


def variants() -> Iterable[tuple[str, ModelShape, str, int, bool]]:
    """(name, shape, precision, batch, whether on a GPU) of every table."""
    choices = itertools.product(Family, (False, True), (False, True), DTYPES, (BATCH, 1))
    for family, tied, special, precision, batch in choices:
        shape = _shape(family, tied=tied, special=special)
        for is_for_cuda in (False, True) if shape.dropout else (False,):
            title = name(shape, precision, batch, is_for_cuda=is_for_cuda)
            yield title, shape, precision, batch, is_for_cuda


def name(shape: ModelShape, precision: str, batch: int, *, is_for_cuda: bool = False) -> str:
    """Says what the operators depend on: one sample's targets, for example, need no copy."""
    parts = [shape.family.value, "tied" if shape.tied else "untied"]
    if shape.family is Family.LLAMA:
        parts.append("mha" if shape.heads == shape.kv_heads else "gqa")
    else:
        parts.append("dropout" if shape.dropout else "plain")
    parts += ["cuda"] * is_for_cuda
    return "-".join((*parts, precision, *(("one",) if batch == 1 else ())))


def _shape(family: Family, *, tied: bool, special: bool) -> ModelShape:
    if family is Family.LLAMA:
        primes = PRIMES[family]
        heads = primes["kv_heads"] * (primes["repeats"] if special else 1)
        head_dim = 2 * primes["pairs"]
        kv_heads, dropout = primes["kv_heads"], 0.0
    else:
        heads, head_dim = PRIMES[family]["heads"], PRIMES[family]["head_dim"]
        kv_heads, dropout = heads, 0.1 if special else 0.0
    return ModelShape(
        family=family,
        layers=LAYERS,
        hidden=heads * head_dim,
        heads=heads,
        kv_heads=kv_heads,
        ffn=COMMON["ffn"],
        vocab=COMMON["vocab"],
        tied=tied,
        dropout=dropout,
    )


Make = Callable[[], dict[str, object]]  # a table, within seconds
Tracer = Callable[[ModelShape, torch.dtype, int], Recording]


class BlockTableBuilder:
    """One table in the making: sizes are numbered as they come."""

    def __init__(
        self,
        shape: ModelShape,
        precision: str,
        batch: int,
        symbols: dict[str, int] | None,
        tracer: Tracer,
        writer: TableWriter | None = None,
    ) -> None:
        self.shape, self.precision, self.batch = shape, precision, batch
        self.tracer = tracer
        self.symbols = dict(symbols or {**PRIMES[shape.family], **COMMON})
        if shape.family is Family.LLAMA and shape.heads == shape.kv_heads:
            self.symbols.pop("repeats", None)
        if batch == 1:
            self.symbols.pop("batch", None)
        self.writer = writer or TableWriter(tuple(self.symbols))
        self.recordings = [tracer(shape, dtype, batch) for dtype in DTYPES[precision]]
        self.units = _smallest_units(shape)
        self._classes = self._classify()
        self.statistics = self.recordings[0].statistics

    def _classify(self) -> dict[int, int]:
        """Storage id -> 1 where its size follows the compute dtype's."""
        first, *others = self.recordings
        classes = dict.fromkeys(first.sizes, 0)
        for other in others:
            assert course(first.forward) == course(other.forward)
            assert course(first.backward) == course(other.backward)
            for number, size in first.sizes.items():
                assert other.sizes[number] in (size, 2 * size)
                classes[number] = int(size > 0 and other.sizes[number] == 2 * size)
        return classes

    def size(self, number: int) -> int:
        """Return the number of a storage's size."""
        return self.writer.size(
            self.recordings[0].sizes[number],
            self.symbols,
            follows=bool(self._classes[number]),
            is_statistics=number in self.statistics,
        )

    def parts(self, recording: Recording) -> dict[str, dict[str, list[object]]]:
        """Forward and backward, each in what precedes the blocks, one block, and what follows."""
        cut = _cut(recording, self.units)
        return {
            phase: _fold([coded(events, self.size, self.units, block) for block, events in parts])
            for phase, parts in cut.items()
        }

    def saved(self, recording: Recording) -> dict[str, list[object]]:
        """Return the storages that forward leaves for backward, by operator and size's index."""
        alive = set(recording.saved)
        return _fold(
            [
                [
                    (event.operator.removeprefix("aten::"), self.size(event.id))
                    for event in events
                    if isinstance(event, Born) and event in alive
                ]
                for _, events in _cut(recording, self.units)["forward"]
            ]
        )

    def build(self) -> dict[str, object]:
        """The table as JSON."""
        recording = self.recordings[0]
        parts, saved = self.parts(recording), self.saved(recording)
        return self.writer.table(**parts, saved=saved)


def builder(
    shape: ModelShape, precision: str, batch: int, *, is_for_cuda: bool
) -> BlockTableBuilder:
    """Return what makes the table of a whole model."""

    def tracer(shape: ModelShape, dtype: torch.dtype, batch: int) -> Recording:
        return trace(shape, dtype, SMALLEST, batch=batch, is_for_cuda=is_for_cuda)

    return BlockTableBuilder(shape, precision, batch, None, tracer)


Part = tuple[int, Sequence[Event]]


def _smallest_units(shape: ModelShape) -> Units:
    with torch.device("meta"):
        return unit_modules(build(shape, sequence=SEQUENCE), SMALLEST)


def _cut(recording: Recording, units: Units) -> dict[str, list[Part]]:
    """(block, events) by phase: what precedes all blocks (block -1), then from block to block."""
    blocks = [index for index, (name,) in enumerate(units) if name.count(".") == 1]
    return {
        "forward": _between(recording.forward, Mark.ENTER, list(enumerate(blocks))),
        "backward": _between(recording.backward, Mark.PRE_BACKWARD, list(enumerate(blocks))[::-1]),
    }


def _between(events: Sequence[Event], mark: Mark, blocks: Sequence[tuple[int, int]]) -> list[Part]:
    """`blocks` are (number of the block, index of its unit)."""
    starts = [events.index(Boundary(mark, unit)) for _, unit in blocks]
    ends = [*starts[1:], len(events)]
    parts = [events[start:end] for start, end in zip(starts, ends, strict=True)]
    numbers = [number for number, _ in blocks]
    return [(-1, events[: starts[0]]), *zip(numbers, parts, strict=True)]


def _fold(parts: Sequence[Sequence[object]]) -> dict[str, list[object]]:
    """What precedes the blocks, what every block has, and what follows the last one."""
    before, *blocks, last = map(list, parts)
    block = blocks[0] if blocks else last
    assert all(other == block for other in blocks), "the blocks do not repeat"
    assert last[: len(block)] == block, "the last block is another"
    return {"before": before, "block": block, "after": last[len(block) :]}


def tables() -> Iterator[tuple[str, Make]]:
    """Yield the name of every table and what makes it."""
    for title, shape, precision, batch, is_for_cuda in variants():
        yield title, partial(_checked, title, shape, precision, batch, is_for_cuda)


def _checked(
    title: str, shape: ModelShape, precision: str, batch: int, is_for_cuda: bool
) -> dict[str, object]:
    """Return a table, which is the same of fewer layers."""
    table = builder(shape, precision, batch, is_for_cuda=is_for_cuda)
    built = table.build()
    for layers in (1, 2):
        assert _same_with(layers, table), f"{title} differs with {layers} layers"
    return built


def _same_with(layers: int, table: BlockTableBuilder) -> bool:
    """Whether a trace of so many layers has the same parts."""
    shape = replace(table.shape, layers=layers)
    few = BlockTableBuilder(shape, table.precision, table.batch, None, table.tracer, table.writer)
    recording = few.recordings[0]
    for phase, parts in table.parts(table.recordings[0]).items():
        cut = _cut(recording, few.units)[phase]
        encoded = [
            event for block, events in cut for event in coded(events, few.size, few.units, block)
        ]
        if encoded != [*parts["before"], *(parts["block"] * layers), *parts["after"]]:
            return False
    return True
