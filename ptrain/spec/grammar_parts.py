"""The sections of a spec that stand for themselves: model, batch, optimizer, data, cluster …

`about` texts are what an editor shows. Defaults come from the resolved dataclasses.
"""

from dataclasses import field
from typing import Annotated

from ptrain.spec.leaf import (
    Choice,
    Either,
    Free,
    Numbers,
    Real,
    Section,
    Text,
    Truth,
    Whole,
    declared,
)
from ptrain.spec.model import BESIDE
from ptrain.spec.role import GIVEN
from ptrain.spec.slips import TIER_SLIPS
from ptrain.spec.spec import (
    CheckpointSpec,
    DataSpec,
    EvalSpec,
    OptimizerSpec,
    Timeout,
    TrainSpec,
)

_OPTIMIZER, _DATA, _TRAIN = OptimizerSpec(), DataSpec(), TrainSpec()
_EVAL, _CHECKPOINT, _TIMEOUT = EvalSpec(), CheckpointSpec(), Timeout()
_DTYPES = {"fp32": "4 bytes", "bf16": "2 bytes", "fp16": "2 bytes, loss scaling", "fp64": "8 bytes"}
_NO_MASTER = {"none": "the optimizer updates the parameters themselves"}
MAX_SAMPLES = 2**31 - 1
MAX_SHARDS = 2**17
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
    experts: Annotated[int | None, Whole("experts per block", 1, 2**16)] = None
    experts_per_token: Annotated[int | None, Whole("experts a token visits", 1, 2**16)] = None
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

    global_: Annotated[
        int | str | None,
        Either(
            "samples per step over all ranks, or `4M tokens` (to the nearest multiple)",
            f"an integer in 1..{MAX_SAMPLES} (samples), or tokens like 4M tokens",
            (Whole("", 1, MAX_SAMPLES), Text("", r"[0-9]{1,15}(\.[0-9]{1,6})? *[kKMBT]? tokens")),
        ),
    ] = None
    micro: Annotated[int, Whole("samples that a rank computes at once", 1, 10**6)] = 1
    sequence: Annotated[int, Whole("tokens of a sample", 1, 10**8)]
    accumulate: Annotated[
        int | None, Whole("micro-batches per step; follows from the others", 1, 10**6)
    ] = None


@declared
class ScheduleRaw:
    """The learning rate over the steps: linear warm-up, then constant or cosine."""

    warmup: Annotated[int, Whole("steps of linear warm-up", 0, 10**9)] = _OPTIMIZER.warmup
    decay_steps: Annotated[
        int, Whole("the step at which the cosine ends; 0: constant after warm-up", 0, 10**9)
    ] = _OPTIMIZER.decay_steps
    min_lr_ratio: Annotated[float, Real("where the cosine ends, as a part of lr", 0.0, 1.0)] = (
        _OPTIMIZER.min_lr_ratio
    )


@declared
class OptimizerRaw:
    """The update of the parameters."""

    name: Annotated[
        str,
        Choice(
            "which optimizer",
            {
                "adamw": "Adam with decoupled weight decay: two moments",
                "sgd": "gradient descent, with momentum if given",
                "muon": "orthogonalized momentum for the blocks' matrices, adamw for all else: "
                "needs whole matrices",
            },
        ),
    ] = _OPTIMIZER.name
    lr: Annotated[float, Real("the highest learning rate", 0.0, 1e6, open=True)] = _OPTIMIZER.lr
    betas: Annotated[list[float], Numbers("adamw's two decay rates", 0.0, 0.999999, count=2)] = (
        field(default_factory=lambda: list(_OPTIMIZER.betas))
    )
    eps: Annotated[float, Real("adamw's epsilon", 0.0, 1.0, open=True)] = _OPTIMIZER.eps
    weight_decay: Annotated[float, Real("decoupled weight decay", 0.0, 1e3)] = (
        _OPTIMIZER.weight_decay
    )
    momentum: Annotated[
        float | None, Real("of sgd (without: 0) and muon (without: 0.95)", 0.0, 0.999999)
    ] = None
    schedule: Annotated[ScheduleRaw, Section(ScheduleRaw, "the learning rate over the steps")] = (
        field(default_factory=ScheduleRaw)
    )
    clip: Annotated[
        float | None,
        Real("the largest global gradient norm; null: no clipping", 0.0, 1e9, open=True, null=True),
    ] = _OPTIMIZER.clip


@declared
class DataRaw:
    """What is read: a built-in corpus, or a file of tokens."""

    corpus: Annotated[
        str | None,
        Choice(
            "a corpus that needs no network",
            {
                "python-docs": "the reference text that every CPython ships",
                "synthetic": "seeded tokens, equal on every machine",
            },
        ),
    ] = None
    path: Annotated[str | None, Text("a memory-mapped token file of your own", null=True)] = (
        _DATA.path
    )
    tokenizer: Annotated[
        str, Choice("how text becomes tokens", {"bytes": "256 bytes and 3 specials, vocab 259"})
    ] = _DATA.tokenizer


@declared
class TrainRaw:
    """How long, and from which seed."""

    steps: Annotated[int, Whole("updates of the parameters", 1, 10**9)] = _TRAIN.steps
    seed: Annotated[int, Whole("of weights, samples and dropout", 0, 2**63 - 1)] = _TRAIN.seed


@declared
class EvalRaw:
    """The mean loss of text that is never trained on."""

    every: Annotated[int, Whole("steps between two; 0: never", 0, 10**9)] = _EVAL.every
    batches: Annotated[int, Whole("global batches each time", 1, 10**6)] = _EVAL.batches


@declared
class CheckpointRaw:
    """When the state is saved."""

    at_end: Annotated[bool, Truth("once, when the training is done")] = _CHECKPOINT.at_end
    every: Annotated[int, Whole("steps between two; 0: never", 0, 10**9)] = _CHECKPOINT.every


@declared
class TimeoutRaw:
    """Seconds until a silent rank counts as hung."""

    init: Annotated[float, Real("for the meeting of the ranks", 0.0, 10**6, open=True)] = (
        _TIMEOUT.init
    )
    step: Annotated[float, Real("for every collective after it", 0.0, 10**6, open=True)] = (
        _TIMEOUT.step
    )


@declared
class LogRaw:
    """What is printed."""

    every: Annotated[int, Whole("steps between two lines", 1, 10**9)] = 10


RESHARD = Either(
    "gathered parameters are given back after forward (true), kept for backward (false), or kept "
    "in n shards among n neighbouring ranks, over which backward then gathers (n); non-root is "
    "true for all units but the root, as torch's None; without: true, and with pp false, since the "
    "micro-batches of a step come one upon the other",
    "true, false, non-root or a number of shards >= 2",
    (
        Truth(""),
        Whole("", 2, MAX_SHARDS),
        Choice(
            "",
            {
                "non-root": "all units but the root, whose backward pass begins at once: what "
                "torch's fully_shard does by itself (reshard_after_forward=None)"
            },
            slips={"nonroot": "non-root", "non_root": "non-root"},
        ),
    ),
)


@declared
class SyncRaw:
    """The accumulation's policy: from 3K units moved per step (every) down to K + 1."""

    gradients: Annotated[
        str | None,
        Choice(
            "when accumulated gradients are reduced",
            {
                "every": "after every micro-batch",
                "last": "after the last micro-batch (no_sync): until then each rank holds the "
                "unsharded sum of its own gradients",
            },
        ),
    ] = None
    reshard_after_forward: Annotated[bool | int | str | None, RESHARD] = None
    reshard_after_backward: Annotated[
        bool | None,
        Truth(
            "gathered parameters are given back after each backward; without: true, and with pp "
            "false"
        ),
    ] = None


@declared
class TensorRaw:
    """How operators are cut over tp."""

    plan: Annotated[
        str | dict[str, object],
        Either(
            "which sums there are; or, for a model that is not built in, each module's role",
            "paired or naive, or a mapping of module names to roles",
            (
                Choice(
                    "",
                    {
                        "paired": "column and row operators in pairs: two sums forward, two "
                        "backward",
                        "naive": "each column operator sums its input's gradient by itself",
                    },
                ),
                Free("", values=Choice("", {str(role): about for role, about in GIVEN.items()})),
            ),
        ),
    ] = "paired"
    loss_parallel: Annotated[
        bool, Truth("logits stay cut over the vocabulary until the loss is computed")
    ] = True
    asynchronous: Annotated[
        bool, Truth("collectives in pieces, each beside the product that it feeds (async TP)")
    ] = False


@declared
class OffloadRaw:
    """Where the mode O is, and who updates optimizer state that is not on the device."""

    tier: Annotated[
        str | None,
        Choice(
            "what the mode O means in this spec",
            {"host": "S@host: a slice in the host's memory", "file": "S@file: a slice in a file"},
            slips=TIER_SLIPS,
        ),
    ] = None
    path: Annotated[
        str | None, Text("the folder of the files (NVMe); without: the temporary folder")
    ] = None
    update: Annotated[
        str | None,
        Choice(
            "where optimizer state that is not on the device is updated",
            {
                "host": "by the processor, where the state is (what is gathered for the update, "
                "S*, comes to the device all the same)",
                "device": "on the device, to which it is copied and from which it is copied back, "
                "unit by unit",
            },
            slips=TIER_SLIPS,
        ),
    ] = None
