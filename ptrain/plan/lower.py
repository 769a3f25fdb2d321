"""Lowering: the conversion of a product of placements to the steps that implement it.

The wrap depends only on the modes of the states, the layout and the optimizer. Some forms are
implemented by torch: a single device; DDP; FSDP2, also with replicas; and ZeroRedundancyOptimizer.
All other legal tuples run as flat units, with one handler per state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from ptrain.activations.rules import missing_block_faults, split_backward_faults
from ptrain.axes.context.attention import context_of, has_ring
from ptrain.axes.data.form import (
    data_factors,
    form_of,
    frozen_factors,
    joins_units,
    places_frozen,
    reduces_in_backward,
    tier_of,
    units_ahead,
    when_gathered,
    whole_axes,
)
from ptrain.axes.expert.form import experts_of, loads_of
from ptrain.axes.pipeline.catalogue import pipeline_of, schedule_of
from ptrain.axes.pipeline.stage_facts import stages_of
from ptrain.axes.tensor.cost import ranks_per_kv_head
from ptrain.cost import State
from ptrain.errors import SpecError, input_error
from ptrain.facts.float8 import products_of
from ptrain.facts.model import ModelFacts
from ptrain.facts.parameters import expert_layers, expert_modules, quantize_facts, roles_of
from ptrain.facts.parameters import facts as facts_of
from ptrain.facts.stages import Stage
from ptrain.optimizers.groups import describe_groups
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import CUT, Axis, Distribution, Factor, Fusions, Roles, Tier
from ptrain.spec.precision import Matmul
from ptrain.spec.spec import Spec
from ptrain.steps.step import (
    Accumulate,
    Clip,
    Compile,
    CreateMesh,
    Keep,
    Parallelize,
    Pipeline,
    Plan,
    Quantize,
    Update,
    balance_of,
    loss_in_head,
)
from ptrain.steps.wraps import (
    FlatUnits,
    Form,
    FrozenPlace,
    FullyShard,
    LocalGradients,
    Replicate,
    Wrap,
)


def built_in_facts(spec: Spec) -> ModelFacts:
    """Return the facts of a built-in model, which follow from its shape.

    Raises:
        SpecError: The model is not built in.
    """
    if not isinstance(spec.model, ModelShape):
        raise input_error(
            "model",
            "the sizes of this model are known only after running its code",
            "Add `--allow-import` (in Python, pass facts to derive: "
            "read_facts(spec, allow_import=True)), or use a built-in model.",
        )
    facts = facts_of(spec.model, spec.batch.sequence, spec.unit, expert_modules(spec))
    dtype = spec.frozen.dtype
    return facts if dtype is None else quantize_facts(facts, dtype)


def lower(spec: Spec, facts: ModelFacts | None = None) -> Plan:
    """Return the plan of a legal spec: the steps that wrap its model, in order.

    Args:
        spec: The spec to run.
        facts: The facts of its model. Built-in models need none; for any other model, read them
            with `ptrain.read_facts`.

    Returns:
        The plan. Printed, it lists the PyTorch parts that wrap the model.

    Raises:
        SpecError: The model's layers do not fit the spec, or a value is still `auto`.

    Example:
        >>> import ptrain
        >>> plan = ptrain.lower(ptrain.load("zero3").spec)
        >>> plan.spec.name
        'zero3'
    """
    facts = built_in_facts(spec) if facts is None else facts
    spec = spec if facts.model is None else replace(spec, model=facts.model)
    units, stages, form = facts.unit_modules, stages_of(spec, facts), form_of(spec)
    factors = tuple(factor for factor in spec.factors if factor.degree > 1)
    wrap, tensor = _make_wrap(spec, form), _make_parallelize(spec, facts.roles, facts.fusions)
    pipeline = _make_pipeline(spec, stages)
    own = experts_of(spec, units, facts.experts or expert_layers(spec))
    # Replicated tensors are equal on all ranks of ep, experts differ: their norms are summed apart.
    apart = () if own is None or own.axis in wrap.reduced_axes else (own.axis,)
    operator_axes = (*((tensor.axis,) if tensor else ()), *apart)
    routing_axes = (*wrap.summed_axes, *spec.folded_axes)
    cut_axes = (*((pipeline.axis,) if pipeline else ()), *wrap.reduced_axes)
    layout = spec.precision.effective_layout
    mesh = CreateMesh(
        axes=tuple(factor.axis for factor in factors),
        degrees=tuple(factor.degree for factor in factors),
    )
    update = Update(
        optimizer=spec.optimizer.name,
        layout=layout,
        scale_axes=(*cut_axes, *operator_axes) if layout.scales_loss else (),
        groups="" if spec.optimizer.is_uniform else describe_groups(spec.optimizer),
    )
    steps = (
        mesh,
        pipeline,  # first: each stage is a model for the steps below
        tensor,  # Theorem 6.2: operators are sharded before units are wrapped
        context_of(spec),  # attention over cp has the heads that tp leaves to a rank
        own,
        _make_quantize(spec),  # before the modes: they save and recompute fp8 products
        _make_keep(spec, facts.blocks),  # before the wrap, whose hooks at a block then run once
        _make_compile(spec),  # a program contains the recomputation, but no hooks of the wrap
        wrap,
        loss_in_head(spec),  # after the wrap, which gathers the head
        _make_accumulate(spec),
        _make_clip(spec, cut_axes, operator_axes),
        update,
        balance_of(spec, tuple(f.axis for f in factors if f.axis in routing_axes)),
    )
    return Plan(
        spec=spec,
        steps=tuple(step for step in steps if step is not None),
        units=units,
        form=form,
        stages=stages,
        loads=loads_of(spec, own),
    )


def _make_wrap(spec: Spec, form: Form) -> Wrap:
    data = data_factors(spec)
    match form:
        case Form.LOCAL:
            return LocalGradients()
        case Form.REPLICATE | Form.SPREAD_UPDATE:
            return Replicate(
                axes=tuple(factor.axis for factor in data),
                bucket_bytes=spec.bucket_bytes,
                overlaps=reduces_in_backward(spec, form, keeps_parts=False),
                zero_redundancy=form is Form.SPREAD_UPDATE,
            )
        case Form.FULLY_SHARD | Form.MATERIALIZE:
            whole = whole_axes(data)
            return FullyShard(
                shard_axes=tuple(factor.axis for factor in data if factor.axis not in whole),
                replicate_axes=whole,
                sync=spec.sync,
                reduce_scatter=spec.reduce_scatter,
                materialized=form is Form.MATERIALIZE,
                prefetch=spec.prefetch,
                overlaps=reduces_in_backward(spec, form, keeps_parts=True),
            )
        case Form.FLAT:
            return _make_flat_units(spec, data)
        case _:
            assert_never(form)


def _make_flat_units(spec: Spec, data: tuple[Factor, ...]) -> FlatUnits:
    def cut(state: State, *distributions: Distribution) -> tuple[Axis, ...]:
        return tuple(
            factor.axis for factor in data if factor.placement[state].distribution in distributions
        )

    stored, updated = cut(State.OPTIMIZER, *CUT), cut(State.OPTIMIZER, Distribution.SHARDED)
    gathered = cut(State.GRADIENTS, Distribution.GATHERED)
    materialized = bool(cut(State.PARAMETERS, Distribution.MATERIALIZED))
    optimizer_tier = tier_of(data, State.OPTIMIZER)
    on_host = optimizer_tier is not Tier.DEVICE and spec.offload.update is Tier.HOST
    consumed = bool(cut(State.GRADIENTS, Distribution.MATERIALIZED))
    gradients = cut(State.GRADIENTS, *CUT)
    return FlatUnits(
        axes=tuple(factor.axis for factor in data),
        # M stores no parameters: the unit is cast from the master copies, so that it is sharded
        # like these.
        parameters=stored if materialized else cut(State.PARAMETERS, *CUT),
        optimizer=stored,
        gradients=gradients,
        updated=updated,
        sync=spec.sync,
        reduce_scatter=spec.reduce_scatter,
        parameters_tier=optimizer_tier if materialized else tier_of(data, State.PARAMETERS),
        optimizer_tier=optimizer_tier,
        # consumed gradients are freed at once, so that no tier stores them
        gradients_tier=Tier.DEVICE if consumed else tier_of(data, State.GRADIENTS),
        # A host updates only the shard that its rank stores. All-gathered state (S*) is updated on
        # the device.
        update_tier=Tier.HOST if on_host and stored == updated else Tier.DEVICE,
        materialized=materialized,
        consumed=consumed,
        gathered_gradients=tuple(axis for axis in gathered if axis not in updated),
        overlaps=reduces_in_backward(spec, Form.FLAT, keeps_parts=bool(gradients)),
        prefetch=units_ahead(spec, Form.FLAT) or 0,
        gather_after_update=when_gathered(spec),
        path=spec.offload.path,
        frozen=_make_frozen_place(frozen_factors(spec)) if places_frozen(spec) else None,
        bucket_bytes=spec.bucket_bytes if joins_units(spec, Form.FLAT) else 0,
    )


def _make_frozen_place(factors: tuple[Factor, ...]) -> FrozenPlace:
    cut = (f.axis for f in factors if f.placement.parameters.distribution in CUT)
    return FrozenPlace(axes=tuple(cut), tier=tier_of(factors, State.PARAMETERS))


def _make_pipeline(spec: Spec, stages: tuple[Stage, ...]) -> Pipeline | None:
    if pipeline_of(spec) is None:
        return None
    return Pipeline(
        axis=Axis.PP,
        schedule=spec.pipeline.schedule,
        rank_of=schedule_of(spec).rank_of,
        layers=tuple(stage.layers for stage in stages),
        shared=tuple(zip(stages[0].shared, stages[-1].shared, strict=True)),
    )


def _make_accumulate(spec: Spec) -> Accumulate:
    if spec.batch.micro_is_open:  # only in a call from Python: commands resolve `auto`
        raise input_error(
            "batch.micro",
            "auto is not resolved to a micro-batch size yet",
            "pass ptrain.resolve_auto(ptrain.load(...))",
        )
    return Accumulate(micro_batches=spec.batch.accumulate)


def _make_keep(spec: Spec, blocks: tuple[str, ...]) -> Keep | None:
    """Return the step that sets activation modes, or None if all blocks are plain. `blocks` are the
    names in the module; built-in models have `blocks.0` and so on."""
    if spec.activations.is_open:  # only in a call from Python: commands resolve the budget
        raise input_error(
            "recompute.budget",
            "the recompute policy is not selected yet",
            "pass ptrain.resolve_auto(ptrain.load(...))",
        )
    if isinstance(spec.model, ModelShape):
        blocks = tuple(f"blocks.{index}" for index in range(spec.model.layers))
    # a call from Python may lower a spec that commands reject
    if faults := (*missing_block_faults(spec, len(blocks)), *split_backward_faults(spec)):
        raise SpecError(*faults)
    if all(mode.is_plain for mode in spec.activations.distinct_of(len(blocks))):
        return None
    named = zip(blocks, spec.activations.block_modes(len(blocks)), strict=True)
    kept = tuple((name, mode) for name, mode in named if not mode.is_plain)
    return Keep(blocks=kept, path=spec.offload.path)


def _make_quantize(spec: Spec) -> Quantize | None:
    if spec.precision.matmul is Matmul.NONE or not isinstance(spec.model, ModelShape):
        return None
    if spec.precision.matmul is Matmul.AUTOCAST:
        blocks = tuple(f"blocks.{layer}" for layer in range(spec.model.layers))
        return Quantize(recipe=Matmul.AUTOCAST, modules=(*blocks, "head"), left_out=())
    products = products_of(spec.model)
    return Quantize(
        recipe=spec.precision.matmul,
        modules=products.scaled,
        left_out=tuple(products.left_out.items()),
    )


def _make_compile(spec: Spec) -> Compile | None:
    if not spec.compile.has_blocks or not isinstance(spec.model, ModelShape):
        return None
    # Routers count tokens, and rings communicate, so the other half of the block is compiled.
    parts = [f"blocks.{layer}" for layer in range(spec.model.layers)]
    for layer, block in enumerate(parts):
        if has_ring(spec):
            parts[layer] = f"{block}.mlp"
        elif spec.model.has_experts(layer):
            parts[layer] = f"{block}.attention"
    return Compile(blocks=tuple(parts))


def _make_parallelize(spec: Spec, roles: Roles, fusions: Fusions) -> Parallelize | None:
    factor = next((f for f in spec.factors if f.axis is Axis.TP and f.degree > 1), None)
    if factor is None:
        return None
    activations, kv_ranks = factor.placement.activations.distribution, 1
    if not roles and isinstance(spec.model, ModelShape):
        kv_ranks = ranks_per_kv_head(spec.model, factor.degree) or 1
        roles = roles_of(
            spec.model,
            has_whole_experts=bool(spec.folded_axes),
            shares_kv_heads=kv_ranks > 1,
        )
    return Parallelize(
        axis=factor.axis,
        roles=roles,
        fusions=fusions,
        is_sequence=activations in CUT,
        is_saved_cut=activations is Distribution.GATHERED,
        loss_parallel=spec.tensor.loss_parallel,
        is_naive=spec.tensor.is_naive,
        kv_ranks=kv_ranks,
    )


def _make_clip(spec: Spec, axes: tuple[Axis, ...], operator_axes: tuple[Axis, ...]) -> Clip | None:
    if spec.optimizer.clip is None:
        return None
    return Clip(max_norm=spec.optimizer.clip, axes=axes, operator_axes=operator_axes)
