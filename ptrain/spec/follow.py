"""What follows the mesh of a sweep, where the command line does not pin it: the global batch, which
was written for the mesh of the file, and the devices of its cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ptrain.spec.load import Source, load, parse_override, written
from ptrain.units import ceil_div

# The least batch that a mesh takes: micro x accumulate x data degree, whatever is written.
_LEAST = ("batch.global=1 tokens", "batch.round=none")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFollower:
    """A key that follows the mesh: the number that is written for it, and the one that the mesh
    takes."""

    key: str
    before: int
    after: int

    @property
    def override(self) -> str:
        """Return it as the command line has it."""
        return f"{self.key}={self.after}"


def followers(source: Source, overrides: Sequence[str]) -> tuple[MeshFollower, ...]:
    """Return what follows the mesh that the overrides make. Raises SpecError for faults of others.

    The global batch is what a training's convergence asks for, and accumulation fills the gap (the
    notes' rule): it stays where whole micro-batches make it up, else it grows until they do. With
    `accumulate` written it is that which stays.
    """
    pinned = {parse_override(override).route for override in overrides}
    batch = () if pinned & {("batch",), ("batch", "global")} else tuple(_batch(source, overrides))
    if pinned & {("cluster",), ("cluster", "devices")}:
        return batch
    spec = load(source, [*overrides, *(follower.override for follower in batch)]).spec
    cluster, ranks = spec.cluster, spec.world_size
    if cluster is None or cluster.devices >= ranks:
        return batch
    return (*batch, MeshFollower(key="cluster.devices", before=cluster.devices, after=ranks))


def _batch(source: Source, overrides: Sequence[str]) -> Iterator[MeshFollower]:
    """Yield the global batch where the mesh does not take it; tokens follow by themselves."""
    tree = written(source, overrides)
    samples = tree.at(("batch", "global"))
    if not isinstance(samples, int) or samples < 1:
        return
    least = load(source, [*overrides, *_LEAST]).spec.batch.global_samples
    is_fixed = tree.has("batch", "accumulate")
    grown = least if is_fixed else ceil_div(samples, least) * least
    if grown != samples:
        yield MeshFollower(key="batch.global", before=samples, after=grown)
