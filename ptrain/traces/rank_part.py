"""Trace one rank's part of a model, as its plan changes it: sharded operators, activation modes, a
loss in chunks, and with pp a stage. The tables of built-in models are made in this way, and the
facts of all other models.

Consecutive equal layers are traced once. The layers of a built-in model run the same operators, so
only the first, the two after it and the last run. The second represents all layers in between.
Every trace checks that the third equals the second. Layers that do not run are replaced by modules
that return their input.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ptrain.activations.run.apply import apply_modes_for_trace
from ptrain.axes.context.run.apply import ContextGroups, parallelize_context
from ptrain.axes.context.run.slices import MicroBatchCut, token_slices
from ptrain.axes.pipeline.run.cut import part_of
from ptrain.axes.pipeline.stage_facts import stage_roles
from ptrain.axes.tensor.run.apply import loss_inside, micro_batch, parallelize
from ptrain.derivation.layers import (
    BlockKind,
    Places,
    Turns,
    block_kinds,
    instantiate,
    places_of,
    played_places,
)
from ptrain.facts.model import AttentionFacts, RowsSize, RowsTimeline, StorageEvents, WorkByKind
from ptrain.facts.stages import Chain, Stage, is_within
from ptrain.interpreter.loss import Loss
from ptrain.models.compiled import compile_blocks
from ptrain.models.objective import SampleBatch, objective_of, of_tokens, sample_batch
from ptrain.models.products import change_products
from ptrain.models.trace import Event, Extent, Recording, list_recomputed_collectives, to_timeline
from ptrain.models.units import ROOT
from ptrain.runtime.comm import Mesh, TagRegistry
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Roles, Tier
from ptrain.spec.spec import Spec
from ptrain.steps.step import (
    Compile,
    CompiledLoss,
    ContextParallel,
    Keep,
    LossStep,
    Parallelize,
    Quantize,
)
from ptrain.timeline import Boundary, Complete, Item, Mark, Timeline
from ptrain.traces.layer_works import work_of
from ptrain.traces.record import TracedStage, Units, record, record_stage, run_unrecorded

Names = tuple[str, ...]  # of layers, first to last

Pairs = list[Any]
X = TypeVar("X")
T = TypeVar("T", Timeline, RowsTimeline)

# Layers of a kind that run before a trace, so that torch caches the sharding of their operators.
# The second one has the inputs of all further ones.
_TEACHING = 2
_MOST = 4  # layers of a row that run: the first, two equal ones, and the last


@dataclass(frozen=True, slots=True)
class EqualLayers:
    """Layers, first to last, with the kind of each.

    Of consecutive layers of a kind, the first and the last run, and the second, which represents
    all between them. The third runs too, to check that it equals the second. If layers depend on
    their neighbours (`runs_all`), all of them run.
    """

    layers: Names
    kinds: tuple[Hashable, ...]
    runs_all: bool = False

    @classmethod
    def from_spec(cls, spec: Spec, layers: Names, *, in_halves: bool = False) -> EqualLayers:
        """Return these layers of a spec's model.

        Each layer is a separate kind if layers may differ. Copies of offloaded activations, and
        backward passes in halves, depend on the neighbouring layers.

        Args:
            spec: The spec, for the activation mode of each layer.
            layers: Names of the layers, first to last.
            in_halves: True if backward passes run in halves. All layers then run.
        """
        kinds = block_kinds(spec, layers)
        if kinds is None:
            return cls(layers, layers)
        is_copied = any(kind.kept.tier is not Tier.DEVICE for kind in kinds)
        return cls(layers, kinds, runs_all=in_halves or is_copied)

    @property
    def rows(self) -> tuple[tuple[Hashable, int], ...]:
        """The kind and the number of running layers of each row of equal layers. Layers with equal
        rows run the same operators, whatever their names are."""
        most = len(self.layers) if self.runs_all else _MOST
        return tuple((kind, min(len([*row]), most)) for kind, row in groupby(self.kinds))

    @property
    def _played_places(self) -> Turns:
        return played_places(self.kinds, len(self.kinds) if self.runs_all else 1)

    @property
    def run_layers(self) -> Names:
        """The layers that run."""
        return tuple(
            name
            for place, times in self._played_places
            for name in self.layers[place : place + min(times, 2)]
        )

    def num_expert_layers_before(self, names: Names) -> list[int]:
        """Return, for each of these layers, the number of layers with experts before it."""
        have = {
            name: isinstance(kind, BlockKind) and kind.has_experts
            for name, kind in zip(self.layers, self.kinds, strict=True)
        }
        return [*accumulate((have[name] for name in names), initial=0)][:-1]

    @property
    def learnt_layers(self) -> Names:
        """The layers that run before the trace, so that torch caches how their operators are
        sharded: at most two of each kind."""
        seen = Counter[Hashable]()
        names = []
        for name, kind in zip(self.layers, self.kinds, strict=True):
            seen[kind] += 1
            names += [name] if seen[kind] <= _TEACHING else []
        return tuple(names)

    def of_all(self, parts: Sequence[X]) -> list[X]:
        """Return a part for each layer.

        Args:
            parts: The parts of the layers that ran, in order.
        """
        left, of_all = iter(parts), list[X]()
        for _, times in self._played_places:
            part = next(left)
            assert times == 1 or part == next(left), "equal layers run different operators"
            of_all += [part] * times
        return of_all


NO_LAYERS = EqualLayers((), ())


def running_units(
    units: Sequence[tuple[str, ...]], layers: Names, names: Names
) -> tuple[tuple[str, ...], ...]:
    """Return the units that run.

    Args:
        units: The modules of all units.
        layers: The names of all layers.
        names: The names of the layers that run.
    """
    skipped = [name for name in layers if name not in names]
    return tuple(modules for modules in units if not is_within(modules[0], skipped))


class _SkippedLayer(nn.Identity):
    def forward(self, x_BTC: Tensor, *_: Any) -> Tensor:
        return x_BTC


@contextmanager
def run_only(model: nn.Module, layers: Names, names: Names) -> Iterator[None]:
    """Temporarily replace the layers that are not in `names` by modules that return their input.

    Args:
        model: The model, changed until the context ends.
        layers: Names of all layers.
        names: Names of the layers that run.
    """
    skipped = {name: model.get_submodule(name) for name in layers if name not in names}
    for name in skipped:
        _set_module(model, name, _SkippedLayer())
    try:
        yield
    finally:
        for name, layer in skipped.items():
            _set_module(model, name, layer)


def _set_module(model: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, layer)


@dataclass(frozen=True, slots=True)
class _LayerPart:
    """The events of one layer, without its number in names, after `ahead` layers with experts."""

    items: list[Any]
    ahead: int

    def shifted_items(self, ahead: int) -> list[Any]:
        """Return the events for a layer after `ahead` layers with experts."""
        return [_shift_item(item, ahead - self.ahead) for item in self.items]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LayerPart) and self.items == other.shifted_items(self.ahead)


def _shift_item(item: Any, layers: int) -> Any:
    """Return the item with the numbers of its layers with experts moved by `layers`."""
    match item:
        case StorageEvents(events) if layers:
            return StorageEvents(tuple(e._replace(size=e.size.shift_layer(layers)) for e in events))
        case str(), RowsSize():
            return item[0], item[1].behind(layers)
    return item


class TracedLayers:
    """The trace of the layers that ran. It represents equal layers with other names too.

    Args:
        recording: The recording.
        layers: The layers, of which some ran.
        units: The modules of each unit that ran.
        halves: The recording with the backward pass in halves, or None.
    """

    def __init__(
        self,
        recording: Recording,
        layers: EqualLayers,
        units: Units,
        halves: Recording | None = None,
    ) -> None:
        self.recording, self.layers, self.units, self.halves = recording, layers, units, halves

    @cached_property
    def own_timeline(self) -> Timeline:
        """The timeline of the layers that ran."""
        return to_timeline(self.recording)

    @cached_property
    def _own_work(self) -> WorkByKind | None:
        return work_of(self.units, self.layers.run_layers, self.recording, self.halves)

    def work(self, layers: EqualLayers) -> WorkByKind | None:
        """Return the computation of layers with these kinds. None if unknown."""
        own = self._own_work
        return own and own._replace(order=tuple(layers.of_all(own.order)))

    def timeline(self, layers: EqualLayers, units: Units) -> Timeline:
        """Return the timeline of layers with these kinds, in a model or stage with these units."""
        return self.of_all(self.own_timeline, layers, units)

    def of_all(self, own: T, layers: EqualLayers, units: Units) -> T:
        """Return a timeline, or a formula of rows, for all layers.

        Args:
            own: The timeline or formula of the layers that ran.
            layers: All layers, of the same kinds.
            units: The modules of all units.
        """
        if layers.layers == self.layers.run_layers:
            return own
        if layers.runs_all:
            return self._rename_layers(own, layers)
        enter, begin, places = Mark.ENTER, Mark.PRE_BACKWARD, places_of(tuple(units))
        again = _sent_again(self.recording, self._boundaries(begin))
        return type(own)(
            forward=self._items(own.forward, enter, layers, places),
            backward=self._items(own.backward, begin, layers, places),
            moved=own.moved,
            repeated=tuple(chain(*self._all(again, begin, layers))),
        )

    def _rename_layers(self, own: T, layers: EqualLayers) -> T:
        """Return a timeline with the names of other layers, all of which run."""
        names = dict(zip(self.layers.layers, layers.layers, strict=True))

        def rename_item(item: Any) -> Any:
            layer = next((name for name in names if is_within(item.parameter, (name,))), "")
            return item._replace(parameter=names.get(layer, "") + item.parameter[len(layer) :])

        forward, backward = (
            tuple(rename_item(item) if isinstance(item, Complete) else item for item in items)
            for items in (own.forward, own.backward)
        )
        return own._replace(forward=forward, backward=backward)

    def _items(
        self, items: Sequence[Any], mark: Mark, layers: EqualLayers, places: Places
    ) -> tuple[Any, ...]:
        """Return the items of a pass over all layers, in the order of the pass. Layers begin at
        `mark`."""
        is_reversed = mark is Mark.PRE_BACKWARD
        marks = self._boundaries(mark)
        names = "", *(self.units[mark.unit][0] for mark in marks)
        parts = zip(_split_at(items, marks), names, strict=True)
        templates = [[*self._template(part, name)] for part, name in parts]
        order = layers.layers[::-1] if is_reversed else layers.layers
        numbers = "", *(layer.rpartition(".")[2] for layer in order)
        return tuple(
            item
            for part, number in zip(self._all(templates, mark, layers), numbers, strict=True)
            for item in _instantiate(part, number, places)
        )

    def _all(self, parts: Sequence[list[Any]], mark: Mark, layers: EqualLayers) -> list[list[Any]]:
        """Return the events before all layers and the events of each layer, in the order of the
        pass, from the parts of the layers that ran."""
        order = -1 if mark is Mark.PRE_BACKWARD else 1
        of_ran, of_all = (
            self.layers.num_expert_layers_before(self.layers.run_layers),
            layers.num_expert_layers_before(layers.layers),
        )
        ran = [*map(_LayerPart, parts[1:][::order], of_ran)]
        own = [part.shifted_items(at) for part, at in zip(layers.of_all(ran), of_all, strict=True)]
        return [
            _LayerPart(parts[0], of_ran[::order][0]).shifted_items(of_all[::order][0]),
            *own[::order],
        ]

    def _boundaries(self, mark: Mark) -> list[Boundary]:
        """Return the boundaries at which the layers that ran begin, in the order of the pass."""
        marks = [Boundary(mark, self.units.index((name,))) for name in self.layers.run_layers]
        return marks[::-1] if mark is Mark.PRE_BACKWARD else marks

    def _template(self, items: Sequence[Item], layer: str = "") -> Iterator[Any]:
        """Yield items in the form of a table: the layer's number is replaced by `*`."""
        for item in items:
            match item:
                case Boundary(mark, unit):
                    yield mark, _pattern(self.units[unit][0], layer)
                case Complete(parameter, size, cloned, beside):
                    yield _pattern(parameter, layer), size, cloned, beside
                case _:
                    yield item


def _instantiate(items: Iterable[Any], number: str, places: Places) -> Iterator[Any]:
    for item in items:
        if isinstance(item, StorageEvents):
            yield item
        else:
            yield from instantiate((item,), number, places)


def _pattern(name: str, layer: str) -> str:
    is_own = layer and is_within(name, (layer,))
    return f"{layer.rpartition('.')[0]}.*{name[len(layer) :]}" if is_own else name


def _split_at(items: Sequence[X], marks: Sequence[X]) -> list[Sequence[X]]:
    """Return the items before all marks, and from each mark to the next."""
    ends = [*map(items.index, marks), len(items)]
    assert ends == sorted(ends), "layers do not run one after the other"
    return [items[: ends[0]], *(items[start:end] for start, end in pairwise(ends))]


def _sent_again(recording: Recording, marks: Sequence[Event]) -> list[Pairs]:
    """Return the collectives of forward that backward repeats, by layer."""
    bounds = [recording.backward.index(mark) for mark in marks]
    parts: list[Pairs] = [[] for _ in range(len(bounds) + 1)]
    for place, work in recording.works.get("backward", ()):
        parts[bisect_left(bounds, place)] += list_recomputed_collectives(((place, work),))
    return parts


Change = Callable[[nn.Module], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCuts:
    """The stages into which pp splits a model, and the chain of layers that is split."""

    stages: Sequence[Stage]
    chain: Chain


class ContextSlices:
    """The shards of the tokens over a mesh, of which this process plays one rank."""

    def __init__(
        self,
        step: ContextParallel,
        mesh: Mesh,
        via: ReduceScatterVia,
        cut: MicroBatchCut,
        attending: AttentionFacts | None = None,
    ) -> None:
        self._groups = ContextGroups(step, mesh, cut, attending)
        self._apply = partial(parallelize_context, step=step, mesh=mesh, via=via)
        self.spans = self._groups.masks.spans

    def apply(self, module: nn.Module) -> None:
        """Change a module in place."""
        self._apply(module, groups=self._groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """The changes of a plan to a model, and the micro-batch that then runs through it.

    Attributes:
        batch: Samples.
        sequence: Tokens per sample.
        mesh: The mesh over which operators are sharded; this process plays one of its ranks.
        kv_group: The ranks that share a key-value head, if several do.
        context: The shards of the tokens over cp.
        experts: Leaves a module only the rank's experts.
        slices: The number of shards of the tokens between blocks.
        head: The module that computes the logits of a model that is not built in.
        extent: The share of elements that operators select by data.
    """

    batch: int
    sequence: int
    tensor: Parallelize | None = None
    mesh: DeviceMesh | None = None
    kv_group: dist.ProcessGroup | None = None
    context: ContextSlices | None = None
    experts: Callable[[nn.Module], None] | None = None
    slices: int = 1
    keep: Keep | None = None
    compiled: Compile | None = None
    quantize: Quantize | None = None
    loss: LossStep | None = None
    head: str = ROOT
    spec: Spec | None = None  # whose samples and loss they are, where these are not ours
    has_learnt: bool = False  # torch, on a part with the same operators
    extent: Extent = Extent.GIVEN

    def traces(
        self,
        model: nn.Module,
        units: Units,
        layers: EqualLayers = NO_LAYERS,
        *changes: Change,
    ) -> list[Recording]:
        """Record a full model, which is changed in place.

        Args:
            model: The model.
            units: The modules of each unit.
            layers: The equal layers, of which few run.
            changes: Further changes to the model.

        Returns:
            A recording, and another one after each of `changes`.
        """
        loss = self._prepare(model, self.tensor.roles if self.tensor else ())
        samples = self._samples()

        def forward() -> Tensor:
            return loss.compute_loss(model, samples) / samples.rows

        with micro_batch(self.tensor)():
            run = partial(record, model, units, forward, *samples.tensors, extent=self.extent)
            few = layers.run_layers, layers.learnt_layers
            learn = partial(run_unrecorded, model, running_units(units, *few), forward)
            recordings = [self._when_learnt(run, learn, partial(run_only, model, *few))]
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
        layers: EqualLayers = NO_LAYERS,
        *changes: Change,
        in_halves: bool,
    ) -> list[Recording]:
        """Record the passes of a stage. The model is not changed, and may be on the meta device.

        Args:
            model: The full model.
            units: The modules of each unit of the stage.
            cuts: The stages.
            index: The index of the stage.
            layers: The equal layers, of which few run.
            changes: Further changes to the stage's part of the model.
            in_halves: Also record the backward pass in halves.

        Returns:
            The recording, then with `in_halves` the one of the halves; then the same after each of
            `changes`.
        """
        stages, ends = cuts.stages, cuts.chain.ends
        is_last = index == len(stages) - 1
        part = part_of(model, stages, index, cuts.chain)
        roles = self.tensor.roles if self.tensor else ()
        loss = self._prepare(
            part, stage_roles(roles, stages[index], len(stages), ends), has_loss=is_last
        )
        _make_real(part)
        samples = self._samples()
        dtype = next(part.parameters()).dtype
        stage = TracedStage(
            module=part,
            units=units,
            hidden=torch.zeros(
                self.batch, *cuts.chain.sample_shape(self.sequence, self.slices), dtype=dtype
            ),
            samples=samples,
            is_first=index == 0,
            forward=lambda model: loss.forward(model, samples),
            loss=(lambda output: loss.of_forward(output, samples) / samples.rows)
            if is_last
            else None,
            around=partial(loss.provide_targets, samples),
            extent=self.extent,
        )
        with micro_batch(self.tensor)():
            recordings, runs, few = [], [], (layers.run_layers, layers.learnt_layers)
            short = replace(stage, units=running_units(units, *few))
            for halves in (False, True) if in_halves else (False,):
                run = partial(record_stage, stage, in_halves=halves)
                learn = partial(record_stage, short, in_halves=halves)
                recordings.append(self._when_learnt(run, learn, partial(run_only, part, *few)))
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
        """Return a recording that is made after torch has cached the sharding of each operator.

        DTensor computes an operator's sharding on tensors when it first runs, which would be
        recorded. `learn` runs the same operators on few layers, within `few`.
        """
        # The first run of a program compiles it on tensors, which would be recorded too.
        has_program = self.compiled or isinstance(self.loss, CompiledLoss)
        if (self.mesh or self.experts or has_program) and not self.has_learnt:
            with few():
                learn()
        return run()

    def _prepare(self, module: nn.Module, roles: Roles, *, has_loss: bool = True) -> Loss:
        """Change a module in place, and return the function of its loss."""
        if self.tensor is not None:
            assert self.mesh is not None, "operators are not sharded over ranks"
            step = replace(self.tensor, roles=roles)
            parallelize(module, step, self.mesh, TagRegistry(), self.kv_group)
        if self.context is not None:
            self.context.apply(module)
        if self.experts is not None:
            self.experts(module)
        if self.quantize is not None:
            change_products(module, self.quantize)
        # Compilation comes last: a program must contain the other changes.
        apply_modes_for_trace(module, self.keep, is_compiled=self.compiled is not None)
        if self.compiled is not None:
            compile_blocks(module, self.compiled.blocks)
        is_inside = has_loss and self.loss is not None
        objective = objective_of(self.spec) if self.spec else None
        inside = loss_inside(self.loss, self.tensor) if is_inside and self.loss else None
        loss = Loss(objective, inside)
        loss.attach(module, self.head)
        return loss

    def _samples(self) -> SampleBatch:
        tokens = of_tokens(torch.zeros(self.batch, self.sequence + 1, dtype=torch.int64))
        if self.context is not None:
            return token_slices(tokens, self.context.spans)
        return tokens if self.spec is None else sample_batch(self.spec)


@torch.no_grad()
def _make_real(part: nn.Module) -> None:
    """Allocate a part on the meta device and fill it with zeros. No size depends on the values."""
    if any(parameter.is_meta for parameter in part.parameters()):
        part.to_empty(device="cpu")
        for parameter in part.parameters():
            parameter.zero_()
