"""Make the tables of computation and allocation of a built-in model's layers: of one block, by how
its activations are kept, and before and after the blocks; of the full model and of its first, a
middle and its last stage.

A pass is a list of operators by their numbers in the table; each is its kind or collective, its
dtype (none: the compute dtype) and the numbers of its sizes. A pass over one layer is `only`; over
three it is `begin`, `block` and `end`, and over more the block repeats, which is checked with four
layers.

Tables over the context axis state what a rank at each place of the ring allocates and computes, by
how attention reaches the tokens of other ranks. A block is the same at every place except between
some of its boundaries, where a table has one entry per place. Comparing traces finds which entries
differ, and that places with more neighbours before or after them add nothing else. Computation is a
list with one more hop for each place before and after, and every trace is checked against it.

A separate process plays these ranks, one after the other: torch has one world per process.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ptrain.axes.context.attention import EXCHANGING, ContextKind, ContextPart, parts_told_apart
from ptrain.axes.context.run.slices import MicroBatchCut
from ptrain.derivation.archive import Table, TablePart
from ptrain.derivation.blocks import OVER_CONTEXT, VARIANTS
from ptrain.derivation.tables import SYMBOLS, Pieces, Place, Setting
from ptrain.derivation.work import unrolled
from ptrain.models.kernels import kernels_of
from ptrain.models.trace import Born, Recording
from ptrain.models.work import VIEW, OperatorSizes, SentTensor
from ptrain.rooms.comm import Mesh
from ptrain.rooms.world import fake_world
from ptrain.spec.activations import PLAIN, Kept
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.model import Family
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType
from ptrain.steps.step import ContextParallel, CreateMesh, Keep
from ptrain.traces.block_tables import (
    ATTENTIONS,
    CHUNKS,
    BlockTable,
    CodedTrace,
    LossTable,
    alike,
    frees_input,
    repeating,
)
from ptrain.traces.layer_works import Computed, LayerWorks, by_layer, grouped, views_last
from ptrain.traces.rank_part import ContextSlices, RankPart
from ptrain.traces.settings import (
    DTYPES,
    SEQUENCE,
    Coded,
    Make,
    TableWriter,
    cuts_of,
    model_of,
    of_shape,
    part_of,
    shape_of,
    smallest_units,
    symbols,
)

SEVERAL = 3  # layers: with as many, begin, block and end are all there
_STAGES = (Place.FIRST, Place.MIDDLE, Place.LAST)

Passes = dict[str, list[Coded]]  # each layer by layer, in its own order


class PassTable:
    """One table in the making, from models in these `dtypes`."""

    def __init__(
        self,
        setting: Setting,
        mesh: DeviceMesh | None = None,
        *,
        dtypes: Sequence[torch.dtype] = (),
    ) -> None:
        self.setting, self.mesh = setting, mesh
        self.dtypes = dtypes or DTYPES[setting.compute]
        self.values = symbols(setting)
        self.writer = TableWriter(tuple(self.values))

    def build(self, several: int = SEVERAL) -> dict[str, object]:
        """Return the table as JSON. A GPU's dropout is known of whole models alone."""
        places = [Place.ALONE] if self.setting.is_for_cuda else [*Place]
        return self.writer.table(**{place: self._place(place, several) for place in places})

    def _place(self, place: Place, several: int) -> dict[str, object]:
        several += place is Place.ALONE  # there two blocks between the ends are compared
        (few, _), (many, more) = (self._passes(place, layers) for layers in (1, several))
        return {**{name: self._parts(few[name], many[name]) for name in few}, **more}

    def _parts(self, few: Sequence[Coded], many: Sequence[Coded]) -> list[int]:
        (only,), (begin, *blocks, end) = few, many
        assert all(block == blocks[0] for block in blocks), "the layers do not repeat"
        return [self.writer.part(part) for part in (only, begin, blocks[0], end)]

    def _passes(self, place: Place, layers: int) -> tuple[Passes, dict[str, object]]:
        """Return the passes of so many layers, and what else a table says of this place."""
        traces = [self.alone(layers)] if place is Place.ALONE else self.stage(place, layers)
        passes = {name: trace.layers(name) for trace in traces for name in trace.recording.passes}
        whole = traces[0]
        if whole.recording.output is None:
            return passes, {"saved": _saved(whole)}
        return passes, {"output": whole.size(whole.recording.output)}

    def alone(self, layers: int) -> CodedTrace:
        """Return the trace of a whole model of so many layers."""
        setting = replace(self.setting, shape=replace(self.setting.shape, layers=layers))
        units = smallest_units(setting)
        part = part_of(setting, self.mesh, has_learnt=layers > 1)
        with kernels_of(is_for_cuda=setting.is_for_cuda):
            recordings = [part.trace(model_of(setting, dtype), units) for dtype in self.dtypes]
        return CodedTrace(recordings, units, self.values, self.writer)

    def stage(self, place: Place, layers: int) -> list[CodedTrace]:
        """Return the passes of a stage of so many layers, and but for the first one its halves."""
        counts = tuple(layers if other is place else 1 for other in _STAGES)
        setting = replace(self.setting, shape=replace(self.setting.shape, layers=sum(counts)))
        cuts, index = cuts_of(setting, counts), _STAGES.index(place)
        units = smallest_units(setting, cuts.stages[index])
        part = part_of(setting, self.mesh, has_learnt=layers > 1)
        by_dtype: list[list[Recording]] = [
            part.trace_stage(
                model_of(setting, dtype, is_meta=True), units, cuts, index, in_halves=index > 0
            )
            for dtype in self.dtypes
        ]
        return [
            CodedTrace(recordings, units, self.values, self.writer)
            for recordings in zip(*by_dtype, strict=True)
        ]


def _saved(trace: CodedTrace) -> dict[str, Coded]:
    """What forward leaves for backward, by operator and size's number: in front of the blocks, in
    each of them and behind them."""
    alive = set(trace.recording.saved)
    layers = [
        [
            (event.operator.removeprefix("aten::"), trace.size(event.id))
            for event in events
            if isinstance(event, Born) and event in alive
        ]
        for _, events in trace.split("forward")
    ]
    if len(layers) < SEVERAL:
        return {}
    before, *blocks, last = layers
    number = len(before) - len(blocks[0])
    ends = before[number:], last[: len(blocks[0])]
    assert all(block == blocks[0] for block in (*blocks, *ends)), "the blocks do not repeat"
    return {"before": [*before[:number]], "block": [*blocks[0]], "after": [*last[len(blocks[0]) :]]}


_NAMES = {"forward": "forward", "backward": "backward", "input": "inputs", "weight": "weights"}
_ALIKE = 2  # layers, so that what repeats is seen to
# What is as wide as the compute dtype is told from what is fp32 in any case where the two differ.
_TRACED = {DType.FP32: (torch.float64,), DType.BF16: (torch.bfloat16,)}
_COMPUTE = {DType.FP32: DType.FP64, DType.BF16: DType.BF16}
_WIDTH = DType.FP32.itemsize  # of an element of what a writer is given


class WorkWriter:
    """Operators as a setting's table numbers them. `values` are those of the dimensions."""

    def __init__(self, setting: Setting, dimensions: Sequence[str] = ()) -> None:
        self.values = symbols(setting)
        self.compute = _COMPUTE[setting.compute]
        self.writer = TableWriter(dimensions or tuple(self.values))
        self._operators: dict[str, int] = {}

    def passes(self, computed: Mapping[str, Computed]) -> dict[str, int]:
        """Return the number of each pass's list."""
        return {
            _NAMES[name]: self.writer.part(self.coded(views_last(ran)))
            for name, ran in computed.items()
        }

    def coded(self, computed: Computed) -> Coded:
        """Return a list of operators as their numbers."""
        return [self.number(what) for what in computed]

    def number(self, what: OperatorSizes | SentTensor) -> int:
        """Return the number of an operator, or of what is sent."""
        row: list[object]
        if isinstance(what, SentTensor):
            row = [what.collective, "", [self._size(what.payload, what.dtype)]]
            if what.axis:
                row = [what.operator.collective, *row[1:], what.axis]
        else:
            dtype = "" if what.dtype is self.compute else what.dtype
            dtypes = what.dtypes or (None,) * len(what.sizes)
            row = [what.kind, dtype, [*map(self._size, what.sizes, dtypes)]]
            row += ["", True] if what.is_whole else []
        text = json.dumps(row, separators=(",", ":"))
        return self._operators.setdefault(text, len(self._operators))

    def _size(self, size: int, dtype: DType | None) -> int:
        """Return the number of a size, in bytes of what has a dtype."""
        follows = dtype is self.compute
        own = size * _WIDTH // self.compute.itemsize if follows else size
        return self.writer.size(own, self.values, follows=follows)

    def table(self, **content: object) -> dict[str, object]:
        """Return the table as JSON, with what names its passes."""
        operators = [json.loads(text) for text in self._operators]
        return self.writer.table(operators=operators, **content)


class BlockWorkTable:
    """The table of a block in the making."""

    def __init__(self, setting: Setting, mesh: DeviceMesh | None = None) -> None:
        self.setting, self.mesh = setting, mesh
        self.writer = WorkWriter(setting)

    def build(self) -> dict[str, object]:
        """Return the table as JSON. `halves` are those of a block whose backward pass is in halves,
        of which tables know the plain one alone."""
        dtypes = _TRACED[self.setting.compute]
        layers = _ALIKE if self.setting.cut is None else 1
        blocks = BlockTable(self.setting, self.mesh, layers=layers, dtypes=dtypes)
        content: dict[str, object] = {}
        for attention in ATTENTIONS:
            traces = {
                name: blocks.trace(attention, kept, has_learnt=kept != PLAIN)
                for name, kept in VARIANTS
                if kept.tier is Tier.DEVICE  # copies between tiers are no operators
            }
            content[attention.value] = {
                name: self.writer.passes(alike(_by_layer(trace).layers))
                for name, trace in traces.items()
            }
        if not self.setting.is_for_cuda:
            stages = PassTable(self.setting, self.mesh, dtypes=dtypes)
            *_, halves = stages.stage(Place.MIDDLE, SEVERAL)
            # The half of the weights has no boundaries: what one layer has left there is done when
            # the next one is, so that of three the middle one does as much as each.
            _, middle, _ = _by_layer(halves).layers
            content["halves"] = self.writer.passes(middle)
        return self.writer.table(**content)


class LossWorkTable:
    """The table of what is behind the blocks where the loss is in chunks, in the making."""

    def __init__(self, setting: Setting, mesh: DeviceMesh | None = None) -> None:
        self.traces = LossTable(setting, mesh, dtypes=_TRACED[setting.compute])
        self.writer = WorkWriter(setting, SYMBOLS)

    def build(self) -> dict[str, object]:
        """Return the table as JSON. A last stage computes the same, and so does a tied head."""
        return self.writer.table(
            even=self._passes(has_rest=False),
            rest=self._passes(has_rest=True),
        )

    def _passes(self, *, has_rest: bool) -> dict[str, object]:
        coded = partial(self._coded, has_rest=has_rest)
        less, more = map(coded, CHUNKS)
        (view,) = self.writer.coded([VIEW])
        pieces = {name: _pieces(less[name], more[name], view) for name in less}
        few = [coded(number) for number in range(1, max(of.least for of in pieces.values()))]
        return {
            name: {
                "few": [self.writer.writer.part(code[name]) for code in few[: of.least - 1]],
                "pieces": [self.writer.writer.part(piece) for piece in of.listed],
            }
            for name, of in pieces.items()
        }

    def _coded(self, chunks: int, *, has_rest: bool) -> dict[str, Coded]:
        trace = self.traces.trace(Place.ALONE, chunks, has_rest=has_rest)
        self.writer.values = trace.values
        computed = _by_layer(trace).behind
        return {name: self.writer.coded(views_last(ran)) for name, ran in computed.items()}


def _pieces(less: Coded, more: Coded, view: object) -> Pieces:
    """What computes repeats in its order; each chunk has as many views, which have none."""
    computing = [[number for number in code if number != view] for code in (less, more)]
    pieces = repeating(*computing)
    # Where a chunk is cut, of six or more one has a view more.
    of_chunk = (more.count(view) - less.count(view)) // (CHUNKS[1] - CHUNKS[0])
    once = less.count(view) - of_chunk * (CHUNKS[0] - pieces.least)
    front, every = pieces.front + [view] * once, pieces.every + [view] * of_chunk
    return pieces._replace(front=front, every=every)


class EndWorkTable:
    """The table of what is in front of the blocks and behind them, in the making."""

    def __init__(self, setting: Setting, mesh: DeviceMesh | None = None) -> None:
        self.setting, self.mesh = setting, mesh
        self.writer = WorkWriter(setting)

    def build(self) -> dict[str, object]:
        """Return the table as JSON. Stages compute what an untied model does; `halves` are those of
        a last stage."""
        traces = PassTable(self.setting, self.mesh, dtypes=_TRACED[self.setting.compute])
        passes, alone = self.writer.passes, _by_layer(traces.alone(1))
        content = {"front": passes(alone.front), "behind": passes(alone.behind)}
        if not (self.setting.is_for_cuda or self.setting.shape.tied):
            *_, halves = traces.stage(Place.LAST, 1)
            content["halves"] = passes(_by_layer(halves).behind)
        return self.writer.table(**content)


def _by_layer(trace: CodedTrace) -> LayerWorks:
    blocks = [
        unit for (unit,) in trace.units if unit.startswith("blocks.") and unit.count(".") == 1
    ]
    works = by_layer(trace.recording, trace.units, sorted(blocks))
    assert works is not None, "the blocks are not units"
    return works


ULYSSES = 3
_OF_HEADS = ("hidden", "heads", "kv_heads")
_LAYERS = 3  # one in front of what repeats, which the middle one does, and the last one
_BEFORE, _BEHIND = 29, 1  # of gathered keys; their sum and one more is a prime too
_FURTHER = ((4, 0), (0, 4), (4, 4))  # a table tells no more than of fewer

Segments = list[Coded]  # a boundary or a completed gradient, and what follows it
Groups = list[list[int]]  # an operator's number, how often it runs, how many run beside it
Ran = tuple[Groups, int]  # and how many views
Trace = tuple[dict[str, Segments], dict[str, Ran]]  # by pass, events and operators


def settings() -> Iterator[Setting]:
    """Yield a setting for each table: one sample of a model whose blocks are llama's, in 16 bits,
    as long ones are trained."""
    for kind, is_grouped in itertools.product(ContextKind, (False, True)):
        shape = shape_of(Family.LLAMA, None, tied=False, special=is_grouped)
        own = parts_of(kind)[0]
        heads = {name: own.ulysses * getattr(shape, name) for name in _OF_HEADS}
        setting = of_shape(
            replace(shape, layers=_LAYERS, **heads),
            None,
            compute=DType.BF16,
            batch=1,
            sequence=own.halves * SEQUENCE,
        )
        yield replace(setting, context=own)


def parts_of(kind: ContextKind) -> list[ContextPart]:
    """Return the parts that are traced, those that a table names first."""
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
    """One table in the making."""

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

    def _variant(self, kept: Kept) -> tuple[dict[str, object], dict[str, object]]:
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
        """Return the numbers of the parts that take the place of the base's."""
        assert [of[0] for of in base] == [of[0] for of in own], "the gradients of a block differ"
        pairs = enumerate(zip(base, own, strict=True))
        return {str(n): self.writer.part(mine) for n, (of_base, mine) in pairs if mine != of_base}

    def _work(self, traced: list[dict[str, Ran]]) -> dict[str, object]:
        """Return by pass and place what runs how often."""
        places = [part.place for part in self.parts]
        return {
            name: {
                place: self._often(
                    {
                        (part.before, part.behind): ran[name]
                        for part, ran in zip(self.parts, traced, strict=True)
                        if part.place == place
                    }
                )
                for place in dict.fromkeys(places)
            }
            for name in ("forward", "backward")
        }

    def _often(self, traced: dict[tuple[int, int], Ran]) -> dict[str, object]:
        """Return the pass with the fewest places before the own one and behind it, and what each
        place more puts into it. `traced`: by how many there are."""
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
            *expected, (_, times, _) = unrolled(written, part)
            assert (own, own_views) == (expected, times), (
                f"{self.kind} {places} runs other operators"
            )
        return written

    def _trace(self, part: ContextPart, kept: Kept) -> Trace:
        setting = replace(self.setting, context=part)
        units = smallest_units(setting)
        keep = None
        if not kept.is_plain:
            keep = Keep(blocks=tuple((f"blocks.{index}", kept) for index in range(_LAYERS)))
        recordings = [
            _rank_part(setting, part, keep).trace(model_of(setting, dtype), units)
            for dtype in DTYPES[setting.compute]
        ]
        trace = CodedTrace(recordings, units, symbols(setting), self.writer)
        self.frees_input = frees_input(trace)  # of whatever part, as its segments say
        events = {
            name: _segments(alike(trace.layers(name)[1:-1])) for name in ("forward", "backward")
        }
        return events, self._operators(recordings[-1], units, symbols(setting))

    def _operators(
        self, recording: Recording, units: tuple[tuple[str, ...], ...], values: Mapping[str, int]
    ) -> dict[str, Ran]:
        self.works.values = values
        works = by_layer(recording, units, [f"blocks.{index}" for index in range(_LAYERS)])
        assert works is not None, "the blocks are not units"
        _, middle, _ = works.layers
        return {name: self._ran(computed) for name, computed in middle.items()}

    def _ran(self, computed: Computed) -> Ran:
        groups = grouped(computed)
        views = sum(group.times for group in groups if group.what == VIEW)
        others = [group for group in groups if group.what != VIEW]
        return [[self.works.number(g.what), g.times, g.beside] for g in others], views


def _put_in(base: Groups, longer: Groups) -> list[list[Any]]:
    """Return at which places of one list something is put into it in another, and what."""
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
    segments: Segments = []
    for event in events:
        if not isinstance(event, int):
            segments.append([])
        segments[-1].append(event)
    return segments


def _rank_part(setting: Setting, part: ContextPart, keep: Keep | None) -> RankPart:
    """What is done to a model on one rank of a world that is there from now on."""
    degree = part.ulysses * part.ring
    step = ContextParallel(
        axis=Axis.CP,
        ulysses=part.ulysses,
        ring=part.ring,
        sequence=degree * setting.sequence,
        is_balanced=part.halves > 1,
        gathers=part.kind is ContextKind.GATHER,
    )
    if dist.is_initialized():
        dist.destroy_process_group()
    # Two of them: an axis that is all of the world has its group, which says of no axis.
    mesh_step = CreateMesh(axes=(Axis.DP_REPLICATE, Axis.CP), degrees=(2, degree))
    cut = MicroBatchCut(samples=setting.batch, slices=degree)
    mesh = Mesh(mesh_step, fake_world(part.before * part.ulysses, 2 * degree))
    return RankPart(
        batch=setting.batch,
        sequence=step.sequence,
        context=ContextSlices(step, mesh, ReduceScatterVia.NATIVE, cut),
        keep=keep,
    )


def tables() -> Iterator[tuple[str, Make]]:
    """Yield every table's name, and what makes it."""
    for setting in settings():
        yield setting.name(TablePart.CONTEXT), partial(_of_process, setting)


def _of_process(setting: Setting) -> Table:
    words = [sys.executable, "-m", __name__, setting.name(TablePart.CONTEXT)]
    answer = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    table: Table = json.loads(answer.stdout)
    return table


def main(name: str) -> None:
    """Print the table of this name."""
    torch.set_num_threads(1)
    (setting,) = (own for own in settings() if own.name(TablePart.CONTEXT) == name)
    print(json.dumps({setting.way(TablePart.CONTEXT): ContextTable(setting).build()}))


if __name__ == "__main__":
    main(sys.argv[1])
