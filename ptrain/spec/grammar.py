"""The grammar of a spec's file: the keys that resolve to other types, such as the model, the mesh,
the placement, precision and batch. `spec.keys` has all other keys.

All keys are reserved from the start, so that the schema only grows. `ptrain.spec.load` rejects keys
that are not supported yet. `ptrain.spec.resolve` makes the `Spec`.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from ptrain.spec.activations import (
    ACTIVATIONS,
    KEPT_MEANINGS,
    LOSS,
    RECOMPUTE,
    ActivationModeText,
    LossRaw,
    RecomputeRaw,
)
from ptrain.spec.batch import BatchRaw
from ptrain.spec.cluster import Cluster
from ptrain.spec.dials import RESHARD
from ptrain.spec.keys import Keys
from ptrain.spec.leaf import (
    Choice,
    FreeMapping,
    Integer,
    ModeText,
    Section,
    Text,
    grammar_dataclass,
    words_schema,
)
from ptrain.spec.model import ModelRaw, StepRaw
from ptrain.spec.placement import Mode, S
from ptrain.spec.precision import PrecisionRaw

MAX_DEGREE = 2**17
_TUPLE_TEXTS = (
    {"type": "string", "description": "a strategy's name, or the modes in the order Θ,Ω,G,A"},
    {
        "type": "array",
        "items": words_schema(KEPT_MEANINGS),
        "minItems": 4,
        "maxItems": 4,
        "description": "the modes in the order Θ, Ω, G, A",
    },
)


_Degree = int | str | None


def _degree_leaf(about: str, *aka: str) -> Integer:
    return Integer(about, 1, MAX_DEGREE, words=("auto",), aka=aka)


@grammar_dataclass
class MeshRaw:
    """The ranks as a product of axes, outermost first. An axis of degree 1 vanishes."""

    pp: Annotated[
        _Degree,
        _degree_leaf(
            "Number of pipeline-parallel ranks; the layers are split over them.",
            "pipeline",
            "pipeline_parallel",
            "pipeline_model_parallel_size",
        ),
    ] = None
    dp_replicate: Annotated[
        _Degree, _degree_leaf("Number of replicas of the model (DDP).", "replicate")
    ] = None
    dp_shard: Annotated[
        _Degree,
        _degree_leaf(
            "Number of ranks over which data parallelism shards states (ZeRO, FSDP).",
            "fsdp",
            "shard",
        ),
    ] = None
    cp: Annotated[
        _Degree,
        _degree_leaf(
            "Number of context-parallel ranks; the tokens of a sequence are split over them."
        ),
    ] = None
    ep: Annotated[
        _Degree,
        _degree_leaf(
            "Number of expert-parallel ranks; the experts are split over them.",
            "expert",
            "expert_parallel",
            "ep_size",
            "expert_parallel_size",
            "expert_parallel_degree",
            "expert_model_parallel_size",
        ),
    ] = None
    tp: Annotated[
        _Degree,
        _degree_leaf(
            "Number of tensor-parallel ranks; each operator is split over them.",
            "tensor",
            "tensor_parallel",
            "tensor_model_parallel_size",
        ),
    ] = None
    dp: Annotated[
        _Degree,
        _degree_leaf(
            "Short for `dp_replicate` or `dp_shard`, whichever the placement of this axis "
            "belongs to."
        ),
    ] = None


@grammar_dataclass
class TupleRaw:
    """A tuple (Θ, Ω, G, A): the mode of each state on one axis (Definition 2)."""

    parameters: Annotated[Mode, ModeText("Θ, the model's parameters")]
    optimizer: Annotated[Mode, ModeText("Ω, the optimizer's state, master copies included")]
    gradients: Annotated[Mode, ModeText("G, the gradients")]
    activations: Annotated[Mode, ActivationModeText("A, what forward saves for backward")]


def _tuple_section(about: str) -> Section:
    return Section(TupleRaw, about, other_schemas=_TUPLE_TEXTS)


def _tuple_on(axis: str) -> Section:
    return _tuple_section(f"Placement on {axis}: a strategy name or the four modes.")


EXPERTS_TUPLE = _tuple_section(
    "Placement of the experts on ep: each rank holds some experts in full (S, S, S, S)."
)


@grammar_dataclass
class ExpertTupleRaw:
    """The tuples of ep: one of the experts, and one of all else, for which ep is a data axis."""

    experts: Annotated[TupleRaw, EXPERTS_TUPLE] = field(
        default_factory=partial(TupleRaw, parameters=S, optimizer=S, gradients=S, activations=S)
    )
    rest: Annotated[
        TupleRaw,
        _tuple_section(
            "Placement on ep of all tensors except the experts: a strategy name or the four modes."
        ),
    ]


@grammar_dataclass
class PlacementRaw:
    """The tuple of each mesh axis: a strategy's name, or the modes."""

    pp: Annotated[TupleRaw | None, _tuple_on("pp")] = None
    dp_replicate: Annotated[TupleRaw | None, _tuple_on("dp_replicate")] = None
    dp_shard: Annotated[TupleRaw | None, _tuple_on("dp_shard")] = None
    cp: Annotated[TupleRaw | None, _tuple_on("cp")] = None
    ep: Annotated[
        ExpertTupleRaw | None,
        Section(
            ExpertTupleRaw,
            "Placements on ep: of the experts and of all other tensors, or of all other tensors"
            " only.",
            other_schemas=({"$ref": "#/$defs/TupleRaw"}, *_TUPLE_TEXTS),
        ),
    ] = None
    tp: Annotated[TupleRaw | None, _tuple_on("tp")] = None
    dp: Annotated[TupleRaw | None, _tuple_on("`mesh.dp`")] = None


@dataclass(frozen=True, kw_only=True, init=False, eq=False, repr=False)
class _LeadingKeys:
    """The first keys of a file, which are resolved to other types."""

    name: Annotated[
        str | None,
        Text(
            "Name of the run. Default: the name of the spec file.",
            r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}",
            "a name of 1 to 64 letters, digits, . _ - (no . in front)",
        ),
    ] = None
    model: Annotated[
        ModelRaw,
        Section(
            ModelRaw,
            "The model: a preset, shape fields, a "
            "Transformers class (`hf`) or your function "
            "(`target`).",
        ),
    ]
    mesh: Annotated[
        MeshRaw, Section(MeshRaw, "Axes of the device mesh and their sizes, outermost first.")
    ]
    placement: Annotated[
        PlacementRaw | None,
        Section(
            PlacementRaw,
            "One placement per mesh axis, or a strategy name for all axes.",
            other_schemas=({"type": "string", "description": "a strategy's name"},),
        ),
    ] = None
    precision: Annotated[PrecisionRaw, Section(PrecisionRaw, "Dtypes of each state.")] = field(
        default_factory=PrecisionRaw
    )
    batch: Annotated[
        BatchRaw, Section(BatchRaw, "Number of samples per step and how they are split.")
    ]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SpecRaw(Keys, _LeadingKeys):
    """A spec: the model, the mesh of ranks and how each state is placed on it."""

    cluster: Annotated[
        dict[str, Any] | None,
        Section(
            Cluster,
            "Devices, memory and links that the job runs on.",
            accepts_null=True,
            is_partial=True,
        ),
    ] = None
    activations: Annotated[Any, ACTIVATIONS] = None
    recompute: Annotated[RecomputeRaw | None, RECOMPUTE] = None
    expert: Annotated[Any, FreeMapping("How experts are selected and placed.", supported=())] = None
    attention: Annotated[
        str | None,
        Choice(
            "Attention implementation of built-in models and `hf` classes. Default: sdpa, or "
            "eager if the class supports nothing else.",
            {
                "sdpa": "torch's scaled_dot_product_attention, which selects the kernel",
                "sdpa-gqa": "the same with enable_gqa: without copies of keys and values",
                "eager": "operator by operator, with the scores in memory",
                "math": "alias of eager",
                "flash": "tiled, without scores in memory",
                "flex": "torch's flex_attention, block-sparse and compiled",
            },
            slips={
                "flash_attention_2": "sdpa",
                "flash-attention": "sdpa",
                "flex_attention": "flex",
                "naive": "eager",
                "manual": "eager",
            },
            supported=("sdpa", "sdpa-gqa", "eager", "flex", "math"),
            reason="; sdpa selects it where possible",
        ),
    ] = None
    loss: Annotated[LossRaw | None, LOSS] = None
    step: Annotated[
        StepRaw | None, Section(StepRaw, "Your function that runs the model and returns its loss.")
    ] = None
    reshard: Annotated[
        bool | int | str | None,
        replace(RESHARD, description="Alias of `sync.reshard_after_forward`."),
    ] = None
