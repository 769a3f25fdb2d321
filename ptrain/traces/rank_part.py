"""What one rank runs of a model, traced as its plan leaves it: operators cut, activations kept, the
loss in chunks, and with pp its part of a stage. The tables of built-in models are made so, and what
the ranks have of any other model.

Equal layers in a row are traced once: of a built-in model, whose layers have the same operators,
the first one runs, two behind it and the last one, and the second stands for all in their midst.

That the third did what the second did is looked at in every trace. What stands in for the others
hands on what it is given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ptrain.activations.run.apply import keep_traced
from ptrain.axes.context.run.apply import ContextGroups, parallelize_context
from ptrain.axes.context.run.slices import MicroBatchCut, token_slices
from ptrain.axes.expert.form import is_by_routing
from ptrain.axes.pipeline.run.cut import part_of
from ptrain.axes.pipeline.stage_facts import stage_roles
from ptrain.axes.tensor.run.apply import loss_inside, micro_batch, parallelize
from ptrain.derivation.layers import Places, alike, instantiate, places_of
from ptrain.facts.model import Attending, WorkByKind
from ptrain.facts.stages import Chain, Stage, is_within
from ptrain.interpreter.loss import Loss
from ptrain.models.objective import SampleBatch, objective_of, of_tokens, sample_batch
from ptrain.models.trace import Born, Event, Extent, Recording, sent_again, to_timeline
from ptrain.models.units import ROOT
from ptrain.rooms.comm import Mesh, Registry
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Tier
from ptrain.spec.role import Roles
from ptrain.spec.spec import Spec
from ptrain.steps.step import ChunkedLoss, ContextParallel, Keep, Parallelize
from ptrain.timeline import Boundary, Complete, Item, Mark, Timeline
from ptrain.traces.layer_works import work_of
from ptrain.traces.record import TracedStage, Units, record, record_stage, run_unrecorded

Names = tuple[str, ...]  # of layers, first to last

Pairs = list[tuple[str, int]]
X = TypeVar("X")

_AHEAD = 3  # the first one, the one that stands for others, and its witness


def kind_of_row(spec: Spec, layers: Names) -> Hashable:
    """Return what each of these layers does, where all do the same; None where nobody says so, and
    where a router decides sizes, of which each layer has its own."""
    if is_by_routing(spec):
        return None
    kinds = alike(spec, layers)
    if not kinds or len({*kinds}) > 1 or spec.pipeline.is_in_halves:
        return None
    shape = spec.model
    assert isinstance(shape, ModelShape), "only built-in models"
    if not shape.are_equal(int(layer.rpartition(".")[2]) for layer in layers):
        return None
    is_on_device = kinds[0].tier is Tier.DEVICE  # when copies are back depends on what runs ahead
    return kinds[0] if is_on_device else None


def running(spec: Spec, layers: Names) -> Names:
    """Return those of the layers that run for all of them."""
    is_long = len(layers) > _AHEAD + 1 and kind_of_row(spec, layers) is not None
    return (*layers[:_AHEAD], layers[-1]) if is_long else layers


def alike_of(spec: Spec, layers: Names) -> Names:
    """Return the layers that run, if they are alike; else none."""
    return () if kind_of_row(spec, layers) is None else running(spec, layers)


def running_units(
    units: Sequence[tuple[str, ...]], layers: Names, names: Names
) -> tuple[tuple[str, ...], ...]:
    """Return the units that run where of the layers those of these names do."""
    skipped = [name for name in layers if name not in names]
    return tuple(modules for modules in units if not is_within(modules[0], skipped))


class _Skipped(nn.Identity):
    def forward(self, x_BTC: Tensor, *_: Any) -> Tensor:
        return x_BTC


@contextmanager
def only(model: nn.Module, layers: Names, names: Names) -> Iterator[None]:
    """Within it those of the layers that have these names run, and the others do not."""
    skipped = {name: model.get_submodule(name) for name in layers if name not in names}
    for name in skipped:
        _put(model, name, _Skipped())
    try:
        yield
    finally:
        for name, layer in skipped.items():
            _put(model, name, layer)


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, layer)


class TracedLayers:
    """What layers of these `names` did in a model, or a stage, of these `units`. They stand for as
    many equal ones, or for more."""

    def __init__(
        self,
        recording: Recording,
        names: Names,
        units: tuple[tuple[str, ...], ...],
        halves: Recording | None = None,
    ) -> None:
        self.recording, self.names, self.units, self.halves = recording, names, units, halves

    @cached_property
    def own_timeline(self) -> Timeline:
        """The timeline of what ran."""
        return to_timeline(self.recording)

    @cached_property
    def _own_work(self) -> WorkByKind | None:
        return work_of(self.units, self.names, self.recording, self.halves)

    def work(self, layers: Names) -> WorkByKind | None:
        """Return what the layers compute, as `work_of` does."""
        if (own := self._own_work) is None:
            return None
        return own._replace(order=tuple(_of_all(own.order, len(layers))))

    def timeline(self, layers: Names, units: tuple[tuple[str, ...], ...]) -> Timeline:
        """Return the timeline of the layers, in a model or stage of those units."""
        if layers == self.names:
            return self.own_timeline
        whole, recording, places = self.own_timeline, self.recording, places_of(units)
        enter, begin = self._boundaries(Mark.ENTER), self._boundaries(Mark.PRE_BACKWARD)[::-1]
        number = len(layers)
        return Timeline(
            forward=self._items(whole.forward, enter, layers, places),
            backward=self._items(whole.backward, begin, layers[::-1], places),
            saved=tuple(_joined(_saved(recording, enter), number)),
            moved=whole.moved,
            repeated=tuple(_joined(_sent_again(recording, begin), number)),
        )

    def _boundaries(self, mark: Mark) -> list[Boundary]:
        return [Boundary(mark, self.units.index((name,))) for name in self.names]

    def _items(
        self, items: Sequence[Item], marks: list[Boundary], layers: Names, places: Places
    ) -> tuple[Item, ...]:
        """Return a pass of all layers, which stand in its order. The `marks` are where those that
        ran begin."""
        front, *parts = _parted(items, marks)
        names = [self.units[mark.unit][0] for mark in marks]
        own = [[*self._template(part, name)] for part, name in zip(parts, names, strict=True)]
        filled = [*instantiate(self._template(front), "", places)]
        for template, name in zip(_of_all(own, len(layers)), layers, strict=True):
            filled += instantiate(template, name.rpartition(".")[2], places)
        return tuple(filled)

    def _template(self, items: Sequence[Item], layer: str = "") -> Iterator[Any]:
        """Yield items as tables have them, without the layer's number in their names."""
        for item in items:
            match item:
                case Boundary(mark, unit):
                    yield mark, _pattern(self.units[unit][0], layer)
                case Complete(parameter, size, cloned, beside):
                    yield _pattern(parameter, layer), size, cloned, beside
                case _:
                    yield item


def _pattern(name: str, layer: str) -> str:
    is_own = layer and is_within(name, (layer,))
    return f"{layer.rpartition('.')[0]}.*{name[len(layer) :]}" if is_own else name


def _of_all(parts: Sequence[X], layers: int) -> list[X]:
    """Return a part for each of so many layers, of those for the layers that ran."""
    if layers == len(parts):
        return [*parts]
    first, second, third, last = parts
    assert second == third, "identical layers run different operators"
    return [first, *[second] * (layers - 2), last]


def _joined(parts: Sequence[Pairs], layers: int) -> Iterator[tuple[str, int]]:
    """Yield what stands in the part in front, and in those of so many layers."""
    front, *own = parts
    for part in (front, *_of_all(own, layers)):
        yield from part


def _parted(items: Sequence[X], marks: Sequence[X]) -> list[Sequence[X]]:
    """Return what is in front of all these items, and from each to the next."""
    ends = [*map(items.index, marks), len(items)]
    assert ends == sorted(ends), "layers do not run one after the other"
    return [items[: ends[0]], *(items[start:end] for start, end in pairwise(ends))]


def _saved(recording: Recording, marks: Sequence[Event]) -> list[Pairs]:
    """Return what forward left for backward, by layer."""
    alive = {event.id for event in recording.saved}
    return [
        [
            (event.operator, event.size)
            for event in part
            if isinstance(event, Born) and event.id in alive
        ]
        for part in _parted(recording.forward, marks)
    ]


def _sent_again(recording: Recording, marks: Sequence[Event]) -> list[Pairs]:
    """Return what backward sent again of forward, by layer."""
    bounds = [recording.backward.index(mark) for mark in marks]
    parts: list[Pairs] = [[] for _ in range(len(bounds) + 1)]
    for place, work in recording.works.get("backward", ()):
        parts[bisect_left(bounds, place)] += sent_again(((place, work),))
    return parts


_TEACHING = 2  # layers
Change = Callable[[nn.Module], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCuts:
    """The stages that pp cuts a model into, and what they are cut from."""

    stages: Sequence[Stage]
    chain: Chain


class ContextSlices:
    """Slices of the tokens over a mesh of which this process plays one rank."""

    def __init__(
        self,
        step: ContextParallel,
        mesh: Mesh,
        via: ReduceScatterVia,
        cut: MicroBatchCut,
        attending: Attending | None = None,
    ) -> None:
        self._groups = ContextGroups(step, mesh, cut, attending)
        self._apply = partial(parallelize_context, step=step, mesh=mesh, via=via)
        self.spans = self._groups.masks.spans

    def apply(self, module: nn.Module) -> None:
        """Change a module in place."""
        self._apply(module, groups=self._groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What a plan does to a model before a micro-batch of `batch` samples of `sequence` tokens runs
    through it. Operators are cut over `mesh`, of which this process plays one rank; `head` is the
    module that makes the logits of a model that is not built in; `extent` how much operators select
    by data. `context`: the rank has a slice of the tokens; `slices` of them it has one between the
    blocks. `experts` leaves a module the rank's own ones."""

    batch: int
    sequence: int
    tensor: Parallelize | None = None
    mesh: DeviceMesh | None = None
    context: ContextSlices | None = None
    experts: Callable[[nn.Module], None] | None = None
    slices: int = 1
    keep: Keep | None = None
    loss: ChunkedLoss | None = None
    head: str = ROOT
    spec: Spec | None = None  # whose samples and loss they are, where these are not ours
    has_learnt: bool = False  # torch, on a part with the same operators
    extent: Extent = Extent.GIVEN

    def trace(self, model: nn.Module, units: Units, alike: Names = ()) -> Recording:
        """Return the recording of a whole model, which is changed in place. Of layers that are
        `alike` torch learns from two: the second is given what all behind it are."""
        return self.traces(model, units, alike)[0]

    def traces(
        self, model: nn.Module, units: Units, alike: Names = (), *changes: Change
    ) -> list[Recording]:
        """Return the same, and another recording after each of `changes` to the model."""
        loss = self._prepared(model, self.tensor.roles if self.tensor else ())
        samples = self._samples()

        def forward() -> Tensor:
            return loss.run(model, samples) / samples.rows

        with micro_batch(self.tensor)():
            run = partial(record, model, units, forward, *samples.tensors, extent=self.extent)
            taught = alike[:_TEACHING]
            learn = partial(run_unrecorded, model, running_units(units, alike, taught), forward)
            recordings = [self._when_learnt(run, learn, partial(only, model, alike, taught))]
            for change in changes:
                change(model)
                recordings.append(run())
            return recordings

    def trace_stage(
        self,
        model: nn.Module,
        units: Units,
        cuts: StageCuts,
        index: int,
        alike: Names = (),
        *changes: Change,
        in_halves: bool,
    ) -> list[Recording]:
        """Return the recording of a stage's passes, and where its backward pass runs `in_halves`
        that of the halves; the same after each of `changes` to its part; `alike` as of `trace`. The
        model is not changed; its part may be on meta, and is then made of nothing in particular."""
        stages, ends = cuts.stages, cuts.chain.ends
        is_last = index == len(stages) - 1
        part = part_of(model, stages, index, cuts.chain)
        roles = self.tensor.roles if self.tensor else ()
        loss = self._prepared(
            part, stage_roles(roles, stages[index], len(stages), ends), has_loss=is_last
        )
        _make_real(part)
        samples = self._samples()
        dtype = next(part.parameters()).dtype
        stage = TracedStage(
            module=part,
            units=units,
            hidden=torch.zeros(self.batch, *self._boundary(cuts.chain), dtype=dtype),
            samples=samples,
            is_first=index == 0,
            forward=partial(_forward, loss, samples),
            loss=partial(_mean, loss, samples) if is_last else None,
            around=partial(loss.given, samples),
            extent=self.extent,
        )
        with micro_batch(self.tensor)():
            recordings, runs, taught = [], [], alike[:_TEACHING]
            short = replace(stage, units=running_units(units, alike, taught))
            for halves in (False, True) if in_halves else (False,):
                run = partial(record_stage, stage, in_halves=halves)
                learn = partial(record_stage, short, in_halves=halves)
                recordings.append(self._when_learnt(run, learn, partial(only, part, alike, taught)))
                runs.append(run)
            for change in changes:
                change(part)
                recordings += [run() for run in runs]
            return recordings

    def _when_learnt(
        self,
        run: Callable[[], Recording],
        learn: Callable[[], object],
        few: Callable[[], AbstractContextManager[None]],
    ) -> Recording:
        """What happens when torch has learnt what each operator is cut to: it computes that on
        tensors, the first time. `learn` runs the same operators, within `few` as many layers as it
        takes."""
        if (self.mesh or self.experts) and not self.has_learnt:
            with few():
                learn()
        return run()

    def _prepared(self, module: nn.Module, roles: Roles, *, has_loss: bool = True) -> Loss:
        """Change a module in place, and return how it gives its loss."""
        if self.tensor is not None:
            assert self.mesh is not None, "operators are not sharded over ranks"
            parallelize(module, replace(self.tensor, roles=roles), self.mesh, Registry())
        if self.context is not None:
            self.context.apply(module)
        if self.experts is not None:
            self.experts(module)
        keep_traced(module, self.keep)
        is_inside = has_loss and self.loss is not None
        objective = objective_of(self.spec.loss) if self.spec else None
        inside = loss_inside(self.loss, self.tensor) if is_inside and self.loss else None
        loss = Loss(objective, inside)
        loss.attach(module, self.head)
        return loss

    def _samples(self) -> SampleBatch:
        if self.context is not None:
            return token_slices(of_tokens(self._tokens()), self.context.spans)
        return of_tokens(self._tokens()) if self.spec is None else sample_batch(self.spec)

    def _tokens(self) -> Tensor:
        return torch.zeros(self.batch, self.sequence + 1, dtype=torch.int64)

    def _boundary(self, chain: Chain) -> tuple[int, ...]:
        """The shape of a sample's hidden states that the rank has between the blocks."""
        return chain.sample_shape(self.sequence, self.slices)


def _mean(loss: Loss, samples: SampleBatch, output: Tensor) -> Tensor:
    return loss.of_forward(output, samples) / samples.rows


def _forward(loss: Loss, samples: SampleBatch, model: Any) -> Tensor:
    return loss.forward(model, samples)


@torch.no_grad()
def _make_real(part: nn.Module) -> None:
    """No size depends on what is in a parameter."""
    if any(parameter.is_meta for parameter in part.parameters()):
        part.to_empty(device="cpu")
        for parameter in part.parameters():
            parameter.zero_()
