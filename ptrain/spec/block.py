"""What a built-in model is composed of beside its sizes: each option is declared here, once.

The spec's file and the resolved shape (`spec.model.ModelShape`) have the same options; in a file
each may be left out. What then stands for norm, activation, bias and positions the family says.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, dataclass_transform

from ptrain.spec.experts import ExpertOptions
from ptrain.spec.leaf import Choice, Kind, Real, Truth, Whole, declared


class Norm(StrEnum):
    LAYER = "layer"
    LAYER_WITHOUT_BIAS = "layer-without-bias"
    RMS = "rms"
    RMS_PLUS_ONE = "rms-plus-one"

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of a norm's parameters, each of as many elements as there are features."""
        return ("weight", "bias") if self is Norm.LAYER else ("weight",)

    @property
    def is_rms(self) -> bool:
        """Whether it subtracts no mean."""
        return self in (Norm.RMS, Norm.RMS_PLUS_ONE)


class Activation(StrEnum):
    GELU = "gelu"
    GELU_TANH = "gelu-tanh"
    RELU2 = "relu2"
    SWIGLU = "swiglu"
    GEGLU = "geglu"

    @property
    def is_gated(self) -> bool:
        """Whether it multiplies a projection of its own."""
        return self in (Activation.SWIGLU, Activation.GEGLU)


class Bias(StrEnum):
    ALL = "all"
    QKV = "qkv"
    NONE = "none"


class Positions(StrEnum):
    LEARNED = "learned"
    ROPE = "rope"
    NONE = "none"


class RopeScaling(StrEnum):
    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


class Dropouts(NamedTuple):
    """Probabilities of dropout, by place."""

    embedding: float
    attention: float
    hidden: float


_OF_FAMILY: Any = None  # the family says it
UNSAID: Any = object()  # what stands in a file's section for an option that the file does not say
_RATE = (0.0, 0.99)
_ABOVE_0 = (0.0, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True, init=False, eq=False, repr=False)
class BlockOptions(ExpertOptions):
    """What a model and its blocks are composed of; `own_head_dim` is the file's `head_dim`."""

    tied: Annotated[
        bool,
        Truth(
            "the head is the transposed embedding; without: false, and true of gpt",
            aka=("tie_word_embeddings",),
        ),
    ] = False
    norm: Annotated[
        Norm,
        Choice(
            "the norms of blocks and of the stream's end; without: the family's",
            {
                "layer": "LayerNorm",
                "layer-without-bias": "LayerNorm with a weight alone",
                "rms": "RMSNorm",
                "rms-plus-one": "RMSNorm that multiplies by 1 + weight, in at least fp32: Gemma's",
            },
            read=Norm,
        ),
    ] = _OF_FAMILY
    norm_eps: Annotated[
        float,
        Real(
            "what a norm adds to the variance; without: 1e-5",
            0.0,
            0.1,
            open=True,
            aka=("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        ),
    ] = 1e-5
    post_norm: Annotated[
        bool, Truth("a norm behind each sub-block too, as Gemma's; without: false")
    ] = False
    parallel: Annotated[
        bool,
        Truth("attention and MLP read one norm and are added at once, as Phi's; without: false"),
    ] = False
    activation: Annotated[
        Activation,
        Choice(
            "of the feed-forward part; without: the family's",
            {
                "gelu": "GELU by the error function",
                "gelu-tanh": "GELU by tanh, as GPT-2's",
                "relu2": "squared ReLU",
                "swiglu": "SiLU, gated",
                "geglu": "GELU by tanh, gated, as Gemma's",
            },
            aka=("hidden_act", "activation_function", "hidden_activation"),
            read=Activation,
        ),
    ] = _OF_FAMILY
    bias: Annotated[
        Bias,
        Choice(
            "which projections of a block have one; without: the family's",
            {"all": "all of them", "qkv": "queries, keys and values", "none": "none"},
            read=Bias,
        ),
    ] = _OF_FAMILY
    head_bias: Annotated[bool, Truth("a bias of the layer to the vocabulary; without: false")] = (
        False
    )
    own_head_dim: Annotated[
        int | None,
        Whole("width of a head; without: hidden / heads", 1, 2**14, key="head_dim", null=True),
    ] = None
    qk_norm: Annotated[
        bool, Truth("queries and keys are normed head by head, with a weight; without: false")
    ] = False
    attention_scale: Annotated[
        float | None,
        Real(
            "what scores are multiplied by; without: head_dim ** -0.5",
            *_ABOVE_0,
            open=True,
            null=True,
        ),
    ] = None
    attention_soft_cap: Annotated[
        float | None,
        Real(
            "bound of attention's scores, by tanh; without: none. No fused kernel has it: sdpa "
            "goes operator by operator then",
            *_ABOVE_0,
            open=True,
            aka=("attn_logit_softcapping",),
            null=True,
        ),
    ] = None
    logit_soft_cap: Annotated[
        float | None,
        Real(
            "bound of the logits, by tanh; without: none",
            *_ABOVE_0,
            open=True,
            aka=("final_logit_softcapping",),
            null=True,
        ),
    ] = None
    window: Annotated[
        int | None,
        Whole(
            "tokens that a query attends to, itself and those before it; without: all",
            1,
            2**24,
            aka=("sliding_window",),
            null=True,
        ),
    ] = None
    document_start: Annotated[
        int | None,
        Whole(
            "token that a document begins with, or that stands between two: tokens attend to those "
            "of their own document alone; without: to all before them in the sample",
            0,
            10**9,
            aka=("reset_attention_mask", "document_mask", "block_diagonal_mask", "bos_token_id"),
            null=True,
        ),
    ] = None
    document_end: Annotated[
        int | None,
        Whole(
            "token that a document ends with: as document_start, where documents begin with tokens "
            "that stand within them too, like those of chats",
            0,
            10**9,
            aka=("eod", "eod_token_id", "eod_token"),
            null=True,
        ),
    ] = None
    global_every: Annotated[
        int | None,
        Whole(
            "every how many layers one has no window; without: all have it", 2, 10_000, null=True
        ),
    ] = None
    positions: Annotated[
        Positions,
        Choice(
            "how a token's place is known; without: the family's",
            {
                "learned": "a table, added to the embedding",
                "rope": "rotary: queries and keys turn by their place",
                "none": "by the causal mask alone",
            },
            read=Positions,
        ),
    ] = _OF_FAMILY
    rotary: Annotated[
        float,
        Real(
            "share of a head that turns, the front of it; without: 1",
            0.0,
            1.0,
            open=True,
            aka=("partial_rotary_factor", "rotary_pct"),
        ),
    ] = 1.0
    rope_base: Annotated[
        float,
        Real(
            "base of the rotary positions; without: 10000",
            0.0,
            1e12,
            open=True,
            aka=("rope_theta",),
        ),
    ] = 10000.0
    window_rope_base: Annotated[
        float | None,
        Real(
            "base of the rotary positions of layers with a window, which are not scaled; without: "
            "as of all layers",
            0.0,
            1e12,
            open=True,
            aka=("rope_local_base_freq",),
            null=True,
        ),
    ] = None
    rope_scaling: Annotated[
        RopeScaling,
        Choice(
            "how rotary frequencies are lowered for longer texts; without: none",
            {
                "none": "they are not",
                "linear": "all are divided by rope_factor",
                "llama3": "the slow ones are, as in Llama 3.1",
                "yarn": "the same by the pairs' numbers; attention_scale is written apart",
            },
            read=RopeScaling,
        ),
    ] = RopeScaling.NONE
    rope_factor: Annotated[float, Real("what frequencies are divided by; without: 1", 1.0, 1e6)] = (
        1.0
    )
    rope_low_factor: Annotated[
        float,
        Real(
            "llama3 and yarn: turns in rope_original below which all is divided; without: 1",
            *_ABOVE_0,
            open=True,
        ),
    ] = 1.0
    rope_high_factor: Annotated[
        float,
        Real(
            "llama3 and yarn: turns in rope_original above which nothing is; without: 4",
            *_ABOVE_0,
            open=True,
        ),
    ] = 4.0
    rope_original: Annotated[
        int,
        Whole("llama3 and yarn: tokens of the texts that came first; without: 8192", 1, 2**24),
    ] = 8192
    embedding_scale: Annotated[
        float | None,
        Real("what embeddings are multiplied by; without: 1", *_ABOVE_0, open=True, null=True),
    ] = None
    residual_scale: Annotated[
        float | None,
        Real(
            "what a sub-block adds to the stream is multiplied by this, as Granite's; without: 1",
            *_ABOVE_0,
            open=True,
            aka=("residual_multiplier",),
            null=True,
        ),
    ] = None
    dropout: Annotated[
        float,
        Real("probability of the three dropouts, where theirs is not written; without: 0", *_RATE),
    ] = 0.0
    embedding_dropout: Annotated[
        float | None,
        Real(
            "dropout behind the embedding; without: dropout", *_RATE, aka=("embd_pdrop",), null=True
        ),
    ] = None
    attention_dropout: Annotated[
        float | None,
        Real(
            "dropout of attention's weights; without: dropout",
            *_RATE,
            aka=("attn_pdrop",),
            null=True,
        ),
    ] = None
    hidden_dropout: Annotated[
        float | None,
        Real(
            "dropout of what a sub-block adds to the stream; without: dropout",
            *_RATE,
            aka=("resid_pdrop", "residual_dropout"),
            null=True,
        ),
    ] = None


# Options on which no size of a tensor depends.
OF_VALUES = (
    "norm_eps",
    "attention_scale",
    "rope_base",
    "rope_scaling",
    "rope_factor",
    "rope_low_factor",
    "rope_high_factor",
    "rope_original",
)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def with_options(kind: type[Kind]) -> type[Kind]:
    """Declare a part of the grammar that has the options too, in front of its key `hf`: UNSAID is
    what a file does not say, and None that there is none."""
    own = dict(kind.__annotations__)
    at = list(own).index("hf")
    options = {spot.name: spot.type for spot in fields(BlockOptions)}
    rows = [*own.items()]
    kind.__annotations__ = dict([*rows[:at], *options.items(), *rows[at:]])
    for name in options:
        setattr(kind, name, field(default_factory=lambda: UNSAID))
    return declared(kind)
