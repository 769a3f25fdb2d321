"""Format a plan as text: the mesh and its groups, then the steps in their order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from ptrain.axes.context.draw import step_text, token_lines
from ptrain.axes.data.rules import keeps_state
from ptrain.axes.expert.draw import expert_lines
from ptrain.axes.expert.draw import step_text as expert_text
from ptrain.axes.pipeline.catalogue import pipeline_of, schedule_of
from ptrain.axes.pipeline.schedule import Schedule
from ptrain.axes.pipeline.simulate import bubble_text, draw_schedule, simulate
from ptrain.axes.pipeline.stage_facts import most_held_of
from ptrain.facts.stages import Units
from ptrain.plan.composition import all_conditions, condition_lines, ranks_text
from ptrain.spec.activations import ActivationMode, Operators, Scope
from ptrain.spec.dials import (
    WHOLE_BUCKET,
    GatherAfterUpdate,
    GradientSync,
    ReduceScatterVia,
    Reshard,
    SyncPolicy,
)
from ptrain.spec.job import OPTIMIZERS
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis, Role, Roles, Tier
from ptrain.spec.precision import Layout, Matmul
from ptrain.spec.spec import Spec, rank_groups
from ptrain.steps.experts import ExpertParallel
from ptrain.steps.step import (
    Accumulate,
    BalanceExperts,
    ChunkedLoss,
    Clip,
    Compile,
    CompiledLoss,
    ContextParallel,
    CreateMesh,
    Keep,
    LossStep,
    Parallelize,
    Pipeline,
    Plan,
    Quantize,
    Step,
    Update,
)
from ptrain.steps.wraps import FlatUnits, FullyShard, LocalGradients, PlanStep, Replicate
from ptrain.units import format_memory, group_by_key, with_noun

_FEW_GROUPS = 8  # groups that are listed: further ones repeat the pattern


def format_plan(spec: Spec, plan: Plan) -> str:
    """Return the full plan as text.

    Args:
        spec: A legal spec.
        plan: Its plan, from `lower`.

    Returns:
        Several lines of text.
    """
    lines = [f"plan of {spec.name}: {with_noun(spec.world_size, 'rank')}", ""]
    stateless = not keeps_state(spec.optimizer) and plan.update.layout.master is None
    steps = [_step_text(step, stateless=stateless) for step in plan.steps]
    lines += [f"  {number}. {step}" for number, step in enumerate(steps, start=1)]
    lines += ["", *_group_lines(spec, plan), *_composition_lines(spec, plan), *_policy_lines(plan)]
    lines += token_lines(spec, plan.context) if plan.context else ()
    lines += _expert_lines(spec, plan)
    lines += _stage_lines(spec, plan)
    whose = "of the full model; each stage has its units and a root: "
    lines.append(f"units    {whose if plan.pipeline else ''}{_units_text(plan.units)}")
    if plan.tensor and not isinstance(spec.model, ModelShape):
        lines += _role_lines(plan.tensor.roles)
    lines += _schedule_lines(spec)
    return "\n".join(lines)


def _role_lines(roles: Roles) -> Iterator[str]:
    """Yield the roles of modules in the plan of a model that is not built in."""
    for role in dict.fromkeys(role for _, role in roles):
        names = ", ".join(pattern for pattern, has in roles if has is role)
        yield f"roles    {role}: {names}"


def _expert_lines(spec: Spec, plan: Plan) -> Iterator[str]:
    """Yield lines about ep, and about the wrap of expert units, which excludes ep."""
    yield from expert_lines(spec, plan)
    if plan.experts is not None:
        wrap = plan.wrap_of(plan.experts.modules)
        stateless = not keeps_state(spec.optimizer) and plan.update.layout.master is None
        yield f"wrapped  experts: {_step_text(wrap, stateless=stateless)}"


def _step_text(step: Step, *, stateless: bool) -> str:
    if isinstance(step, FlatUnits):
        return _flat_text(step, stateless=stateless)
    return _TEXTS[type(step)](step)


def _mesh_text(step: CreateMesh) -> str:
    if not step.axes:
        return "no mesh"
    pairs = zip(step.axes, step.degrees, strict=True)
    return "create a mesh " + " × ".join(f"{axis} {degree}" for axis, degree in pairs)


def _pipeline_text(step: Pipeline) -> str:
    ranks, names = max(step.rank_of) + 1, ", ".join(name for name, _ in step.shared)
    shared = f"; first and last stage share {names}; its gradients are summed" if names else ""
    return (
        f"split the model over {step.axis} into {with_noun(step.stages, 'stage')}, "
        f"{step.stages // ranks} per rank; each stage holds Θ, Ω and G of its layers; schedule "
        f"{step.schedule}{shared}"
    )


def _stage_lines(spec: Spec, plan: Plan) -> Iterator[str]:
    """Yield a line for each stage: its rank along the axis, what it has, and how much is in
    flight."""
    step, schedule = plan.pipeline, _schedule_of(spec)
    if step is None or schedule is None:
        return
    for stage, (rank, layers) in enumerate(zip(step.rank_of, step.layers, strict=True)):
        ends = ["input modules"] * (stage == 0), ["output modules"] * (stage == step.stages - 1)
        names = ", ".join([*ends[0], _shorten_names(list(layers)), *ends[1]])
        most = with_noun(most_held_of(schedule, stage), "micro-batch")
        yield f"stage    {stage} on {step.axis} {rank}: {names}; up to {most} in flight"


def _schedule_lines(spec: Spec) -> Iterator[str]:
    """Yield the bubble in both conventions of the literature, then the drawn schedule."""
    if (schedule := _schedule_of(spec)) is None:
        return
    yield f"bubble   {bubble_text(simulate(schedule))}"
    yield ""
    yield from draw_schedule(schedule).splitlines()


def _schedule_of(spec: Spec) -> Schedule | None:
    return schedule_of(spec) if pipeline_of(spec) else None


def _parallelize_text(step: Parallelize) -> str:
    pairs = "column-wise, one by one" if step.is_naive else "column- and row-wise in pairs"
    between = "sharded by tokens" if step.is_sequence else "replicated"
    shared = f"; {step.kv_ranks} ranks share a key-value head" if step.kv_ranks > 1 else ""
    saved = ", saved as shards and all-gathered again in backward" if step.is_saved_cut else ""
    return (
        f"shard operators over {step.axis}: {pairs}; activations between them {between}{saved}"
        f"{shared}; logits {_logits_text(step)}"
    )


def _logits_text(step: Parallelize) -> str:
    """Describe the sharding of the logits.

    In a built-in model with a tied head, the head has no role; the norm before it has one.
    """
    if not any(role in (Role.HEAD, Role.LAST_NORM) for _, role in step.roles):
        return "replicated, since no head is sharded"
    return "sharded over the vocabulary" if step.loss_parallel else "all-gathered"


def _replicate_text(step: Replicate) -> str:
    when = "overlapped with" if step.overlaps else "after"
    owners = "; each tensor of Ω on a single rank, which updates and broadcasts it"
    return (
        f"replicate over {_axes_text(step.axes)}: DistributedDataParallel, {_bucket_text(step)} "
        f"reduced once, {when} the last micro-batch's backward{owners * step.zero_redundancy}"
    )


def _bucket_text(step: Replicate) -> str:
    """Return the text of a bucket size. The sizes 1 and WHOLE_BUCKET mean single gradients and
    for all gradients."""
    match step.bucket_bytes:
        case 1:
            return "gradients one by one"
        case size if size >= WHOLE_BUCKET:
            return "all gradients in one bucket"
        case size:
            return f"buckets of {format_memory(size)}"


def _fully_shard(step: FullyShard) -> str:
    theta = "Θ M (all-gathered as casts of the master shards)" if step.materialized else "Θ S*"
    copies = f"; replicate over {_axes_text(step.replicate_axes)}" if step.replicate_axes else ""
    ahead = "" if step.prefetch is None else f"; {_prefetch_text(step.prefetch)}"
    dials = ahead if step.overlaps else "; no overlap, no prefetch"
    shards = f"fully_shard each unit over {_axes_text(step.shard_axes)}: {theta}, Ω S, G S"
    return f"{shards}{copies}{dials}{_reduce_scatter_text(step.reduce_scatter)}"


def _prefetch_text(num: int) -> str:
    return f"prefetch {with_noun(num, 'unit')}" if num else "no prefetch"


def _flat_text(step: FlatUnits, *, stateless: bool) -> str:
    over = f" over {_axes_text(step.axes)}" if step.axes else ""
    optimizer = "Ω none" if stateless else _flat_optimizer(step)
    states = ", ".join((_flat_parameters(step), optimizer, _flat_gradients(step)))
    if step.frozen is not None:
        states += f"; frozen parameters: {_flat_parameters(step.of_frozen)}"
    return "; ".join([f"keep each unit in a flat buffer{over}: {states}", *_flat_dials(step)]) + (
        _reduce_scatter_text(step.reduce_scatter)
    )


def _flat_parameters(step: FlatUnits) -> str:
    if step.materialized:
        return "Θ made unit by unit from the masters in Ω"
    stored = _stored_text("Θ", step.parameters, step.parameters_tier)
    if step.parameters:
        return f"{stored}, all-gathered for use"
    return stored if step.parameters_tier is Tier.DEVICE else f"{stored}, copied for use"


def _flat_optimizer(step: FlatUnits) -> str:
    stored = _stored_text("Ω", step.optimizer, step.optimizer_tier)
    stored += _gathered_text([axis for axis in step.optimizer if axis not in step.updated])
    is_near = step.optimizer_tier is Tier.DEVICE
    return stored if is_near else f"{stored}, updated on the {step.update_tier}"


def _gathered_text(axes: Sequence[Axis]) -> str:
    return f", all-gathered over {_axes_text(axes)} for the update" if axes else ""


def _flat_gradients(step: FlatUnits) -> str:
    if step.consumed:
        return "G freed: each unit is reduced and updated within backward"
    stored = _stored_text("G", step.gradients, step.gradients_tier)
    return stored + _gathered_text(step.gathered_gradients)


def _stored_text(letter: str, axes: Sequence[Axis], tier: Tier) -> str:
    """Return `Ω sharded over dp_shard on the host`."""
    where = {Tier.DEVICE: "", Tier.HOST: " on the host", Tier.FILE: " in files"}[tier]
    return f"{letter} {'sharded over ' + _axes_text(axes) if axes else 'replicated'}{where}"


def _flat_dials(step: FlatUnits) -> Iterator[str]:
    if step.path is not None:
        yield f"files in {step.path}"
    if step.bucket_bytes:
        yield f"buckets of up to {format_memory(step.bucket_bytes)} of gradients"
    if step.overlaps:
        yield "reductions overlapped with backward"
    if step.prefetch:
        yield _prefetch_text(step.prefetch)
    if any(axis not in step.parameters for axis in step.updated):
        when = {
            GatherAfterUpdate.BLOCKING: "after each unit's update",
            GatherAfterUpdate.DURING_UPDATE: "while other units are updated",
            GatherAfterUpdate.NEXT_FORWARD: "in the next forward",
        }[step.gather_after_update]
        yield f"updated shards all-gathered {when}"


def _reduce_scatter_text(via: ReduceScatterVia) -> str:
    return "" if via is ReduceScatterVia.NATIVE else "; reduce-scatter as all-to-all and a sum"


def _clip_text(step: Clip) -> str:
    axes = step.reduced_axes
    over = f", a scalar all-reduce over {' and '.join(axes)}" if axes else ""
    return f"clip the gradient norm to {step.max_norm:g}{over}"


def _update_text(step: Update) -> str:
    remainder = OPTIMIZERS[step.optimizer].remainder
    rest = f" ({remainder} for all but the blocks' matrices)" if remainder else ""
    over = f" over {_axes_text(step.scale_axes)}" if step.scale_axes else ""
    scaled = f"; the loss is scaled, and a step whose gradients overflow{over} is skipped"
    layout = step.layout
    groups = f"; {step.groups}" * bool(step.groups)
    return (
        f"update with {step.optimizer}{rest}, {_layout_text(layout)}{groups}"
        f"{scaled * layout.scales_loss}"
    )


def _balance_text(step: BalanceExperts) -> str:
    over = f", an all-reduce over {' × '.join(step.axes)}" if step.axes else ""
    return (
        f"move each expert's bias by {step.rate:g} towards the mean of {step.choices} choices per "
        f"layer{over}"
    )


def _layout_text(layout: Layout) -> str:
    sent = "" if layout.reduced is layout.gradients else f" reduced in {layout.reduced}"
    both = " next to each micro-batch's gradients" if layout.keeps_both else ""
    master = f", master {layout.master}" if layout.master else ""
    return (
        f"layout {layout.name} (Θ {layout.parameters}, G {layout.gradients}{sent}{both}{master}, "
        f"moments {layout.moments})"
    )


def _group_lines(spec: Spec, plan: Plan) -> Iterator[str]:
    for axes in _axes_of_groups(plan):
        members = list(rank_groups(spec, axes))
        shown = " ".join(ranks_text(group) for group in members[:_FEW_GROUPS])
        rest = f" … {len(members)} groups" if len(members) > _FEW_GROUPS else ""
        yield f"groups   {_axes_text(axes)}: {shown}{rest}"


def _axes_of_groups(plan: Plan) -> Iterator[tuple[Axis, ...]]:
    """Yield each axis, and all axes together if there are several."""
    for axis in plan.mesh.axes:
        yield (axis,)
    if len(plan.mesh.axes) > 1:
        yield plan.mesh.axes


def _composition_lines(spec: Spec, plan: Plan) -> Iterator[str]:
    for line in condition_lines(all_conditions(spec, plan)):
        yield f"composed {line}"


def _policy_lines(plan: Plan) -> Iterator[str]:
    if plan.wrap.is_updated_in_backward:
        yield "sync     gradients reduced unit by unit, during backward"
    elif (policy := plan.wrap.policy) is not None:
        yield f"sync     {_sync_text(policy, gathers=plan.wrap.gathers_parameters)}"


def _sync_text(sync: SyncPolicy, *, gathers: bool) -> str:
    is_once = sync.gradients is GradientSync.LAST
    when = "once, after the last micro-batch" if is_once else "after every micro-batch"
    if not gathers:
        return f"gradients {when}"
    match sync.reshard_after_forward:
        case bool() as freed:
            forward = "resharded after forward" if freed else "kept after forward"
        case Reshard.NON_ROOT:
            forward = "resharded after forward (except the root unit)"
        case shards:
            forward = f"kept in {shards} shards after forward"
    backward = "after backward" if sync.reshard_after_backward else "after the last micro-batch"
    return f"gradients {when}; parameters {forward} and {backward}"


def _units_text(units: Units) -> str:
    """Return a text such as `blocks.0 … blocks.79, the root`."""
    names = ["+".join(modules) for modules in units]
    blocks = _shorten_names([name for name in names if name])
    root = ["the root"] if "" in names else []
    return f"{len(names)}: {', '.join([blocks, *root] if blocks else root)}"


def _shorten_names(names: list[str]) -> str:
    """Return a text such as `blocks.0, blocks.1` or `blocks.0 … blocks.79`."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]}"


def _axes_text(axes: Sequence[Axis]) -> str:
    return " × ".join(axes)


# The activation modes of blocks as text. Blocks with the same mode share an entry.


_TO = {Tier.HOST: "to the host", Tier.FILE: "to files"}
_ON = {Tier.DEVICE: "", Tier.HOST: " on the host", Tier.FILE: " in files"}
_RESULTS = {
    Operators.MATMUL: "matrix products",
    Operators.ATTENTION: "fused attention",
    Operators.SOFTMAX: "softmax",
    Operators.NORM: "norms",
    Operators.COLLECTIVE: "collectives",
}


def keep_text(step: Keep) -> str:
    """Return a text such as `recompute blocks 0-7, keeping inputs; offload the saved tensors of
    block 8 …`."""
    alike = group_by_key((kept, name) for name, kept in step.blocks)
    texts = [_kept_text(kept, _blocks_text(names)) for kept, names in alike.items()]
    files = [f"files in {step.path}"] if step.path is not None else []
    return "; ".join([*texts, *files])


def _quantize_text(step: Quantize) -> str:
    """Return a text such as `multiply in fp8-rowwise: attention.query, … of blocks 0-3; left out:
    the head (head)`."""
    if step.recipe is Matmul.AUTOCAST:
        return "run blocks and head in torch.autocast: products in bf16, all else in fp32"
    texts = [_of_blocks(step.modules)]
    for reason, names in step.left_out:
        texts.append(f"left out, {reason}: {_of_blocks(names)}")
    return f"multiply by factors in {step.recipe}: {'; '.join(texts)}"


def _of_blocks(names: Sequence[str]) -> str:
    """Return a text such as `attention.query, attention.key of blocks 0-3; embed`."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        is_within = parts[0] == "blocks"
        block = ".".join(parts[:2]) if is_within else ""
        blocks.setdefault(block, []).append(".".join(parts[2:]) if is_within else name)
    alike = group_by_key((tuple(inner), block) for block, inner in blocks.items())
    texts = [
        (", ".join(inner), _blocks_text(of) if of != [""] else "") for inner, of in alike.items()
    ]
    return "; ".join(" of ".join(filter(None, text)) for text in texts)


def _compile_text(step: Compile) -> str:
    return f"compile the forward pass of {_of_blocks(step.blocks)}, one program per distinct block"


def loss_text(step: LossStep) -> str:
    """Return a text such as `compute logits and loss of 256 tokens at a time, by torch's
    linear_cross_entropy`."""
    if isinstance(step, CompiledLoss):
        return "compile the logits and the cross entropy of all tokens as one program"
    how = "by torch's linear_cross_entropy" if step.fused else "again in backward"
    tokens = f"{step.tokens} token{'' if step.tokens == 1 else 's'}"
    return f"compute logits and loss of {tokens} at a time, {how}"


def _kept_text(kept: ActivationMode, blocks: str) -> str:
    if kept.policy is None:
        to = _TO[kept.tier]
        return f"offload the saved tensors of {blocks} {to}, and bring them back for backward"
    what = blocks
    if kept.policy.scope is Scope.ATTENTION:
        what = f"the scores and softmax of {blocks}"
    inputs = f"inputs{_ON[kept.tier]}"
    results = [_RESULTS[kind] for kind in kept.policy.keep]
    too = f" and the results of {_join_words(results)}" if results else ""
    return f"recompute {what}, keeping {inputs}{too}"


def _join_words(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _blocks_text(names: Sequence[str]) -> str:
    """Return a text such as `blocks 0-7`, `blocks 0, 2, 4`, `every 2nd of blocks 0-78` or
    `encoder.layers.0-5`."""
    return _join_words([_numbers_text(prefix, numbers) for prefix, numbers in _by_list(names)])


def _by_list(names: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield (prefix, numbers) for names that differ only in their last number. A name without a
    number is its own prefix, with no numbers."""
    parts = [re.fullmatch(r"(.*\.|)(\d+)", name) for name in names]
    pairs = [
        (match[1], int(match[2])) if match else (name, -1)
        for name, match in zip(names, parts, strict=True)
    ]
    for prefix, entries in groupby(pairs, key=lambda pair: pair[0]):
        yield prefix, [number for _, number in entries if number >= 0]


def _numbers_text(prefix: str, numbers: list[int]) -> str:
    if not numbers:
        return prefix
    first, last = numbers[0], numbers[-1]
    is_ours = prefix == "blocks."
    if first == last:
        return f"{'block ' if is_ours else prefix}{first}"
    said = "blocks " if is_ours else prefix
    steps = {right - left for left, right in pairwise(numbers)}
    if steps == {1}:
        return f"{said}{first}-{last}"
    if len(steps) == 1 and len(numbers) > _FEW:
        return f"every {_ordinal_text(steps.pop())} of {said}{first}-{last}"
    return f"{said}{', '.join(_iter_ranges(numbers))}"


_FEW = 3  # a list of at most this number of numbers is shorter than `every 2nd of …`


def _iter_ranges(numbers: list[int]) -> Iterator[str]:
    """Yield texts such as `0-3` and `5`."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0])


def _ordinal_text(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if 10 < number % 100 < 14 else ends.get(number % 10, 'th')}"


def _local_text(step: LocalGradients) -> str:
    return "leave the units as they are: no data axis, nothing to reduce"


def _accumulate_text(step: Accumulate) -> str:
    return f"accumulate {with_noun(step.micro_batches, 'micro-batch')}"


# The function that formats each kind of step, except FlatUnits, whose text also depends on the
# optimizer.
_TEXTS: Mapping[type[PlanStep], Callable[[Any], str]] = {
    CreateMesh: _mesh_text,
    Pipeline: _pipeline_text,
    Parallelize: _parallelize_text,
    ContextParallel: step_text,
    ExpertParallel: expert_text,
    Keep: keep_text,
    Quantize: _quantize_text,
    Compile: _compile_text,
    ChunkedLoss: loss_text,
    CompiledLoss: loss_text,
    LocalGradients: _local_text,
    Replicate: _replicate_text,
    FullyShard: _fully_shard,
    Accumulate: _accumulate_text,
    Clip: _clip_text,
    Update: _update_text,
    BalanceExperts: _balance_text,
}
