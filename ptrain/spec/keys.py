"""The keys that a spec's file and the resolved spec have alike: each is declared here, or in its
section's class, and nowhere else."""

from dataclasses import field
from typing import Annotated

from ptrain.spec import slips
from ptrain.spec.dials import (
    WHOLE_BUCKET,
    GatherAfterUpdate,
    Overlap,
    ReduceScatterVia,
    SyncPolicy,
    UnitKind,
    UnitSize,
)
from ptrain.spec.job import (
    CheckpointSpec,
    DataSpec,
    EvalSpec,
    LogSpec,
    OptimizerSpec,
    Timeout,
    TrainSpec,
)
from ptrain.spec.leaf import (
    Choice,
    Either,
    Numbers,
    Section,
    Size,
    Text,
    Truth,
    Whole,
    section,
)
from ptrain.spec.offload import Offload
from ptrain.spec.pipeline import PipelineSpec
from ptrain.spec.tensor import TensorSpec

_BUCKETS = {"per-tensor": 1, "whole": WHOLE_BUCKET}


def _unit(written: str) -> UnitSize:
    """`block`, `sub-block`, `model` or `n blocks`; one block is `block`."""
    count, _, blocks = written.partition(" ")
    if not blocks:
        return UnitSize(kind=UnitKind(written))
    return UnitSize(kind=UnitKind.BLOCKS, count=int(count)) if int(count) > 1 else UnitSize()


def _bytes(written: int | str) -> int:
    return _BUCKETS.get(written, 0) if isinstance(written, str) else written


def _bucket(size: int) -> object:
    names = {size: name for name, size in _BUCKETS.items()}
    return names.get(size, size)


@section
class Keys:
    """What a file says of a spec as ptrain reads it."""

    optimizer: Annotated[OptimizerSpec, Section(OptimizerSpec, "the update and its schedule")] = (
        field(default_factory=OptimizerSpec)
    )
    data: Annotated[DataSpec, Section(DataSpec, "what is read")] = field(default_factory=DataSpec)
    train: Annotated[TrainSpec, Section(TrainSpec, "how long, and from which seed")] = field(
        default_factory=TrainSpec
    )
    sync: Annotated[
        SyncPolicy, Section(SyncPolicy, "when accumulated gradients and gathered units move")
    ] = field(default_factory=SyncPolicy)
    eval: Annotated[EvalSpec, Section(EvalSpec, "loss on held-out text")] = field(
        default_factory=EvalSpec
    )
    checkpoint: Annotated[
        CheckpointSpec,
        Section(
            CheckpointSpec,
            "when the state is saved",
            also=({"const": "at_end", "description": "once, when the training is done"},),
        ),
    ] = field(default_factory=CheckpointSpec)
    timeout: Annotated[
        Timeout,
        Section(Timeout, "seconds until a silent rank counts as hung", also=({"type": "number"},)),
    ] = field(default_factory=Timeout)
    log: Annotated[LogSpec, Section(LogSpec, "what is printed")] = field(default_factory=LogSpec)
    profile: Annotated[
        tuple[int, ...], Numbers("steps whose trace is written", 0, 10**9, whole=True)
    ] = ()
    device: Annotated[
        str,
        Choice(
            "where the ranks compute",
            {
                "auto": "GPUs if every local rank has one, else the processor",
                "cpu": "the processor",
                "cuda": "one GPU per rank",
            },
        ),
    ] = "auto"
    backend: Annotated[
        str,
        Choice(
            "how the ranks talk",
            {"auto": "nccl on GPUs, else gloo", "gloo": "over sockets", "nccl": "between GPUs"},
        ),
    ] = "auto"
    deterministic: Annotated[bool, Truth("only algorithms that repeat to the bit")] = False

    reduce_scatter: Annotated[
        ReduceScatterVia,
        Either(
            "how gradients are reduced to shards",
            "native or all_to_all",
            (
                Choice(
                    "",
                    {
                        "native": "the backend's own (gloo executes it as an all-reduce)",
                        "all_to_all": "an exchange and a local sum: a true one on gloo",
                        "stock": "another word for native",
                    },
                ),
                Truth("true: all_to_all"),
            ),
            read=ReduceScatterVia,
        ),
    ] = ReduceScatterVia.NATIVE
    bucket_bytes: Annotated[
        int,
        Size(
            "DistributedDataParallel's buckets: a bucket is reduced once this many bytes of "
            "gradients are there; per-tensor: one each; whole: one for all; size: 25 MiB, the "
            "first one 1 MiB",
            words=("size", "per-tensor", "whole"),
            low=2**10,
            high=2**40,
            example="25 MiB",
            key="bucket",
            read=_bytes,
            write=_bucket,
        ),
    ] = 25 * 2**20
    unit: Annotated[
        UnitSize,
        Either(
            "what is gathered, reduced and freed together (the paper's s_unit)",
            "block, sub-block, n blocks or model",
            (
                Choice(
                    "",
                    {
                        "block": "one transformer block; the root keeps embedding and head",
                        "sub-block": "attention and feed-forward apart; the block keeps its norms",
                        "model": "everything at once",
                    },
                ),
                Text("so many neighbouring blocks", r"[1-9][0-9]{0,4} blocks"),
            ),
            hint=slips.unit,
            read=_unit,
            write=str,
        ),
    ] = UnitSize()
    overlap: Annotated[
        Overlap | None,
        Choice(
            "whether gradients are reduced beside the backward pass; without: as the wrapper does "
            "by itself (DDP and fully_shard: backward; flat units: none)",
            {
                "none": "a reduction is awaited before anything goes on; DDP's begin when "
                "backward is over, and fully_shard gathers nothing ahead",
                "backward": "a unit's or bucket's reduction runs while backward goes on",
            },
            slips={"true": "backward", "on": "backward", "false": "none", "off": "none"},
            read=Overlap,
        ),
    ] = None
    prefetch: Annotated[
        int | None,
        Whole(
            "units whose gathering is begun ahead of their use; without: 0, and for fully_shard "
            "torch's own (the next unit in backward)",
            0,
            10_000,
        ),
    ] = None
    gather_after_update: Annotated[
        GatherAfterUpdate,
        Choice(
            "when parameters that were updated in parts become whole again",
            {
                "blocking": "after each unit's update, before the next unit's",
                "during-update": "begun after each unit's update, awaited when all are updated",
                "next-forward": "unit by unit, when each is used next",
            },
            read=GatherAfterUpdate,
        ),
    ] = GatherAfterUpdate.BLOCKING
    tensor: Annotated[TensorSpec, Section(TensorSpec, "how tp cuts operators")] = field(
        default_factory=TensorSpec
    )
    pipeline: Annotated[
        PipelineSpec, Section(PipelineSpec, "how pp cuts the model, and its schedule")
    ] = field(default_factory=PipelineSpec)
    offload: Annotated[Offload, Section(Offload, "states that are not on the device")] = field(
        default_factory=Offload
    )
    consistency_every: Annotated[
        int,
        Whole(
            "stop where ranks differ in what they hold alike, looked at every so many steps "
            "(0: never)",
            0,
            10**9,
        ),
    ] = 0
