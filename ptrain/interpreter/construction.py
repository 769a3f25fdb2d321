"""The state that the steps of a plan build, and the bias update of routers.

Legend of shape suffixes: L layers of this rank that have routers, E experts.

The counts and biases of all layers are rows of one tensor each, so that a step needs one
all-reduce. The counts are summed over the ranks in place and then become the signs of their
deviation from the mean, so that nothing is allocated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptrain.axes.context.run.apply import ContextGroups
from ptrain.axes.context.run.rehearsal import require_slices
from ptrain.axes.data.run.flat import WrapOptimizer, WrappedModel
from ptrain.axes.pipeline.run.cut import part_of, require_alike
from ptrain.axes.pipeline.run.stage import LocalStage, PassCallbacks, PipelinedPasses, StagedModel
from ptrain.axes.pipeline.stage_facts import chain_of, stage_roles, stages_of
from ptrain.axes.tensor.run.apply import FusedOrder
from ptrain.cost import State
from ptrain.errors import input_error
from ptrain.facts.model import AttentionFacts, ModelFacts
from ptrain.facts.stages import Chain, Stage
from ptrain.internals.fakes import detect_fake_mode
from ptrain.interpreter.loss import Clipping, Enter, Loss, LossScale, PassRunner, StepLoss
from ptrain.models.drawn import DrawnWeights
from ptrain.models.initialize import InitialValues, ModuleWeights, cast_module, keeps_its_weights
from ptrain.models.moe import Gate
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.objective import LossInHead, StepBatch
from ptrain.models.units import ROOT
from ptrain.optimizers.update import TargetsUpdate
from ptrain.runtime.comm import Mesh
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from ptrain.steps.step import BalanceExperts, LossStep, Pipeline, Plan
from ptrain.steps.wraps import ExecutedStep


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a model, first to last, and the chain of modules that they partition."""

    chain: Chain
    all: tuple[Stage, ...]


@dataclass(kw_only=True, eq=False)
class ModelPart:
    """The model, or one pipeline stage's part of it, under the model's names.

    Attributes:
        module: The module to shard and wrap.
        plan: The plan, with the units and roles of this part.
        index: The stage's number.
        is_whole: The module is the full model.
        has_logits: The module's output is logits, or a loss.
        copies: Names of tensors that start as copies of other tensors of the model, by name.
        wrapped: The wrapped module, None before the wrap.
    """

    module: nn.Module
    plan: Plan
    index: int = 0
    is_whole: bool = True
    has_logits: bool = True
    copies: Mapping[str, str] = field(default_factory=dict)
    wrapped: WrappedModel | None = None

    def place_on_device(self, world: World) -> None:
        """Move a module that is not on meta to the device, and cast it to the stored dtype."""
        device, layout = world.device, self.plan.update.layout
        tensors = list(self.module.parameters())
        if any(parameter.device != device for parameter in tensors) and not self.is_meta:
            self.module.to(device)
        if self.plan.wrap.has_masters_for_parameters and layout.master is not None:
            cast_module(
                self.module, TORCH_DTYPES[layout.master]
            )  # before the tensors become DTensors

    @property
    def is_meta(self) -> bool:
        """True if parameters have no values yet."""
        return any(parameter.is_meta for parameter in self.module.parameters())


class ExpertBalancer:
    """The bias update of one rank's routers, which balances the load of experts.

    The modules in `parts` have the model's names.
    """

    def __init__(self, step: BalanceExperts, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        self.step = step
        # created also on ranks without a router: creating a group is collective
        self._group = mesh.group(step.axes) if step.axes else None
        self._gates = {
            name: gate
            for part in parts
            for name, gate in part.named_modules()
            if isinstance(gate, Gate)
        }
        self._load_LE = self._join_stages("load_E")
        self._bias_LE = self._join_stages("bias_E")
        if self._load_LE is not None:
            mesh.registry.tag(self._load_LE, State.OTHER)

    def _join_stages(self, name: str) -> Tensor | None:
        """Stack the buffers of this name of all routers, and make the buffers rows of the result.

        Returns None if this rank has no router.
        """
        if not self._gates:
            return None
        joined_LE = torch.stack([gate.get_buffer(name) for gate in self._gates.values()])
        # Views of one tensor, so that one all-reduce and one update serve all layers.
        for row_E, gate in zip(joined_LE.unbind(), self._gates.values(), strict=True):
            setattr(gate, name, row_E)
        return joined_LE

    def begin(self) -> None:
        """Discard the choices of an earlier step that was not completed."""
        if self._load_LE is not None:
            self._load_LE.zero_()

    def update_biases(self, halted: Tensor | None = None) -> None:
        """Move the biases by the choices since `begin`, unless `halted` is 1."""
        if self._load_LE is None or self._bias_LE is None:
            return
        if self._group is not None:
            dist.all_reduce(self._load_LE, group=self._group)
        # E times the mean is the number of choices, which is equal in all layers
        below_LE = self._load_LE.mul_(-self._load_LE.shape[1]).add_(self.step.choices).sign_()
        if halted is not None:
            below_LE.masked_fill_(halted != 0, 0)
        self._bias_LE.add_(below_LE, alpha=self.step.rate)
        # Counts of a step that was halted must not count for the next one either.
        self._load_LE.zero_()

    def state(self) -> Mapping[str, Tensor]:
        """Return the biases by their names in the model, for a checkpoint."""
        return {f"{name}.bias_E": gate.get_buffer("bias_E") for name, gate in self._gates.items()}


@dataclass(kw_only=True, eq=False)
class Construction:
    """One rank's program while the steps of its plan are executed.

    Callables that a step leaves here receive the construction as an argument and must not keep it:
    such a cycle would keep the model alive until garbage collection.

    Attributes:
        spec: The spec.
        plan: The plan of the full model.
        world: The ranks.
        module: The model.
        head: Name of the module that makes the logits, for a model that is not built in.
        attending: The modules that attend over cp.
        stages: The stages of the model, None without pp.
        weights: Initial weights of a model on meta that is not built in.
        whole_because: The reason why the model was built with all weights, "" if it was not.
        ran: The executed steps, in order.
        pieces: The pieces that a step has reached so far.
        cut: Yields the pieces of the model; None for the full model as one piece.
        join: Joins the wrapped pieces to one model; None for a single piece.
        operators: Opens the context in which a micro-batch's operators run.
        order: The order of features in fused projections.
        context: The process groups of cp.
        own_tokens: Selects a rank's tokens of its samples.
        inside_of: Returns the loss that is computed within the model's forward pass.
        loss: The loss of the model.
        passes_of: Returns the runner of forward and backward passes.
        clipping: Gradient clipping, None without.
        update: The optimizer.
        scaling: The scale of the loss, None without.
        balancing: The bias update of routers, None without.
    """

    spec: Spec
    plan: Plan
    world: World
    module: nn.Module
    head: str = ROOT
    attending: AttentionFacts | None = None
    stages: Stages | None = None
    weights: ModuleWeights | DrawnWeights | None = None
    whole_because: str = ""
    ran: list[ExecutedStep] = field(default_factory=list)
    pieces: list[ModelPart] = field(default_factory=list)  # reached by a step so far
    cut: Callable[[Construction], Iterator[ModelPart]] | None = None  # None: one piece, the model
    join: Callable[[Construction], tuple[WrappedModel, nn.Module]] | None = None
    operators: Callable[[], AbstractContextManager[None]] = nullcontext
    order: FusedOrder = field(default_factory=FusedOrder)
    context: ContextGroups | None = None
    own_tokens: Callable[[StepBatch], StepBatch] = lambda batch: batch  # the rank's tokens
    inside_of: Callable[[LossStep], LossInHead] = LossInHead  # for full logits
    loss: Loss = field(default_factory=Loss)  # the loss of the model
    passes_of: Callable[[Construction, StepLoss, Enter], PassRunner] | None = None
    clipping: Clipping | None = None
    update: TargetsUpdate | WrapOptimizer | None = None
    scaling: LossScale | None = None
    balancing: ExpertBalancer | None = None
    _mesh: Mesh | None = None
    _join_stages: tuple[WrappedModel, nn.Module] | None = None

    @property
    def mesh(self) -> Mesh:
        assert self._mesh is not None, "no mesh was created"
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @property
    def has_mesh(self) -> bool:
        return self._mesh is not None

    def initial_values(self, module: nn.Module) -> InitialValues:
        """Return the initial values of a module on meta: the model, or a part of it."""
        return InitialValues(
            module=module,
            seed=self.spec.train.seed,
            dtype=TORCH_DTYPES[self.spec.precision.effective_layout.parameters],
            weights=self.weights,
        )

    def placed_pieces(self) -> Iterator[ModelPart]:
        """Yield the pieces, each placed on its first turn.

        Cutting is lazy: a stage is wrapped before the next one is cut.
        """
        if self.pieces:
            yield from self.pieces
            return
        whole = (ModelPart(module=self.module, plan=self.plan),)
        for piece in self.cut(self) if self.cut else whole:
            piece.place_on_device(self.world)
            self.pieces.append(piece)
            yield piece

    @property
    def is_wrapped(self) -> bool:
        """True if all pieces are wrapped."""
        return bool(self.pieces) and all(piece.wrapped is not None for piece in self.pieces)

    @property
    def wrapped(self) -> WrappedModel:
        """All pieces as one wrapped model."""
        return self._join_once()[0]

    @property
    def model(self) -> nn.Module:
        """The module inside `wrapped`: the model, or the rank's stages of it."""
        return self._join_once()[1]

    def _join_once(self) -> tuple[WrappedModel, nn.Module]:
        """Return the wrapped model and its module, joined on first use."""
        if self._join_stages is None:
            assert self.is_wrapped, "the units are not wrapped"
            self._join_stages = self.join(self) if self.join else self._only_piece()
        return self._join_stages

    def _only_piece(self) -> tuple[WrappedModel, nn.Module]:
        (piece,) = self.pieces
        assert piece.wrapped is not None
        return piece.wrapped, piece.module


def stages_of_module(spec: Spec, module: nn.Module, facts: ModelFacts) -> Stages | None:
    """Return the stages of a module, None without pp.

    Args:
        spec: The spec.
        module: The model, with weights if its values are compared.
        facts: The facts of the model.

    Raises:
        SpecError: The stages do not compute the module's function, or sharded tokens change its
            results.
    """
    require_slices(module, spec, facts.attending)
    if not (cut := stages_of(spec, facts)):
        return None
    chain = chain_of(spec, facts)
    # The comparison needs values, which built-in models do not have yet.
    if keeps_its_weights(module) and detect_fake_mode() is None:
        require_alike(module, cut, chain, spec)
    return Stages(chain, cut)


def cut_into_stages(step: Pipeline, rank: Construction) -> None:
    """Make this rank's stages its pieces, first to last, and run their passes by the schedule.

    Raises:
        SpecError: The wrap cannot sum the gradients of parameters that two stages share.
    """
    _require_summable_ties(step, rank.plan)
    stages = rank.stages
    assert stages is not None, "the plan has no stages"
    rank.cut = partial(_cut_stages, step, stages)
    rank.join = partial(_join_stages, step, stages)
    rank.passes_of = _pipeline_passes


def _cut_stages(step: Pipeline, stages: Stages, rank: Construction) -> Iterator[ModelPart]:
    """Yield this rank's stages as pieces."""
    copies = {copied: name for name, copied in step.shared}
    for index in step.stages_of(rank.mesh.coordinate(step.axis)):
        part = part_of(rank.module, stages.all, index, stages.chain)
        # A stage without a head may return a view; nothing writes into its output.
        warnings.filterwarnings(
            "ignore", f".*module .FSDP{type(part).__name__}. returned a view tensor", UserWarning
        )
        yield ModelPart(
            module=part,
            plan=_stage_plan(rank.plan, stages, index),
            index=index,
            is_whole=False,
            has_logits=index == step.stages - 1,
            copies=copies,
        )


def _join_stages(
    step: Pipeline, stages: Stages, rank: Construction
) -> tuple[StagedModel, nn.Module]:
    """Join the wrapped stages to one model."""
    parts = []
    for piece in rank.pieces:
        assert piece.wrapped is not None
        parts.append(LocalStage(piece.index, piece.module, piece.wrapped))
    staged = StagedModel(parts, step, rank.mesh, stages.chain)
    return staged, staged.module


def _pipeline_passes(rank: Construction, loss: StepLoss, enter: Enter) -> PipelinedPasses:
    """Return the runner of the pipeline's passes."""
    staged = rank.wrapped
    assert isinstance(staged, StagedModel), "the model is not made of stages"
    callbacks = PassCallbacks(
        loss.loss.forward,
        loss.loss.provide_targets,
        loss.of_last_stage,
        loss.of_output,
        loss.seed,
        enter,
    )
    return PipelinedPasses(rank.spec, rank.plan, rank.mesh, staged, callbacks)


def _require_summable_ties(step: Pipeline, plan: Plan) -> None:
    """Require that the gradients of a tied head can be summed between two stages.

    For models that are not built in, the algebra does not see whether the head is tied, so this is
    checked here.
    """
    if step.shared and not plan.wrap.keeps_gradients_on_device:
        finding = (
            "not supported yet: sharded or offloaded gradients of a tied head, which "
            "are summed between "
        )
        finding += "the first and the last stage on the device before the update"
        raise input_error(
            "placement", finding, "Use gradients `R` or `S`, or a model without a tied head."
        )


def _stage_plan(plan: Plan, stages: Stages, index: int) -> Plan:
    """Return the plan of one stage: its units and its operators' roles."""
    stage, tensor = stages.all[index], plan.tensor
    if tensor is not None:
        roles = stage_roles(tensor.roles, stage, len(stages.all), stages.chain.ends)
        plan = plan.replace_steps(replace(tensor, roles=roles))
    return replace(plan, units=stage.stage_units(plan.units))
