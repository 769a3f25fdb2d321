"""The grammar of a spec: every key, what it may hold, and what it means (the hover text).

All keys are reserved from the start, so that the schema only ever grows; `ptrain.spec.not_yet`
refuses those that nothing executes yet. These are the raw values of a file; `ptrain.spec.resolve`
makes the `Spec` of them. Defaults are those of the resolved spec.
"""

from dataclasses import field, replace
from typing import Annotated, Any

from ptrain.spec import slips
from ptrain.spec.grammar_cluster import ClusterRaw
from ptrain.spec.grammar_keep import ACTIVATIONS, LOSS, RECOMPUTE, LossRaw, RecomputeRaw
from ptrain.spec.grammar_parts import (
    RESHARD,
    BatchRaw,
    CheckpointRaw,
    DataRaw,
    EvalRaw,
    LogRaw,
    ModelRaw,
    OffloadRaw,
    OptimizerRaw,
    PrecisionRaw,
    SyncRaw,
    TensorRaw,
    TimeoutRaw,
    TrainRaw,
)
from ptrain.spec.grammar_pipeline import PipelineRaw
from ptrain.spec.leaf import (
    Choice,
    Either,
    Free,
    Numbers,
    Section,
    Size,
    Text,
    Truth,
    Whole,
    declared,
    meanings,
)
from ptrain.spec.leaf_mode import KEPT_MEANINGS, KeptText, ModeText
from ptrain.spec.placement import Mode, R

MAX_DEGREE = 2**17
_TUPLE_TEXTS = (
    {"type": "string", "description": "a strategy's name, or the modes in the order Θ,Ω,G,A"},
    {
        "type": "array",
        "items": meanings(KEPT_MEANINGS),
        "minItems": 4,
        "maxItems": 4,
        "description": "the modes in the order Θ, Ω, G, A",
    },
)


@declared
class MeshRaw:
    """The ranks as a product of axes, outermost first. An axis of degree 1 vanishes."""

    pp: Annotated[
        int | str | None,
        Whole("pipeline stages: the layers are spread", 1, MAX_DEGREE, words=("auto",)),
    ] = None
    dp_replicate: Annotated[
        int | str | None,
        Whole("ranks that keep whole copies (DDP)", 1, MAX_DEGREE, words=("auto",)),
    ] = None
    dp_shard: Annotated[
        int | str | None,
        Whole("ranks that shard states (ZeRO, FSDP)", 1, MAX_DEGREE, words=("auto",)),
    ] = None
    cp: Annotated[
        int | str | None,
        Whole("ranks that share a sequence's tokens", 1, MAX_DEGREE, words=("auto",)),
    ] = None
    ep: Annotated[
        int | str | None,
        Whole("ranks that share the experts", 1, MAX_DEGREE, words=("auto",)),
    ] = None
    tp: Annotated[
        int | str | None,
        Whole("ranks that share each operator", 1, MAX_DEGREE, words=("auto",)),
    ] = None
    dp: Annotated[
        int | str | None,
        Whole(
            "short for dp_replicate or dp_shard, whichever its tuple belongs to",
            1,
            MAX_DEGREE,
            words=("auto",),
        ),
    ] = None


@declared
class TupleRaw:
    """One tuple (Θ, Ω, G, A): the mode of each state on one axis (Definition 2)."""

    parameters: Annotated[Mode, ModeText("Θ, the model's parameters")]
    optimizer: Annotated[Mode, ModeText("Ω, the optimizer's state, master copies included")]
    gradients: Annotated[Mode, ModeText("G, the gradients")]
    activations: Annotated[Mode, KeptText("A, what forward saves for backward")]


@declared
class ExpertTupleRaw:
    """The tuples of expert parallelism: one for the experts, one for the rest."""

    experts: Annotated[
        Any, Either("the experts' tuple", "a name or a tuple", (Text(""), Free("")))
    ] = None
    rest: Annotated[
        Any, Either("everybody else's tuple", "a name or a tuple", (Text(""), Free("")))
    ] = None
    parameters: Annotated[Mode | None, ModeText("Θ, the model's parameters")] = None
    optimizer: Annotated[Mode | None, ModeText("Ω, the optimizer's state")] = None
    gradients: Annotated[Mode | None, ModeText("G, the gradients")] = None
    activations: Annotated[Mode, KeptText("A, what forward saves for backward")] = R


def _tuple(about: str) -> Section:
    return Section(TupleRaw, about, also=_TUPLE_TEXTS)


PP_TUPLE = _tuple("the tuple on pp: a strategy's name or the modes")
DP_REPLICATE_TUPLE = _tuple("the tuple on dp_replicate: a strategy's name or the modes")
DP_SHARD_TUPLE = _tuple("the tuple on dp_shard: a strategy's name or the modes")
CP_TUPLE = _tuple("the tuple on cp: a strategy's name or the modes")
TP_TUPLE = _tuple("the tuple on tp: a strategy's name or the modes")
DP_TUPLE = _tuple("the tuple of `mesh.dp`: a strategy's name or the modes")


@declared
class PlacementRaw:
    """One tuple per axis of the mesh: a strategy's name, or the modes."""

    pp: Annotated[TupleRaw | None, PP_TUPLE] = None
    dp_replicate: Annotated[TupleRaw | None, DP_REPLICATE_TUPLE] = None
    dp_shard: Annotated[TupleRaw | None, DP_SHARD_TUPLE] = None
    cp: Annotated[TupleRaw | None, CP_TUPLE] = None
    ep: Annotated[
        ExpertTupleRaw | None,
        Section(ExpertTupleRaw, "the tuple on ep, for experts and rest", also=_TUPLE_TEXTS),
    ] = None
    tp: Annotated[TupleRaw | None, TP_TUPLE] = None
    dp: Annotated[TupleRaw | None, DP_TUPLE] = None


@declared
class SpecRaw:
    """A spec: the model, the mesh of ranks and how each state is placed on it."""

    name: Annotated[
        str | None,
        Text(
            "the run's name",
            r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}",
            "a name of 1 to 64 letters, digits, . _ - (no . in front)",
        ),
    ] = None
    model: Annotated[ModelRaw, Section(ModelRaw, "which model: preset, shape, hf or target")]
    mesh: Annotated[MeshRaw, Section(MeshRaw, "axes and degrees, outermost first")]
    placement: Annotated[
        PlacementRaw | None,
        Section(
            PlacementRaw,
            "one tuple per axis, or a strategy's name for all of them",
            also=({"type": "string", "description": "a strategy's name"},),
        ),
    ] = None
    precision: Annotated[PrecisionRaw, Section(PrecisionRaw, "bytes per element of each state")] = (
        field(default_factory=PrecisionRaw)
    )
    batch: Annotated[BatchRaw, Section(BatchRaw, "samples per step and how they are split")]
    optimizer: Annotated[OptimizerRaw, Section(OptimizerRaw, "the update and its schedule")] = (
        field(default_factory=OptimizerRaw)
    )
    data: Annotated[DataRaw, Section(DataRaw, "what is read")] = field(default_factory=DataRaw)
    train: Annotated[TrainRaw, Section(TrainRaw, "how long, and from which seed")] = field(
        default_factory=TrainRaw
    )
    cluster: Annotated[
        ClusterRaw | None,
        Section(ClusterRaw, "devices, memory and links the job runs on", null=True),
    ] = None
    sync: Annotated[
        SyncRaw, Section(SyncRaw, "when accumulated gradients and gathered units move")
    ] = field(default_factory=SyncRaw)
    eval: Annotated[EvalRaw, Section(EvalRaw, "loss on held-out text")] = field(
        default_factory=EvalRaw
    )
    checkpoint: Annotated[
        CheckpointRaw,
        Section(
            CheckpointRaw,
            "when the state is saved",
            also=({"const": "at_end", "description": "once, when the training is done"},),
        ),
    ] = field(default_factory=CheckpointRaw)
    timeout: Annotated[
        TimeoutRaw,
        Section(
            TimeoutRaw, "seconds until a silent rank counts as hung", also=({"type": "number"},)
        ),
    ] = field(default_factory=TimeoutRaw)
    log: Annotated[LogRaw, Section(LogRaw, "what is printed")] = field(default_factory=LogRaw)
    profile: Annotated[list[int], Numbers("steps whose trace is written", 0, 10**9, whole=True)] = (
        field(default_factory=list)
    )
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
        str,
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
        ),
    ] = "native"
    bucket: Annotated[
        int | str,
        Size(
            "DistributedDataParallel's buckets: a bucket is reduced once this many bytes of "
            "gradients are there; per-tensor: one each; whole: one for all; size: 25 MiB, the "
            "first one 1 MiB",
            words=("size", "per-tensor", "whole"),
            low=2**10,
            high=2**40,
            example="25 MiB",
        ),
    ] = 25 * 2**20
    unit: Annotated[
        str,
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
        ),
    ] = "block"
    activations: Annotated[Any, ACTIVATIONS] = None
    recompute: Annotated[RecomputeRaw | None, RECOMPUTE] = None
    tensor: Annotated[TensorRaw, Section(TensorRaw, "how tp cuts operators")] = field(
        default_factory=TensorRaw
    )
    pipeline: Annotated[
        PipelineRaw, Section(PipelineRaw, "how pp cuts the model, and its schedule")
    ] = field(default_factory=PipelineRaw)
    expert: Annotated[Any, Free("how experts are chosen and placed")] = None
    attention: Annotated[
        str | None,
        Choice(
            "which attention kernel, of a built-in model or an hf class; without: sdpa",
            {
                "sdpa": "torch's scaled_dot_product_attention, which takes the best kernel it has",
                "eager": "operator by operator, the scores in memory",
                "math": "another word for eager",
                "flash": "tiled, the scores never in memory",
                "flex": "torch's compiled block-sparse attention",
            },
            slips={
                "flash_attention_2": "sdpa",
                "flash-attention": "sdpa",
                "flex_attention": "flex",
                "naive": "eager",
                "manual": "eager",
            },
        ),
    ] = None
    loss: Annotated[LossRaw | None, LOSS] = None
    reshard: Annotated[
        bool | int | str | None,
        replace(RESHARD, about="another word for sync.reshard_after_forward"),
    ] = None
    overlap: Annotated[
        str | None,
        Choice(
            "whether gradients are reduced beside the backward pass; without: as the wrapper does "
            "by itself (DDP and fully_shard: backward; flat units: none)",
            {
                "none": "a reduction is awaited before anything goes on; DDP's begin when "
                "backward is over, and fully_shard gathers nothing ahead",
                "backward": "a unit's or bucket's reduction runs while backward goes on",
            },
            slips={"true": "backward", "on": "backward", "false": "none", "off": "none"},
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
        str,
        Choice(
            "when parameters that were updated in parts become whole again",
            {
                "blocking": "after each unit's update, before the next unit's",
                "during-update": "begun after each unit's update, awaited when all are updated",
                "next-forward": "unit by unit, when each is used next",
            },
        ),
    ] = "blocking"
    offload: Annotated[
        OffloadRaw | None, Section(OffloadRaw, "states that are not on the device")
    ] = None
    compile: Annotated[bool, Truth("torch.compile the blocks")] = False
    consistency_every: Annotated[
        int,
        Whole(
            "stop where ranks differ in what they hold alike, looked at every so many steps "
            "(0: never)",
            0,
            10**9,
        ),
    ] = 0
