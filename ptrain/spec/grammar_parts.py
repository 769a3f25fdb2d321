"""The sections of a spec that are resolved to something else: model, precision and batch

`about` texts are what an editor shows.
"""

from typing import Annotated

from ptrain.spec.leaf import Choice, Either, Free, Real, Text, Truth, Whole, declared
from ptrain.spec.model import BESIDE

_DTYPES = {"fp32": "4 bytes", "bf16": "2 bytes", "fp16": "2 bytes, loss scaling", "fp64": "8 bytes"}
_NO_MASTER = {"none": "the optimizer updates the parameters themselves"}
MAX_SAMPLES = 2**31 - 1
_NAME_OR_FILE = r"[^\x00-\x1f]{1,300}"


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
    layers: Annotated[int | None, Whole("blocks", 1, 10_000)] = None
    hidden: Annotated[int | None, Whole("width of the residual stream", 1, 2**20)] = None
    heads: Annotated[int | None, Whole("query heads; divides hidden", 1, 2**14)] = None
    kv_heads: Annotated[int | None, Whole("key and value heads; divides heads", 1, 2**14)] = None
    ffn: Annotated[int | None, Whole("width inside the feed-forward part", 1, 2**22)] = None
    vocab: Annotated[int | None, Whole("tokens in the vocabulary", 2, 2**24)] = None
    tied: Annotated[bool | None, Truth("the head is the transposed embedding")] = None
    dropout: Annotated[float | None, Real("probability of dropout", 0.0, 0.99)] = None
    rope_base: Annotated[
        float | None, Real("base of the rotary positions", 0.0, 1e12, open=True)
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
        ),
    ] = None
    compute: Annotated[
        str | None,
        Choice("one dtype in place of all of a layout", {"fp64": "float64: equality tests"}),
    ] = None
    parameters: Annotated[
        str | None, Choice("dtype of the parameters, which the model computes in", _DTYPES)
    ] = None
    gradients: Annotated[
        str | None,
        Choice(
            "dtype in which reduced gradients are kept and accumulated until the update", _DTYPES
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
        Choice("dtype of the copy of the parameters that is updated", _DTYPES | _NO_MASTER),
    ] = None
    moments: Annotated[
        str | None, Choice("dtype in which the optimizer's moments are kept", _DTYPES)
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
        ),
    ] = None
    micro: Annotated[int, Whole("samples that a rank computes at once", 1, 10**6)] = 1
    sequence: Annotated[int, Whole("tokens of a sample", 1, 10**8)]
    accumulate: Annotated[
        int | None, Whole("micro-batches per step; follows from the others", 1, 10**6)
    ] = None
