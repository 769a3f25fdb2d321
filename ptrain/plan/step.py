"""The steps of a plan: what the interpreter will do, as printable data. Nothing about a wrapper
is decided anywhere else."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.spec.axis import Axis
from ptrain.spec.batch import ReduceScatterVia, SyncPolicy
from ptrain.spec.precision import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateMesh:
    """A DeviceMesh with these dimensions, outermost first; empty on one device."""

    axes: tuple[Axis, ...]
    degrees: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradients:
    """One device: no data axis, nothing is wrapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """Theta, Omega and G are R on every data axis: DistributedDataParallel over `axes`; buckets in
    the order in which gradients arrive, reduced (summed) after the last micro-batch."""

    axes: tuple[Axis, ...]
    bucket_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard:
    """Theta is S*, Omega and G are S on `shard_axes` and all three R on `replicate_axes`: FSDP2's
    `fully_shard` on each block and then the root (HSDP with a replicate axis)."""

    shard_axes: tuple[Axis, ...]
    replicate_axes: tuple[Axis, ...]
    sync: SyncPolicy
    reduce_scatter: ReduceScatterVia


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatUnits:
    """Any other tuple: each unit's tensors in one flat padded buffer, a handler per state.

    Theta is stored sharded over `parameters` and gathered by unit for use; G is reduced to shards
    over `gradients` in the backward pass; the update works on shards over `optimizer`. The axes
    are those on which the state is not R; `axes` are all data axes, outermost first.
    """

    axes: tuple[Axis, ...]
    parameters: tuple[Axis, ...]
    optimizer: tuple[Axis, ...]
    gradients: tuple[Axis, ...]
    sync: SyncPolicy
    reduce_scatter: ReduceScatterVia


Wrap = LocalGradients | Replicate | FullyShard | FlatUnits


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """K micro-batches per step; each loss is a sum over tokens divided by the global number."""

    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One norm over all gradients; a scalar all-reduce per axis in `axes`, on which they are
    sharded when the optimizer sees them."""

    max_norm: float
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """torch's own optimizer on the local shards (or on their master copies)."""

    optimizer: str
    layout: Layout


Step = CreateMesh | Wrap | Accumulate | Clip | Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """In the order of execution."""

    name: str
    mesh: CreateMesh
    wrap: Wrap
    accumulate: Accumulate
    clip: Clip | None
    update: Update
    units: tuple[str, ...]  # module names of the wrap units, blocks first, "" is the root

    @property
    def steps(self) -> tuple[Step, ...]:
        clip = (self.clip,) if self.clip else ()
        return (self.mesh, self.wrap, self.accumulate, *clip, self.update)
