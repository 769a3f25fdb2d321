"""Make the tables of what is computed and allocated by the layers of a built-in model: by one
block, by how its activations are kept, and before and after the blocks; of the whole model and
of its first, a middle and its last stage.

A pass is a list of operators by their numbers in the table; each is its kind or collective, its
dtype (none: the compute dtype) and the numbers of its sizes. Of one layer a pass is `only`; of
three it is `begin`, `block` and `end`, and of more the block repeats, which is checked with four
layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from ptrain.derivation.blocks import VARIANTS
from ptrain.derivation.tables import SYMBOLS, Pieces, Place, Setting
from ptrain.models.kernels import kernels_of
from ptrain.models.trace import Born, Recording
from ptrain.models.work import VIEW, OperatorSizes, SentTensor
from ptrain.spec.activations import PLAIN
from ptrain.spec.placement import Tier
from ptrain.spec.precision import DType
from ptrain.traces.block_tables import ATTENTIONS, CHUNKS, BlockTable, LossTable, alike, repeating
from ptrain.traces.coded import CodedTrace
from ptrain.traces.layer_works import Computed, LayerWorks, by_layer, views_last
from ptrain.traces.settings import (
    DTYPES,
    Coded,
    TableWriter,
    cuts_of,
    model_of,
    part_of,
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
    assert works is not None, "the blocks are units"
    return works
