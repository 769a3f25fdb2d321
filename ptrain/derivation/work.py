"""The operators that a rank computes in a micro-batch: from the committed tables for built-in
models (`traces.block_tables` makes them), from traces for all others.

Equal layers share one work object, so that times can be summed by kind of layer.

`operations` counts the floating-point operations of a built-in model's step: the matrix products of
its blocks and of its head. Recomputed products are counted separately. A recomputation does not run
the product whose result backward does not need. Attention scores are counted as kernels receive
them, masked or not. A rank with a shard of the tokens counts the scores of the blocks that its
queries attend to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ptrain.axes.context.attention import ContextKind, ContextPart, computed_scores
from ptrain.axes.pipeline.catalogue import schedule_of
from ptrain.by_rank import rows_by_rank
from ptrain.cost import Collective, Operations
from ptrain.derivation import blocks, tables
from ptrain.derivation.archive import TablePart
from ptrain.derivation.kernels import is_by_operators
from ptrain.derivation.layers import is_tabulated
from ptrain.derivation.tables import Setting, setting_of
from ptrain.derivation.tensor import cut_of
from ptrain.facts.model import (
    InnerCollective,
    LayerWork,
    ModelFacts,
    ModelWork,
    WorkByKind,
)
from ptrain.spec.activations import PLAIN, ActivationMode
from ptrain.spec.dials import Compiled
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.precision import Matmul
from ptrain.spec.spec import Spec, indices_in_groups, ranks_over
from ptrain.steps.step import ChunkedLoss, Plan

_COLLECTIVES = {collective.value for collective in Collective}
_FUSED_LOSS = "torch's fused loss is one operator, whose work is unknown"
_NO_TABLE = "the operators of the model are unknown: there is no table and no trace"
_UNTRACED = "the operators of the model are unknown, because they are in no trace"


def model_work(spec: Spec, plan: Plan, facts: ModelFacts, index: int = 0) -> ModelWork | None:
    """Return the work of a rank: of each layer, before the layers and after them.

    Args:
        spec: The spec.
        plan: The plan.
        facts: The model.
        index: The rank's place along the cutting axes.

    Returns:
        The work, or None for the reasons of `why_unknown`.
    """
    if (traced := _traced_work(plan, facts, index)) is not None:
        return traced.to_model
    if why_unknown(spec, plan, facts):
        return None
    assert isinstance(spec.model, ModelShape), "a built-in model"
    setting = setting_at(spec, plan, index)
    activations, layers = spec.activations, spec.model.layers
    kept, modes = activations.block_modes(layers), activations.distinct_of(layers)
    # copies between tiers are not operators, so the tier does not change a layer's work
    of_layer = {
        id(mode): _layer_work(setting, ActivationMode(policy=mode.policy)) for mode in modes
    }
    front, behind = _end_works(setting.without_context, is_staged=plan.pipeline is not None)
    return ModelWork(front=front, layers=tuple(of_layer[id(mode)] for mode in kept), behind=behind)


def why_unknown(spec: Spec, plan: Plan, facts: ModelFacts) -> str:
    """Return the reason why the model's operators are unknown.

    Args:
        spec: A resolved spec.
        plan: The plan of the spec.
        facts: The facts of the model. A trace of its operators makes tables unnecessary.

    Returns:
        A clause for a message. Empty if the operators are known.
    """
    if _traced_work(plan, facts, 0) is not None:
        return ""
    if spec.compile is not Compiled.NONE or spec.precision.matmul is not Matmul.NONE:
        return facts.untraced or _UNTRACED
    shape = spec.model
    shares_heads = plan.tensor is not None and plan.tensor.kv_ranks > 1
    is_known = is_tabulated(spec) or (plan.context is None and not shares_heads)
    if not isinstance(shape, ModelShape) or spec.loss.user_function or not is_known:
        return _NO_TABLE
    modes = spec.activations.distinct_of(shape.layers)
    if spec.loss.fused:
        return _FUSED_LOSS
    if spec.loss.chunk and (spec.tensor.is_naive or spec.pipeline.is_in_halves):
        return _NO_TABLE
    return "" if all(blocks.is_known(shape, mode) for mode in modes) else _NO_TABLE


def _traced_work(plan: Plan, facts: ModelFacts, index: int) -> WorkByKind | None:
    """Return the traced work of the rank at this place along the cutting axes, or None."""
    if facts.part_works:
        return facts.part_works[index]
    is_cut = plan.cutting_axes or plan.pipeline is not None
    return None if is_cut else facts.work


@cache
def _layer_work(setting: Setting, kept: ActivationMode) -> LayerWork:
    if setting.context is not None:
        return _context_layer_work(setting, setting.context, kept)
    evaluated = blocks.block_work(setting)
    content, attention = evaluated.content, setting.shape.attention
    entry = content[attention.value][blocks.mode_name(kept)]
    is_plain = kept == PLAIN and attention is Attention.SDPA
    halves = content.get("halves", {}) if is_plain else {}
    in_parts = {name: halves[name] for name in ("inputs", "weights") if name in halves}
    work = evaluated.layer_work({**entry, **in_parts})
    return (
        _sum_inputs_separately(work, setting) if setting.cut and setting.cut.step.is_naive else work
    )


def _context_layer_work(setting: Setting, part: ContextPart, kept: ActivationMode) -> LayerWork:
    """Return the work of a layer that attends to the tokens of other ranks."""
    evaluated = tables.evaluate_table(TablePart.CONTEXT, setting, is_work=True)
    entry = evaluated.content[blocks.mode_name(kept)]
    ranks = part.ring_degree if part.kind is ContextKind.GATHER else part.ulysses
    passes = (unroll_hops(entry[name][part.table_place], part) for name in ("forward", "backward"))
    forward, backward = (evaluated.group_work(groups, ranks) for groups in passes)
    return LayerWork(forward=forward, backward=backward)


def unroll_hops(written: Mapping[str, Any], part: ContextPart) -> Iterator[list[int]]:
    """Yield the groups of a pass, with the hops of all places before and after the rank's.

    A table has the smallest number of hops, and the groups that each further hop inserts by
    position. The group of views is last.

    Args:
        written: The table's JSON of a pass: the groups for the smallest number of hops, and the
            groups to insert for each further hop.
        part: The number of places before and after the rank's, which are the hops.
    """
    before, behind = (
        own - least for own, least in zip((part.before, part.behind), written["least"], strict=True)
    )
    own_before, own_behind = dict(written["before"]), dict(written["behind"])
    for at, group in enumerate([*written["base"], None]):
        yield from own_before.get(at, []) * before
        yield from own_behind.get(at, []) * behind
        if group is not None:
            yield group
    number, views, more_before, more_behind = written["views"]
    yield [number, views + before * more_before + behind * more_behind, 0]


def _sum_inputs_separately(work: LayerWork, setting: Setting) -> LayerWork:
    """Return a layer's work in which each column operator reduces the gradient of its input
    separately.

    The additional all-reduces have equal sizes: two for the other projections of attention, and one
    for the gate of a gated MLP.
    """
    more = 2 + setting.shape.activation.is_gated
    (hidden,) = {
        item._replace(times=1) for item in work.forward if isinstance(item, InnerCollective)
    }
    # The naive plan gives each column operator a separate input, so autograd sums their gradients
    # in separate all-reduces instead of one for all operators of a sub-block.
    sums = (hidden._replace(times=more),)
    inputs = work.inputs + sums if work.inputs else ()
    return work._replace(backward=work.backward + sums, inputs=inputs)


@cache
def _end_works(setting: Setting, *, is_staged: bool) -> tuple[LayerWork, LayerWork]:
    """Return the work before the layers and after them.

    A stage has a separate head, even if embedding and head are tied. Tokens have no gradient, so
    the weights' half of the front's backward is all of it.
    """
    if is_staged:
        setting = replace(setting, shape=replace(setting.shape, tied=False))
    evaluated = tables.evaluate_table(TablePart.PASSES, setting, is_work=True)
    content = evaluated.content
    front, behind = content["front"], content["behind"]
    if is_staged:
        front = {**front, "weights": front["backward"]}
        behind = {**content.get("halves", {}), **behind}
    if setting.loss.chunk is None:
        return evaluated.layer_work(front), evaluated.layer_work(behind)
    return evaluated.layer_work(front), _chunked_loss_work(setting)


def _chunked_loss_work(setting: Setting) -> LayerWork:
    """Return the work after the layers for a loss in chunks."""
    untied = replace(setting, shape=replace(setting.shape, tied=False))  # tied computes the same
    evaluated = tables.evaluate_table(TablePart.LOSS, untied, is_work=True)
    listed = evaluated.content["rest" if tables.values_of(setting)["rest"] else "even"]
    chunks = tables.full_chunks(setting)
    return LayerWork(
        **{
            name: evaluated.pass_work(*tables.parts_of(listed[name], chunks))
            for name in ("forward", "backward")
        }
    )


_PASSES = ("forward", "backward", "again")


def rank_operations(spec: Spec, plan: Plan) -> Sequence[Operations]:
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
        (index, mode, number): blocks.block_operations(setting, mode, number)
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
    if not isinstance(plan.loss, ChunkedLoss):
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
    """Return the setting of a built-in model's blocks on one rank.

    Args:
        spec: A resolved spec with a built-in model.
        plan: The plan of the spec, or of one stage.
        index: The place along `plan.cutting_axes`, from 0.
    """
    setting = setting_of(spec, cut_of(spec, plan, index))
    shape = setting.shape
    if is_by_operators(spec):  # backward has the scores, and saves a product
        shape = replace(shape, attention=Attention.EAGER)
    return setting if shape is setting.shape else replace(setting, shape=shape)
