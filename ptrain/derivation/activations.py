"""The committed tables of the built-in families, evaluated: what a micro-batch allocates and saves.

A table holds every size in bytes as a coefficient times powers of batch, sequence and the model's
dimensions, read off traces at prime shapes (`traces.model_tables` makes them). Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ptrain.axes.tensor.costs import Cut
from ptrain.derivation import archive, blocks, loss_chunks
from ptrain.derivation.archive import TablePart
from ptrain.derivation.attention import Statistics
from ptrain.derivation.monomials import Monomial, dimensions, evaluated, merged, monomials
from ptrain.derivation.repeats import Representatives, Turns
from ptrain.spec.activations import PLAIN, Kept
from ptrain.spec.axis import Axis
from ptrain.spec.batch import Batch
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import LossSpec, Spec
from ptrain.timeline import Boundary, Complete, Item, Mark, Repeated, Run, Timeline

Units = tuple[tuple[str, ...], ...]
Places = dict[tuple[Mark, str], int]
Replace = Callable[[Sequence[Any], blocks.Setting, Kept], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One tensor that forward leaves for backward: by which operator, and how large."""

    part: str  # before (the blocks), block, after
    operator: str
    size: Monomial


def timeline(
    shape: ModelShape,
    played: Representatives | None = None,
    *,
    batch: int,
    sequence: int,
    compute: DType,
    cut: Cut | None = None,
    kept: tuple[Kept, ...] = (),
    loss: LossSpec | None = None,
    is_for_cuda: bool = False,
    statistics: Statistics | None = None,
) -> Timeline:
    """Return the timeline of one micro-batch of `batch` samples of a built-in model, of its units
    that are `played` (by default one block each and the root); of one rank's part, where operators
    are `cut`. `kept`: how the blocks' activations are (by default plain); `loss`: how the loss is
    (of whole logits). `is_for_cuda`: whether a GPU drops out; `statistics`: its attention's."""
    name = table_name(shape, compute, batch, is_for_cuda=is_for_cuda)
    kind = cut.kind if cut else None
    table = _table(name, kind)
    values = (cut.dimensions if cut else dimensions)(shape, batch=batch, sequence=sequence)
    sizes = evaluated(_sizes(name, kind), values, compute.itemsize, statistics)
    layers = shape.layers
    modules: Units = (*((f"blocks.{block}",) for block in range(layers)), ("",))
    turns: Turns = tuple((block, 1) for block in range(layers))
    if played is not None:
        modules, turns = played.modules, played.turns
    places = places_of(modules)
    forward, backward = table["forward"], table["backward"]
    kept = kept or (PLAIN,) * layers
    whole = blocks.Setting(
        shape=shape,
        batch=batch,
        sequence=sequence,
        compute=compute,
        cut=cut,
        is_for_cuda=is_for_cuda,
        statistics=statistics,
    )
    setting, ends = None if blocks.is_as_usual(shape, kept) else whole, _ends(whole, loss)

    def of_blocks(phase: str, of_kept: Replace) -> list[Sequence[Any]]:
        """Return each block's part of a phase, first to last."""
        base = list(merged(table[phase]["block"], sizes))
        last = ends.around(phase, base) if ends else base
        if setting is None:
            return [*([base] * (layers - 1)), last]
        part_of = {mode: of_kept(base, setting, mode) for mode in dict.fromkeys(kept)}
        return [*(part_of[mode] for mode in kept[:-1]), of_kept(last, setting, kept[-1])]

    if ends:  # has what follows the blocks in forward and precedes them in backward
        forward, backward = {**forward, "after": []}, {**backward, "before": []}
    first_to_last = of_blocks("forward", blocks.forward_part)
    last_to_first = of_blocks("backward", blocks.backward_part)
    return Timeline(
        forward=_items(forward, sizes, first_to_last, turns, places),
        backward=_items(backward, sizes, last_to_first, turns[::-1], places),
        moved=blocks.moved(setting, kept) if setting else (),
        repeated=blocks.repeated(setting, kept) if setting else (),
    )


def _ends(setting: blocks.Setting, loss: LossSpec | None) -> loss_chunks.LossHead | None:
    """What is around the blocks where the loss is in chunks."""
    if loss is None or loss.chunk is None:
        return None
    chunks = loss_chunks.LossSetting(
        shape=setting.shape,
        batch=setting.batch,
        sequence=setting.sequence,
        compute=setting.compute,
        loss=loss,
        cut=setting.cut,
    )
    return loss_chunks.ends(chunks, loss_chunks.MODEL)


def is_tabulated(spec: Spec) -> bool:
    """Return whether the committed tables tell what a micro-batch allocates; else it is traced."""
    shape = spec.model
    if not isinstance(shape, ModelShape) or _is_column(spec.batch) or drops_in_parts(spec):
        return False
    kept = spec.activations.of(shape.layers)
    is_in_chunks = spec.loss.chunk is not None
    if blocks.is_as_usual(shape, kept) and not is_in_chunks:
        return True
    compute = spec.precision.effective.parameters
    if is_in_chunks and not loss_chunks.is_known(shape, compute, spec.loss):
        return False
    is_whole = not spec.pipeline.is_in_halves and not spec.tensor.is_naive
    return is_whole and all(blocks.is_known(shape, mode) for mode in kept)


def drops_in_parts(spec: Spec) -> bool:
    """Return whether GPUs drop out in a built-in model whose layers or operators are cut."""
    is_cut = spec.degree(Axis.PP) > 1 or spec.degree(Axis.TP) > 1
    shape = spec.model
    return isinstance(shape, ModelShape) and shape.dropout > 0 and spec.is_for_cuda and is_cut


def _is_column(batch: Batch) -> bool:
    """Whether each sample of several has one target: these are contiguous, and what a loss copies
    in the tables is not copied."""
    return batch.sequence == 1 and batch.micro > 1


def saved_bytes(shape: ModelShape, *, batch: int, sequence: int, compute: DType) -> int:
    """|A| of one micro-batch."""
    return timeline(shape, batch=batch, sequence=sequence, compute=compute).saved_bytes


def saved(shape: ModelShape, compute: DType, *, batch: int) -> tuple[Saved, ...]:
    """The polynomials behind `saved_bytes`, operator by operator; those of a block count once per
    layer. One sample alone saves less, so that `batch` matters beyond its factor."""
    name = table_name(shape, compute, batch)
    sizes = _sizes(name)
    return tuple(
        Saved(part=part, operator=operator, size=sizes[index])
        for part, tensors in _table(name)["saved"].items()
        for operator, index in tensors
    )


def torch_version(shape: ModelShape, compute: DType) -> str:
    """The version of torch that was traced."""
    version: str = _table(table_name(shape, compute, batch=2))["torch"]
    return version


def table_name(shape: ModelShape, compute: DType, batch: int, *, is_for_cuda: bool = False) -> str:
    """Return the name of the table of a shape: it says what its operators depend on."""
    tied = "tied" if shape.tied else "untied"
    kind = blocks.kind_of_operators(shape, is_for_cuda=is_for_cuda)
    precision = "full" if compute in (DType.FP32, DType.FP64) else "bf16"
    one = "-one" if batch == 1 else ""
    return f"{shape.family}-{tied}-{kind}-{precision}{one}"


def _table(name: str, kind: str | None = None) -> archive.Table:
    """Of a plain model, or of one kind of cut."""
    if kind is None:
        return archive.table(TablePart.MODEL, name)
    of_kind: archive.Table = archive.table(TablePart.SLICES, name)[kind]
    return of_kind


@cache
def _sizes(name: str, kind: str | None = None) -> tuple[Monomial, ...]:
    return monomials(_table(name, kind))


def places_of(units: Units) -> Places:
    """Return which boundary of which module is a boundary of which unit: a unit begins with its
    first module and ends with its last one, and backward runs the other way."""
    places: Places = {}
    for index, modules in enumerate(units):
        places[Mark.ENTER, modules[0]] = places[Mark.POST_BACKWARD, modules[0]] = index
        places[Mark.LEAVE, modules[-1]] = places[Mark.PRE_BACKWARD, modules[-1]] = index
    return places


def _items(
    parts: dict[str, list[Any]],
    sizes: Sequence[int],
    of_blocks: Sequence[Sequence[Any]],
    turns: Turns,
    places: Places,
) -> tuple[Item, ...]:
    """What precedes the blocks, each block's part in the order of their `turns`, and what
    follows."""
    items: list[Item] = []
    append(items, instantiate(merged(parts["before"], sizes), "", places))
    for block, times in turns:
        append(items, instantiate(of_blocks[block], str(block), places), times)
    append(items, instantiate(merged(parts["after"], sizes), "", places))
    return tuple(items)


def append(items: list[Item], more: Iterator[Item], times: int = 1) -> None:
    """A run that goes on from one part into the next is one run, unless that is repeated."""
    if times > 1:
        items.append(Repeated(times, tuple(more)))
        return
    for item in more:
        if items and isinstance(item, Run) and isinstance(last := items[-1], Run):
            items[-1] = last.then(item)
        else:
            items.append(item)


def instantiate(template: Iterable[Any], number: str, places: Places) -> Iterator[Item]:
    """A part for the block of this number; boundaries of modules that bound no unit are dropped."""
    for item in template:
        if isinstance(item, Run):
            yield item
        elif len(item) == 2:
            mark, pattern = item
            unit = places.get((mark, pattern.replace("*", number)))
            if unit is not None:
                yield Boundary(mark, unit)
        else:
            pattern, size, cloned = item
            yield Complete(pattern.replace("*", number), size, cloned)
