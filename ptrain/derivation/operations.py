"""Floating-point operations of a step of a built-in model: the matrix products of its blocks, from
the tables of blocks, and of its head.

Recomputed products are counted separately. A recomputation does not run the product whose result
backward does not need. Attention scores are counted as kernels receive them, masked or not. A rank
with a shard of the tokens counts the scores of the blocks that its queries attend to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ptrain.axes.context.attention import computed_scores
from ptrain.axes.pipeline.catalogue import schedule_of
from ptrain.by_rank import rows_by_rank
from ptrain.cost import Operations
from ptrain.derivation import blocks
from ptrain.derivation.attention import is_by_operators
from ptrain.derivation.tables import Setting, setting_of
from ptrain.derivation.tensor import cut_of
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, indices_in_groups, ranks_over
from ptrain.steps.step import Plan

_PASSES = ("forward", "backward", "again")


def operations(spec: Spec, plan: Plan) -> Sequence[Operations]:
    """Return the operations of each rank in a step.

    Returns:
        The operations by rank. Empty for models that are not built in and for blocks without a
        table.
    """
    shape = spec.model
    if not isinstance(shape, ModelShape):
        return ()
    kept = spec.activations.block_modes(shape.layers)
    if not all(blocks.is_known(shape, mode) for mode in kept):
        return ()
    like: dict[int, int] = {}  # ranks of tp differ only in their vocabulary shards
    indices = [
        like.setdefault(_vocab_shard_size(setting_at(spec, plan, index)), index)
        for index in range(ranks_over(spec, plan.cutting_axes))
    ]
    settings = {
        index: replace(setting_at(spec, plan, index), sequence=plan.tokens)
        for index in like.values()
    }
    token_axes = tuple(axis for step in plan.steps for axis in step.token_axes)
    scores = computed_scores(plan.context) if plan.context else (spec.batch.sequence**2,)
    of_block = {
        (index, mode, number): blocks.operations(setting, mode, number)
        for index, setting in settings.items()
        for mode in {*kept}
        for number in {*scores}
    }

    def of_rank(place: int, index: int, number: int) -> Operations:
        own = plan.pipeline.stages_of(place) if plan.pipeline else ()
        layers = [layer for stage in own for layer in plan.stages[stage].layers]
        numbers = [int(layer.rpartition(".")[2]) for layer in layers] or range(shape.layers)
        sums = Counter[str]()
        for mode, times in Counter(kept[number] for number in numbers).items():
            for name, count in of_block[index, mode, number].items():
                sums[name] += times * count
        micro_batches = plan.accumulate.micro_batches
        row = {name: micro_batches * sums[name] for name in _PASSES}
        if plan.pipeline is None or plan.pipeline.stages - 1 in own:
            for name, count in _head_operations(spec, plan, settings[index]):
                row[name] += count
        return Operations(rank=0, **row)

    axes = (Axis.PP,), plan.cutting_axes, token_axes
    places = zip(*(indices_in_groups(spec, names) for names in axes), strict=True)
    keys = ((place, indices[index], scores[slice_]) for place, index, slice_ in places)
    return rows_by_rank(keys, lambda key: [of_rank(*key)])


def _vocab_shard_size(setting: Setting) -> int:
    """Return the size of a rank's shard of the vocabulary."""
    vocab = setting.shape.vocab_rows
    return setting.cut.slice_of(vocab) if setting.cut else vocab


def _head_operations(spec: Spec, plan: Plan, setting: Setting) -> Iterator[tuple[str, int]]:
    """Yield the operations of the logits of all tokens, and of the gradients of both factors.

    A loss in chunks recomputes its logits in backward, and in each half of a backward pass in
    halves. So does torch's fused loss if it returns the loss of each token. It is one operator,
    which either half runs in full, and torch's counter attributes the second run to backward.
    """
    shape, tokens = setting.shape, setting.batch * setting.sequence
    product = 2 * tokens * shape.hidden * _vocab_shard_size(setting)
    micro_batches = plan.accumulate.micro_batches
    yield "forward", micro_batches * product
    yield "backward", 2 * micro_batches * product
    if plan.loss is None:
        return
    yield "again", micro_batches * product
    if plan.pipeline is not None:
        in_halves = schedule_of(spec).halves_of(plan.pipeline.stages - 1)
        yield (
            ("backward", 3 * in_halves * product)
            if plan.loss.fused
            else ("again", in_halves * product)
        )


def setting_at(spec: Spec, plan: Plan, index: int) -> Setting:
    """Return the setting of a built-in model's blocks on the rank at this place along the cutting
    axes."""
    setting = setting_of(spec, cut_of(spec, plan, index))
    shape = setting.shape
    if is_by_operators(spec):  # backward has the scores, and saves a product
        shape = replace(shape, attention=Attention.EAGER)
    return setting if shape is setting.shape else replace(setting, shape=shape)
