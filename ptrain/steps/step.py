"""The steps of a plan: what the interpreter does, in this order, as printable data. Nothing about a
wrapper is decided anywhere else, and what others must know of a step they ask it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from ptrain.spec.activations import Kept
from ptrain.spec.axis import Axis, without
from ptrain.spec.dials import GatherAfterUpdate, GradientSync, ReduceScatterVia, SyncPolicy
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Tier
from ptrain.spec.precision import Layout
from ptrain.spec.role import Fusions, Role, Roles
from ptrain.spec.schedule_file import ListedSchedule
from ptrain.spec.spec import Spec
from ptrain.steps.axes import PlanAxes
from ptrain.steps.context import ContextParallel
from ptrain.steps.experts import ExpertParallel
from ptrain.steps.kind import PlanStep, WrapStep
from ptrain.wording import Worded

Units = tuple[tuple[str, ...], ...]  # a wrap unit is the modules that are gathered together


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
class ChunkedLoss(PlanStep):
    """Logits and loss of `tokens` tokens at a time, so that all logits are never there at once:
    computed again in backward, or (`fused`) by torch's linear_cross_entropy."""

    tokens: int
    fused: bool = False


def chunked_loss(spec: Spec) -> ChunkedLoss | None:
    """None where the logits are whole."""
    if spec.loss.chunk is None:
        return None
    return ChunkedLoss(tokens=spec.loss.chunk, fused=spec.loss.fused)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradients(WrapStep):
    """One device: no data axis, nothing is wrapped."""

    def without(self, axis: Axis) -> LocalGradients:
        """Return itself, which is over no axis."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate(WrapStep):
    """Theta and G are R on every data axis: DistributedDataParallel over `axes`; buckets in the
    order in which gradients arrive, reduced (summed) after the last micro-batch: beside its
    backward pass (`overlaps`), or one by one when it is over.

    Omega is R, or with `zero_redundancy` S by torch's ZeroRedundancyOptimizer: whole tensors are
    spread over the ranks, and each owner broadcasts what it updated.
    """

    axes: tuple[Axis, ...]
    bucket_bytes: int
    overlaps: bool = True
    zero_redundancy: bool = False

    @property
    def summed_axes(self) -> tuple[Axis, ...]:
        return self.axes

    @property
    def policy(self) -> SyncPolicy:
        return SyncPolicy(gradients=GradientSync.LAST)

    def without(self, axis: Axis) -> Replicate | LocalGradients:
        """Return the same over the other axes."""
        axes = without(self.axes, (axis,))
        return replace(self, axes=axes) if axes else LocalGradients()

    @property
    def treats_equal_blocks_alike(self) -> bool:
        return not self.zero_redundancy

    def differing_axes(self, *, within_tp: bool) -> tuple[Axis, ...]:
        return self.axes if self.zero_redundancy else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard(WrapStep):
    """Theta is S*, Omega and G are S on `shard_axes` and all three R on `replicate_axes`: FSDP2's
    `fully_shard` on each unit and then the root (HSDP with a replicate axis).

    `materialized`: Theta is M; the shards are the optimizer's master copies, and a gathered unit
    is a cast of them. `prefetch`: units gathered ahead in both passes, None for torch's own (the
    next in backward). Without `overlaps` nothing is gathered ahead, and a reduction is awaited.
    """

    shard_axes: tuple[Axis, ...]
    replicate_axes: tuple[Axis, ...]
    sync: SyncPolicy
    reduce_scatter: ReduceScatterVia
    materialized: bool = False
    prefetch: int | None = None
    overlaps: bool = True

    @property
    def summed_axes(self) -> tuple[Axis, ...]:
        return (*self.replicate_axes, *self.shard_axes)

    @property
    def reduced_axes(self) -> tuple[Axis, ...]:
        return self.shard_axes

    def without(self, axis: Axis) -> FullyShard | LocalGradients:
        """Return the same over the other axes, of which some shards."""
        shards, replicas = without(self.shard_axes, (axis,)), without(self.replicate_axes, (axis,))
        assert shards or not replicas, "replicas alone are flat units (axes.data.form)"
        if not shards:
            return LocalGradients()
        return replace(self, shard_axes=shards, replicate_axes=replicas)

    @property
    def row_axes(self) -> tuple[Axis, ...]:
        return self.shard_axes

    @property
    def gathered_by_unit(self) -> tuple[Axis, ...]:
        return self.shard_axes

    @property
    def reduced_by_unit(self) -> tuple[Axis, ...]:
        return self.shard_axes

    def differing_axes(self, *, within_tp: bool) -> tuple[Axis, ...]:
        return self.shard_axes

    @property
    def policy(self) -> SyncPolicy:
        return self.sync

    @property
    def is_filled_as_shards(self) -> bool:
        return True

    @property
    def has_masters_for_parameters(self) -> bool:
        return self.materialized

    @property
    def gathers_parameters(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatUnits(WrapStep):
    """Any other tuple: each unit's tensors in one flat padded buffer, a handler per state.

    `axes` are all data axes, outermost first; `parameters`, `optimizer` and `gradients` those
    along which the state is kept as a shard, each on its tier. Theta is brought whole to the
    device by unit for use; `materialized`: it is M and made of Omega's master shards. G is
    reduced to shards over `gradients` in the backward pass; along `gathered_gradients` (S*) it is
    made whole again by unit for the update; `consumed`: it is M, and a unit is reduced and updated
    as soon as its gradients are complete. The update works on shards over `updated` (where Omega
    is S), on `update_tier`; along `optimizer` without `updated` (S*) Omega is gathered for it.
    """

    axes: tuple[Axis, ...]
    parameters: tuple[Axis, ...]
    optimizer: tuple[Axis, ...]
    gradients: tuple[Axis, ...]
    updated: tuple[Axis, ...]
    sync: SyncPolicy
    reduce_scatter: ReduceScatterVia
    parameters_tier: Tier = Tier.DEVICE
    optimizer_tier: Tier = Tier.DEVICE
    gradients_tier: Tier = Tier.DEVICE
    update_tier: Tier = Tier.DEVICE
    materialized: bool = False
    consumed: bool = False
    gathered_gradients: tuple[Axis, ...] = ()
    overlaps: bool = False
    prefetch: int = 0
    gather_after_update: GatherAfterUpdate = GatherAfterUpdate.BLOCKING
    path: str | None = None

    @property
    def summed_axes(self) -> tuple[Axis, ...]:
        return self.axes

    @property
    def gathered_by_unit(self) -> tuple[Axis, ...]:
        return self.parameters

    @property
    def reduced_by_unit(self) -> tuple[Axis, ...]:
        return self.gradients

    def differing_axes(self, *, within_tp: bool) -> tuple[Axis, ...]:
        return (*self.updated, *self.gathered_gradients) if within_tp else ()

    def without(self, axis: Axis) -> FlatUnits:
        """Return the same over the other axes."""
        return replace(
            self,
            axes=without(self.axes, (axis,)),
            parameters=without(self.parameters, (axis,)),
            optimizer=without(self.optimizer, (axis,)),
            gradients=without(self.gradients, (axis,)),
            updated=without(self.updated, (axis,)),
            gathered_gradients=without(self.gathered_gradients, (axis,)),
        )

    @property
    def first_differs(self) -> bool:
        """Whether a run's first step is another than those that follow: it learns in which order
        units are used, or no update before it has left anything to it."""
        late = self.gather_after_update is GatherAfterUpdate.NEXT_FORWARD
        return late or self.prefetch > 0

    @property
    def reduced_axes(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a in (*self.updated, *self.gathered_gradients))

    @property
    def policy(self) -> SyncPolicy:
        return self.sync

    @property
    def is_updated_in_backward(self) -> bool:
        return self.consumed

    @property
    def keeps_gradients_on_device(self) -> bool:
        return not self.consumed and self.gradients_tier is Tier.DEVICE

    @property
    def gathers_parameters(self) -> bool:
        off_device = self.parameters_tier is not Tier.DEVICE
        return bool(self.parameters) or self.materialized or off_device


Wrap = LocalGradients | Replicate | FullyShard | FlatUnits


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(PlanStep):
    """torch's own optimizer on the local shards (or on their master copies)."""

    optimizer: str
    layout: Layout
    scale_axes: tuple[Axis, ...] = ()  # of a scaled loss: along which overflows are looked for


Cut = Pipeline | Parallelize | ContextParallel | ExpertParallel
Step = CreateMesh | Cut | Keep | Wrap | ChunkedLoss | Accumulate | Clip | Update


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(PlanAxes, Worded):
    """What the interpreter does: `steps`, in the order of execution. Of each kind there is at most
    one, at hand by its name too; a mesh, a wrap, micro-batches and an update there always are.
    `units` are in the order of wrapping, the root ("",) last; `spec` is what it was made from."""

    spec: Spec = field(compare=False)
    steps: tuple[Step, ...]
    units: Units
    mesh: CreateMesh = field(init=False, compare=False)
    wrap: Wrap = field(init=False, compare=False)
    accumulate: Accumulate = field(init=False, compare=False)
    clip: Clip | None = field(init=False, compare=False)
    update: Update = field(init=False, compare=False)
    tensor: Parallelize | None = field(init=False, compare=False)
    context: ContextParallel | None = field(init=False, compare=False)
    experts: ExpertParallel | None = field(init=False, compare=False)
    pipeline: Pipeline | None = field(init=False, compare=False)
    keep: Keep | None = field(init=False, compare=False)
    loss: ChunkedLoss | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {_name_of(step): step for step in self.steps}
        assert len(by_name) == len(self.steps), "two steps of a kind"
        assert by_name.keys() >= _NEEDED, f"no {', '.join(sorted(_NEEDED - by_name.keys()))}"
        for name in _NAMES.values():
            object.__setattr__(self, name, by_name.get(name))

    def wrap_of(self, unit: Sequence[str]) -> Wrap:
        """Return how a unit of these modules is wrapped: one of experts as the axes say that do not
        give ranks other experts."""
        if self.experts is None or not self.experts.has(unit):
            return self.wrap
        return self.wrap.without(self.experts.axis)

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
    Keep: "keep",
    **dict.fromkeys((LocalGradients, Replicate, FullyShard, FlatUnits), "wrap"),
    ChunkedLoss: "loss",
    Accumulate: "accumulate",
    Clip: "clip",
    Update: "update",
}

_NEEDED = {"mesh", "wrap", "accumulate", "update"}


def _name_of(step: Step) -> str:
    return _NAMES[type(step)]
