"""Passes of a built-in model or of one of its stages, from the committed tables: with the
activation modes and the loss of a spec, and the check if the tables cover a spec.

A table has every size in bytes as a coefficient times powers of the model's dimensions, read from
traces at prime shapes (`traces.block_tables` makes them). Nothing is fitted. A pass consists of
`begin`, `block` for each layer but two, and `end`, in its order. A pass over one layer is `only`.
Each of these is a concatenation of segments: the front, a block, the head.

Consecutive equal blocks are simulated once: a block between equal neighbours allocates, sends and
leaves the same as the one before it. A wrap acts at a unit's boundaries and on its neighbours (it
prefetches units, and frees memory of the previous one). The first and the last few blocks, as many
as the wrap's `reach`, are therefore simulated individually.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from ptrain.axes.context.attention import context_of, part_at
from ptrain.derivation import archive, blocks, tables
from ptrain.derivation.archive import TablePart
from ptrain.derivation.kernels import is_by_operators
from ptrain.derivation.tables import (
    EvaluatedTable,
    LossHead,
    Parts,
    Place,
    RankCut,
    Setting,
    evaluate_table,
    setting_of,
)
from ptrain.facts.model import Passes, UnitFacts, passes_of_stage
from ptrain.facts.stages import Stage
from ptrain.spec.activations import PLAIN, ActivationMode
from ptrain.spec.dials import Compiled, UnitKind
from ptrain.spec.keys import FrozenSpec
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.precision import Matmul
from ptrain.spec.spec import Spec
from ptrain.timeline import Boundary, Complete, Item, Kind, Mark, Repeated, Run

Turns = tuple[tuple[int, int], ...]  # indices of blocks, and how many blocks each represents


class Representatives(NamedTuple):
    """The units that are simulated, each for all the units it represents.

    Attributes:
        turns: By simulated block, its place and the number of blocks it represents.
        units: The units of these blocks, and the root.
        times: The number of units that each of `units` represents.
    """

    turns: Turns
    units: tuple[UnitFacts, ...]
    times: tuple[int, ...]

    @property
    def modules(self) -> tuple[tuple[str, ...], ...]:
        """The modules of each simulated unit."""
        return tuple(unit.modules for unit in self.units)


def all_represented(units: tuple[UnitFacts, ...], blocks: int) -> Representatives:
    """Return every unit of a model with `blocks` blocks, each representing only itself.

    Args:
        units: The units of the model.
        blocks: The number of blocks.
    """
    return Representatives(tuple((place, 1) for place in range(blocks)), units, (1,) * len(units))


def represent(
    spec: Spec, units: tuple[UnitFacts, ...], blocks: Sequence[str], reach: int | None
) -> Representatives:
    """Return the simulated units of a built-in model or stage.

    Args:
        spec: The spec.
        units: All units.
        blocks: The names of the blocks, first to last.
        reach: The number of neighbouring units on which a unit's wrap acts. None if it is
            unbounded: every unit is then simulated.
    """
    kinds = block_kinds(spec, blocks)
    if reach is None or kinds is None:
        return all_represented(units, len(blocks))
    places = played_places(kinds, reach + 1)
    times_of = {blocks[place]: times for place, times in places}
    # The block of a unit is in the first two parts of a module's name, also for units within a
    # block. The root has the name "", which is never in `gone`.
    gone = {*blocks} - times_of.keys()
    played = [(unit, ".".join(unit.modules[0].split(".")[:2])) for unit in units]
    return Representatives(
        places,
        tuple(unit for unit, block in played if block not in gone),
        tuple(times_of.get(block, 1) for _, block in played if block not in gone),
    )


class BlockKind(NamedTuple):
    """The properties of a built-in model's layer that its operators depend on. Layers of one kind
    are equal."""

    kept: ActivationMode
    has_experts: bool
    is_local: bool


_OF_A_BLOCK = (UnitKind.BLOCK, UnitKind.SUB_BLOCK, UnitKind.ENDS)


def block_kinds(spec: Spec, blocks: Sequence[str]) -> tuple[BlockKind, ...] | None:
    """Return the kind of each of these blocks.

    Args:
        spec: The spec.
        blocks: Module names that end with the block's number, such as `blocks.3`.

    Returns:
        The kinds. None if blocks of one kind may still differ: for models that are not built in,
        and if a unit has several blocks.
    """
    is_within, shape = spec.unit_size.kind in _OF_A_BLOCK, spec.model
    if not isinstance(shape, ModelShape) or not is_within:
        return None
    kept = spec.activations.block_modes(shape.layers)
    numbers = [int(block.rpartition(".")[2]) for block in blocks]
    return tuple(BlockKind(kept[n], shape.has_experts(n), shape.is_local(n)) for n in numbers)


def played_places(kinds: Sequence[Hashable], apart: int) -> Turns:
    """Return the simulated places, each with the number of places it represents.

    Args:
        kinds: The kind of each place. Consecutive equal kinds form a row.
        apart: Places at the start and at the end of each row that represent only themselves. One
            place represents all between them.

    Returns:
        (place, number of places) in order. The numbers add up to the number of kinds.
    """
    places: list[tuple[int, int]] = []
    start = 0
    for _, row in groupby(kinds):
        number = len(list(row))
        between = number - 2 * apart
        # One place in the middle would represent only itself.
        if between < 2:
            places += [(start + place, 1) for place in range(number)]
        else:
            places += [(start + place, 1) for place in range(apart)]
            places.append((start + apart, between))
            places += [(start + place, 1) for place in range(number - apart, number)]
        start += number
    return tuple(places)


Units = tuple[tuple[str, ...], ...]
Places = dict[tuple[Mark, str], int]
Pairs = tuple[tuple[str, int], ...]
RepeatedCalls = tuple[tuple[str, int, int], ...]

_PASSES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input",
    Kind.WEIGHT: "weight",
}
# Halves of a backward pass have tables only for plain activations and a loss of full logits. Other
# combinations are traced (`is_tabulated`), because each would multiply the number of tables.
_HALVES = (Kind.INPUT, Kind.WEIGHT)


class LayerPasses(NamedTuple):
    """The passes of consecutive layers.

    Attributes:
        setting: The setting of the tables.
        place: The position of the layers in the model.
        numbers: The layers' numbers in the model, as text.
        kept: How each layer keeps its activations.
        held: Bytes of the first layer's input, if another stage sends it. Else 0.
        head: The loss in chunks after the last layer. None for a loss of full logits.
    """

    setting: Setting
    place: Place
    numbers: Sequence[str]
    kept: Sequence[ActivationMode]
    held: int = 0
    head: LossHead | None = None

    @property
    def is_plain(self) -> bool:
        """True if the layers keep activations as autograd does, with fused attention to the rank's
        tokens only."""
        is_alone = self.setting.context is None
        return is_alone and blocks.is_as_usual(self.setting.shape, self.kept)

    @property
    def moved(self) -> Pairs:
        """The (tier, bytes) of each storage that a micro-batch moves off the device."""
        return () if self.is_plain else blocks.moved_storages(self.setting, self.kept)

    @property
    def repeated(self) -> RepeatedCalls:
        """The (collective, bytes, ranks) of each collective that backward repeats."""
        return () if self.is_plain else blocks.repeated_collectives(self.setting, self.kept)

    def passes(self, units: Units, turns: Turns) -> dict[Kind, tuple[Item, ...]]:
        """Return the items of each kind of pass.

        Args:
            units: The modules of each simulated unit.
            turns: The simulated layers, each with the number of layers it represents.
        """
        evaluated = evaluate_table(TablePart.PASSES, self.setting.without_context)
        of_place, places = evaluated.content[self.place], places_of(units)
        is_whole = not self.is_plain or self.head is not None
        return {
            kind: tuple(self._items(kind, evaluated, of_place[name], turns, places))
            for kind, name in _PASSES.items()
            if name in of_place and not (is_whole and kind in _HALVES)
        }

    def output(self) -> int:
        """Return the bytes of the tensor that a stage sends to the next one."""
        if self.head is not None:
            return self.head.output
        evaluated = evaluate_table(TablePart.PASSES, self.setting.without_context)
        number: int = evaluated.content[self.place]["output"]
        return evaluated.sizes[number]

    def _items(
        self,
        kind: Kind,
        evaluated: EvaluatedTable,
        listed: Sequence[Sequence[int]],
        turns: Turns,
        places: Places,
    ) -> list[Item]:
        only, begin, block, end = map(tuple, listed)
        last = len(self.numbers) - 1
        is_reversed = kind in (Kind.BACKWARD, Kind.INPUT)
        first_place, last_place = (last, 0) if is_reversed else (0, last)
        # In backward the last layer comes first. Its part is `begin`, since it also has the
        # backward of the head.
        items: list[Item] = []
        for place, times in turns[::-1] if is_reversed else turns:
            part = begin if place == first_place else end if place == last_place else block
            layer = _layer_items(
                self.setting,
                kind,
                part if last else only,
                None if self.is_plain else self.kept[place],
                0 if place else self.held,
                self.head if place == last else None,
            )
            append_items(items, instantiate(layer, self.numbers[place], places), times)
        return items


@lru_cache(maxsize=2**10)
def _layer_items(
    setting: Setting,
    kind: Kind,
    parts: Parts,
    kept: ActivationMode | None,
    held: int,
    head: LossHead | None,
) -> Sequence[Any]:
    """Return the events of a layer in a pass.

    Args:
        setting: The setting of the tables.
        kind: The kind of pass.
        parts: The table's parts of a plain layer.
        kept: How the layer keeps its activations. None if as autograd does.
        held: Bytes of the layer's input, if it is sent by another stage.
        head: The loss in chunks that follows the layer, or None.
    """
    base: Sequence[Any] = evaluate_table(TablePart.PASSES, setting.without_context).events(*parts)
    if head is not None:
        base = head.wrap_last_block(_PASSES[kind], base)
    if kept is None:
        return base
    return blocks.part_with(base, setting, kept, is_forward=kind is Kind.FORWARD, held=held)


def places_of(units: Units) -> Places:
    """Return the index of the unit that each boundary of a module bounds.

    A unit begins with its first module and ends with its last one. In backward it is the other way
    round.
    """
    places: Places = {}
    for index, modules in enumerate(units):
        places[Mark.ENTER, modules[0]] = places[Mark.POST_BACKWARD, modules[0]] = index
        places[Mark.LEAVE, modules[-1]] = places[Mark.PRE_BACKWARD, modules[-1]] = index
    return places


def append_items(items: list[Item], more: Iterator[Item], times: int = 1) -> None:
    """Append items, and merge adjacent runs into one unless the items are repeated.

    Args:
        items: The list that is extended in place.
        more: Items to append. They are consumed.
        times: Repetitions. Above 1, the items become one `Repeated` item.
    """
    if times > 1:
        items.append(Repeated(times, tuple(more)))
        return
    for item in more:
        if items and isinstance(item, Run) and isinstance(last := items[-1], Run):
            items[-1] = last.followed_by(item)
        else:
            items.append(item)


def instantiate(template: Iterable[Any], number: str, places: Places) -> Iterator[Item]:
    """Yield a template's items for the block of this number.

    Args:
        template: Runs, (mark, pattern) pairs and (pattern, sizes) of gradients. `*` in a pattern is
            the block's number.
        number: The block's number, as text.
        places: The index of the unit that each boundary of a module bounds. Boundaries that are not
            in it are dropped.
    """
    for item in template:
        if isinstance(item, Run):
            yield item
        elif len(item) == 2:
            mark, pattern = item
            if (unit := places.get((mark, pattern.replace("*", number)))) is not None:
                yield Boundary(mark, unit)
        else:
            pattern, *sizes = item
            yield Complete(pattern.replace("*", number), *sizes)


# -- stages


def stage_passes(
    spec: Spec, stage: Stage, stages: int, played: Representatives, cut: RankCut
) -> Passes:
    """Return the passes of a built-in model's stage, or of the full model if it is the only stage.

    Args:
        spec: The spec.
        stage: The stage.
        stages: The number of stages.
        played: The simulated units.
        cut: The rank's part of each layer and of the sample.
    """
    ends = {0: Place.FIRST, stages - 1: Place.LAST}
    place = ends.get(stage.index, Place.MIDDLE) if stages > 1 else Place.ALONE
    numbers, kept = _layers_of(spec, stage)
    return _setting_passes(
        setting_of(spec, cut), place, numbers, kept, played.modules, played.turns
    )


@lru_cache(maxsize=2**7)
def _setting_passes(
    setting: Setting,
    place: Place,
    numbers: tuple[str, ...],
    kept: tuple[ActivationMode, ...],
    units: Units,
    turns: Turns,
) -> Passes:
    """Return the passes for these units and turns.

    They do not depend on the data axes, so a search requests the same passes many times.
    """
    hidden = 0 if place in (Place.FIRST, Place.ALONE) else _hidden_bytes(setting)
    layers = LayerPasses(
        setting=setting,
        place=place,
        numbers=numbers,
        kept=kept,
        held=hidden,
        head=_loss_head(setting, place, len(numbers)),
    )
    items = layers.passes(units, turns)
    if place is Place.ALONE:
        of_stage = Passes(items=items, output=0, hidden=0)
    else:
        is_first, output = place is Place.FIRST, layers.output()
        of_stage = passes_of_stage(items, is_first=is_first, output=output, hidden=hidden)
    return of_stage._replace(moved=layers.moved, repeated=layers.repeated)


def moved_and_repeated(spec: Spec, stage: Stage, cut: RankCut) -> tuple[Pairs, RepeatedCalls]:
    """Return the bytes that a micro-batch moves off the device, and the collectives that backward
    repeats, on a built-in model's stage.

    Args:
        spec: The spec.
        stage: The stage.
        cut: The rank's part of each layer and of the sample.

    Returns:
        (tier, bytes) for each moved storage, and (collective, bytes of the full tensor, ranks or 0
        for all) for each repeated call.
    """
    numbers, kept = _layers_of(spec, stage)
    layers = LayerPasses(setting_of(spec, cut), Place.MIDDLE, numbers, kept)
    return layers.moved, layers.repeated


def _layers_of(spec: Spec, stage: Stage) -> tuple[tuple[str, ...], tuple[ActivationMode, ...]]:
    """Return the numbers of a stage's layers, and how their activations are kept."""
    assert isinstance(spec.model, ModelShape), "a built-in model"
    kept = spec.activations.block_modes(spec.model.layers)
    numbers = tuple([layer.rpartition(".")[2] for layer in stage.layers])
    return numbers, tuple([kept[int(number)] for number in numbers])


def _hidden_bytes(setting: Setting) -> int:
    """Return the bytes of the tensor that crosses a boundary between stages."""
    cut = setting.cut
    tokens = setting.sequence // (cut.degree if cut and cut.step.is_sequence else 1)
    return setting.batch * tokens * setting.shape.hidden * setting.compute.itemsize


def _loss_head(setting: Setting, place: Place, layers: int) -> LossHead | None:
    """Return the loss in chunks after a model's layers, or None for a loss of full logits.

    Tables of a last stage are made with one layer, whose input belongs to the schedule. In a stage
    with several layers, the input of the last one is freed in its forward pass if nothing saves it.
    """
    head = tables.head_of(setting, place) if place in (Place.LAST, Place.ALONE) else None
    if head is None or place is Place.ALONE or layers == 1:
        return head
    if not blocks.block_passes(setting.without_context, PLAIN, Attention.SDPA).frees_input:
        return head
    return head._replace(forward=(Run(0, -_hidden_bytes(setting)), *head.forward))


def is_tabulated(spec: Spec) -> bool:
    """Return True if the committed tables cover the allocations of a spec's micro-batch. Otherwise
    it is traced."""
    shape = spec.model
    if not isinstance(shape, ModelShape) or shape.tabulated is None:
        return False
    if spec.unit_size.kind is UnitKind.ENDS:  # tables have no boundaries of these units
        return False
    if spec.degree(Axis.TP) > shape.kv_heads:  # ranks gather keys and values of a shared head
        return False
    if spec.compile is not Compiled.NONE:  # fusions and saved tensors depend on torch's version
        return False
    if spec.precision.matmul is not Matmul.NONE:
        return False
    # with one target per sample the targets are contiguous, and the loss makes no copy of them
    is_column = spec.batch.sequence == 1 and spec.batch.micro > 1
    if is_column or is_by_operators(spec) or spec.loss.user_function:
        return False
    if spec.has_token_slices and not _are_slices_known(spec, shape):
        return False
    kept = spec.activations.distinct_of(shape.layers)
    is_in_chunks = spec.loss.chunk is not None
    if blocks.is_as_usual(shape, kept) and not is_in_chunks:
        return True
    compute = spec.precision.effective_layout.parameters
    if is_in_chunks and not tables.is_known(shape, compute, spec.loss):
        return False
    is_whole = not spec.pipeline.is_in_halves and not spec.tensor.is_naive
    return is_whole and all(blocks.is_known(shape, mode) for mode in kept)


def without_programs(spec: Spec) -> Spec:
    """Return the spec without compiled blocks, fp8 products and frozen parameters, which no table
    covers."""
    precision = replace(spec.precision, matmul=Matmul.NONE)
    return replace(spec, compile=Compiled.NONE, precision=precision, frozen=FrozenSpec())


def _are_slices_known(spec: Spec, shape: ModelShape) -> bool:
    """Return True if tables cover ranks that attend to the tokens of other ranks.

    They cover one sample per micro-batch, full operators, and equal shards of the tokens.
    """
    is_whole = spec.degree(Axis.TP) == 1 and not spec.pipeline.is_in_halves
    kept = spec.activations.block_modes(shape.layers)
    is_known = all(blocks.is_known_over_context(shape, mode) for mode in kept)
    is_even = spec.own_tokens % 2 == 0 and not spec.batch.padding
    if not (is_known and is_whole and spec.batch.micro == 1 and is_even):
        return False
    step = context_of(spec)
    assert step is not None, "ranks have slices"
    if shape.kv_heads % step.ulysses:  # heads of keys are repeated before the exchange
        return False
    setting = setting_of(spec, RankCut(context=part_at(step, 0)))
    return setting.name(TablePart.CONTEXT) in archive.table_names(TablePart.CONTEXT)
