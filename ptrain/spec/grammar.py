"""The grammar of a spec: the keys that a file has and `spec.keys` has not, since they become
something else: the model, the mesh, the placement, precision and batch, what blocks keep.

All keys are reserved from the start, so that the schema only ever grows; `ptrain.spec.load`
refuses those that nothing executes yet. `ptrain.spec.resolve` makes the `Spec` of them.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from ptrain.spec.activations import ACTIVATIONS, LOSS, RECOMPUTE, LossRaw, RecomputeRaw
from ptrain.spec.batch import BatchRaw
from ptrain.spec.cluster import Cluster
from ptrain.spec.dials import RESHARD
from ptrain.spec.function import StepRaw
from ptrain.spec.keys import Keys
from ptrain.spec.leaf import (
    KEPT_MEANINGS,
    Choice,
    Free,
    KeptText,
    ModeText,
    Text,
    Truth,
    Whole,
    declared,
    meanings,
)
from ptrain.spec.model import ModelRaw
from ptrain.spec.placement import Mode, S
from ptrain.spec.precision import PrecisionRaw
from ptrain.spec.section import Section

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
        Whole(
            "pipeline stages: the layers are spread",
            1,
            MAX_DEGREE,
            words=("auto",),
            aka=("pipeline", "pipeline_parallel", "pipeline_model_parallel_size"),
        ),
    ] = None
    dp_replicate: Annotated[
        int | str | None,
        Whole(
            "ranks that keep whole copies (DDP)",
            1,
            MAX_DEGREE,
            words=("auto",),
            aka=("replicate",),
        ),
    ] = None
    dp_shard: Annotated[
        int | str | None,
        Whole(
            "ranks that shard states (ZeRO, FSDP)",
            1,
            MAX_DEGREE,
            words=("auto",),
            aka=("fsdp", "shard"),
        ),
    ] = None
    cp: Annotated[
        int | str | None,
        Whole("ranks that share a sequence's tokens", 1, MAX_DEGREE, words=("auto",)),
    ] = None
    ep: Annotated[
        int | str | None,
        Whole(
            "ranks that share the experts",
            1,
            MAX_DEGREE,
            words=("auto",),
            aka=(
                "expert",
                "expert_parallel",
                "ep_size",
                "expert_parallel_size",
                "expert_parallel_degree",
                "expert_model_parallel_size",
            ),
        ),
    ] = None
    tp: Annotated[
        int | str | None,
        Whole(
            "ranks that share each operator",
            1,
            MAX_DEGREE,
            words=("auto",),
            aka=("tensor", "tensor_parallel", "tensor_model_parallel_size"),
        ),
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


def _tuple(about: str) -> Section:
    return Section(TupleRaw, about, also=_TUPLE_TEXTS)


REST_TUPLE = _tuple("the tuple of all tensors but the experts': a strategy's name or the modes")
EXPERTS_TUPLE = _tuple("the experts' tuple: a rank has some of them, whole (S, S, S, S)")


@declared
class ExpertTupleRaw:
    """The tuples of ep: one of the experts, and one of all else, for which ep is a data axis."""

    experts: Annotated[TupleRaw, EXPERTS_TUPLE] = field(
        default_factory=partial(TupleRaw, parameters=S, optimizer=S, gradients=S, activations=S)
    )
    rest: Annotated[TupleRaw, REST_TUPLE]


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
        Section(
            ExpertTupleRaw,
            "the tuples on ep, of the experts and of the rest; or the rest's alone",
            also=({"$ref": "#/$defs/TupleRaw"}, *_TUPLE_TEXTS),
        ),
    ] = None
    tp: Annotated[TupleRaw | None, TP_TUPLE] = None
    dp: Annotated[TupleRaw | None, DP_TUPLE] = None


@dataclass(frozen=True, kw_only=True, init=False, eq=False, repr=False)
class _Head:
    """What comes first in a file, and is resolved to something else."""

    name: Annotated[
        str | None,
        Text(
            "the run's name; without: its file's",
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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SpecRaw(Keys, _Head):
    """A spec: the model, the mesh of ranks and how each state is placed on it."""

    cluster: Annotated[
        dict[str, Any] | None,
        Section(Cluster, "devices, memory and links the job runs on", null=True, is_partial=True),
    ] = None
    activations: Annotated[Any, ACTIVATIONS] = None
    recompute: Annotated[RecomputeRaw | None, RECOMPUTE] = None
    expert: Annotated[Any, Free("how experts are chosen and placed", executed=())] = None
    attention: Annotated[
        str | None,
        Choice(
            "which attention kernel, of a built-in model or an hf class; without: sdpa, or eager "
            "of a class that has no other",
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
            executed=("sdpa", "eager", "flex", "math"),
            why=" by itself (sdpa chooses it where it can)",
        ),
    ] = None
    loss: Annotated[LossRaw | None, LOSS] = None
    step: Annotated[
        StepRaw | None,
        Section(StepRaw, "a function of yours that runs the model and gives its loss"),
    ] = None
    reshard: Annotated[
        bool | int | str | None,
        replace(RESHARD, about="another word for sync.reshard_after_forward"),
    ] = None
    compile: Annotated[bool, Truth("torch.compile the blocks", executed=(False,))] = False
