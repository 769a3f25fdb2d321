"""The keys that a spec's file and the resolved spec have in common. Each is declared once, here or
in the class of its section."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from ptrain.spec import slips
from ptrain.spec.batch import ContextSpec
from ptrain.spec.dials import (
    STOCK_BUCKET_BYTES,
    WHOLE_BUCKET,
    Compiled,
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
    MODE_MEANINGS,
    Boolean,
    Choice,
    Dial,
    Either,
    FreeMapping,
    Integer,
    Leaf,
    ModeText,
    Numbers,
    Section,
    Size,
    Text,
    grammar_dataclass,
    iter_keys,
    reject,
    section_dataclass,
)
from ptrain.spec.pipeline import PipelineSpec
from ptrain.spec.placement import DATA_AXES, GIVEN, Axis, Mode, Role, Roles, Tier
from ptrain.spec.precision import Quantization
from ptrain.spec.routing import FILE, Routing, RoutingText, plain_routing, read_routing
from ptrain.spec.slips import TIER_SLIPS
from ptrain.spec.text import to_flow_yaml
from ptrain.word import words_of

PAIRED, NAIVE = "paired", "naive"
CUT, FOLDED = "cut", "folded"


def _parse_plan(written: str | Mapping[str, str]) -> str | Roles:
    """Return the name of a plan, or the roles of a model's modules."""
    if isinstance(written, str):
        return written
    return tuple((name, Role(role)) for name, role in written.items()) or PAIRED


@section_dataclass
class TensorSpec:
    """The sharding of operators over tp."""

    plan: Annotated[
        str | Roles,
        Either(
            "Parallel plan of built-in models, or a mapping from module names to roles for your"
            " own model.",
            "paired or naive, or a mapping of module names to roles",
            (
                Choice(
                    "",
                    {
                        PAIRED: "column- and row-parallel layers in pairs (Megatron): two all-"
                        "reduces per block in forward, two in backward",
                        NAIVE: "every column-parallel layer reduces its input gradient separately",
                    },
                ),
                FreeMapping(
                    "", values=Choice("", {str(role): about for role, about in GIVEN.items()})
                ),
            ),
            read=_parse_plan,
            write=lambda plan: (
                plan if isinstance(plan, str) else {name: role.value for name, role in plan}
            ),
        ),
    ] = PAIRED
    loss_parallel: Annotated[
        bool, Boolean("Keep logits sharded over the vocabulary until the loss is computed.")
    ] = True
    experts: Annotated[
        str,
        Choice(
            "How tensor-parallel ranks share the experts of an ep rank.",
            {
                CUT: "each rank holds a shard of every expert",
                FOLDED: "each rank of ep × tp holds some experts in full and routes its shard "
                "of the tokens",
            },
        ),
    ] = CUT
    asynchronous: Annotated[
        bool,
        Boolean(
            "Split collectives into pieces that overlap with matrix products (async TP).",
            supported=(False,),
            reason="; torch supports it only on CUDA, where it is not tested",
        ),
    ] = False

    @property
    def is_naive(self) -> bool:
        """True if every column-parallel operator reduces its input's gradient separately."""
        return self.plan == NAIVE

    @property
    def is_folded(self) -> bool:
        """True if ranks of tp have different experts, in addition to the ranks of ep."""
        return self.experts == FOLDED

    @property
    def roles(self) -> Roles:
        """The roles of a user-defined model's modules, by name pattern; empty for a named plan."""
        return () if isinstance(self.plan, str) else self.plan


@section_dataclass
class Offload:
    """The tier of mode O, and the processor that updates offloaded optimizer state."""

    tier: Annotated[
        Tier | None,
        Choice(
            "Memory tier that mode O stands for in this spec.",
            {"host": "S@host: a shard in host memory", "file": "S@file: a shard in a file"},
            slips=TIER_SLIPS,
            read=Tier,
        ),
    ] = None
    path: Annotated[
        str | None,
        Text("Folder of the offload files (NVMe). Default: the folder for temporary files."),
    ] = None
    update: Annotated[
        Tier,
        Choice(
            "Where optimizer state that is not on the device is updated.",
            {
                "host": "on the CPU; S* states that are gathered for the update still move to "
                "the device",
                "device": "on the device: states are copied there and back, unit by unit",
            },
            slips=TIER_SLIPS,
            read=Tier,
        ),
    ] = Tier.HOST


_NO_PLACE = ("S", "M")  # no whole values to use, and no masters to make them of
_TUPLE = (
    "frozen parameters have no optimizer state, gradients or activations, so their "
    "placement is one mode"
)


@grammar_dataclass
class FrozenMode(ModeText):
    """The mode of frozen parameters on one axis. They have no other state."""

    modes: ClassVar[Mapping[str, str]] = {
        mode: about for mode, about in MODE_MEANINGS.items() if mode not in _NO_PLACE
    }

    def describe_values(self) -> str:
        return "a mode of Θ: R, S* or O, or with a tier (R@host, S*@file)"

    def convert(self, value: Any) -> object:
        if isinstance(value, str) and "," in value:
            reject(f"{value!r} has several modes", f"{_TUPLE}. Use `{value.partition(',')[0]}`.")
        if value == "M":
            reject(
                "M is cast from the master copy in the optimizer state, and frozen parameters have "
                "none",
                "Use `S*`, `R` or `O`.",
            )
        return super().convert(value)

    def suggest(self, value: Any) -> str:
        return "Did you mean `S*`?" if value == "S" else super().suggest(value)


@section_dataclass
class FrozenSpec:
    """The storage of frozen weights, and the modes of frozen parameters by axis. Axes without a
    mode place them like trained parameters."""

    dtype: Annotated[
        Quantization | None,
        Choice(
            "Storage of the frozen weights of linear layers within blocks, which are dequantized "
            "for use (QLoRA). Default: the dtype of the parameters.",
            words_of(Quantization),
            slips={"int4": "nf4", "fp4": "nf4", "4bit": "nf4", "8bit": "int8"},
            accepts_null=True,
            read=Quantization,
            allows_auto_micro=False,
        ),
    ] = None

    dp_replicate: Annotated[
        Mode | None,
        FrozenMode(
            "Mode of frozen parameters on dp_replicate. Default: as for trained parameters."
        ),
    ] = None
    dp_shard: Annotated[
        Mode | None,
        FrozenMode("Mode of frozen parameters on dp_shard. Default: as for trained parameters."),
    ] = None

    @property
    def is_written(self) -> bool:
        """Return True if the spec sets the storage or a mode."""
        return self.dtype is not None or self.dp_replicate is not None or self.dp_shard is not None

    def mode_on(self, axis: Axis) -> Mode | None:
        """Return the mode that the spec sets for an axis, or None."""
        mode: Mode | None = getattr(self, axis.value, None)
        return mode

    def modes_by_axis(self) -> dict[Axis, Mode]:
        """Return the modes that the spec sets, by axis."""
        modes = {Axis(spot.name): getattr(self, spot.name) for spot in fields(self)[1:]}
        return {axis: mode for axis, mode in modes.items() if mode is not None}


_BUCKETS = {"per-tensor": 1, "size": STOCK_BUCKET_BYTES, "whole": WHOLE_BUCKET}


def _parse_reduce_scatter(written: str | bool) -> ReduceScatterVia:
    if isinstance(written, bool):
        return ReduceScatterVia.ALL_TO_ALL if written else ReduceScatterVia.NATIVE
    return ReduceScatterVia.NATIVE if written == "stock" else ReduceScatterVia(written)


def _parse_compile(written: str | bool) -> Compiled:
    if isinstance(written, bool):
        return Compiled.BLOCK if written else Compiled.NONE
    return Compiled(written)


def _on_data_axes(mode: object, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Expand one mode of frozen parameters to every data axis of the mesh, or to dp_shard if the
    mesh has none."""
    mesh = spec.get("mesh")
    if not isinstance(mode, str) or not isinstance(mesh, dict):
        return {}
    axes = [axis.value for axis in DATA_AXES if mesh.get(axis.value, 1) != 1]
    return dict.fromkeys(axes or [Axis.DP_SHARD.value], mode)


def _parse_unit(written: str) -> UnitSize:
    """Parse `block`, `sub-block`, `ends`, `model` or `n blocks`; `1 blocks` is `block`."""
    count, _, blocks = written.partition(" ")
    if not blocks:
        return UnitSize(kind=UnitKind(written))
    return UnitSize(kind=UnitKind.BLOCKS, count=int(count)) if int(count) > 1 else UnitSize()


@dataclass(frozen=True, kw_only=True, init=False, eq=False, repr=False)
class Keys:
    """The keys of a spec that are read without another resolution."""

    optimizer: Annotated[
        OptimizerSpec, Section(OptimizerSpec, "The optimizer and its learning-rate schedule.")
    ] = field(default_factory=OptimizerSpec)
    data: Annotated[DataSpec, Section(DataSpec, "The training data.")] = field(
        default_factory=DataSpec
    )
    train: Annotated[TrainSpec, Section(TrainSpec, "Length and seed of the training.")] = field(
        default_factory=TrainSpec
    )
    sync: Annotated[
        SyncPolicy,
        Section(SyncPolicy, "When accumulated gradients are reduced and gathered units are freed."),
    ] = field(default_factory=SyncPolicy)
    eval: Annotated[EvalSpec, Section(EvalSpec, "Evaluation on held-out text.")] = field(
        default_factory=EvalSpec
    )
    checkpoint: Annotated[
        CheckpointSpec,
        Section(
            CheckpointSpec,
            "When checkpoints are saved.",
            other_schemas=(
                {"const": "at_end", "description": "Save a checkpoint after the last step."},
            ),
            alone=lambda value, _: {"at_end": True} if value == "at_end" else {},
        ),
    ] = field(default_factory=CheckpointSpec)
    timeout: Annotated[
        Timeout,
        Section(
            Timeout,
            "Timeouts in seconds, after which a silent rank counts as hung.",
            other_schemas=({"type": "number"},),
            alone=lambda value, _: {"step": value} if type(value) in (int, float) else {},
        ),
    ] = field(default_factory=Timeout)
    log: Annotated[LogSpec, Section(LogSpec, "What is printed and tracked.")] = field(
        default_factory=LogSpec
    )
    profile: Annotated[
        tuple[int, ...],
        Numbers("Steps of which a profiler trace is written.", 0, 10**9, is_integer=True),
    ] = ()
    device: Annotated[
        str,
        Choice(
            "Device type of the ranks; `auto` uses GPUs if each rank has one.",
            {
                "auto": "GPUs if every local rank has one, otherwise the CPU",
                "cpu": "the CPU",
                "cuda": "one GPU per rank",
            },
            slips={"gpu": "cuda"},
        ),
    ] = "auto"
    backend: Annotated[
        str,
        Choice(
            "Process-group backend; `auto` follows the device.",
            {"auto": "nccl on GPUs, otherwise gloo", "gloo": "sockets, on CPUs", "nccl": "GPUs"},
        ),
    ] = "auto"
    deterministic: Annotated[
        bool, Boolean("Use only deterministic algorithms.", aka=("use_deterministic_algorithms",))
    ] = False
    compile: Annotated[
        Compiled,
        Either(
            "Compile blocks, or the logits and the loss, with torch.compile.",
            "none, block, loss or all",
            (
                Choice("", words_of(Compiled)),
                Boolean("true: block"),
            ),
            read=_parse_compile,
            allows_auto_micro=False,
        ),
    ] = Compiled.NONE

    reduce_scatter: Annotated[
        ReduceScatterVia,
        Either(
            "How gradients are reduced to shards.",
            "native or all_to_all",
            (
                Choice(
                    "",
                    {
                        "native": "the backend's reduce-scatter (on gloo an all-reduce; an "
                        "exchange between two ranks)",
                        "all_to_all": "an all-to-all and a local sum: a true reduce-scatter on "
                        "gloo",
                        "stock": "alias of native",
                    },
                ),
                Boolean("true: all_to_all"),
            ),
            read=_parse_reduce_scatter,
            dial=Dial(free="native", other="all_to_all"),
        ),
    ] = ReduceScatterVia.NATIVE
    bucket_bytes: Annotated[
        int,
        Size(
            "Size of the buckets in which replicated gradients are reduced: a number of bytes, "
            "`size` (25 MiB, the first one 1 MiB, as DistributedDataParallel), `per-tensor`, or"
            " `whole` (one bucket). Buckets of flat units consist of full blocks.",
            words=("size", "per-tensor", "whole"),
            low=2**10,
            high=2**40,
            example="25 MiB",
            key="bucket",
            read=lambda written: _BUCKETS.get(written, 0) if isinstance(written, str) else written,
            write=lambda size: {1: "per-tensor", WHOLE_BUCKET: "whole"}.get(size, size),
            dial=Dial(free="size", other="per-tensor"),
        ),
    ] = STOCK_BUCKET_BYTES
    unit: Annotated[
        UnitSize | None,
        Either(
            "Modules that are gathered, reduced and freed together (FSDP unit). Default: block;"
            " for built-in models with replicated parameters, as many blocks as fill a "
            "`bucket`.",
            "block, sub-block, ends, n blocks or model",
            (
                Choice(
                    "",
                    {
                        "block": "one transformer block; embedding and head belong to the root",
                        "sub-block": "attention and feed-forward separately; norms belong to "
                        "the block",
                        "ends": "one transformer block; the embedding; the last norm with the "
                        "head, as in torchtitan",
                        "model": "the full model",
                    },
                ),
                Text("so many neighbouring blocks", r"[1-9][0-9]{0,4} blocks"),
            ),
            hint=slips.suggest_unit,
            read=_parse_unit,
            write=str,
            accepts_null=True,
            dial=Dial(free="block", other="sub-block"),
        ),
    ] = None
    overlap: Annotated[
        Overlap | None,
        Choice(
            "Whether gradient reduction overlaps with the backward pass. Default: backward; "
            "none for flat units with replicated gradients.",
            words_of(Overlap),
            slips={
                "true": "backward",
                "on": "backward",
                "yes": "backward",
                "false": "none",
                "off": "none",
                "no": "none",
            },
            read=Overlap,
            accepts_null=True,
            dial=Dial(free="none"),
        ),
    ] = None
    prefetch: Annotated[
        int | None,
        Integer(
            "Number of units that are gathered ahead of their use. Default: 1 for flat units, but 0"
            " in a pipeline or without overlap; for fully_shard, torch's own prefetching (the next"
            " unit in backward).",
            0,
            10_000,
            accepts_null=True,
            dial=Dial(free=0),
        ),
    ] = None
    gather_after_update: Annotated[
        GatherAfterUpdate | None,
        Choice(
            "When parameters that were updated in shards are gathered again. Default: during-"
            "update if that needs no extra memory, otherwise blocking.",
            words_of(GatherAfterUpdate),
            read=GatherAfterUpdate,
            accepts_null=True,
            dial=Dial(free="blocking", other="during-update"),
        ),
    ] = None
    tensor: Annotated[TensorSpec, Section(TensorSpec, "Options of tensor parallelism.")] = field(
        default_factory=TensorSpec
    )
    pipeline: Annotated[PipelineSpec, Section(PipelineSpec, "Options of pipeline parallelism.")] = (
        field(default_factory=PipelineSpec)
    )
    context: Annotated[
        ContextSpec | None,
        Section(ContextSpec, "Options of context parallelism.", accepts_null=True),
    ] = None
    offload: Annotated[Offload, Section(Offload, "States that are not on the device.")] = field(
        default_factory=Offload
    )
    frozen: Annotated[
        FrozenSpec,
        Section(
            FrozenSpec,
            "Placement of frozen parameters: a mode per data axis, or one mode for all data axes.",
            other_schemas=({"type": "string", "description": "the mode on all data axes"},),
            alone=_on_data_axes,
        ),
    ] = field(default_factory=FrozenSpec)
    consistency_every: Annotated[
        int,
        Integer(
            "Steps between checks that replicated state is identical on all ranks; a difference"
            " stops the training. 0 disables them.",
            0,
            10**9,
        ),
    ] = 0
    verify_every: Annotated[
        int,
        Integer(
            "Steps between replays of one step on a single device; a different loss or gradient"
            " stops the training. 0 disables them.",
            0,
            10**9,
        ),
    ] = 0
    overlap_shared_experts: Annotated[
        bool,
        Boolean(
            "Compute shared experts while tokens travel to the experts of other ranks, and "
            "overlap their backward with the return of gradients.",
            aka=("moe_shared_expert_overlap",),
        ),
    ] = False
    routing: Annotated[
        Routing,
        RoutingText(
            "Routing assumed in predictions and on fake ranks, where sizes depend on it: "
            "balanced, best, worst, or a JSON file with token counts, for example of a run. "
            "Default: balanced.",
            {
                "balanced": "every expert receives the same number of tokens",
                "best": "tokens select experts of their local rank; all ranks receive the same "
                "number",
                "worst": "all tokens select experts of one rank",
            },
            slips={"even": "balanced", "uniform": "balanced"},
            read=read_routing,
            file=FILE,
            write=plain_routing,
        ),
    ] = None


AnyKeys = TypeVar("AnyKeys", bound=Keys)


class DialKey(NamedTuple):
    """A key that the wrapper of units must support.

    Attributes:
        place: The dotted key in a file.
        path: The field names in a spec.
        leaf: The kind of value.
        default: The default value.
    """

    place: str
    path: tuple[str, ...]
    leaf: Leaf
    default: object

    def read_value(self, spec: Keys) -> object:
        """Return the value of the key in a spec."""
        value: object = attrgetter(".".join(self.path))(spec)
        return value

    def replace_value(self, spec: AnyKeys, written: object) -> AnyKeys:
        """Return the spec with another value of the key, given in file syntax."""
        outer, *inner = self.path
        value: Any = self.leaf.parse(written)
        if inner:
            value = replace(getattr(spec, outer), **{inner[0]: value})
        changed: Any = {outer: value}
        return replace(spec, **changed)

    @property
    def dial(self) -> Dial:
        assert self.leaf.dial is not None, "a dial"
        return self.leaf.dial

    @property
    def default_override(self) -> str:
        """The override that sets the value that every placement supports."""
        return f"{self.place}={to_flow_yaml(self.dial.free)}"

    def is_free(self, spec: Keys) -> bool:
        """Return True if the key has the value that every placement supports."""
        return self.read_value(spec) == self.leaf.parse(self.dial.free)


@cache
def data_axis_dials() -> tuple[DialKey, ...]:
    """Return the dials of the data axes, in the order of declaration."""
    return tuple(
        DialKey(".".join(route), (*route[:-1], spot.name), holds, spot.default)
        for route, spot, holds in iter_keys(Keys)
        if isinstance(holds, Leaf) and holds.dial is not None
    )
