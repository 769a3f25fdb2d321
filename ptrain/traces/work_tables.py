"""Makes the tables of what is computed: by one block, by how its activations are kept, and in front
of the blocks and behind them.

A pass is a list of operators by their numbers in the table; each is its kind or collective, its
dtype (none: that in which the model computes) and the numbers of its sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from ptrain.derivation.blocks import VARIANTS
from ptrain.derivation.loss_chunks import SYMBOLS, Pieces
from ptrain.derivation.tables import Place, Setting
from ptrain.models.work import VIEW, OperatorSizes, SentTensor
from ptrain.spec.activations import PLAIN
from ptrain.spec.placement import Tier
from ptrain.spec.precision import DType
from ptrain.traces.block_tables import ATTENTIONS, BlockTable, alike
from ptrain.traces.coded import CodedTrace
from ptrain.traces.layer_works import Computed, LayerWorks, by_layer, views_last
from ptrain.traces.loss_tables import CHUNKS, LossTable, repeating
from ptrain.traces.pass_tables import SEVERAL, PassTable
from ptrain.traces.settings import symbols
from ptrain.traces.table_format import Coded, TableWriter

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
    return replace(pieces, front=front, every=every)


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
