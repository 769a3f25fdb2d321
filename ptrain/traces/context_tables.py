"""Makes the tables of a block over the context axis: what a rank at each of the ring's places
allocates and computes, by how attention reaches the tokens of others.

A block is the same wherever its rank stands, but between some of its boundaries: there a table has
what each place does. Which of them differ is found by comparing traces; that those with more places
before or behind do nothing else, too. What is computed is a list with a hop more for each place
before and behind, which every trace is held against.

A process of its own plays the ranks, one after the other: torch has one world in a process.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ptrain.axes.context.attention import EXCHANGING, ContextKind, ContextPart, parts_told_apart
from ptrain.axes.context.run.randomness import MicroBatchCut
from ptrain.derivation.archive import Table, TablePart
from ptrain.derivation.blocks import OVER_CONTEXT
from ptrain.derivation.tables import Setting
from ptrain.derivation.work import unrolled
from ptrain.models.trace import Recording
from ptrain.models.work import VIEW
from ptrain.rooms.fake import fake_world
from ptrain.rooms.mesh import Mesh
from ptrain.spec.activations import Kept
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.model import Family
from ptrain.spec.placement import Axis
from ptrain.spec.precision import DType
from ptrain.steps.step import ContextParallel, CreateMesh, Keep
from ptrain.traces.block_tables import alike, frees_input
from ptrain.traces.coded import CodedTrace
from ptrain.traces.layer_works import Computed, by_layer, grouped
from ptrain.traces.rank_part import ContextSlices, RankPart
from ptrain.traces.settings import (
    DTYPES,
    SEQUENCE,
    Coded,
    Make,
    TableWriter,
    model_of,
    of_shape,
    shape_of,
    smallest_units,
    symbols,
)
from ptrain.traces.work_tables import WorkWriter

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
        assert setting.context is not None, "over the context axis"
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
            assert known == differing, f"{self.kind}: {part} is not as {part.name}"
        entry: dict[str, object] = {
            name: [self.writer.part(segment) for segment in segments]
            for name, segments in base.items()
        }
        entry |= {"places": by_name, "frees_input": self.frees_input}
        return entry, self._work([operators for _, operators in traces])

    def _differing(self, base: Segments, own: Segments) -> dict[str, int]:
        """Return the numbers of the parts that take the place of the base's."""
        assert [of[0] for of in base] == [of[0] for of in own], "a block has its gradients anywhere"
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
            assert (own, own_views) == (expected, times), f"{self.kind} {places} does another thing"
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
        assert works is not None, "the blocks are units"
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
        assert what in ("equal", "insert"), "a place more does the same and something more"
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
    table = ContextTable(setting).build()
    print(json.dumps({setting.way(TablePart.CONTEXT): table}))


if __name__ == "__main__":
    main(sys.argv[1])
