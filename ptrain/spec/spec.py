"""The resolved spec: what every other part of ptrain reads. Made by `spec.load`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ptrain.costs import State
from ptrain.spec.axis import DATA_AXES, Axis, Factor
from ptrain.spec.batch import (
    Batch,
    GatherAfterUpdate,
    Overlap,
    ReduceScatterVia,
    SyncPolicy,
    UnitSize,
)
from ptrain.spec.cluster import Cluster
from ptrain.spec.keep import PLAIN, Kept
from ptrain.spec.model import ModelSpec
from ptrain.spec.pipeline import PipelineSpec
from ptrain.spec.placement import Distribution, Tier
from ptrain.spec.precision import Precision
from ptrain.spec.role import Roles

WHOLE_BUCKET = 2**40  # bytes: more than any model's gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """`clip` is the maximum global gradient norm, None for none. `decay_steps` 0: constant after
    warm-up, else cosine to `min_lr_ratio` of `lr`."""

    name: str = "adamw"  # adamw | sgd | muon
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0  # of sgd and muon
    warmup: int = 0
    decay_steps: int = 0
    min_lr_ratio: float = 0.1
    clip: float | None = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """`corpus` is a built-in name (python-docs, synthetic) or None with `path`, a token file."""

    corpus: str | None = "python-docs"
    path: str | None = None
    tokenizer: str = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    steps: int = 50
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSpec:
    """Every `every` steps (0: never) the mean loss of `batches` held-out global batches."""

    every: int = 0
    batches: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """`at_end`: save once, when the training is done. `every` steps: 0 for never."""

    at_end: bool = False
    every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeout:
    """Seconds: `init` for the meeting of the ranks, `step` for every collective after it."""

    init: float = 300.0
    step: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """`path`: the folder of the file tier (None: the system's temporary folder). `update`: whether
    optimizer state off the device is updated where it is (host) or streamed to the device."""

    path: str | None = None
    update: Tier = Tier.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """How operators are cut over tp. `loss_parallel`: logits stay cut over the vocabulary until the
    loss. `is_naive`: every column operator sums its input's gradient by itself. `roles` are what
    the spec says of a model that is not built in, by patterns of module names."""

    loss_parallel: bool = True
    is_naive: bool = False
    roles: Roles = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """A of this rank. `default` is every block's mode but of those in `by_block`: (first, last,
    mode), `last` None for all that follow. Of blocks that are M only every `every`-th one is, from
    the first on; the others are R. `budget`: bytes of peak memory, from which the policy follows;
    `is_open` until it is chosen, and M full stands for it.
    """

    default: Kept = PLAIN
    by_block: tuple[tuple[int, int | None, Kept], ...] = ()
    every: int = 1
    budget: int | None = None
    is_open: bool = False

    @property
    def modes(self) -> tuple[Kept, ...]:
        """Every mode that some block may have."""
        return (self.default, *(kept for _, _, kept in self.by_block))

    @property
    def tiers(self) -> frozenset[Tier]:
        """Where something of some block lies."""
        return frozenset(kept.tier for kept in self.modes)

    def of(self, blocks: int) -> tuple[Kept, ...]:
        """The mode of each of so many blocks."""
        found = [self.default] * blocks
        for first, last, kept in self.by_block:
            for index in range(first, blocks if last is None else last + 1):
                found[index] = kept
        recomputed = [index for index, kept in enumerate(found) if kept.policy is not None]
        for place, index in enumerate(recomputed):
            if place % self.every:
                found[index] = PLAIN
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """`chunk`: tokens of a micro-batch whose logits are there at once; None for all of them.
    `fused`: by torch's linear_cross_entropy."""

    chunk: int | None = None
    fused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A complete, resolved spec. `factors` outermost first, axes of degree 1 gone; the product of
    the degrees is the world size. `trivial_factors` are those of degree 1 that have a tuple, which
    is checked and means nothing else. `device` is cpu, cuda or auto; `backend` gloo, nccl or auto.
    `resolved` is the plain mapping that, written as YAML, loads to this very spec.
    """

    name: str
    model: ModelSpec
    factors: tuple[Factor, ...]
    batch: Batch
    precision: Precision = field(default_factory=Precision)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    data: DataSpec = field(default_factory=DataSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    cluster: Cluster | None = None
    sync: SyncPolicy = field(default_factory=SyncPolicy)
    reduce_scatter: ReduceScatterVia = ReduceScatterVia.NATIVE
    bucket_bytes: int = 25 * 2**20  # 1: a bucket per tensor; WHOLE_BUCKET: one for all
    unit: UnitSize = field(default_factory=UnitSize)
    overlap: Overlap | None = None  # None: as the wrap does by itself
    prefetch: int | None = None  # units gathered ahead; None: as the wrap does by itself
    gather_after_update: GatherAfterUpdate = GatherAfterUpdate.BLOCKING
    offload: Offload = field(default_factory=Offload)
    tensor: TensorSpec = field(default_factory=TensorSpec)
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    activations: ActivationSpec = field(default_factory=ActivationSpec)
    loss: LossSpec = field(default_factory=LossSpec)
    eval: EvalSpec = field(default_factory=EvalSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    timeout: Timeout = field(default_factory=Timeout)
    profile: tuple[int, ...] = ()
    log_every: int = 10
    consistency_every: int = 0  # steps; 0: the ranks' states are never compared
    deterministic: bool = False
    device: str = "auto"
    backend: str = "auto"
    resolved: dict[str, object] = field(default_factory=dict)
    trivial_factors: tuple[Factor, ...] = field(default=(), compare=False)

    @property
    def world_size(self) -> int:
        return math.prod(factor.degree for factor in self.factors)

    @property
    def data_degree(self) -> int:
        """Ranks that see different samples."""
        return math.prod(self.degree(axis) for axis in DATA_AXES)

    @property
    def may_be_on_cuda(self) -> bool:
        """Whether it may run on GPUs, by its device and else by its cluster's kind; where neither
        says it, it may."""
        if self.device != "auto":
            return self.device == "cuda"
        return self.cluster is None or self.cluster.kind != "cpu"

    def degree(self, axis: Axis) -> int:
        return next((factor.degree for factor in self.factors if factor.axis is axis), 1)

    def axes_where(self, state: State, *distributions: Distribution) -> tuple[Axis, ...]:
        """The mesh axes, outermost first, on which `state` has one of these distributions."""
        return tuple(
            factor.axis
            for factor in self.factors
            if factor.placement[state].distribution in distributions
        )
