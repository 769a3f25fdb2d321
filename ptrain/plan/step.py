"""The steps of a plan: what the interpreter will do, as printable data. Nothing about a wrapper
is decided anywhere else."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.spec.axis import Axis
from ptrain.spec.batch import GatherAfterUpdate, ReduceScatterVia, SyncPolicy
from ptrain.spec.keep import Kept
from ptrain.spec.orders import ListedSchedule
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Tier
from ptrain.spec.precision import Layout
from ptrain.spec.role import Roles

Units = tuple[tuple[str, ...], ...]  # a wrap unit is the modules that are gathered together


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateMesh:
    """A DeviceMesh with these dimensions, outermost first; empty on one device."""

    axes: tuple[Axis, ...]
    degrees: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Theta, Omega and G are S on `axis`, by layer: a rank has some of the model's stages, and
    computes their micro-batches in its order of the schedule (`axes.pipeline.known`).

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
        """Of one rank along the axis, in the order of a forward pass."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelize:
    """Theta, Omega and G are S on `axis`: each operator is cut as its role says, from outside, by
    torch's parallel styles.

    `is_sequence`: A is S or S*, between the sub-blocks a rank has its slice of the tokens;
    `is_saved_cut`: A is S*, and what a sub-block's operators save of their whole input is that
    slice, gathered again in backward. `loss_parallel`: the logits stay cut over the vocabulary.
    `is_naive`: every column operator takes its input by itself, and sums its gradient by itself.
    """

    axis: Axis
    roles: Roles
    block_pattern: str = "blocks.*"
    is_sequence: bool = False
    is_saved_cut: bool = False
    loss_parallel: bool = True
    is_naive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What blocks leave for their backward passes, by module name: those that are not plain.
    `path` is the folder of the file tier."""

    blocks: tuple[tuple[str, Kept], ...]
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss:
    """Logits and loss of `tokens` tokens at a time, so that all logits are never there at once:
    computed again in backward, or (`fused`) by torch's linear_cross_entropy."""

    tokens: int
    fused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradients:
    """One device: no data axis, nothing is wrapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatUnits:
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


Wrap = LocalGradients | Replicate | FullyShard | FlatUnits


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """K micro-batches per step, those of a pipeline too; each loss is a sum over tokens divided by
    the global number."""

    micro_batches: int


# A processor adds a tensor's squares one after the other: in fp32 that is off by 1e-5 at 1M
# elements and by 1e-2 at 100M. Longer tensors than this go row by row.
LONG_NORM, NORM_ROW = 2**14, 2**12  # elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One norm over all gradients; a scalar all-reduce per axis in `axes`, on which they are
    sharded when the optimizer sees them (on pp by layer), and in `operator_axes`, on which some
    tensors are cut and others whole: of these one rank's count."""

    max_norm: float
    axes: tuple[Axis, ...]
    operator_axes: tuple[Axis, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """torch's own optimizer on the local shards (or on their master copies)."""

    optimizer: str
    layout: Layout
    scale_axes: tuple[Axis, ...] = ()  # of a scaled loss: along which overflows are looked for


Step = CreateMesh | Pipeline | Parallelize | Keep | Wrap | ChunkedLoss | Accumulate | Clip | Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """In the order of execution."""

    name: str
    mesh: CreateMesh
    wrap: Wrap
    accumulate: Accumulate
    clip: Clip | None
    update: Update
    units: Units  # in the order of wrapping: blocks first, the root ("",) last
    tensor: Parallelize | None = None
    pipeline: Pipeline | None = None
    keep: Keep | None = None
    loss: ChunkedLoss | None = None

    @property
    def steps(self) -> tuple[Step, ...]:
        steps = (
            self.mesh,
            self.pipeline,
            self.tensor,
            self.keep,
            self.wrap,
            self.loss,
            self.accumulate,
            self.clip,
            self.update,
        )
        return tuple(step for step in steps if step is not None)
