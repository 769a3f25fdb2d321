"""The steps of a plan: what the interpreter does, in this order, as printable data. Nothing about a
wrapper is decided anywhere else, and what others must know of a step they ask it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from ptrain.facts.stages import Stage, Units
from ptrain.spec.activations import Kept
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import ListedSchedule, ScheduleName
from ptrain.spec.placement import SAMPLE_AXES, Axis
from ptrain.spec.precision import Layout, Matmul
from ptrain.spec.role import Fusions, Role, Roles
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
    """A is S or S* on `axis`: a rank has a slice of the tokens of every sample, and attention
    reaches those of the others. Theta, Omega and G are the wrap's, as on a data axis.

    `ulysses` neighbouring ranks exchange tokens for heads; `ring` such groups pass keys and values
    on (`ulysses * ring` is the degree). `is_balanced`: zigzag, each of the ring's places has an
    early and a late chunk; else slices are contiguous. `gathers`: A is S*, keys and values of the
    ring's places are gathered, in place of passed on. `sequence`: tokens of a sample.
    `has_documents`: samples are of several, and a mask says who attends to whom. Ranks draw the
    same random numbers, the masks of all tokens, of which each has its slice.
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
        """Of how many stretches a rank's tokens are, at most."""
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
    """The bias of every expert rises by `rate` where the tokens of a step chose it less often than
    the mean of its layer's experts, and falls by it where more often (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2; Wang et al. 2024, arXiv:2408.15664, algorithm 1).

    Choices are those of the global batch's tokens, `choices` in every layer, dropped ones too: each
    rank's are summed over `axes`, whose ranks have tokens of their own. All ranks keep the same
    biases.
    """

    rate: float
    choices: int
    axes: tuple[Axis, ...]


def balance_of(spec: Spec, axes: tuple[Axis, ...]) -> BalanceExperts | None:
    """Return the step of a spec whose gradients are summed over `axes`; None where no router has a
    bias."""
    shape = spec.model
    if not isinstance(shape, ModelShape) or shape.bias_update_rate is None:
        return None
    tokens = spec.batch.global_samples * spec.batch.sequence
    return BalanceExperts(
        rate=shape.bias_update_rate, choices=tokens * shape.experts_per_token, axes=axes
    )


# What the steps of a plan say of the axes of its mesh.


class _Mesh(Protocol):
    @property
    def axes(self) -> tuple[Axis, ...]: ...

    @property
    def degrees(self) -> tuple[int, ...]: ...


class PlanAxes:
    """The axes of a plan by what their ranks have."""

    __slots__ = ()
    spec: Spec
    steps: Sequence[PlanStep]
    mesh: _Mesh

    @property
    def sample_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks have samples of their own, the outermost first."""
        return tuple(axis for axis in SAMPLE_AXES if axis in self.mesh.axes)

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks run other parts of a layer, or it on other tokens, outermost
        first."""
        cutting = [axis for step in self.steps for axis in step.cutting_axes]
        return tuple(axis for axis in self.mesh.axes if axis in cutting)

    @property
    def tokens(self) -> int:
        """How many tokens of a sample a rank has in all of the model."""
        axes = [axis for step in self.steps for axis in step.token_axes]
        return self.spec.batch.sequence // self._ranks_over(axes)

    @property
    def boundary_slices(self) -> int:
        """Into how many slices the tokens of a sample are cut between the blocks."""
        return self._ranks_over([axis for step in self.steps for axis in step.boundary_axes])

    def _ranks_over(self, axes: list[Axis]) -> int:
        degrees = zip(self.mesh.axes, self.mesh.degrees, strict=True)
        return math.prod(degree for axis, degree in degrees if axis in axes)

    @property
    def drawing_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks draw random numbers of their own."""
        return (*self.sample_axes, *(axis for step in self.steps for axis in step.drawing_axes))

    @property
    def summed_axes(self) -> tuple[Axis, ...]:
        """The axes along which gradients are summed, the outermost first."""
        summed = [axis for step in self.steps for axis in step.summed_axes]
        return tuple(axis for axis in self.mesh.axes if axis in summed)

    @property
    def loss_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks have the same loss of the same samples."""
        return tuple(axis for step in self.steps for axis in step.loss_axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateMesh(PlanStep):
    """A DeviceMesh with these dimensions, outermost first; empty on one device."""

    axes: tuple[Axis, ...]
    degrees: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(PlanStep):
    """Theta, Omega and G are S on `axis`, by layer: a rank has some of the model's stages, and
    computes their micro-batches in its order of the schedule (`axes.pipeline.catalogue`).

    `rank_of` is the rank of each stage along the axis, `layers` the modules of each, first to last.
    The first stage has what is in front of the layers too, the last one what is behind them.
    `shared` are the tensors that both have (a tied head), by their names on the first and on the
    last: their gradients are summed over the two.
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
        """Return the stages of one rank along the axis, in the order of a forward pass."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    @property
    def drawing_axes(self) -> tuple[Axis, ...]:
        return (self.axis,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelize(PlanStep):
    """Theta, Omega and G are S on `axis`: each operator is cut as its role says, from outside.

    `is_sequence`: A is S or S*, between the sub-blocks a rank has its slice of the tokens;
    `is_saved_cut`: A is S*, and what a sub-block's operators save of their whole input is that
    slice, gathered again in backward. `loss_parallel`: the logits stay cut over the vocabulary.
    `is_naive`: every column operator takes its input and sums its gradient by itself. `fusions`: of
    a projection that is several, the lengths that are cut one by one.
    """

    axis: Axis
    roles: Roles
    fusions: Fusions = ()
    block_pattern: str = "blocks.*"
    is_sequence: bool = False
    is_saved_cut: bool = False
    loss_parallel: bool = True
    is_naive: bool = False

    @property
    def has_whole_ends(self) -> bool:
        """Whether ranks have all tokens in front of the blocks and behind them, not between."""
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
    """What blocks leave for their backward passes, by module name: those that are not plain.
    `path` is the folder of the file tier."""

    blocks: tuple[tuple[str, Kept], ...]
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize(PlanStep):
    """The matrix products of linear layers take fp8 factors.

    Attributes:
        recipe: The dtypes and scales of the factors.
        linears: The names of these layers.
        left_out: The names of the other layers with matrices, by the reason.
    """

    recipe: Matmul
    linears: tuple[str, ...]
    left_out: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(PlanStep):
    """The forward pass of each of `blocks` (names of modules) is one program of torch.compile, with
    what recomputation repeats in it. Hooks of wraps, which come later, stay outside."""

    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss(PlanStep):
    """Logits and loss of `tokens` tokens at a time, so that all logits are never there at once:
    computed again in backward, or (`fused`) by torch's linear_cross_entropy. The last `padding`
    logits are of no token."""

    tokens: int
    fused: bool = False
    padding: int = 0


def chunked_loss(spec: Spec) -> ChunkedLoss | None:
    """None where the logits are whole."""
    if spec.loss.chunk is None:
        return None
    return ChunkedLoss(tokens=spec.loss.chunk, fused=spec.loss.fused, padding=spec.vocab_padding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate(PlanStep):
    """K micro-batches per step, those of a pipeline too; each loss is a sum over tokens divided by
    the global number."""

    micro_batches: int


# A processor adds a tensor's squares one after the other: in fp32 that is off by 1e-5 at 1M
# elements and by 1e-2 at 100M. Longer tensors than this go row by row.
LONG_NORM, NORM_ROW = 2**14, 2**12  # elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(PlanStep):
    """One norm over all gradients; a scalar all-reduce per axis in `axes`, on which they are
    sharded when the optimizer sees them (on pp by layer), and in `operator_axes`, on which some
    tensors are cut and others whole: of these one rank's count."""

    max_norm: float
    axes: tuple[Axis, ...]
    operator_axes: tuple[Axis, ...] = ()

    @property
    def reduced_axes(self) -> tuple[Axis, ...]:
        """All axes that the square of the norm is summed over, in this order."""
        return (*self.operator_axes, *self.axes)

    @property
    def groups(self) -> tuple[tuple[Axis, ...], ...]:
        """Of which tensors there is a norm each: of those that are cut over all operator axes,
        then of those that are over the first of them alone, and at last of those that their ranks
        have alike."""
        return tuple(self.operator_axes[:count] for count in range(len(self.operator_axes), -1, -1))

    def group_of(self, cutting: Collection[Axis]) -> int:
        """Return the place among the groups of what these axes cut."""
        return self.groups.index(tuple(axis for axis in self.operator_axes if axis in cutting))


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(PlanStep):
    """torch's own optimizer on the local shards (or on their master copies)."""

    optimizer: str
    layout: Layout
    scale_axes: tuple[Axis, ...] = ()  # of a scaled loss: along which overflows are looked for


Cut = Pipeline | Parallelize | ContextParallel | ExpertParallel
OfBlocks = Quantize | Keep | Compile
Step = (
    CreateMesh | Cut | OfBlocks | Wrap | ChunkedLoss | Accumulate | Clip | Update | BalanceExperts
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(PlanAxes, Worded):
    """What the interpreter does: `steps`, in the order of execution. Of each kind there is at most
    one, at hand by its name too; a mesh, a wrap, micro-batches and an update there always are.
    `units` are in the order of wrapping, the root ("",) last; `spec` is what it was made from.
    `form` says by which parts of torch the wrap is executed, `stages` are those that pp cuts the
    model into, none without it, and `loads` say where rows of tokens go to experts, None where they
    go evenly."""

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
    loss: ChunkedLoss | None = field(init=False, compare=False)
    balance: BalanceExperts | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {_name_of(step): step for step in self.steps}
        assert len(by_name) == len(self.steps), "two steps of a kind"
        assert by_name.keys() >= _NEEDED, f"no {', '.join(sorted(_NEEDED - by_name.keys()))}"
        for name in _NAMES.values():
            object.__setattr__(self, name, by_name.get(name))

    @property
    def is_clipped_apart(self) -> bool:
        """Whether the norm is computed apart for operators that are cut and for others."""
        return self.clip is not None and bool(self.clip.operator_axes)

    @property
    def differing_axes(self) -> tuple[Axis, ...]:
        """The axes along which ranks store different numbers of bytes, or, of flat units within tp,
        have other pieces of tensors in their shards, of each of which there is a norm."""
        return self.wrap.differing_axes(within_tp=self.is_clipped_apart)

    def wrap_of(self, unit: Sequence[str]) -> Wrap:
        """Return how a unit of these modules is wrapped: one of experts as the axes say that do not
        give ranks other experts."""
        if self.experts is None or not self.is_apart(unit):
            return self.wrap
        return self.wrap.without(self.experts.axis)

    def is_apart(self, unit: Sequence[str]) -> bool:
        """Return whether a unit of these modules is one of experts."""
        return self.experts is not None and self.experts.has(unit)

    def having(self, *steps: Step) -> Self:
        """The plan with these in the place of its steps of their kinds."""
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
    ChunkedLoss: "loss",
    Accumulate: "accumulate",
    Clip: "clip",
    Update: "update",
    BalanceExperts: "balance",
}

_NEEDED = {"mesh", "wrap", "accumulate", "update"}


def _name_of(step: Step) -> str:
    return _NAMES[type(step)]
