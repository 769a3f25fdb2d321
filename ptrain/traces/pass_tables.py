"""Makes the tables of what the layers of a built-in model allocate: of all of it, and of its first
stage, one in the middle and the last one (`derivation.layers` reads them).

Of one layer a pass is `only`; of three it is `begin`, `block` and `end`, and of more the block is
repeated, which is checked of every whole model with four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from ptrain.derivation.tables import Place, Setting
from ptrain.models.kernels import kernels_of
from ptrain.models.trace import Born, Recording
from ptrain.traces.coded import CodedTrace
from ptrain.traces.settings import (
    DTYPES,
    cuts_of,
    model_of,
    part_of,
    smallest_units,
    symbols,
)
from ptrain.traces.table_format import Coded, TableWriter

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
