"""The keys that a spec's file and the resolved spec have alike: each is declared here, or in its
section's class, and nowhere else."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypeVar

from ptrain.spec import slips
from ptrain.spec.context import ContextSpec
from ptrain.spec.dials import (
    STOCK_BUCKET_BYTES,
    WHOLE_BUCKET,
    GatherAfterUpdate,
    Overlap,
    ReduceScatterVia,
    SyncPolicy,
    UnitKind,
    UnitSize,
)
from ptrain.spec.frozen import FrozenSpec
from ptrain.spec.job import (
    CheckpointSpec,
    DataSpec,
    EvalSpec,
    LogSpec,
    OptimizerSpec,
    Timeout,
    TrainSpec,
)
from ptrain.spec.leaf import Choice, Dial, Either, Leaf, Numbers, Size, Text, Truth, Whole
from ptrain.spec.offload import Offload
from ptrain.spec.pipeline import PipelineSpec
from ptrain.spec.routing import Routing, RoutingText, plain_routing, read_routing
from ptrain.spec.section import Section, keys
from ptrain.spec.tensor import TensorSpec
from ptrain.spec.text import flow

_BUCKETS = {"per-tensor": 1, "size": STOCK_BUCKET_BYTES, "whole": WHOLE_BUCKET}


def _unit(written: str) -> UnitSize:
    """`block`, `sub-block`, `model` or `n blocks`; one block is `block`."""
    count, _, blocks = written.partition(" ")
    if not blocks:
        return UnitSize(kind=UnitKind(written))
    return UnitSize(kind=UnitKind.BLOCKS, count=int(count)) if int(count) > 1 else UnitSize()


def _bytes(written: int | str) -> int:
    return _BUCKETS.get(written, 0) if isinstance(written, str) else written


def _bucket(size: int) -> object:
    """Return a word where only a word says the size, else bytes."""
    return {1: "per-tensor", WHOLE_BUCKET: "whole"}.get(size, size)


@dataclass(frozen=True, kw_only=True, init=False, eq=False, repr=False)
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
    log: Annotated[LogSpec, Section(LogSpec, "what is printed and tracked")] = field(
        default_factory=LogSpec
    )
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
            slips={"gpu": "cuda"},
        ),
    ] = "auto"
    backend: Annotated[
        str,
        Choice(
            "how the ranks talk",
            {"auto": "nccl on GPUs, else gloo", "gloo": "over sockets", "nccl": "between GPUs"},
        ),
    ] = "auto"
    deterministic: Annotated[
        bool, Truth("only algorithms that repeat to the bit", aka=("use_deterministic_algorithms",))
    ] = False

    reduce_scatter: Annotated[
        ReduceScatterVia,
        Either(
            "how gradients are reduced to shards",
            "native or all_to_all",
            (
                Choice(
                    "",
                    {
                        "native": "the backend's own (on gloo an all-reduce; two ranks exchange)",
                        "all_to_all": "an exchange and a local sum: a true one on gloo",
                        "stock": "another word for native",
                    },
                ),
                Truth("true: all_to_all"),
            ),
            read=ReduceScatterVia,
            dial=Dial(free="native", other="all_to_all"),
        ),
    ] = ReduceScatterVia.NATIVE
    bucket_bytes: Annotated[
        int,
        Size(
            "what is reduced together where parameters stay whole: a bucket is reduced once this "
            "many bytes of gradients are there; per-tensor: one each; whole: one for all; size: "
            "25 MiB, DistributedDataParallel's first one 1 MiB. Flat units have buckets of whole "
            "blocks, which are no larger, but for a block that is",
            words=("size", "per-tensor", "whole"),
            low=2**10,
            high=2**40,
            example="25 MiB",
            key="bucket",
            read=_bytes,
            write=_bucket,
            dial=Dial(free="size", other="per-tensor"),
        ),
    ] = STOCK_BUCKET_BYTES
    unit: Annotated[
        UnitSize | None,
        Either(
            "what is gathered, reduced and freed together (the paper's s_unit); without: block, "
            "and of built-in models, where all states are R or S on the device and parameters R, "
            "as many neighbouring blocks as fill a `bucket`",
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
            null=True,
            dial=Dial(free="block", other="sub-block"),
        ),
    ] = None
    overlap: Annotated[
        Overlap | None,
        Choice(
            "whether gradients are reduced beside the backward pass; without: as the wrapper does "
            "by itself (backward; flat units whose gradients stay whole: none)",
            {
                "none": "a reduction is awaited before anything goes on; DDP's begin when "
                "backward is over, fully_shard gathers nothing ahead, and flat units are gathered "
                "before the next one is updated, unless gather_after_update says when",
                "backward": "a unit's or bucket's reduction runs while backward goes on",
            },
            slips={
                "true": "backward",
                "on": "backward",
                "yes": "backward",
                "false": "none",
                "off": "none",
                "no": "none",
            },
            read=Overlap,
            null=True,
            dial=Dial(free="none"),
        ),
    ] = None
    prefetch: Annotated[
        int | None,
        Whole(
            "units whose gathering is begun ahead of their use; without: 0, and for fully_shard "
            "torch's own (the next unit in backward)",
            0,
            10_000,
            null=True,
            dial=Dial(free=0),
        ),
    ] = None
    gather_after_update: Annotated[
        GatherAfterUpdate | None,
        Choice(
            "when parameters that were updated in parts become whole again; without: "
            "during-update where that takes no room (parameters on the device, ranks' parts in "
            "the order of their group), else, with overlap none and with gradients M, blocking",
            {
                "blocking": "after each unit's update, before the next unit's",
                "during-update": "begun after each unit's update, awaited when all are updated",
                "next-forward": "unit by unit, when each is used next",
            },
            read=GatherAfterUpdate,
            null=True,
            dial=Dial(free="blocking", other="during-update"),
        ),
    ] = None
    tensor: Annotated[TensorSpec, Section(TensorSpec, "how tp cuts operators")] = field(
        default_factory=TensorSpec
    )
    pipeline: Annotated[
        PipelineSpec, Section(PipelineSpec, "how pp cuts the model, and its schedule")
    ] = field(default_factory=PipelineSpec)
    context: Annotated[
        ContextSpec | None,
        Section(ContextSpec, "how cp reaches the tokens of other ranks", null=True),
    ] = None
    offload: Annotated[Offload, Section(Offload, "states that are not on the device")] = field(
        default_factory=Offload
    )
    frozen: Annotated[
        FrozenSpec,
        Section(
            FrozenSpec,
            "where frozen parameters are, of which there is Θ alone: a mode by data axis, or one "
            "for all of them",
            also=({"type": "string", "description": "the mode on all data axes"},),
        ),
    ] = field(default_factory=FrozenSpec)
    consistency_every: Annotated[
        int,
        Whole(
            "stop where ranks differ in what they hold alike, looked at every so many steps "
            "(0: never)",
            0,
            10**9,
        ),
    ] = 0
    verify_every: Annotated[
        int,
        Whole(
            "stop where one device, given the run's own state, has another loss or gradient, "
            "looked at every so many steps (0: never)",
            0,
            10**9,
        ),
    ] = 0
    overlap_shared_experts: Annotated[
        bool,
        Truth(
            "experts that all tokens go to compute while rows travel to other ranks' experts, and "
            "in backward while gradients travel back; without: when rows are back",
            aka=("moe_shared_expert_overlap",),
        ),
    ] = False
    routing: Annotated[
        Routing,
        RoutingText(
            "where tokens are taken to go in predictions and on fake ranks, where sizes depend on "
            "it; or FILE.json, counts of one's own or of a run; without: balanced",
            {
                "balanced": "every expert is chosen as often",
                "best": "tokens choose the experts of their own rank: nobody gets more than others",
                "worst": "all tokens choose the experts of one rank",
            },
            slips={"even": "balanced", "uniform": "balanced"},
            read=read_routing,
            write=plain_routing,
        ),
    ] = None


AnyKeys = TypeVar("AnyKeys", bound=Keys)


class DialKey(NamedTuple):
    """A key that the wrapper of units obeys, and not every one: where it stands in a file (`place`)
    and in a spec (`path`, names of fields), and its default."""

    place: str
    path: tuple[str, ...]
    leaf: Leaf
    default: object

    def of(self, spec: Keys) -> object:
        """Return the value that a spec has."""
        value: object = attrgetter(".".join(self.path))(spec)
        return value

    def set(self, spec: AnyKeys, written: object) -> AnyKeys:
        """Return the spec with another value, which is one as a file has it."""
        outer, *inner = self.path
        value: Any = self.leaf.take(written)
        if inner:
            value = replace(getattr(spec, outer), **{inner[0]: value})
        changed: Any = {outer: value}
        return replace(spec, **changed)

    @property
    def dial(self) -> Dial:
        assert self.leaf.dial is not None, "a dial"
        return self.leaf.dial

    @property
    def override(self) -> str:
        """Return the override that sets it to the value that every placement obeys."""
        return f"{self.place}={flow(self.dial.free)}"

    def is_free(self, spec: Keys) -> bool:
        """Return whether the key has the value that every placement obeys."""
        return self.of(spec) == self.leaf.take(self.dial.free)


@cache
def dials() -> tuple[DialKey, ...]:
    """The dials of the data axes, in the order of their declaration."""
    return tuple(_dials(Keys, (), ()))


def _dials(kind: type, above: tuple[str, ...], path: tuple[str, ...]) -> Iterator[DialKey]:
    for key, (spot, holds) in keys(kind).items():
        place, fields = (*above, key), (*path, spot.name)
        if isinstance(holds, Section):
            yield from _dials(holds.kind, place, fields)
        elif holds.dial is not None:
            yield DialKey(place=".".join(place), path=fields, leaf=holds, default=spot.default)
