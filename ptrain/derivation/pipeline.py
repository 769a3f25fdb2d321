"""The pipeline stages in the `exact` column: the part of the model, the resident memory and the
traffic of each. Without pp the model is one stage.

A stage is a smaller model: the data axes and the operators of tp derive its costs as for a full
model. A rank sums its stages, each of which is wrapped separately, with separate buffers. The
step's tokens, targets and loss exist once on every rank.

`in_flight` computes the memory of micro-batches in flight.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from ptrain.axes.context.cost import attention_traffic as sent_over_context
from ptrain.axes.context.cost import own_kept
from ptrain.axes.expert.cost import expert_traffic as sent_to_experts
from ptrain.axes.pipeline.schedule import Schedule
from ptrain.axes.pipeline.stage_facts import (
    Transfer,
    chain_of,
    list_transfers,
    stage_facts,
    stage_gathers,
    stage_roles,
)
from ptrain.axes.ring import Calls, Group, group_over
from ptrain.by_rank import ByRank
from ptrain.cost import Collective, Footprint, Phase, State, Traffic, add_traffic
from ptrain.derivation import blocks, tensor
from ptrain.derivation.ghosts.table import make_wrapping
from ptrain.derivation.ghosts.wrapping import (
    Wrapping,
    by_shard,
    expert_count_traffic,
    norm_traffic,
    other_bytes,
)
from ptrain.derivation.layers import Pairs, RepeatedCalls, block_kinds, moved_and_repeated
from ptrain.derivation.tape import kept_traffic
from ptrain.facts.model import AttentionHeads, ModelFacts, Passes, RowsPasses, passes_of
from ptrain.facts.stages import ENDS, Chain, Ends, Stage
from ptrain.spec.activations import ActivationMode
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, indices_in_groups, ranks_over
from ptrain.steps.experts import ByLayer
from ptrain.steps.step import Plan
from ptrain.units import group_by_key

# Gradients of tensors that the first and the last stage share are summed over both.


_ENDS = 2  # ranks: the first stage's and the last one's

Rows = tuple[Traffic, ...]


def tied_sums(ghost: Wrapping, stage: Stage) -> tuple[Rows, ...]:
    """Return the all-reduces of gradients of tensors that the first and the last stage share.

    Args:
        ghost: The wrapping of one rank's part of tp.
        stage: The stage.

    Returns:
        One row for each shared tensor, of its gradient as kept between reduction and update. There
        is one tuple of rows for each shard if shards differ in size, else one for all.
    """
    plan, part = ghost.wrapped.plan, ghost.wrapped.facts
    step = plan.pipeline
    if step is None or not stage.shared or step.rank_of[0] == step.rank_of[-1]:
        return ((),)
    units = [unit for unit in part.units if {t.name for t in unit.trained} & {*stage.shared}]
    if not units:  # frozen tensors have no gradients
        return ((),)
    calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.UPDATE)
    group, itemsize = Group((step.axis,), _ENDS), plan.update.layout.gradients.itemsize
    sums = tuple(
        tuple(calls.traffic(group, numel * itemsize) for numel in numels)
        for numels in zip(*map(ghost.kept_gradients, units), strict=True)
    )
    return sums if len(set(sums)) > 1 else sums[:1]


_PLACED = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)


def parts(spec: Spec, plan: Plan, part: ModelFacts) -> Iterator[tuple[ModelFacts, tuple[int, ...]]]:
    """Yield each distinct part of a stage, with the places along the cutting axes that have it.

    Args:
        spec: A resolved spec.
        plan: The plan of the stage, not of the full model.
        part: The facts of the stage.

    Yields:
        The facts of one rank's part, with local shapes, and the places (from 0) that have it.
    """
    for units, indices in tensor.units_by_place(spec, plan, part):
        local = replace(part, units=units)
        yield from ((local, own) for own in tensor.alike_in_context(spec, plan, indices))


def stage_plan(plan: Plan, stage: Stage, ends: Ends = ENDS) -> Plan:
    """Return the plan of one stage, in which tp has only the roles of the stage's modules.

    Args:
        plan: The plan of the full model, which has a pipeline step.
        stage: The stage.
        ends: Names of the modules before the first and after the last layer. Default: the names of
            built-in models.
    """
    assert plan.pipeline is not None
    if plan.tensor is None:
        return plan
    roles = stage_roles(plan.tensor.roles, stage, plan.pipeline.stages, ends)
    return plan.replace_steps(replace(plan.tensor, roles=roles))


class StageParts(NamedTuple):
    """One stage with the distinct parts that ranks have of it.

    Attributes:
        stage: The stage.
        like: Index of the first equal stage, whose names `plan` and `facts` use.
        plan: The plan of the stage.
        facts: The part of the model.
        parts: The distinct parts, each in its wrapping, with their places along the cutting axes.
        passes: The traced passes of each place. Empty if the stage was not traced.
        formulas: The traced passes of each place as functions of the rows that experts receive.
            Empty if they do not depend on them.
    """

    stage: Stage
    like: int
    plan: Plan
    facts: ModelFacts
    parts: Sequence[tuple[Wrapping, tuple[int, ...]]]
    passes: tuple[Passes, ...] = ()
    formulas: tuple[RowsPasses, ...] = ()

    @property
    def is_traced(self) -> bool:
        """True if traces have the memory of the passes, for any rows sent to experts."""
        return bool(self.passes) and (self.plan.loads is None or bool(self.formulas))

    def micro_batches(self, index: int, loads: ByLayer | None) -> tuple[Passes, ...]:
        """Return the passes of each micro-batch on a rank.

        Args:
            index: The rank's place along the cutting axes.
            loads: The rows that the rank sends and receives, by layer.

        Returns:
            The passes of each micro-batch. Empty if all micro-batches have the same.
        """
        if loads is None or not self.formulas:
            return ()
        formula = self.formulas[index]
        received = zip(*(loads[layer] for layer in formula.layers), strict=True)
        known: dict[tuple[int, ...], Passes] = {}
        micro_batches = []
        for rows in received:
            numbers = tuple(of_layer.num_received for of_layer in rows)
            micro_batches.append(known.setdefault(numbers, formula.at_rows(numbers)))
        return tuple(micro_batches)

    def tied_sum_rows(self, index: int) -> Rows:
        """Return the all-reduces of shared tensors on the rank at this place, for its largest
        shard.

        Args:
            index: The place along the cutting axes, from 0.
        """
        sums = tied_sums(self.part_at(index)[0], self.stage)
        # The clock runs on one rank for all shards, and the largest message decides when the update
        # starts.
        return max(sums, key=lambda rows: sum(row.payload_bytes for row in rows))

    def part_at(self, index: int) -> tuple[Wrapping, int]:
        """Return the part of the rank at this place, and the first place that has it.

        Args:
            index: The place along the cutting axes, from 0.
        """
        return next((ghost, places[0]) for ghost, places in self.parts if index in places)


def split_stages(spec: Spec, plan: Plan, facts: ModelFacts) -> tuple[StageParts, ...]:
    """Return the stages, first to last.

    Args:
        spec: A resolved spec.
        plan: The plan of the full model.
        facts: The facts of the full model. If `stage_passes` is not empty, places along the cutting
            axes with different traces are separate parts.

    Returns:
        One entry for each stage, and one for the full model without pp. Equal stages share the
        parts of the first of them.
    """
    if plan.pipeline is None:
        return (_whole_model(spec, plan, facts),)
    ends = chain_of(spec, facts).ends
    first: dict[Hashable, StageParts] = {}
    all_parts = []
    for stage in plan.stages:
        # Equal stages differ only in the names of layers, on which no figure depends.
        if (kind := _kind(spec, facts, stage, len(plan.stages))) not in first:
            narrowed, part = stage_plan(plan, stage, ends), stage_facts(spec, facts, stage)
            passes = facts.stage_passes[stage.index] if facts.stage_passes else ()
            first[kind] = StageParts(
                stage=stage,
                like=stage.index,
                plan=narrowed,
                facts=part,
                parts=[
                    (make_wrapping(spec, narrowed, local), alike)
                    for local, indices in parts(spec, narrowed, part)
                    for alike in _group_by_passes(indices, passes)
                ],
                passes=passes,
                formulas=facts.stage_rows[stage.index] if facts.stage_rows else (),
            )
        all_parts.append(first[kind]._replace(stage=stage))
    return tuple(all_parts)


def _whole_model(spec: Spec, plan: Plan, facts: ModelFacts) -> StageParts:
    """Return the only stage of a model without pp."""
    passes = facts.stage_passes[0] if facts.stage_passes else ()
    if facts.timeline and not plan.cutting_axes:
        passes = (passes_of(facts.timeline, None, is_first=True, output=0, hidden=0),)
    formulas = facts.stage_rows[0] if facts.stage_rows and plan.loads is not None else ()
    if plan.loads is not None and not formulas:
        passes = ()
    blocks = facts.blocks
    if not blocks and isinstance(spec.model, ModelShape):
        blocks = tuple(f"blocks.{number}" for number in range(spec.model.layers))
    return StageParts(
        stage=Stage(index=0, layers=blocks, tensors=(), shared=(), numel=facts.numel),
        like=0,
        plan=plan,
        facts=facts,
        parts=[
            (make_wrapping(spec, plan, part), indices)
            for part, indices in tensor.distinct_parts(spec, plan, facts)
        ],
        passes=passes,
        formulas=formulas,
    )


def fullest_of(schedule: Schedule, stages: Sequence[StageParts]) -> dict[int, int]:
    """Return the place along pp that represents each place in a search for the fullest rank.

    Memory in flight grows or falls monotonically from rank to rank. Of ranks with equal stages, the
    first and the last are therefore enough.
    """
    groups = group_by_key(
        (tuple(stages[stage].like for stage in schedule.stages_of(place)), place)
        for place in range(schedule.ranks)
    )
    return {
        place: place if place == group[-1] else group[0]
        for group in groups.values()
        for place in group
    }


def _group_by_passes(
    indices: tuple[int, ...], passes: Sequence[Passes]
) -> Sequence[tuple[int, ...]]:
    """Return the places grouped by equal passes."""
    if not passes:
        return (indices,)
    alike: list[tuple[int, ...]] = []
    for index in indices:
        like = next((group for group in alike if passes[group[0]] == passes[index]), ())
        alike = [group for group in alike if group is not like] + [(*like, index)]
    return sorted(alike)


def _kind(spec: Spec, facts: ModelFacts, stage: Stage, stages: int) -> Hashable:
    """Return a key that is equal for equal stages.

    Middle stages of built-in models, wrapped by block or finer, are equal if they have the same
    number of layers and the same activation modes.
    """
    # Traced stages may differ in anything that their code does. The first and the last stage have
    # the ends of the model.
    if facts.stage_passes or stage.index in (0, stages - 1):
        return stage.index
    return block_kinds(spec, stage.layers) or stage.index


def resident(
    spec: Spec, plan: Plan, stages: Sequence[StageParts], schedule: Schedule
) -> ByRank[Footprint]:
    """Return the rows of parameters, optimizer state, gradients and other memory by rank.

    Args:
        spec: A resolved spec.
        plan: The plan of the full model.
        stages: The stages, first to last.
        schedule: The pipeline schedule, which assigns stages to ranks.

    Returns:
        Rows in bytes. Parameters, optimizer state and gradients are sums over the rank's stages.
    """
    rows: list[tuple[Footprint, ...]] = []
    of_part: dict[tuple[int, int], list[int]] = {}  # an index into the rows by shard
    for taken in stages:
        for ghost, indices in taken.parts:
            if (taken.like, indices[0]) not in of_part:
                kinds, kind_of = by_shard(ghost)
                of_part[taken.like, indices[0]] = [len(rows) + kind for kind in kind_of]
                rows += kinds
            numbers = of_part[taken.like, indices[0]]
            of_part |= {(taken.stage.index, index): numbers for index in indices}
    stages_of = [schedule.stages_of(place) for place in range(schedule.ranks)]
    number_of: dict[tuple[int, ...], int] = {}
    lists_at = [
        [
            [of_part[stage, index] for stage in own]
            for index in range(ranks_over(spec, plan.cutting_axes))
        ]
        for own in stages_of
    ]
    unlike = {(place, *map(id, own)): own for place, at in enumerate(lists_at) for own in at}
    kinds_of = {  # the kind of rank by shard
        key: [
            number_of.setdefault((key[0], *numbers), len(number_of))
            for numbers in zip(*lists, strict=True)
        ]
        for key, lists in unlike.items()
    }
    kinds_at = [[kinds_of[place, *map(id, own)] for own in at] for place, at in enumerate(lists_at)]
    places = map(
        partial(indices_in_groups, spec), ((Axis.PP,), plan.cutting_axes, plan.differing_axes)
    )
    kind_of = [kinds_at[p][index][shard] for p, index, shard in zip(*places, strict=True)]
    kinds = [
        _rank_rows(spec, stages, stages_of[place], [rows[number] for number in numbers])
        for place, *numbers in number_of
    ]
    return ByRank((kinds, kind_of))


def _rank_rows(
    spec: Spec,
    stages: Sequence[StageParts],
    own: Sequence[int],
    held: Sequence[tuple[Footprint, ...]],
) -> tuple[Footprint, ...]:
    """Return the rows of a rank with these stages.

    Args:
        spec: The spec.
        stages: All stages.
        own: Indices of the rank's stages.
        held: The rows of each of them.
    """
    buffers = tuple(row for stage in own for row in stages[stage].facts.buffers)
    other = other_bytes(spec, replace(stages[0].facts, buffers=buffers))
    rows = list(chain.from_iterable(held))
    return (
        *(_sum_rows(state, rows) for state in _PLACED),
        Footprint(state=State.OTHER, rank=0, device_bytes=other),
    )


def _sum_rows(state: State, rows: Iterable[Footprint]) -> Footprint:
    """Return the sum of the rows of a state."""
    held = [row for row in rows if row.state is state]
    return Footprint(
        state=state,
        rank=0,
        device_bytes=sum(row.device_bytes for row in held),
        host_bytes=sum(row.host_bytes for row in held),
        file_bytes=sum(row.file_bytes for row in held),
    )


def accounts(
    spec: Spec, plan: Plan, facts: ModelFacts, stages: Sequence[StageParts], schedule: Schedule
) -> tuple[tuple[Rows, ...], tuple[int, ...]]:
    """Return the traffic of the ranks in a step.

    This is the traffic over stage boundaries, to experts, and, for each stage, of the data axes, of
    tp's operators and of shared tensors.

    Args:
        spec: A resolved spec.
        plan: The plan of the full model.
        facts: The facts of the full model.
        stages: The stages, first to last.
        schedule: The pipeline schedule.

    Returns:
        The distinct accounts, and by rank the index of its account. Accounts differ by place along
        pp and tp, and by shard and tokens if the traffic depends on them.
    """
    crossing, loads = list_transfers(schedule), plan.loads
    known: dict[Hashable, list[list[Rows]]] = {}
    operators_of: dict[int, Rows] = {}
    of_stage = []
    for taken in stages:
        gathers = _gather_counts(plan, schedule, taken.stage.index)
        if (taken.like, gathers) not in known:
            known[taken.like, gathers] = _stage_traffic(spec, schedule, taken)
        of_stage.append(known[taken.like, gathers])
        if taken.like not in operators_of:
            operators_of[taken.like] = (
                *tensor.operator_traffic(spec, taken.plan, taken.facts),
                *sent_over_context(spec, taken.plan, *_attention_modes(spec, taken)),
            )
    place_of = _rank_places(spec, plan, stages, of_stage)
    ghost, _ = stages[0].parts[0]  # the norm covers all stages, so any wrapping gives it

    def of_place(rank: int, index: int, shard: int, tokens: int) -> Rows:
        own = [stages[stage] for stage in schedule.stages_of(rank)]
        layers = [layer for taken in own for layer in taken.stage.layers] if plan.pipeline else None
        rows = loads.rows_by_layer(tokens) if loads else None
        sent = [*norm_traffic(ghost), *sent_to_experts(spec, plan, layers, rows)]
        for taken in own:
            shards = of_stage[taken.stage.index][index]
            sent += (
                *shards[shard if len(shards) > 1 else 0],
                *_activation_traffic(spec, taken, index, rows),
            )
        ordered = add_traffic(
            (
                *sent,
                *(row for taken in own for row in operators_of[taken.like]),
                *expert_count_traffic(spec, plan, [taken.facts for taken in own]),
                *over_boundaries(spec, plan, facts, [t for t in crossing if t.rank == rank]),
            )
        )
        # The order of rows is that of reports: data axes first, as in plans without tp.
        if plan.pipeline is None:  # rows that only operators have come last
            first = {row.key for row in sent}
            return tuple(sorted(ordered, key=lambda row: row.key not in first))
        return ordered

    places = sorted(set(place_of))
    account_of = {place: number for number, place in enumerate(places)}
    return (
        tuple(of_place(*place) for place in places),
        tuple(account_of[place] for place in place_of),
    )


def _gather_counts(plan: Plan, schedule: Schedule, stage: int) -> Hashable:
    """Return the all-gathers per step of a stage's units and of its root, as a key."""
    if (sync := plan.wrap.policy) is None:
        return None
    return tuple(stage_gathers(schedule, stage, sync, is_root=is_root) for is_root in (False, True))


def _rank_places(
    spec: Spec,
    plan: Plan,
    stages: Sequence[StageParts],
    of_stage: Sequence[list[list[Rows]]],
) -> list[tuple[int, int, int, int]]:
    """Return the places of each rank along pp and tp, among the shards and among the tokens.

    A place is 0 if it does not change the traffic.
    """
    cut = plan.cutting_axes if any(len(stage_parts.parts) > 1 for stage_parts in stages) else ()
    is_uneven = any(len(shards) > 1 for of_index in of_stage for shards in of_index)
    shards = plan.differing_axes if is_uneven else ()
    axes = (Axis.PP,), cut, shards, spec.routing_axes if plan.loads else ()
    return list(zip(*(indices_in_groups(spec, names) for names in axes), strict=True))


def over_boundaries(
    spec: Spec, plan: Plan, facts: ModelFacts, own: Sequence[Transfer]
) -> Iterator[Traffic]:
    """Yield the traffic of a rank's transfers over stage boundaries.

    Activations of each micro-batch go to the next stage and their gradients back. A call has micro
    x sequence x hidden elements, or a shard of the tokens if tp shards tokens between blocks.

    Args:
        spec: A resolved spec.
        plan: The plan of the full model.
        facts: The facts of the full model.
        own: The rank's transfers in one step. Empty yields nothing.
    """
    if not own:
        return
    size, group = message_bytes(spec, plan, chain_of(spec, facts)), group_over(spec, (Axis.PP,))
    for transfer in own:
        calls = Calls(transfer.collective, State.ACTIVATIONS, transfer.phase, transfer.calls)
        yield calls.traffic(group, size)


def message_bytes(spec: Spec, plan: Plan, model: Chain) -> int:
    """Return the bytes of a micro-batch that a stage sends to the next one.

    Args:
        spec: The spec, for the samples of a micro-batch and the dtype of parameters.
        plan: The plan. If tp shards the tokens between blocks, the message is one shard.
        model: The chain of the model's stages, for the shape of a sample.
    """
    shape = model.sample_shape(spec.batch.sequence, plan.boundary_slices)
    return spec.batch.micro * math.prod(shape) * spec.precision.effective_layout.parameters.itemsize


def _stage_traffic(spec: Spec, schedule: Schedule, taken: StageParts) -> list[list[Rows]]:
    """Return the traffic of the data axes for a stage, by place along the cutting axes and by
    shard.

    Places with equal shards have one entry.
    """
    stage = taken.stage
    times = partial(stage_gathers, schedule, stage.index) if taken.plan.pipeline else None
    rows_of: dict[int, list[Rows]] = {}
    for ghost, indices in taken.parts:
        rows = add_traffic(ghost.traffic(times))
        sums = tied_sums(ghost, stage)
        rows_of |= {index: [(*rows, *more) for more in sums] for index in indices}
    return [rows_of[index] for index in sorted(rows_of)]


def _attention_modes(
    spec: Spec, stage_parts: StageParts
) -> tuple[tuple[ActivationMode, ...], tuple[AttentionHeads, ...]]:
    """Return the activation modes of the stage's layers, and the heads of each layer.

    Heads are given only for models that are not built in and have attention over cp.
    """
    stage, facts = stage_parts.stage, stage_parts.facts
    if isinstance(spec.model, ModelShape):
        kept = spec.activations.block_modes(spec.model.layers)
        return tuple(kept[int(layer.rpartition(".")[2])] for layer in stage.layers), ()
    if facts.attending is None:
        return (), ()
    return own_kept(spec, facts.blocks, facts.attending, stage.layers)


def _activation_traffic(
    spec: Spec, taken: StageParts, index: int, loads: ByLayer | None
) -> Iterator[Traffic]:
    """Yield the traffic that the activation modes add on a rank.

    Args:
        spec: The spec.
        taken: The stage.
        index: The rank's place along the cutting axes.
        loads: The rows that its tokens send and receive.
    """
    if micro_batches := taken.micro_batches(index, loads):
        for passes in micro_batches:
            yield from kept_traffic(spec, taken.plan, passes.moved, passes.repeated, 1)
        return
    moved, repeated = (
        taken.passes[index][-2:] if taken.passes else _moved_from_tables(spec, taken, index)
    )
    yield from kept_traffic(spec, taken.plan, moved, repeated)


def _moved_from_tables(spec: Spec, taken: StageParts, index: int) -> tuple[Pairs, RepeatedCalls]:
    is_plain = all(kept.is_plain for kept in spec.activations.modes)
    if is_plain or not isinstance(spec.model, ModelShape) or not blocks.are_known(spec):
        return (), ()  # no traffic, or unknown: the figure is then undefined
    return moved_and_repeated(spec, taken.stage, tensor.cut_of(spec, taken.plan, index))
