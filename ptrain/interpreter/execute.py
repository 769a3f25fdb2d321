"""Execute the steps of a plan in the plan's order, so that the run equals the printed plan.

Each kind of step has one executor, in this module only; it calls the package of its axis. An
executor whose step cannot run at its place in the plan rejects it; steps are never reordered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

from ptrain.activations.run.apply import apply_modes
from ptrain.axes.context.run.apply import ContextGroups, own_tokens, parallelize_context
from ptrain.axes.context.run.slices import MicroBatchCut
from ptrain.axes.data.form import require_any
from ptrain.axes.data.run.apply import apply
from ptrain.axes.data.run.flat import parameters_by_unit
from ptrain.axes.data.run.flat_target import names_of
from ptrain.axes.data.run.target import stored_part
from ptrain.axes.expert.run.apply import parallelize_experts
from ptrain.axes.tensor.run.apply import (
    FusedOrder,
    loss_inside,
    micro_batch,
    parallelize,
    require_rows,
)
from ptrain.errors import BrokenPlan, input_error
from ptrain.internals.compiled import lacks_compiler
from ptrain.interpreter.construction import Construction, ExpertBalancer, ModelPart, cut_into_stages
from ptrain.interpreter.look import ModuleFiller
from ptrain.interpreter.loss import Clipping, Enter, Loss, LossScale, SequentialRunner, StepLoss
from ptrain.models.compiled import compile_blocks
from ptrain.models.moe import scale_losses
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.products import change_products, require_fp8_device
from ptrain.models.units import ROOT
from ptrain.optimizers.build import TorchOptimizerFactory
from ptrain.optimizers.groups import TargetRules, rule_of
from ptrain.optimizers.update import TargetsUpdate
from ptrain.runtime.comm import Mesh
from ptrain.runtime.torch import Tiers, TorchRuntime
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
    Quantize,
    Step,
    Update,
)
from ptrain.steps.wraps import (
    ExecutedStep,
    FlatUnits,
    FullyShard,
    LocalGradients,
    PlanStep,
    Replicate,
    Wrap,
)


def execute(rank: Construction) -> None:
    """Run the steps of the rank's plan.

    Consecutive steps on pieces run in order on each piece before the next piece is cut.

    Raises:
        BrokenPlan: A step cannot run at its place in the plan.
        SpecError: The package of an axis rejects the model.
    """
    require_any(rank.spec, not all(p.requires_grad for p in rank.module.parameters()))
    steps = rank.plan.steps
    by_kind = groupby(range(len(steps)), key=lambda number: type(steps[number]) in OF_PIECES)
    for is_of_pieces, numbers in [(kind, list(group)) for kind, group in by_kind]:
        if not is_of_pieces:
            for number in numbers:
                _run_of_rank(steps[number], rank)
            continue
        _require(rank.has_mesh, steps[numbers[0]], "no mesh was created before")
        for piece in rank.placed_pieces():
            for number in numbers:
                step = piece.plan.steps[number]
                OF_PIECES[type(step)](step, piece, rank)
                rank.ran.append(ExecutedStep(step, piece.index))


def _run_of_rank(step: Step, rank: Construction) -> None:
    _require(rank.has_mesh or isinstance(step, CreateMesh), step, "no mesh was created before")
    OF_RANK[type(step)](step, rank)
    rank.ran.append(ExecutedStep(step))


def _require(is_so: bool, step: Step, otherwise: str) -> None:
    """Reject a step at its place in the plan, with the reason `otherwise`, unless `is_so`."""
    if not is_so:
        raise BrokenPlan(step, otherwise)


def _create_mesh(step: CreateMesh, rank: Construction) -> None:
    _require(not rank.has_mesh, step, "a mesh already exists")
    rank.mesh = Mesh(step, rank.world)


def _cut_model(step: Pipeline, rank: Construction) -> None:
    _require(not rank.pieces, step, "the model is already sharded over another axis, or wrapped")
    cut_into_stages(step, rank)


def _cut_operators(step: Parallelize, piece: ModelPart, rank: Construction) -> None:
    before = "units are already wrapped, so gradients would be reduced before the sums over "
    _require(piece.wrapped is None, step, f"{before}{step.axis} exist (Theorem 6.2)")
    kept = any(
        isinstance(earlier.step, Keep) and earlier.piece == piece.index for earlier in rank.ran
    )
    _require(
        not kept,
        step,
        "the activations saved for backward are already those of unsharded operators",
    )
    parallelize(
        piece.module,
        step,
        rank.mesh.submesh((step.axis,)),
        rank.mesh.registry,
        rank.mesh.consecutive_group(step.axis, step.kv_ranks),
    )
    require_rows(
        piece.module,
        rank.mesh.group_size((step.axis,)),
        rank.mesh.group_size(piece.plan.wrap.row_axes),
    )
    rank.operators = micro_batch(step)
    rank.order = FusedOrder(step, rank.mesh.group_size((step.axis,)))
    rank.inside_of = partial(loss_inside, tensor=step)


def _slice_tokens(step: ContextParallel, piece: ModelPart, rank: Construction) -> None:
    _require(
        piece.wrapped is None, step, "units are already wrapped, with attention over full samples"
    )
    # Once for all stages: creating groups is a collective over all ranks.
    if rank.context is None:
        slices, samples = rank.plan.boundary_slices, rank.spec.batch.micro
        cut = MicroBatchCut(samples=samples, slices=slices)
        rank.context = ContextGroups(step, rank.mesh, cut, rank.attending)
        rank.own_tokens = own_tokens(step, rank.mesh)
    via = rank.spec.reduce_scatter
    parallelize_context(piece.module, step, rank.mesh, rank.context, via)


def _give_experts(step: ExpertParallel, piece: ModelPart, rank: Construction) -> None:
    before = "units are already wrapped, with the experts of all ranks"
    _require(piece.wrapped is None, step, before)
    parallelize_experts(piece.module, step, rank.mesh)


def _keep_less(step: Keep, piece: ModelPart, rank: Construction) -> None:
    _require(
        piece.wrapped is None,
        step,
        "units are already wrapped, so recomputation in backward would repeat the hooks of a block",
    )
    tiers = Tiers(rank.world.device, rank.mesh.registry, step.path)
    apply_modes(piece.module, step, tiers, is_compiled=piece.plan.compiled is not None)


def _quantize(step: Quantize, piece: ModelPart, rank: Construction) -> None:
    _require(piece.wrapped is None, step, "units are already wrapped, with other linear layers")
    dtype = TORCH_DTYPES[rank.spec.precision.effective_layout.parameters]
    if step.recipe.is_fp8:
        require_fp8_device(rank.world.device, dtype, step.recipe)
    change_products(piece.module, step)


def _require_compiler(rank: Construction) -> None:
    if rank.world.device.type == "cpu" and lacks_compiler():
        raise input_error(
            "compile",
            "torch.compile needs a C++ compiler on CPUs, and there is none",
            "Install one, such as g++, or use `compile=none`.",
        )


def _compile(step: Compile, piece: ModelPart, rank: Construction) -> None:
    _require_compiler(rank)
    _require(
        piece.wrapped is None,
        step,
        "units are already wrapped, so a block's program would include their hooks",
    )
    compile_blocks(piece.module, step.blocks)


def _wrap_units(step: Wrap, piece: ModelPart, rank: Construction) -> None:
    _require(piece.wrapped is None, step, "its units are already wrapped")
    filling, write = None, None
    if piece.is_meta:
        values = rank.initial_values(piece.module)
        filling = ModuleFiller(piece.module, values, rank.world.device, piece.copies, rank.order)
    # Filled as late as possible: by unit while flat buffers are made, or after the wrap if only
    # shards need values. A full model in memory is the last resort.
    if filling and step.is_filled_by_unit:
        write = filling.fill_by_unit()
    elif filling and not step.is_filled_as_shards:
        filling.fill_all()
    piece.wrapped = apply(piece.module, piece.plan, rank.mesh, rank.mesh.registry, write)
    if filling and step.is_filled_as_shards:
        filling.fill_all()


def _compute_loss_in_head(step: LossStep, piece: ModelPart, rank: Construction) -> None:
    _require(
        piece.wrapped is not None,
        step,
        "the head is not wrapped yet, so its weights would not be all-gathered",
    )
    if isinstance(step, CompiledLoss):
        _require_compiler(rank)
    # Hooks of units and of the head's wrapper are outside of the program: it is made of the head's
    # forward pass, which they surround.
    if not rank.loss.is_inside:
        rank.loss = Loss(inside=rank.inside_of(step))
    if piece.has_logits:
        rank.loss.attach(piece.module, rank.head)


def _accumulate(step: Accumulate, rank: Construction) -> None:
    _require(rank.is_wrapped, step, "no units were wrapped before")
    if rank.passes_of is None:
        rank.passes_of = partial(_in_turn, step)


def _in_turn(
    step: Accumulate, rank: Construction, loss: StepLoss, enter: Enter
) -> SequentialRunner:
    sizes = step.micro_batches, rank.spec.batch.micro
    return SequentialRunner(rank.wrapped, rank.model, sizes, loss, enter)


def _clip(step: Clip, rank: Construction) -> None:
    _require(rank.passes_of is not None, step, "no step before it computes gradients")
    _require(rank.update is None, step, "the optimizer step has already used the gradients")
    dtype = TORCH_DTYPES[rank.plan.update.layout.gradients]
    rank.clipping = Clipping(step, rank.mesh, dtype)


def _update(step: Update, rank: Construction) -> None:
    _require(
        rank.is_wrapped and rank.passes_of is not None, step, "no step before it computes gradients"
    )
    spec = rank.spec.optimizer
    room = TorchRuntime(rank.mesh, rank.mesh.registry)
    rules = TorchOptimizerFactory(stands_in=rank.mesh.world.stands_in)
    rank.update = rank.wrapped.own_update(spec, step.layout) or TargetsUpdate(
        rank.wrapped.targets(), spec, step.layout, room, rules, list(_target_rules(rank))
    )
    if step.layout.scales_loss:
        rank.scaling = LossScale(rank.mesh, step.scale_axes)
        for piece in rank.pieces:
            scale_losses(piece.module, rank.scaling.scale)


def _balance(step: BalanceExperts, rank: Construction) -> None:
    _require(rank.update is not None, step, "no optimizer step comes before it")
    rank.balancing = ExpertBalancer(step, [piece.module for piece in rank.pieces], rank.mesh)


def _target_rules(rank: Construction) -> Iterator[TargetRules]:
    """Yield for each group of targets the rules of the tensors of each trained target."""
    for piece in rank.pieces:
        rules = {
            name: rule_of(
                rank.spec.optimizer,
                rank.wrapped.canonical_name(name),
                stored_part(parameter).detach().dim(),
                modules != (ROOT,),
            )
            for modules, named in parameters_by_unit(piece.module, piece.plan.units)
            for name, parameter in named
        }
        assert piece.wrapped is not None, "wrapped before the update"
        for group in piece.wrapped.targets():
            trained = [target for target in group if not target.is_frozen]
            yield [[rules[name] for name in names_of(target)] for target in trained]


OF_RANK: dict[type[PlanStep], Callable[[Any, Construction], None]] = {
    CreateMesh: _create_mesh,
    Pipeline: _cut_model,
    Accumulate: _accumulate,
    Clip: _clip,
    Update: _update,
    BalanceExperts: _balance,
}
OF_PIECES: dict[type[PlanStep], Callable[[Any, ModelPart, Construction], None]] = {
    Parallelize: _cut_operators,
    ContextParallel: _slice_tokens,
    ExpertParallel: _give_experts,
    Quantize: _quantize,
    Keep: _keep_less,
    Compile: _compile,
    LocalGradients: _wrap_units,
    Replicate: _wrap_units,
    FullyShard: _wrap_units,
    FlatUnits: _wrap_units,
    ChunkedLoss: _compute_loss_in_head,
    CompiledLoss: _compute_loss_in_head,
}
