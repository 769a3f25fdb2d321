"""The passes of a built-in model's stage: the committed tables of stages, evaluated
(`traces.stage_tables` makes them, as `traces.model_tables` those of whole models).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ptrain.axes.tensor.costs import Cut
from ptrain.derivation import activations, archive, blocks, loss_chunks
from ptrain.derivation.archive import TablePart
from ptrain.derivation.attention import statistics_of
from ptrain.derivation.monomials import Monomial, dimensions, evaluated, merged, monomials
from ptrain.derivation.repeats import Representatives, Turns
from ptrain.facts.passes import Passes, of_first_stage, of_later_stage
from ptrain.facts.stages import Stage
from ptrain.spec.activations import PLAIN, Kept
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.spec import Spec
from ptrain.timeline import Item, Kind, Run

Pairs = tuple[tuple[str, int], ...]

_PASSES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input",
    Kind.WEIGHT: "weight",
}
# Of these there are no tables by how activations are kept, nor of a loss in chunks: what is in
# halves then is traced.
_HALVES = (Kind.INPUT, Kind.WEIGHT)


def passes(
    spec: Spec, stage: Stage, stages: int, played: Representatives, cut: Cut | None
) -> Passes:
    """Return the passes of a built-in model's stage, of those units of it that are `played`; of one
    rank's part of it, where operators are `cut`."""
    shape, batch = spec.model, spec.batch
    assert isinstance(shape, ModelShape), "a built-in model"
    compute = spec.precision.effective.parameters
    name = activations.table_name(shape, compute, batch.micro)
    kind_of_cut = cut.kind if cut else None
    table = _table(name, kind_of_cut)
    of_symbols = cut.dimensions if cut else dimensions
    values = of_symbols(shape, batch=batch.micro, sequence=batch.sequence)
    statistics = statistics_of(spec)
    sizes = evaluated(_sizes(name, kind_of_cut), values, compute.itemsize, statistics)
    ends = {0: "first", stages - 1: "last"}
    place = table[ends.get(stage.index, "middle")]
    places = activations.places_of(played.modules)
    tokens = batch.sequence // (cut.degree if cut and cut.step.is_sequence else 1)
    hidden = batch.micro * tokens * shape.hidden * compute.itemsize
    loss = _loss(spec, stage, cut, hidden) if stage.index == stages - 1 else None
    layers = _layers(spec, stage, cut, hidden if stage.index else 0, loss)
    items = {
        kind: tuple(
            _items(
                layers,
                kind,
                _of_layers(table, place[key], len(layers.numbers)),
                sizes,
                played.turns,
                places,
            )
        )
        for kind, key in _PASSES.items()
        if key in place and (layers.is_as_usual or kind not in _HALVES)
    }
    output = loss.output if loss else sizes[place["output"]]
    if stage.index == 0:
        stage_passes = of_first_stage(items, output=output)
    else:
        stage_passes = of_later_stage(items, output=output, hidden=hidden)
    moved, repeated = layers.moved_and_repeated()
    return replace(stage_passes, moved=moved, repeated=repeated)


def moved_and_repeated(spec: Spec, stage: Stage, cut: Cut | None) -> tuple[Pairs, Pairs]:
    """Return what goes off the device and comes back in one micro-batch on a built-in model's
    stage, and the collectives that backward runs again, as a timeline has them."""
    return _layers(spec, stage, cut, held=0).moved_and_repeated()


def _of_layers(table: dict[str, Any], listed: Sequence[int], layers: int) -> list[list[Any]]:
    """A pass of so many layers, layer by layer."""
    only, begin, block, end = (table["parts"][index] for index in listed)
    return [only] if layers == 1 else [begin, *([block] * (layers - 2)), end]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """A stage's layers, first to last: their numbers in the model, and how their activations are
    kept; `setting` None where all of them are as in the stages' tables. `held`: bytes of the first
    one's input, where it is not the stage's own."""

    setting: blocks.Setting | None
    numbers: Sequence[str]
    kept: Sequence[Kept]
    held: int
    loss: loss_chunks.LossHead | None = None

    @property
    def is_as_usual(self) -> bool:
        """Whether the stages' tables tell it all."""
        return self.setting is None and self.loss is None

    def moved_and_repeated(self) -> tuple[Pairs, Pairs]:
        if self.setting is None:
            return (), ()
        return blocks.moved(self.setting, self.kept), blocks.repeated(self.setting, self.kept)

    def part(self, kind: Kind, place: int, base: list[Any]) -> list[Any]:
        """Return what the layer at this place of the stage does in a pass."""
        if self.loss is not None and place == len(self.numbers) - 1:
            base = self.loss.around(_PASSES[kind], base)
        if self.setting is None:
            return base
        make_part = blocks.forward_part if kind is Kind.FORWARD else blocks.backward_part
        return make_part(base, self.setting, self.kept[place], held=0 if place else self.held)


def _layers(
    spec: Spec, stage: Stage, cut: Cut | None, held: int, loss: loss_chunks.LossHead | None = None
) -> _Layers:
    shape = spec.model
    assert isinstance(shape, ModelShape), "a built-in model"
    kept = spec.activations.of(shape.layers)
    numbers = [layer.rpartition(".")[2] for layer in stage.layers]
    setting = None if blocks.is_as_usual(shape, kept) else _setting(spec, cut)
    return _Layers(
        setting=setting,
        numbers=numbers,
        kept=[kept[int(number)] for number in numbers],
        held=held,
        loss=loss,
    )


def _setting(spec: Spec, cut: Cut | None) -> blocks.Setting:
    assert isinstance(spec.model, ModelShape), "a built-in model"
    return blocks.Setting(
        shape=spec.model,
        batch=spec.batch.micro,
        sequence=spec.batch.sequence,
        compute=spec.precision.effective.parameters,
        cut=cut,
        statistics=statistics_of(spec),
    )


def _loss(spec: Spec, stage: Stage, cut: Cut | None, hidden: int) -> loss_chunks.LossHead | None:
    """Return what a loss in chunks does behind a last stage's layers, None of whole logits. The
    tables are of one layer, whose input of `hidden` bytes is the schedule's: that of the last of
    several goes with its forward pass, where nothing saves it."""
    setting = loss_chunks.setting_of(spec, cut)
    if setting is None:
        return None
    head = loss_chunks.ends(setting, loss_chunks.STAGE)
    plain = blocks.block(_setting(spec, cut), PLAIN, Attention.SDPA)
    if len(stage.layers) == 1 or not plain.frees_input:
        return head
    return replace(head, forward=(Run(0, -hidden), *head.forward))


def _items(
    layers: _Layers,
    kind: Kind,
    parts: Sequence[list[Any]],
    sizes: Sequence[int],
    turns: Turns,
    places: activations.Places,
) -> Iterator[Item]:
    """Yield a pass: the layers that are played, in its order. `parts` are those of all layers."""
    cache: dict[tuple[int, Kept, bool], list[Any]] = {}
    items: list[Item] = []
    is_reversed = kind in (Kind.BACKWARD, Kind.INPUT)
    for place, times in turns[::-1] if is_reversed else turns:
        part = parts[-1 - place if is_reversed else place]
        key = (id(part), layers.kept[place], place == 0)
        if key not in cache:
            cache[key] = layers.part(kind, place, list(merged(part, sizes)))
        instance = activations.instantiate(cache[key], layers.numbers[place], places)
        activations.append(items, instance, times)
    yield from items


def _table(name: str, kind: str | None) -> archive.Table:
    """Of a stage that is whole, or of one kind of cut."""
    if kind is None:
        return archive.table(TablePart.STAGE, name)
    of_kind: archive.Table = archive.table(TablePart.STAGE_SLICES, name)[kind]
    return of_kind


@cache
def _sizes(name: str, kind: str | None) -> tuple[Monomial, ...]:
    return monomials(_table(name, kind))
