"""The steps of a plan, in the order in which the interpreter runs them, as printable data.

Nothing else decides how a model is wrapped. Other packages read the properties of a step instead of
its class.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from ptrain.facts.stages import Stage, Units
from ptrain.spec.activations import ActivationMode
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import ListedSchedule, ScheduleName
from ptrain.spec.placement import SAMPLE_AXES, Axis, Fusions, Role, Roles
from ptrain.spec.precision import Layout, Matmul
from ptrain.spec.spec import Spec
from ptrain.steps.experts import ExpertParallel, Loads
from ptrain.steps.wraps import (
    FlatUnits,
    Form,
    FullyShard,
    LocalGradients,
    PlanStep,
    Replicate,
    Wrap,
)
from ptrain.wording import Worded

# The step of the context axis.


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel(PlanStep):
    """Context parallelism: activations are S or S* on `axis`, so that each rank has a shard of the
    tokens of every sample.

    The wrap handles parameters, optimizer state and gradients, as on a data axis. All ranks draw
    the same random numbers, the masks of all tokens, and use their shard of them.

    Attributes:
        axis: The mesh axis `cp`.
        ulysses: Neighbouring ranks that exchange tokens for heads.
        ring: Groups of them that pass keys and values on; `ulysses * ring` is the degree.
        sequence: Tokens of a sample.
        is_balanced: Zigzag: each place of the ring has an early and a late chunk. Otherwise shards
            are contiguous.
        gathers: Activations are S*: keys and values are all-gathered instead of passed on.
        has_documents: A sample contains several documents, and a mask separates them.
    """

    axis: Axis
    ulysses: int
    ring: int
    sequence: int
    is_balanced: bool = False
    gathers: bool = False
    has_documents: bool = False

    @property
    def chunks(self) -> int:
        """The largest number of contiguous ranges of tokens on a rank."""
        return 2 if self.is_balanced and self.ulysses % 2 else 1

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        return (self.axis,)

    @property
    def token_axes(self) -> tuple[Axis, ...]:
        return (self.axis,)


# The step that moves the biases of routers.


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceExperts(PlanStep):
    """The update of the routers' biases, which balances the load of experts.

    An expert's bias increases by `rate` if the tokens of a step chose it less often than the mean
    of its layer's experts, and decreases by `rate` if more often (DeepSeek-V3, arXiv:2412.19437,
    section 2.1.2; Wang et al. 2024, arXiv:2408.15664, algorithm 1). All ranks keep the same biases.

    Attributes:
        rate: Change of a bias per step.
        choices: Choices of the global batch's tokens in each layer, including dropped ones.
        axes: The axes whose ranks have different tokens, over which choices are summed.
    """

    rate: float
    choices: int
    axes: tuple[Axis, ...]


def balance_of(spec: Spec, axes: tuple[Axis, ...]) -> BalanceExperts | None:
    """Return the step that balances experts, or None if no router has a bias.

    Args:
        spec: The spec.
        axes: The axes over which gradients are summed.
    """
    shape = spec.model
    if not isinstance(shape, ModelShape) or shape.bias_update_rate is None:
        return None
    tokens = spec.batch.global_samples * spec.batch.sequence
    return BalanceExperts(
        rate=shape.bias_update_rate, choices=tokens * shape.experts_per_token, axes=axes
    )


# The axes of a plan.


class _Mesh(Protocol):
    @property
    def axes(self) -> tuple[Axis, ...]: ...

    @property
    def degrees(self) -> tuple[int, ...]: ...


class PlanAxes:
    """The axes of a plan, grouped by the differences between their ranks."""

    __slots__ = ()
    spec: Spec
    steps: Sequence[PlanStep]
    mesh: _Mesh

    @property
    def sample_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks have different samples, outermost first."""
        return tuple(axis for axis in SAMPLE_AXES if axis in self.mesh.axes)

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks run different parts of a layer, or run it on different tokens,
        outermost first."""
        cutting = [axis for step in self.steps for axis in step.cutting_axes]
        return tuple(axis for axis in self.mesh.axes if axis in cutting)

    @property
    def tokens(self) -> int:
        """The tokens of a sample that a rank has throughout the model."""
        axes = [axis for step in self.steps for axis in step.token_axes]
        return self.spec.batch.sequence // self._ranks_over(axes)

    @property
    def boundary_slices(self) -> int:
        """The number of shards into which the tokens of a sample are split between blocks."""
        return self._ranks_over([axis for step in self.steps for axis in step.boundary_axes])

    def _ranks_over(self, axes: list[Axis]) -> int:
        degrees = zip(self.mesh.axes, self.mesh.degrees, strict=True)
        return math.prod(degree for axis, degree in degrees if axis in axes)

    @property
    def drawing_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks draw different random numbers."""
        return (*self.sample_axes, *(axis for step in self.steps for axis in step.drawing_axes))

    @property
    def summed_axes(self) -> tuple[Axis, ...]:
        """The axes over which gradients are summed, outermost first."""
        summed = [axis for step in self.steps for axis in step.summed_axes]
        return tuple(axis for axis in self.mesh.axes if axis in summed)

    @property
    def loss_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks have the same loss for the same samples."""
        return tuple(axis for step in self.steps for axis in step.loss_axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateMesh(PlanStep):
    """The DeviceMesh with these dimensions, outermost first; empty on a single device."""

    axes: tuple[Axis, ...]
    degrees: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(PlanStep):
    """Pipeline parallelism: parameters, optimizer state and gradients are S on `axis`, by layer.

    Each rank has some stages of the model, and runs their micro-batches in its order of the
    schedule (`axes.pipeline.catalogue`). The first stage also has the modules before the layers,
    and the last stage those after them.

    Attributes:
        axis: The mesh axis `pp`.
        schedule: The schedule.
        rank_of: The rank of each stage along the axis.
        layers: The modules of each stage, first to last.
        shared: Tensors that the first and the last stage share (a tied head), by their names on
            both. Their gradients are summed over the two stages.
    """

    axis: Axis
    schedule: ScheduleName | ListedSchedule
    rank_of: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]
    shared: tuple[tuple[str, str], ...] = ()

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of one rank along the axis, in the order of a forward pass.

        Args:
            rank: The rank's index along the axis, from 0.
        """
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    @property
    def drawing_axes(self) -> tuple[Axis, ...]:
        return (self.axis,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelize(PlanStep):
    """Tensor parallelism: parameters, optimizer state and gradients are S on `axis`, and the role
    of each module determines how its operators are sharded.

    Attributes:
        axis: The mesh axis `tp`.
        roles: The roles by module name pattern.
        fusions: The sizes of the parts of fused projections, which are sharded part by part.
        block_pattern: The pattern of the blocks' names.
        is_sequence: Activations are S or S*: between sub-blocks, a rank has a shard of the tokens
            (sequence parallelism).
        is_saved_cut: Activations are S*: operators save the shard of their input, and all-gather it
            again in backward.
        loss_parallel: Logits stay sharded over the vocabulary.
        is_naive: Each column-parallel operator takes its input and reduces its gradient separately.
        kv_ranks: The number of consecutive ranks that share a key-value head.
    """

    axis: Axis
    roles: Roles
    fusions: Fusions = ()
    block_pattern: str = "blocks.*"
    is_sequence: bool = False
    is_saved_cut: bool = False
    loss_parallel: bool = True
    is_naive: bool = False
    kv_ranks: int = 1

    @property
    def has_whole_ends(self) -> bool:
        """True if ranks have all tokens before and after the blocks, but a shard between them."""
        return any(role in (Role.FIRST_BLOCK, Role.LAST_BLOCK) for _, role in self.roles)

    @property
    def drawing_axes(self) -> tuple[Axis, ...]:
        return (self.axis,) if self.is_sequence and not self.has_whole_ends else ()

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        return (self.axis,)

    @property
    def boundary_axes(self) -> tuple[Axis, ...]:
        return (self.axis,) if self.is_sequence else ()

    @property
    def loss_axes(self) -> tuple[Axis, ...]:
        return (self.axis,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep(PlanStep):
    """The activation modes of the blocks that do not save all activations, by module name. `path`
    is the folder of the file tier."""

    blocks: tuple[tuple[str, ActivationMode], ...]
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize(PlanStep):
    """Matrix products take narrower factors.

    Attributes:
        recipe: The dtypes and scales of the factors.
        modules: The linear layers with fp8 factors, or the modules that run in autocast.
        left_out: The names of the other layers with matrices, by the reason.
    """

    recipe: Matmul
    modules: tuple[str, ...]
    left_out: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(PlanStep):
    """torch.compile of the forward pass of each of `blocks` (module names), recomputation included.
    Hooks of later wraps stay outside the compiled program.

    Of a block with experts only the attention is compiled, and next to a ring of cp only the
    feed-forward layer.
    """

    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss(PlanStep):
    """The loss of `tokens` tokens at a time, so that the logits of all tokens never exist at once.

    Logits are recomputed in backward or, with `fused`, computed by torch's linear_cross_entropy.
    The last `padding` logits belong to no token.
    """

    tokens: int
    fused: bool = False
    padding: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLoss(PlanStep):
    """torch.compile of the logits and the cross entropy of all tokens, as one program.

    The last `padding` logits belong to no token.
    """

    padding: int = 0


LossStep = ChunkedLoss | CompiledLoss


def loss_in_head(spec: Spec) -> LossStep | None:
    """Return the step that computes the loss in the head, or None if the model returns logits."""
    if spec.compile.has_loss:
        return CompiledLoss(padding=spec.vocab_padding)
    if spec.loss.chunk is None:
        return None
    return ChunkedLoss(tokens=spec.loss.chunk, fused=spec.loss.fused, padding=spec.vocab_padding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate(PlanStep):
    """Gradient accumulation over K micro-batches per step, also in a pipeline. Each loss is a sum
    over tokens divided by the global number of tokens."""

    micro_batches: int


# A CPU adds a tensor's squares one after the other, with a relative error in fp32 of 1e-5 at 1M
# elements and of 1e-2 at 100M. The norm of a longer tensor is therefore computed row by row.
LONG_NORM, NORM_ROW = 2**14, 2**12  # elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(PlanStep):
    """The clipping of the global gradient norm.

    Attributes:
        max_norm: The largest norm.
        axes: The axes that shard gradients at the update (pp by layer). The square of the norm is
            all-reduced over each.
        operator_axes: The axes on which some tensors are sharded and others are replicated.
            Replicated tensors count on one rank.
    """

    max_norm: float
    axes: tuple[Axis, ...]
    operator_axes: tuple[Axis, ...] = ()

    @property
    def reduced_axes(self) -> tuple[Axis, ...]:
        """All axes over which the square of the norm is summed, in this order."""
        return (*self.operator_axes, *self.axes)

    @property
    def groups(self) -> tuple[tuple[Axis, ...], ...]:
        """The groups of tensors with a separate norm, each given by the operator axes that shard
        them: all operator axes first, then the first one only, and last none."""
        # The axes are nested: experts are sharded over ep, or over ep within tp, but no tensor over
        # ep alone if tp shards operators too.
        return tuple(self.operator_axes[:count] for count in range(len(self.operator_axes), -1, -1))

    def group_of(self, cutting: Collection[Axis]) -> int:
        """Return the index of the group of tensors that these axes shard.

        Args:
            cutting: Axes that shard the tensor. Axes other than `operator_axes` are ignored.
        """
        return self.groups.index(tuple(axis for axis in self.operator_axes if axis in cutting))


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(PlanStep):
    """The optimizer step on the local shards, or on their master copies. `scale_axes` are the axes
    along which the gradients of a scaled loss are checked for overflow. `groups` describes the
    parameters with other hyperparameters; empty if there are none."""

    optimizer: str
    layout: Layout
    scale_axes: tuple[Axis, ...] = ()
    groups: str = ""


Cut = Pipeline | Parallelize | ContextParallel | ExpertParallel
OfBlocks = Quantize | Keep | Compile
Step = CreateMesh | Cut | OfBlocks | Wrap | LossStep | Accumulate | Clip | Update | BalanceExperts


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(PlanAxes, Worded):
    """The steps that the interpreter runs, in order.

    There is at most one step of each kind, which is also available as an attribute. A plan always
    has a mesh, a wrap, micro-batches and an update.

    Attributes:
        spec: The spec of the plan.
        steps: The steps in the order of execution.
        units: The wrap units in the order of wrapping; the root ("",) is last.
        form: The parts of torch that implement the wrap.
        stages: The pipeline stages; empty without pp.
        loads: The routing of rows to experts; None if it is even.
    """

    spec: Spec = field(compare=False)
    steps: tuple[Step, ...]
    units: Units
    form: Form = field(compare=False)
    stages: tuple[Stage, ...] = field(default=(), compare=False)
    loads: Loads | None = field(default=None, compare=False)
    mesh: CreateMesh = field(init=False, compare=False)
    wrap: Wrap = field(init=False, compare=False)
    accumulate: Accumulate = field(init=False, compare=False)
    clip: Clip | None = field(init=False, compare=False)
    update: Update = field(init=False, compare=False)
    tensor: Parallelize | None = field(init=False, compare=False)
    context: ContextParallel | None = field(init=False, compare=False)
    experts: ExpertParallel | None = field(init=False, compare=False)
    pipeline: Pipeline | None = field(init=False, compare=False)
    quantize: Quantize | None = field(init=False, compare=False)
    keep: Keep | None = field(init=False, compare=False)
    compiled: Compile | None = field(init=False, compare=False)
    loss: LossStep | None = field(init=False, compare=False)
    balance: BalanceExperts | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {_name_of(step): step for step in self.steps}
        assert len(by_name) == len(self.steps), "two steps of a kind"
        assert by_name.keys() >= _NEEDED, f"no {', '.join(sorted(_NEEDED - by_name.keys()))}"
        for name in _NAMES.values():
            # Attributes, because predictions read single steps many thousand times in a search.
            object.__setattr__(self, name, by_name.get(name))

    @property
    def has_programs(self) -> bool:
        """True if torch.compile compiles a part of the model."""
        return self.compiled is not None or isinstance(self.loss, CompiledLoss)

    @property
    def is_clipped_apart(self) -> bool:
        """True if sharded and replicated operators have separate gradient norms."""
        return self.clip is not None and bool(self.clip.operator_axes)

    @property
    def differing_axes(self) -> tuple[Axis, ...]:
        """The axes along which ranks store different numbers of bytes. For flat units within tp,
        also the axes along which shards have different pieces of tensors, each with a separate
        norm."""
        return self.wrap.differing_axes(within_tp=self.is_clipped_apart)

    def wrap_of(self, unit: Sequence[str]) -> Wrap:
        """Return the wrap of a unit of these modules. Units of experts are not wrapped over the
        axes whose ranks have different experts."""
        if self.experts is None or not self.is_apart(unit):
            return self.wrap
        return self.wrap.drop_axis(self.experts.axis)

    def is_apart(self, unit: Sequence[str]) -> bool:
        """Return True if a unit of these modules contains experts."""
        return self.experts is not None and self.experts.has_experts(unit)

    def replace_steps(self, *steps: Step) -> Self:
        """Return the plan with these steps instead of its steps of the same kinds."""
        given = {_name_of(step): step for step in steps}
        kept = tuple(given.pop(_name_of(step), step) for step in self.steps)
        assert not given, f"no step of the kind of {', '.join(given)}"
        return replace(self, steps=kept)


_NAMES: dict[type[PlanStep], str] = {
    CreateMesh: "mesh",
    Pipeline: "pipeline",
    Parallelize: "tensor",
    ContextParallel: "context",
    ExpertParallel: "experts",
    Quantize: "quantize",
    Keep: "keep",
    Compile: "compiled",
    **dict.fromkeys((LocalGradients, Replicate, FullyShard, FlatUnits), "wrap"),
    **dict.fromkeys((ChunkedLoss, CompiledLoss), "loss"),
    Accumulate: "accumulate",
    Clip: "clip",
    Update: "update",
    BalanceExperts: "balance",
}

_NEEDED = {"mesh", "wrap", "accumulate", "update"}


def _name_of(step: Step) -> str:
    return _NAMES[type(step)]
