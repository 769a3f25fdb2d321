"""What a micro-batch of a whole built-in model allocates and saves, from the committed tables
(`derivation.layers`), and for which specs they tell it."""

from __future__ import annotations

from functools import lru_cache

from ptrain.axes.context.attention import context_of
from ptrain.axes.context.part import part_at
from ptrain.derivation import archive, blocks, loss_chunks
from ptrain.derivation.archive import TablePart
from ptrain.derivation.attention import is_by_operators
from ptrain.derivation.layers import LayerPasses, Units
from ptrain.derivation.repeats import Representatives, Turns
from ptrain.derivation.tables import (
    Place,
    RankCut,
    Setting,
    setting_of,
)
from ptrain.spec.activations import PLAIN, Kept
from ptrain.spec.axis import Axis
from ptrain.spec.batch import Batch
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.timeline import Kind, Timeline


def timeline(
    setting: Setting, played: Representatives | None = None, kept: tuple[Kept, ...] = ()
) -> Timeline:
    """Return the timeline of one micro-batch of a whole model, of its units that are `played` (by
    default one block each and the root). `kept`: how the blocks' activations are, by default
    plain."""
    number = setting.shape.layers
    units: Units = (*((f"blocks.{block}",) for block in range(number)), ("",))
    turns: Turns = tuple((block, 1) for block in range(number))
    if played is not None:
        units, turns = played.modules, played.turns
    return _timeline(setting, units, turns, kept or (PLAIN,) * number)


@lru_cache(maxsize=2**5)
def _timeline(setting: Setting, units: Units, turns: Turns, kept: tuple[Kept, ...]) -> Timeline:
    """Return it of these units and turns: what the data axes choose besides is nothing to it, so
    that a search asks for the same again."""
    layers = LayerPasses(
        setting=setting,
        place=Place.ALONE,
        numbers=[str(block) for block in range(setting.shape.layers)],
        kept=kept,
        head=loss_chunks.head_of(setting, Place.ALONE),
    )
    items = layers.passes(units, turns)
    return Timeline(
        forward=items[Kind.FORWARD],
        backward=items[Kind.BACKWARD],
        moved=layers.moved,
        repeated=layers.repeated,
    )


def is_tabulated(spec: Spec) -> bool:
    """Return whether the committed tables tell what a micro-batch allocates; else it is traced."""
    shape = spec.model
    if not isinstance(shape, ModelShape) or shape.tabulated is None:
        return False
    if _is_column(spec.batch) or drops_in_parts(spec) or is_by_operators(spec):
        return False
    if spec.loss.user_function is not None:
        return False
    if spec.has_token_slices and not _are_slices_known(spec, shape):
        return False
    kept = spec.activations.distinct_of(shape.layers)
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
    return isinstance(shape, ModelShape) and shape.drops and spec.is_for_cuda and is_cut


def _are_slices_known(spec: Spec, shape: ModelShape) -> bool:
    """Return whether tables tell what ranks allocate that attend to the tokens of others: of one
    sample, whose operators are whole, and which fall into even slices."""
    is_whole = spec.degree(Axis.TP) == 1 and not spec.pipeline.is_in_halves
    kept = spec.activations.of(shape.layers)
    is_known = all(blocks.is_known_over_context(shape, mode) for mode in kept)
    is_even = spec.own_tokens % 2 == 0 and not spec.batch.padding
    if not (is_known and is_whole and spec.batch.micro == 1 and is_even):
        return False
    step = context_of(spec)
    assert step is not None, "ranks have slices"
    if shape.kv_heads % step.ulysses:  # heads of keys are repeated ahead of the exchange
        return False
    setting = setting_of(spec, RankCut(context=part_at(step, 0)))
    return setting.name(TablePart.CONTEXT) in archive.names(TablePart.CONTEXT)


def _is_column(batch: Batch) -> bool:
    """Whether each sample of several has one target: these are contiguous, and what a loss copies
    in the tables is not copied."""
    return batch.sequence == 1 and batch.micro > 1
