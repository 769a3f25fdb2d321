"""The grammar of a spec: every key, what it may hold, and what it means (the hover text).

All keys are reserved from the start, so that the schema only ever grows; `ptrain.spec.not_yet`
refuses those that nothing executes yet. These are the raw values of a file; `ptrain.spec.resolve`
makes the `Spec` of them. Defaults are those of the resolved spec.
"""

from dataclasses import field, replace
from typing import Annotated, Any

from ptrain.spec.cluster import Cluster
from ptrain.spec.dials import RESHARD
from ptrain.spec.keep import ACTIVATIONS, LOSS, RECOMPUTE, LossRaw, RecomputeRaw
from ptrain.spec.keys import Keys
from ptrain.spec.leaf import (
    Choice,
    Either,
    Free,
    Real,
    Section,
    Text,
    Truth,
    Whole,
    declared,
    meanings,
    section,
)
from ptrain.spec.leaf_mode import KEPT_MEANINGS, KeptText, ModeText
from ptrain.spec.model import BESIDE
from ptrain.spec.placement import Mode, R

_DTYPES = {"fp32": "4 bytes", "bf16": "2 bytes", "fp16": "2 bytes, loss scaling", "fp64": "8 bytes"}
_DTYPE_SLIPS = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
}
_NO_MASTER = {"none": "the optimizer updates the parameters themselves"}
MAX_SAMPLES = 2**31 - 1
_NAME_OR_FILE = r"[^\x00-\x1f]{1,300}"
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
class ModelRaw:
    """Which model: a preset and shape fields that override it; or hf; or target."""

    preset: Annotated[
        str | None, Text("a model of specs/models, or a file of shape fields", _NAME_OR_FILE)
    ] = None
    family: Annotated[
        str | None,
        Choice(
            "which architecture",
            {
                "llama": "RMSNorm, rotary positions, SwiGLU, grouped queries",
                "gpt": "LayerNorm, learned positions, GELU, dropout",
            },
        ),
    ] = None
    layers: Annotated[
        int | None,
        Whole("blocks", 1, 10_000, aka=("n_layers", "num_layers", "num_hidden_layers", "depth")),
    ] = None
    hidden: Annotated[
        int | None,
        Whole(
            "width of the residual stream",
            1,
            2**20,
            aka=("hidden_size", "d_model", "n_embd", "dim"),
        ),
    ] = None
    heads: Annotated[
        int | None,
        Whole(
            "query heads; divides hidden",
            1,
            2**14,
            aka=("n_heads", "num_heads", "num_attention_heads"),
        ),
    ] = None
    kv_heads: Annotated[
        int | None,
        Whole(
            "key and value heads; divides heads",
            1,
            2**14,
            aka=("n_kv_heads", "num_key_value_heads", "num_query_groups"),
        ),
    ] = None
    ffn: Annotated[
        int | None,
        Whole(
            "width inside the feed-forward part",
            1,
            2**22,
            aka=("ffn_hidden_size", "intermediate_size", "d_ff"),
        ),
    ] = None
    vocab: Annotated[
        int | None, Whole("tokens in the vocabulary", 2, 2**24, aka=("vocab_size",))
    ] = None
    tied: Annotated[
        bool | None, Truth("the head is the transposed embedding", aka=("tie_word_embeddings",))
    ] = None
    dropout: Annotated[float | None, Real("probability of dropout", 0.0, 0.99)] = None
    rope_base: Annotated[
        float | None,
        Real("base of the rotary positions", 0.0, 1e12, open=True, aka=("rope_theta",)),
    ] = None
    experts: Annotated[int | None, Whole("experts per block", 1, 2**16, executed=())] = None
    experts_per_token: Annotated[
        int | None, Whole("experts a token visits", 1, 2**16, executed=())
    ] = None
    hf: Annotated[
        str | None,
        Text(
            "a causal language model of transformers: its class, or its model type",
            r"[A-Za-z][A-Za-z0-9_-]*",
            "a class or a model type, like LlamaForCausalLM or llama",
        ),
    ] = None
    config: Annotated[dict[str, object] | None, Free("arguments of the hf class's config")] = None
    target: Annotated[
        str | None,
        Text(
            "a function that returns the module; runs with --allow-import only",
            r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*",
            "package.module:function",
        ),
    ] = None
    arguments: Annotated[dict[str, object] | None, Free("keyword arguments of target")] = None
    folder: Annotated[
        str | None,
        Text(
            "where target is looked for after what is installed: . is the spec's own folder, and "
            "null is nowhere",
            _NAME_OR_FILE,
            null=True,
        ),
    ] = BESIDE
    blocks: Annotated[
        str | None,
        Text(
            "which modules of a target or hf model are its blocks, * for a number; "
            "without: those it names itself, else its largest ModuleList",
            r"[A-Za-z0-9_*]+(\.[A-Za-z0-9_*]+)*",
            "names of modules, like encoder.layers.*",
        ),
    ] = None


@declared
class PrecisionRaw:
    """A layout: bytes per element of parameters, gradients and optimizer state. A dtype beside the
    name of a layout replaces that one of it."""

    layout: Annotated[
        str | None,
        Choice(
            "a named layout",
            {
                "fp32": "4 + 4 + 8 bytes: everything in fp32",
                "bf16": "2 + 2 + 4 bytes: everything in bf16, no master copy",
                "fp16": "2 + 2 + 12 bytes: fp16 with an fp32 master copy, the loss scaled",
                "zero16": "2 + 2 + 12 bytes: bf16, with an fp32 master copy",
                "megatron18": "2 + 4 + 12 bytes: zero16 whose gradients are kept and sent in fp32",
                "zero20": "2 + 6 + 12 bytes: a micro-batch's gradients in bf16, their sum in fp32",
                "fsdp-mixed": "2 + 4 + 12 bytes: gradients sent in bf16 and kept in fp32; with "
                "parameters M, casts of the master copies, 0 + 4 + 12",
            },
            slips={**_DTYPE_SLIPS, "mixed": "fsdp-mixed"},
        ),
    ] = None
    compute: Annotated[
        str | None,
        Choice("one dtype in place of all of a layout", {"fp64": "float64: equality tests"}),
    ] = None
    parameters: Annotated[
        str | None,
        Choice("dtype of the parameters, which the model computes in", _DTYPES, slips=_DTYPE_SLIPS),
    ] = None
    gradients: Annotated[
        str | None,
        Choice(
            "dtype in which reduced gradients are kept and accumulated until the update",
            _DTYPES,
            slips=_DTYPE_SLIPS,
        ),
    ] = None
    reduced: Annotated[
        str | None,
        Choice(
            "dtype in which a micro-batch's gradients are collected and travel; as `gradients` "
            "where that is written",
            _DTYPES,
        ),
    ] = None
    master: Annotated[
        str | None,
        Choice(
            "dtype of the copy of the parameters that is updated",
            _DTYPES | _NO_MASTER,
            slips=_DTYPE_SLIPS,
        ),
    ] = None
    moments: Annotated[
        str | None,
        Choice("dtype in which the optimizer's moments are kept", _DTYPES, slips=_DTYPE_SLIPS),
    ] = None


@declared
class BatchRaw:
    """global = micro x accumulate x data degree, in samples of `sequence` tokens."""

    samples: Annotated[
        int | str | None,
        Either(
            "samples per step over all ranks, or `4M tokens` (to the nearest multiple)",
            f"an integer in 1..{MAX_SAMPLES} (samples), or tokens like 4M tokens",
            (Whole("", 1, MAX_SAMPLES), Text("", r"[0-9]{1,15}(\.[0-9]{1,6})? *[kKMBT]? tokens")),
            key="global",
            aka=("global_batch_size", "train_batch_size"),
        ),
    ] = None
    micro: Annotated[
        int,
        Whole(
            "samples that a rank computes at once",
            1,
            10**6,
            aka=(
                "micro_batch_size",
                "batch_size",
                "per_device_train_batch_size",
                "train_micro_batch_size_per_gpu",
            ),
        ),
    ] = 1
    sequence: Annotated[
        int,
        Whole(
            "tokens of a sample",
            1,
            10**8,
            aka=(
                "seq_len",
                "seq_length",
                "sequence_length",
                "max_seq_len",
                "context_length",
                "block_size",
            ),
        ),
    ]
    accumulate: Annotated[
        int | None,
        Whole(
            "micro-batches per step; follows from the others",
            1,
            10**6,
            aka=("gradient_accumulation_steps", "accumulation_steps", "grad_accum"),
        ),
    ] = None


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
            aka=("ddp", "replicate"),
        ),
    ] = None
    dp_shard: Annotated[
        int | str | None,
        Whole(
            "ranks that shard states (ZeRO, FSDP)",
            1,
            MAX_DEGREE,
            words=("auto",),
            aka=("fsdp", "zero", "shard"),
        ),
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


@section
class _Head:
    """What comes first in a file, and is resolved to something else."""

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


@section
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
            executed=("sdpa", "eager", "flex", "math"),
            why=" by itself (sdpa chooses it where it can)",
        ),
    ] = None
    loss: Annotated[LossRaw | None, LOSS] = None
    reshard: Annotated[
        bool | int | str | None,
        replace(RESHARD, about="another word for sync.reshard_after_forward"),
    ] = None
    compile: Annotated[bool, Truth("torch.compile the blocks", executed=(False,))] = False
