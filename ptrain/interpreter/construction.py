"""What the steps of a plan are applied to and leave for later steps: the model or the stages of
this rank, and the bias update of routers.

Legend of shape suffixes: L layers of this rank that have routers, E experts.

Note: the counts and biases of all layers are rows of one tensor each, so that a step needs one
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
from ptrain.axes.data.run.flat import OwnUpdate, WrappedModel
from ptrain.axes.pipeline.run.cut import part_of, require_alike
from ptrain.axes.pipeline.run.stage import LocalStage, PassCallbacks, Pipelined, Staged
from ptrain.axes.pipeline.stage_facts import chain_of, stage_roles, stages_of
from ptrain.axes.tensor.run.apply import FusedOrder
from ptrain.cost import State
from ptrain.errors import refused
from ptrain.facts.model import Attending, ModelFacts
from ptrain.facts.stages import Chain, Stage
from ptrain.internals.fakes import detect_fake_mode
from ptrain.interpreter.loss import Clipping, Enter, Loss, LossScale, PassRunner, StepLoss
from ptrain.models.drawn import DrawnWeights
from ptrain.models.initialize import InitialValues, ModuleWeights, cast, keeps_its_weights
from ptrain.models.moe import Gate
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.objective import LossInside, StepBatch
from ptrain.models.units import ROOT
from ptrain.optimizers.update import TargetsUpdate
from ptrain.rooms.comm import Mesh
from ptrain.rooms.world import World
from ptrain.spec.spec import Spec
from ptrain.steps.step import BalanceExperts, ChunkedLoss, Pipeline, Plan
from ptrain.steps.wraps import Ran


@dataclass(frozen=True, slots=True)
class Stages:
    """Those that a spec cuts a model into, first to last, and what they are cut from."""

    chain: Chain
    all: tuple[Stage, ...]


@dataclass(kw_only=True, eq=False)
class Workpiece:
    """The model, or one stage's part of it, under the names of the model. `plan` has its own units
    and roles; `copies` are tensors that begin as others of the model. `is_whole`: it is the model
    itself; `has_logits`: its output is logits, or a loss."""

    module: nn.Module
    plan: Plan
    index: int = 0
    is_whole: bool = True
    has_logits: bool = True
    copies: Mapping[str, str] = field(default_factory=dict)
    wrapped: WrappedModel | None = None

    def place(self, world: World) -> None:
        """Bring what is not on meta to the rank's device, in the dtype that is stored."""
        device, layout = world.device, self.plan.update.layout
        tensors = list(self.module.parameters())
        if any(parameter.device != device for parameter in tensors) and not self.is_meta:
            self.module.to(device)
        if self.plan.wrap.has_masters_for_parameters and layout.master is not None:
            cast(self.module, TORCH_DTYPES[layout.master])  # while its tensors are plain

    @property
    def is_meta(self) -> bool:
        """Whether its parameters have no values yet."""
        return any(parameter.is_meta for parameter in self.module.parameters())


class Balancing:
    """Of one rank's `parts`, whose modules have the model's names."""

    def __init__(self, step: BalanceExperts, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        self.step = step
        # made where no part has a router too: groups are made together
        self._group = mesh.group(step.axes) if step.axes else None
        self._gates = {
            name: gate
            for part in parts
            for name, gate in part.named_modules()
            if isinstance(gate, Gate)
        }
        self._load_LE = self._joined("load_E")
        self._bias_LE = self._joined("bias_E")
        if self._load_LE is not None:
            mesh.registry.tag(self._load_LE, State.OTHER)

    def _joined(self, name: str) -> Tensor | None:
        """Return a tensor of all routers' buffers of this name, which from now on are its rows."""
        if not self._gates:
            return None
        joined_LE = torch.stack([gate.get_buffer(name) for gate in self._gates.values()])
        for row_E, gate in zip(joined_LE.unbind(), self._gates.values(), strict=True):
            setattr(gate, name, row_E)
        return joined_LE

    def begin(self) -> None:
        """A step begins: what was chosen in one that was given up does not count."""
        if self._load_LE is not None:
            self._load_LE.zero_()

    def update(self, halted: Tensor | None = None) -> None:
        """Move the biases by what was chosen since `begin`; not where `halted` is 1."""
        if self._load_LE is None or self._bias_LE is None:
            return
        if self._group is not None:
            dist.all_reduce(self._load_LE, group=self._group)
        # E times the mean is the number of choices, which every layer has alike
        below_LE = self._load_LE.mul_(-self._load_LE.shape[1]).add_(self.step.choices).sign_()
        if halted is not None:
            below_LE.masked_fill_(halted != 0, 0)
        self._bias_LE.add_(below_LE, alpha=self.step.rate)
        self._load_LE.zero_()

    def state(self) -> Mapping[str, Tensor]:
        """Return the biases by their names in the model: what a checkpoint has to have."""
        return {f"{name}.bias_E": gate.get_buffer("bias_E") for name, gate in self._gates.items()}


@dataclass(kw_only=True, eq=False)
class Construction:
    """One rank's program before it is whole. `head` names the module that makes the logits of a
    model that is not built in, and `attending` those that attend over cp; `weights` are those of
    one that has none yet, and `whole_because` is why it was built with all, if it was; `ran` are
    the steps so far, in the order in which they ran. What a step leaves to be called is given the
    construction and does not keep it: the model would live until somebody collects garbage."""

    spec: Spec
    plan: Plan
    world: World
    module: nn.Module
    head: str = ROOT
    attending: Attending | None = None
    stages: Stages | None = None
    weights: ModuleWeights | DrawnWeights | None = None
    whole_because: str = ""
    ran: list[Ran] = field(default_factory=list)
    pieces: list[Workpiece] = field(default_factory=list)  # those that a step has reached
    cut: Callable[[Construction], Iterator[Workpiece]] | None = None  # None: of the model one
    join: Callable[[Construction], tuple[WrappedModel, nn.Module]] | None = None
    operators: Callable[[], AbstractContextManager[None]] = nullcontext
    order: FusedOrder = field(default_factory=FusedOrder)
    context: ContextGroups | None = None
    own_tokens: Callable[[StepBatch], StepBatch] = lambda batch: batch  # those that a rank is given
    inside_of: Callable[[ChunkedLoss], LossInside] = LossInside  # of whole logits
    loss: Loss = field(default_factory=Loss)  # how the model gives it
    passes_of: Callable[[Construction, StepLoss, Enter], PassRunner] | None = None
    clipping: Clipping | None = None
    update: TargetsUpdate | OwnUpdate | None = None
    scaling: LossScale | None = None
    balancing: Balancing | None = None
    _mesh: Mesh | None = None
    _joined: tuple[WrappedModel, nn.Module] | None = None

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
        """Return those of a module that has none: the model, or a part of it."""
        return InitialValues(
            module=module,
            seed=self.spec.train.seed,
            dtype=TORCH_DTYPES[self.spec.precision.effective.parameters],
            weights=self.weights,
        )

    def placed_pieces(self) -> Iterator[Workpiece]:
        """One after the other, each placed when its turn comes first: a stage is wrapped before
        the next one is cut."""
        if self.pieces:
            yield from self.pieces
            return
        whole = (Workpiece(module=self.module, plan=self.plan),)
        for piece in self.cut(self) if self.cut else whole:
            piece.place(self.world)
            self.pieces.append(piece)
            yield piece

    @property
    def is_wrapped(self) -> bool:
        """Whether every piece is."""
        return bool(self.pieces) and all(piece.wrapped is not None for piece in self.pieces)

    @property
    def wrapped(self) -> WrappedModel:
        """All pieces as one wrapped model."""
        return self._whole()[0]

    @property
    def model(self) -> nn.Module:
        """What it wraps: the model, or the rank's stages of it."""
        return self._whole()[1]

    def _whole(self) -> tuple[WrappedModel, nn.Module]:
        if self._joined is None:
            assert self.is_wrapped, "the units are not wrapped"
            self._joined = self.join(self) if self.join else self._only_piece()
        return self._joined

    def _only_piece(self) -> tuple[WrappedModel, nn.Module]:
        (piece,) = self.pieces
        assert piece.wrapped is not None
        return piece.wrapped, piece.module


def stages_of_module(spec: Spec, module: nn.Module, facts: ModelFacts) -> Stages | None:
    """None without pp. Raises SpecError for a module whose stages are not the module, or that is
    not on slices of the tokens what it is on all."""
    require_slices(module, spec, facts.attending)
    if not (cut := stages_of(spec, facts)):
        return None
    chain = chain_of(spec, facts)
    if keeps_its_weights(module) and detect_fake_mode() is None:
        require_alike(module, cut, chain, spec)
    return Stages(chain, cut)


def cut_into_stages(step: Pipeline, rank: Construction) -> None:
    """From here on the rank's pieces are its stages, first to last, and their passes those of the
    schedule. Raises SpecError where the wrap cannot sum what two stages share."""
    _require_sums(step, rank.plan)
    stages = rank.stages
    assert stages is not None, "the plan has no stages"
    rank.cut = partial(_pieces, step, stages)
    rank.join = partial(_joined, step, stages)
    rank.passes_of = _passes


def _pieces(step: Pipeline, stages: Stages, rank: Construction) -> Iterator[Workpiece]:
    copies = {copied: name for name, copied in step.shared}
    for index in step.stages_of(rank.mesh.coordinate(step.axis)):
        part = part_of(rank.module, stages.all, index, stages.chain)
        # where it has no head it may, and nothing writes into what a stage hands on
        warnings.filterwarnings(
            "ignore", f".*module .FSDP{type(part).__name__}. returned a view tensor", UserWarning
        )
        yield Workpiece(
            module=part,
            plan=_stage_plan(rank.plan, stages, index),
            index=index,
            is_whole=False,
            has_logits=index == step.stages - 1,
            copies=copies,
        )


def _joined(step: Pipeline, stages: Stages, rank: Construction) -> tuple[Staged, nn.Module]:
    parts = []
    for piece in rank.pieces:
        assert piece.wrapped is not None
        parts.append(LocalStage(piece.index, piece.module, piece.wrapped))
    staged = Staged(parts, step, rank.mesh, stages.chain)
    return staged, staged.module


def _passes(rank: Construction, loss: StepLoss, enter: Enter) -> Pipelined:
    staged = rank.wrapped
    assert isinstance(staged, Staged), "the model is not made of stages"
    callbacks = PassCallbacks(
        loss.loss.forward, loss.loss.given, loss.of_last_stage, loss.of_output, loss.seed, enter
    )
    return Pipelined(rank.spec, rank.plan, rank.mesh, staged, callbacks)


def _require_sums(step: Pipeline, plan: Plan) -> None:
    """Of a model that is not built in the algebra does not know whether its ends are tied."""
    if step.shared and not plan.wrap.keeps_gradients_on_device:
        finding = (
            "not supported yet: sharded or offloaded gradients of a tied head, which "
            "are summed between "
        )
        finding += "the first and the last stage on the device before the update"
        raise refused(
            "placement", finding, "Use gradients `R` or `S`, or a model without a tied head."
        )


def _stage_plan(plan: Plan, stages: Stages, index: int) -> Plan:
    """Of one stage's part of the model: its units and its operators' roles."""
    stage, tensor = stages.all[index], plan.tensor
    if tensor is not None:
        roles = stage_roles(tensor.roles, stage, len(stages.all), stages.chain.ends)
        plan = plan.having(replace(tensor, roles=roles))
    return replace(plan, units=stage.units(plan.units))
