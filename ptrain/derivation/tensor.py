"""The cutting axes in the `exact` column: each rank's part of the model, and the traffic of tp.

The part is a smaller model: the data axes derive its costs as for a full model. The traffic of
operators is counted here, call by call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from ptrain.axes.context.attention import ContextPart, part_at
from ptrain.axes.expert.form import with_own_experts
from ptrain.axes.pipeline.catalogue import schedule_of
from ptrain.axes.ring import Calls, Group
from ptrain.axes.tensor.cost import TensorRank, cut_dims, module_roles, shard_sizes
from ptrain.cost import Collective, Phase, State, Traffic
from ptrain.derivation import layers as layer_tables
from ptrain.derivation.tables import RankCut
from ptrain.facts.model import ModelFacts, TensorFacts, UnitFacts, module_prefixes
from ptrain.spec.placement import Axis, Role
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec, place_of, ranks_over
from ptrain.steps.step import Parallelize, Plan
from ptrain.timeline import gradient_order
from ptrain.units import ceil_div, group_by_key

Units = tuple[UnitFacts, ...]

_LOSS_SUMS = 3  # of a loss on sharded logits: the maximum, the sum, and the targets' logits


def cut_of(spec: Spec, plan: Plan, index: int) -> RankCut:
    """Return the rank's part of a layer and of a sample, at this place along the cutting axes.

    Args:
        spec: A resolved spec.
        plan: The plan of the spec, or of one stage.
        index: The place along `plan.cutting_axes`, from 0.
    """
    step = plan.tensor
    tensor = None
    if step is not None:
        own = place_of(spec, plan.cutting_axes, index)[step.axis]
        tensor = TensorRank(step=step, degree=spec.degree(step.axis), index=own)
    return RankCut(tensor=tensor, context=context_part(spec, plan, index))


def fullest_place(spec: Spec, plan: Plan) -> int:
    """Return the place along the cutting axes of a rank with the highest memory and work.

    It has the first shards of operators, and the last shard of the tokens.
    """
    if plan.context is None:
        return 0
    parts = [
        context_part(spec, plan, place) for place in range(ranks_over(spec, plan.cutting_axes))
    ]
    # Causal attention: the last shard of the tokens attends to all tokens before it. Of equal
    # places the first is taken.
    return max(range(len(parts)), key=lambda at: (((own := parts[at]) and own.before) or 0, -at))


def context_part(spec: Spec, plan: Plan, index: int) -> ContextPart | None:
    """Return a rank's part of attention over cp, or None without shards of the tokens.

    Args:
        spec: A resolved spec.
        plan: The plan of the spec, or of one stage.
        index: The place along `plan.cutting_axes`, from 0.
    """
    if (step := plan.context) is None:
        return None
    return part_at(step, place_of(spec, plan.cutting_axes, index)[step.axis])


def distinct_parts(
    spec: Spec, plan: Plan, facts: ModelFacts
) -> Iterator[tuple[ModelFacts, tuple[int, ...]]]:
    """Yield each distinct part of the model, with its places along the cutting axes.

    Args:
        spec: A resolved spec.
        plan: The plan of the spec.
        facts: The facts of the full model, with full shapes.

    Yields:
        The facts of one rank's part, with local shapes, and the places (from 0) that have it. Each
        place occurs once.
    """
    if not plan.cutting_axes:
        yield facts, (0,)
        return
    indices_of: dict[tuple[ModelFacts, str], tuple[int, ...]] = {}
    for units, indices in units_by_place(spec, plan, facts):
        traced = [(index,) for index in indices] if facts.stage_passes else [indices]
        for alike in (own for group in traced for own in alike_in_context(spec, plan, group)):
            part = _local_facts(spec, facts, units, alike[0])
            name = "" if facts.stage_passes else _context_name(spec, plan, alike[0])
            indices_of[part, name] = (*indices_of.get((part, name), ()), *alike)
    yield from ((part, indices) for (part, _), indices in indices_of.items())


def alike_in_context(spec: Spec, plan: Plan, indices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield these places grouped by equal work in attention over cp.

    The first place of a group has the most tokens before its shard, and so the most work.

    Args:
        spec: A resolved spec.
        plan: The plan of the spec, or of one stage.
        indices: Places along `plan.cutting_axes`. Without cp, they form one group.
    """
    if plan.context is None:
        yield indices
        return
    # Reversed, so that the first entry of each group is the place with the most tokens before it.
    by_name = group_by_key((_context_name(spec, plan, index), index) for index in reversed(indices))
    yield from map(tuple, reversed(by_name.values()))


def _context_name(spec: Spec, plan: Plan, index: int) -> str:
    part = context_part(spec, plan, index)
    return part.name if part else ""


def units_by_place(
    spec: Spec, plan: Plan, facts: ModelFacts
) -> Iterator[tuple[Units, tuple[int, ...]]]:
    """Yield each distinct set of units, with the places along the cutting axes that have it.

    Args:
        spec: A resolved spec.
        plan: The plan of the spec, or of one stage.
        facts: The facts of the model or stage, with full shapes and all experts.

    Yields:
        The units with local shapes and local experts, and the places (from 0) that have them.
    """
    axes, step = plan.cutting_axes, plan.tensor
    places = range(ranks_over(spec, axes))
    if plan.experts is not None:
        facts = with_own_experts(facts, plan.experts, ranks_over(spec, plan.experts.axes))
    if step is None:
        yield facts.units, tuple(places)
        return
    own = [place_of(spec, axes, place)[step.axis] for place in places]
    for units, indices in local_units(facts, step, spec.degree(step.axis)):
        yield units, tuple(place for place in places if own[place] in indices)


def _local_facts(spec: Spec, facts: ModelFacts, units: Units, index: int) -> ModelFacts:
    """Return the facts of a place: its units and, if it was traced, the timeline of its
    micro-batch."""
    traced = facts.stage_passes
    if layer_tables.is_tabulated(spec) and not facts.roles and not traced:
        return replace(facts, units=units)
    timeline = traced[0][index].timeline if traced else None
    order = gradient_order(timeline) if timeline else facts.gradient_order
    return replace(facts, units=units, timeline=timeline, gradient_order=order, stage_passes=())


UnitsByRanks = tuple[tuple[Units, tuple[int, ...]], ...]


def local_units(facts: ModelFacts, step: Parallelize, degree: int) -> UnitsByRanks:
    """Return the units of each rank of tp with local shapes, and the ranks that have them.

    Args:
        facts: The facts of the model or stage, with full shapes.
        step: The step that shards its operators.
        degree: Ranks along tp.

    Returns:
        (units, ranks) pairs. Ranks share an entry if their shards of every sharded dimension have
        equal sizes.
    """
    return _units_by_ranks(facts, Parallelize(axis=step.axis, roles=step.roles), degree)


@lru_cache(maxsize=64)  # most candidates of a search have equal units
def _units_by_ranks(facts: ModelFacts, step: Parallelize, degree: int) -> UnitsByRanks:
    dims = cut_dims(step, ((tensor.name, tensor.shape) for tensor in facts.tensors))
    lengths = {tensor.shape[dims[tensor.name]] for tensor in facts.tensors if tensor.name in dims}
    by_length = {length: shard_sizes(length, degree) for length in lengths}
    # Shards of a size differ only if its rows do not divide evenly. Ranks with equal sizes of all
    # shards have equal parts, so that a part is derived once and not for each of up to `degree`
    # ranks.
    alike = group_by_key(
        (tuple(cut[index] for cut in by_length.values()), index) for index in range(degree)
    )
    return tuple(
        (
            _local_units(facts, step.axis, dims, dict(zip(by_length, profile, strict=True))),
            tuple(indices),
        )
        for profile, indices in alike.items()
    )


def _local_units(
    facts: ModelFacts, axis: Axis, dims: Mapping[str, int], length: Mapping[int, int]
) -> tuple[UnitFacts, ...]:
    """Return the units with the local shapes of a rank.

    Args:
        facts: The model.
        axis: The axis that shards tensors.
        dims: The sharded dimension of each tensor.
        length: The local size for each size of a sharded dimension.
    """

    def local(tensor: TensorFacts) -> TensorFacts:
        dim, shape = dims.get(tensor.name), tensor.shape
        if dim is None:
            return tensor
        own = (*shape[:dim], length[shape[dim]], *shape[dim + 1 :])
        cut_over = (*tensor.cut_over, axis)
        return TensorFacts(
            tensor.name, own, cut_over, tensor.is_copy, tensor.is_frozen, tensor.num_quantized
        )

    return tuple(
        UnitFacts(modules=unit.modules, tensors=tuple(map(local, unit.tensors)))
        for unit in facts.units
    )


def operator_traffic(spec: Spec, plan: Plan, facts: ModelFacts) -> Iterator[Traffic]:
    """Yield the traffic of the operators of a full model or stage in a step.

    This is the traffic of activations, of their gradients, and of the sums of gradients that each
    rank computes from its tokens.

    Args:
        spec: A resolved spec.
        plan: The plan of the spec, or of one stage. Without tp there is no traffic.
        facts: The facts of the model or stage, with full shapes.

    Yields:
        Rows of one step on one rank: calls are counted over all micro-batches, payloads are bytes
        of the full tensor.
    """
    if (step := plan.tensor) is None:
        return
    group = Group((step.axis,), spec.degree(step.axis))
    times = plan.accumulate.micro_batches
    for collective, state, phase, number, payload in _operator_calls(spec, plan, step, facts):
        yield Calls(collective, state, phase, number * times).traffic(group, payload)
    shared = Group((step.axis,), step.kv_ranks)
    for collective, state, phase, number, payload in _kv_calls(spec, plan, step, facts):
        yield Calls(collective, state, phase, number * times).traffic(shared, payload)
    # backward passes of the last stage that are in halves
    halves = schedule_of(spec).halves_of(plan.pipeline.stages - 1) if plan.pipeline else 0
    for collective, state, phase, number, payload in _loss_calls(spec, plan, step, facts):
        passes = times + halves if phase is Phase.BACKWARD else times
        yield Calls(collective, state, phase, number * passes).traffic(group, payload)


# Roles of weights that are stored as [inputs, outputs], with the equivalent transposed role.
_STORED = {Role.TRANSPOSED_COLUMN: Role.COLUMN, Role.TRANSPOSED_ROW: Role.ROW}

_Row = tuple[Collective, State, Phase, int, int]


def _operator_calls(spec: Spec, plan: Plan, step: Parallelize, facts: ModelFacts) -> Iterator[_Row]:
    """Yield (collective, state, phase, calls in a micro-batch, bytes of each call)."""
    itemsize = spec.precision.effective_layout.parameters.itemsize
    tokens = spec.batch.micro * plan.tokens
    cut = _operators(step, facts)
    for phase, sums, copies, alike, ends in (
        (Phase.FORWARD, cut.joins, cut.inputs, cut.whole_joins, cut.ends),
        (Phase.BACKWARD, cut.opens, cut.joined, cut.whole_opens, cut.begins),
    ):
        if step.is_sequence:
            yield from _activation_calls(Collective.REDUCE_SCATTER, phase, sums, tokens * itemsize)
            yield from _activation_calls(Collective.ALL_GATHER, phase, copies, tokens * itemsize)
            yield from _activation_calls(Collective.ALL_GATHER, phase, ends, tokens * itemsize)
        else:
            yield from _activation_calls(Collective.ALL_REDUCE, phase, sums, tokens * itemsize)
            # token shards are routed, and the results all-gathered, as are the gradients
            yield from _activation_calls(
                Collective.ALL_GATHER, phase, cut.routed, tokens * itemsize
            )
        yield from _activation_calls(
            Collective.REDUCE_SCATTER, phase, cut.of_slices, tokens * itemsize
        )
        yield from _activation_calls(Collective.ALL_GATHER, phase, cut.of_slices, tokens * itemsize)
        yield from _activation_calls(Collective.ALL_REDUCE, phase, alike, tokens * itemsize)
    gather, backward = Collective.ALL_GATHER, Phase.BACKWARD
    if step.is_saved_cut:
        yield from _activation_calls(gather, backward, cut.whole_inputs, tokens * itemsize)
    if step.is_sequence:
        # a gradient of embedded positions is all-gathered for each contiguous range
        stretches = plan.context.chunks if plan.context else 1
        yield from _activation_calls(
            gather, backward, cut.positions * stretches, plan.tokens * itemsize
        )
    for numel, number in cut.summed.items():
        yield Collective.ALL_REDUCE, State.GRADIENTS, Phase.BACKWARD, number, numel * itemsize


def _kv_calls(spec: Spec, plan: Plan, step: Parallelize, facts: ModelFacts) -> Iterator[_Row]:
    """Yield the calls over the ranks that share a key-value head."""
    cut, itemsize = _operators(step, facts), spec.precision.effective_layout.parameters.itemsize
    size, groups = (
        spec.batch.micro * plan.tokens * itemsize,
        spec.degree(step.axis) // step.kv_ranks,
    )
    for collective, phase in (
        (Collective.ALL_GATHER, Phase.FORWARD),
        (Collective.REDUCE_SCATTER, Phase.BACKWARD),
    ):
        features = [width // groups for width in cut.group_features(phase)]
        yield from _activation_calls(collective, phase, features, size)


def _loss_calls(spec: Spec, plan: Plan, step: Parallelize, facts: ModelFacts) -> Iterator[_Row]:
    """Yield the calls of a loss on sharded logits.

    A loss in chunks recomputes the logits in backward, and repeats all calls.
    """
    if (vocab := _operators(step, facts).vocab) is None:
        return
    tokens, ranks = spec.batch.micro * plan.tokens, spec.degree(step.axis)
    itemsize = spec.precision.effective_layout.parameters.itemsize
    # all_gather needs equal shards. The vocabulary is padded to a multiple of the ranks.
    token_bytes = ranks * ceil_div(vocab, ranks) * itemsize
    # The loss is computed in fp32 at least, so the sums over the vocabulary are fp32 too.
    wide = max(itemsize, DType.FP32.itemsize)
    chunk = min(spec.loss.chunk or tokens, tokens)
    for size, number in Counter({chunk: tokens // chunk, tokens % chunk: 1}).items():
        for phase in (Phase.FORWARD, Phase.BACKWARD)[: 1 if spec.loss.chunk is None else 2]:
            if not size:
                continue
            if spec.tensor.loss_parallel:
                sums = Collective.ALL_REDUCE, State.ACTIVATIONS, phase, _LOSS_SUMS * number
                yield *sums, size * wide
            else:
                yield Collective.ALL_GATHER, State.ACTIVATIONS, phase, number, size * token_bytes


def _activation_calls(
    collective: Collective, phase: Phase, features: list[int], size: int
) -> Iterator[_Row]:
    """Yield a call for each number of features. `size` is the bytes of a feature of all tokens."""
    for width, number in Counter(features).items():
        yield collective, State.ACTIVATIONS, phase, number, width * size


@lru_cache(maxsize=64)
def _operators(step: Parallelize, facts: ModelFacts) -> _Operators:
    return _Operators(step, facts)


def _outputs_without_gradients(facts: ModelFacts) -> set[str]:
    """Return the modules whose outputs have no gradients."""
    trained = {tensor.name.rpartition(".")[0] for tensor in facts.trained}
    return {name for name in facts.stops if name not in trained}


class _Operators:
    """The operators of a model, by the features per token that they communicate.

    Attributes:
        joins: Partial sums that are reduced into the residual stream.
        joined: Those of `joins` whose output has a gradient.
        inputs: Inputs of sharded operators.
        opens: Those of `inputs` whose gradient is a partial sum.
        whole_joins: Like `joins`, where ranks have all tokens regardless of sequence parallelism.
        whole_opens: Like `opens`, where ranks have all tokens.
        ends: Outputs that are all-gathered after the blocks.
        begins: Those of `ends` that are sharded again before the blocks and have a gradient.
        routed: Sub-blocks that take shards of the tokens.
        of_slices: Operators within them, in pairs.
        positions: Features of embedded positions.
        vocab: The full vocabulary of sharded logits, or None.
        summed: Replicated tensors whose gradients are all-reduced one by one, counted by elements.
    """

    def __init__(self, step: Parallelize, facts: ModelFacts) -> None:
        self._roles, self._modules = step.roles, module_roles(step.roles)
        self._weights = self._by_role(facts)
        weights = self._weights[Role.ROW].items()
        # sharded operators on token shards, regardless of the tokens between sub-blocks
        self.of_slices = [shape[0] for name, shape in weights if self._is_of_slices(name)]
        stopped = self._stopped = _outputs_without_gradients(facts)
        of_rows = {name: shape[0] for name, shape in weights if not self._is_of_slices(name)}
        rows = [*of_rows.values()]
        has_gradient = [width for name, width in of_rows.items() if name not in stopped]
        of_tables = self._weights[Role.VOCABULARY]
        tables = list(of_tables.values())
        columns = {name: shape[1] for name, shape in self._weights[Role.COLUMN].items()}
        latents = {name: of[1] for name, of in self._weights[Role.LATENT].items() if len(of) > 1}
        inner = self._weights[Role.INNER_ROW]
        experts = self._shared_inputs(
            {name: shape[-2] for name, shape in inner.items()}, Role.EXPERTS
        )
        rows += experts.values()
        has_gradient += experts.values()
        inputs = {} if step.is_naive else self._shared_inputs(columns, Role.WHOLE_INPUT)
        inputs |= self._shared_inputs(latents, Role.LATENT_INPUT) | experts
        alone = {  # column operators that share their input with no other operator
            name: width
            for name, width in columns.items()
            if not any(parent in inputs for parent in module_prefixes(name.rpartition(".")[0]))
        }
        heads = [shape[::-1] for shape in self._weights[Role.HEAD].values()]
        if self._has_role(Role.HEAD) and not heads:  # its weight is the embedding's
            heads = [shape[::-1] for shape in tables]
        last = [shape[0] for shape in self._weights[Role.LAST_NORM].values()]
        self.whole_inputs = list(inputs.values())
        inputs = {name: width for name, width in inputs.items() if not self._is_of_slices(name)}
        self.routed = [
            shape[1]
            for name, shape in self._weights[Role.SHARED].items()
            if self._is_of_slices(name)
        ]
        self.positions = [shape[1] for shape in self._weights[Role.POSITIONS].values()]
        joins = [shape[1] for shape in tables]
        inputs |= alone
        begun = [width for name, width in inputs.items() if name not in facts.stops]
        opens = last or [hidden for hidden, _ in heads]
        is_whole = step.has_whole_ends
        self.joins = [*rows, *([] if is_whole else joins)]
        learned = [shape[1] for name, shape in of_tables.items() if name not in stopped]
        self.joined = [*has_gradient, *([] if is_whole else learned)]
        self.inputs = [*inputs.values(), *([] if is_whole else opens)]
        self.opens = [*begun, *([] if is_whole else opens)]
        self.whole_joins, self.whole_opens = (joins, opens) if is_whole else ([], [])
        self.ends = rows[-1:] if is_whole else []
        is_stopped = any(Role.FIRST_BLOCK in self._modules.roles(name) for name in facts.stops)
        self.begins = [] if is_stopped else self.ends
        is_cut = self._has_role(Role.HEAD) or self._has_role(Role.LAST_NORM)
        vocabularies = [size for _, size in heads] or [shape[0] for shape in tables]
        self.vocab = vocabularies[0] if is_cut and vocabularies else None
        norms = (Role.NORM, Role.LAST_NORM) if step.is_sequence else ()
        shared, of_tensor = {Role.SHARED, Role.LATENT, *norms}, self._modules.of_tensor
        self.summed = Counter(t.numel for t in facts.trained if of_tensor(t.name) in shared)

    def group_features(self, phase: Phase) -> list[int]:
        """Return the features of column operators whose outputs ranks share, of all groups.

        In backward, operators whose outputs have no gradient are left out.
        """
        stopped = self._stopped if phase is Phase.BACKWARD else ()
        weights = self._weights[Role.GROUP_COLUMN].items()
        return [shape[0] for name, shape in weights if name not in stopped]

    def _by_role(self, facts: ModelFacts) -> dict[Role, dict[str, tuple[int, ...]]]:
        """Return the shapes of weights, by role and module."""
        weights: dict[Role, dict[str, tuple[int, ...]]] = {role: {} for role in Role}
        for tensor in facts.tensors:
            module, _, name = tensor.name.rpartition(".")
            if name == "weight":
                for role in self._modules.roles(module):
                    stored = _STORED.get(role, role)
                    weights[stored][module] = tensor.shape if stored is role else tensor.shape[::-1]
        return weights

    def _is_of_slices(self, name: str) -> bool:
        """Return True if a module belongs to a sub-block that routes token shards."""
        return self._has_role(Role.WHOLE_EXPERTS) and any(
            Role.WHOLE_EXPERTS in self._modules.roles(parent) for parent in module_prefixes(name)
        )

    def _has_role(self, role: Role) -> bool:
        return any(has is role for _, has in self._roles)

    def _shared_inputs(self, columns: dict[str, int], role: Role) -> dict[str, int]:
        """Return the features of the input that each sub-block with a role shares among its
        operators."""
        widths: dict[str, int] = {}
        for name, width in columns.items():
            for parent in module_prefixes(name.rpartition(".")[0]):
                if role in self._modules.roles(parent):
                    widths.setdefault(parent, width)
        return widths
