"""The options of a built-in model and its blocks, except its sizes. Each option is declared once,
here.

A spec's file and the resolved shape (`spec.model.ModelShape`) have the same options. In a file,
each may be left out; the defaults of norm, activation, bias and positions depend on the family.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple, dataclass_transform

from ptrain.spec.leaf import Boolean, Choice, Integer, Kind, Real, grammar_dataclass
from ptrain.word import MeantWord, words_of


@dataclass(frozen=True, slots=True, kw_only=True, init=False, eq=False, repr=False)
class LatentOptions:
    """Options of latent attention, whose queries, keys and values are computed from low-rank latent
    vectors that all heads share (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    kv_lora_rank: Annotated[
        int | None,
        Integer(
            "Rank of the latent vector from which all keys and values are computed (MLA). "
            "Default: no latent vector.",
            1,
            2**20,
            aka=("kv_compression_dim",),
            accepts_null=True,
        ),
    ] = None
    q_lora_rank: Annotated[
        int | None,
        Integer(
            "Rank of the latent vector from which queries are computed (MLA). Default: no "
            "latent vector.",
            1,
            2**20,
            aka=("q_compression_dim",),
            accepts_null=True,
        ),
    ] = None
    qk_nope_head_dim: Annotated[
        int,
        Integer(
            "Dimensions of each query and key head without rotary embedding (MLA). Default: 128.",
            1,
            2**14,
        ),
    ] = 128
    qk_rope_head_dim: Annotated[
        int,
        Integer(
            "Dimensions of each query and key head with rotary embedding; all heads share one "
            "rotary key (MLA). Default: 64.",
            2,
            2**14,
        ),
    ] = 64
    v_head_dim: Annotated[
        int, Integer("Dimension of each value head (MLA). Default: 128.", 1, 2**14)
    ] = 128


class Router(MeantWord):
    """The function that converts a router's logits to scores."""

    SOFTMAX = "softmax", "softmax over all experts (Mixtral, Qwen3)"
    SIGMOID = "sigmoid", "independent score per expert (DeepSeek-V3)"


@dataclass(frozen=True, slots=True, kw_only=True, init=False, eq=False, repr=False)
class ExpertOptions(LatentOptions):
    """Options of mixture-of-experts blocks, in which a router picks experts for each token."""

    experts: Annotated[
        int | None,
        Integer(
            "Number of routed experts per MoE layer. Default: dense feed-forward layers.",
            1,
            2**16,
            aka=("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
            accepts_null=True,
        ),
    ] = None
    experts_per_token: Annotated[
        int,
        Integer(
            "Number of experts that process each token (top-k). Default: 1.",
            1,
            2**16,
            aka=("num_experts_per_tok", "top_k", "moe_router_topk", "moe_top_k"),
        ),
    ] = 1
    expert_ffn: Annotated[
        int | None,
        Integer(
            "Inner width of one expert. Default: `ffn`.",
            1,
            2**22,
            aka=("moe_intermediate_size", "moe_ffn_hidden_size"),
            accepts_null=True,
        ),
    ] = None
    shared_experts: Annotated[
        int,
        Integer(
            "Number of shared experts, which process every token; built as one expert of this "
            "multiple of `expert_ffn`. Default: 0.",
            0,
            2**10,
            aka=("n_shared_experts", "num_shared_experts"),
        ),
    ] = 0
    expert_groups: Annotated[
        int | None,
        Integer(
            "Number of groups of neighbouring experts for group-limited routing. The router "
            "first picks the groups with the largest sum of their two best scores. Default: no "
            "groups.",
            2,
            2**15,
            aka=("n_group", "n_expert_groups", "moe_router_num_groups"),
            accepts_null=True,
        ),
    ] = None
    groups_per_token: Annotated[
        int,
        Integer(
            "Number of expert groups from which a token's experts are picked. Default: 1.",
            1,
            2**15,
            aka=("topk_group", "n_limited_groups", "moe_router_group_topk"),
        ),
    ] = 1
    dense_layers: Annotated[
        int,
        Integer(
            "Number of leading layers without experts, of width `ffn`. Default: 0.",
            0,
            10_000,
            aka=("first_k_dense_replace",),
        ),
    ] = 0
    router: Annotated[
        Router,
        Choice(
            "Function that turns router logits into scores, computed in fp32 or wider. Default:"
            " softmax.",
            words_of(Router),
            aka=("scoring_func", "moe_router_score_function"),
            read=Router,
        ),
    ] = Router.SOFTMAX
    router_norm: Annotated[
        bool,
        Boolean(
            "Divide the scores of the selected experts by their sum. Default: true.",
            aka=("norm_topk_prob",),
        ),
    ] = True
    router_scale: Annotated[
        float | None,
        Real(
            "Factor that multiplies the experts' weights. Default: 1.",
            0.0,
            1e6,
            excludes_low=True,
            aka=("routed_scaling_factor", "moe_router_topk_scaling_factor"),
            accepts_null=True,
        ),
    ] = None
    bias_update_rate: Annotated[
        float | None,
        Real(
            "Step size of the auxiliary-loss-free load balancing: each expert has a bias that "
            "affects selection only, raised after a step if the expert received fewer tokens "
            "than the mean and lowered if it received more. Default: no bias.",
            0.0,
            1e3,
            excludes_low=True,
            aka=("bias_update_speed", "moe_router_bias_update_rate", "expert_bias_update_rate"),
            accepts_null=True,
        ),
    ] = None
    capacity_factor: Annotated[
        float | None,
        Real(
            "Limit of tokens per expert, as a multiple of its even share of each sample; tokens"
            " beyond it skip the expert, second choices first. Default: no limit (dropless).",
            0.0,
            1e6,
            excludes_low=True,
            aka=("moe_expert_capacity_factor", "expert_capacity_factor"),
            accepts_null=True,
        ),
    ] = None
    aux_loss: Annotated[
        float,
        Real(
            "Weight of the load-balancing loss, computed per sample and MoE layer. Default: 0.",
            0.0,
            1e3,
            aka=("router_aux_loss_coef", "moe_aux_loss_coeff", "aux_loss_alpha"),
        ),
    ] = 0.0
    z_loss: Annotated[
        float,
        Real(
            "Weight of the loss that keeps router logits small, computed per MoE layer. "
            "Default: 0.",
            0.0,
            1e3,
            aka=("router_z_loss_coef", "moe_z_loss_coeff"),
        ),
    ] = 0.0


class Norm(MeantWord):
    LAYER = "layer", "LayerNorm"
    LAYER_WITHOUT_BIAS = "layer-without-bias", "LayerNorm without bias"
    RMS = "rms", "RMSNorm"
    RMS_PLUS_ONE = "rms-plus-one", "RMSNorm with factor 1 + weight, in fp32 or wider (Gemma)"

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of a norm's parameters, each of as many elements as there are features."""
        return ("weight", "bias") if self is Norm.LAYER else ("weight",)

    @property
    def is_rms(self) -> bool:
        """True if the norm does not subtract the mean."""
        return self in (Norm.RMS, Norm.RMS_PLUS_ONE)


class Activation(MeantWord):
    GELU = "gelu", "exact GELU (error function)"
    GELU_TANH = "gelu-tanh", "GELU with the tanh approximation (GPT-2)"
    RELU2 = "relu2", "squared ReLU"
    SWIGLU = "swiglu", "gated SiLU"
    GEGLU = "geglu", "gated GELU with the tanh approximation (Gemma)"

    @property
    def is_gated(self) -> bool:
        """True if the activation multiplies a second projection (GLU variants)."""
        return self in (Activation.SWIGLU, Activation.GEGLU)


class Bias(MeantWord):
    ALL = "all", "all projections"
    QKV = "qkv", "query, key and value projections"
    NONE = "none", "none"


class Positions(MeantWord):
    LEARNED = "learned", "learned position embeddings"
    ROPE = "rope", "rotary embeddings of queries and keys"
    NONE = "none", "no positional encoding; only the causal mask"


class RopeScaling(MeantWord):
    NONE = "none", "no scaling"
    LINEAR = "linear", "divide all frequencies by rope_factor"
    LLAMA3 = "llama3", "divide only low frequencies (Llama 3.1)"
    YARN = "yarn", "interpolate by dimension (YaRN); set attention_scale separately"


class Dropouts(NamedTuple):
    """Probabilities of dropout, by place."""

    embedding: float
    attention: float
    hidden: float


_OF_FAMILY: Any = None  # the default of the family
UNSAID: Any = object()  # the value of an option that a file leaves out; None is a written null
_RATE = (0.0, 0.99)
_ABOVE_0 = (0.0, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True, init=False, eq=False, repr=False)
class BlockOptions(ExpertOptions):
    """The options of a model and its blocks. `own_head_dim` is the key `head_dim` of files."""

    tied: Annotated[
        bool,
        Boolean(
            "Share the weights of the embedding and the output head. Default: false; true for gpt.",
            aka=("tie_word_embeddings",),
        ),
    ] = False
    vocab_multiple: Annotated[
        int,
        Integer(
            "Pad the embedding and the output head with zero rows to a multiple of this number. "
            "Padding is never predicted, has no gradient, and is not exported. Default: 1.",
            1,
            2**16,
            aka=("pad_to_multiple_of", "make_vocab_size_divisible_by"),
        ),
    ] = 1
    lora_rank: Annotated[
        int | None,
        Integer("Rank of LoRA adapters within blocks. Default: none.", 1, 2**14, accepts_null=True),
    ] = None
    lora_alpha: Annotated[
        float, Real("LoRA output factor, over `lora_rank`. Default: 16.", 0, 1e6, excludes_low=True)
    ] = 16.0
    norm: Annotated[
        Norm,
        Choice(
            "Type of the normalization layers. Default: from `family`.",
            words_of(Norm),
            read=Norm,
        ),
    ] = _OF_FAMILY
    norm_eps: Annotated[
        float,
        Real(
            "Epsilon that the normalization layers add to the variance. Default: 1e-5.",
            0.0,
            0.1,
            excludes_low=True,
            aka=("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        ),
    ] = 1e-5
    post_norm: Annotated[
        bool, Boolean("Also normalize the output of each sub-block (Gemma 2). Default: false.")
    ] = False
    parallel: Annotated[
        bool,
        Boolean(
            "Compute attention and feed-forward from the same normalized input and add both "
            "(Phi). Default: false."
        ),
    ] = False
    activation: Annotated[
        Activation,
        Choice(
            "Activation function of the feed-forward layer. Default: from `family`.",
            words_of(Activation),
            aka=("hidden_act", "activation_function", "hidden_activation"),
            read=Activation,
        ),
    ] = _OF_FAMILY
    bias: Annotated[
        Bias,
        Choice(
            "Projections of a block that have a bias. Default: from `family`.",
            words_of(Bias),
            read=Bias,
        ),
    ] = _OF_FAMILY
    head_bias: Annotated[bool, Boolean("Add a bias to the output head. Default: false.")] = False
    own_head_dim: Annotated[
        int | None,
        Integer(
            "Dimension of each attention head. Default: `hidden` / `heads`.",
            1,
            2**14,
            key="head_dim",
            accepts_null=True,
        ),
    ] = None
    qk_norm: Annotated[
        bool, Boolean("Normalize queries and keys per head, with a learned weight. Default: false.")
    ] = False
    attention_scale: Annotated[
        float | None,
        Real(
            "Factor that multiplies the attention scores. Default: head_dim ** -0.5.",
            *_ABOVE_0,
            excludes_low=True,
            accepts_null=True,
        ),
    ] = None
    attention_soft_cap: Annotated[
        float | None,
        Real(
            "Soft cap of the attention scores by tanh; no fused kernel supports it, so `sdpa` "
            "computes attention operator by operator. Default: no cap.",
            *_ABOVE_0,
            excludes_low=True,
            aka=("attn_logit_softcapping",),
            accepts_null=True,
        ),
    ] = None
    logit_soft_cap: Annotated[
        float | None,
        Real(
            "Soft cap of the logits by tanh. Default: no cap.",
            *_ABOVE_0,
            excludes_low=True,
            aka=("final_logit_softcapping",),
            accepts_null=True,
        ),
    ] = None
    window: Annotated[
        int | None,
        Integer(
            "Sliding-window size in tokens, including the query token. Default: full attention.",
            1,
            2**24,
            aka=("sliding_window",),
            accepts_null=True,
        ),
    ] = None
    document_start: Annotated[
        int | None,
        Integer(
            "Token id that starts a document or separates two; tokens then attend only within "
            "their document. Default: tokens attend to all previous tokens of the sample.",
            0,
            10**9,
            aka=("reset_attention_mask", "document_mask", "block_diagonal_mask", "bos_token_id"),
            accepts_null=True,
        ),
    ] = None
    document_end: Annotated[
        int | None,
        Integer(
            "Token id that ends a document; use it instead of `document_start` if start tokens "
            "also occur inside documents, as in chats.",
            0,
            10**9,
            aka=("eod", "eod_token_id", "eod_token"),
            accepts_null=True,
        ),
    ] = None
    global_every: Annotated[
        int | None,
        Integer(
            "Use full attention in every n-th layer and the window in all others. Default: the "
            "window in every layer.",
            2,
            10_000,
            accepts_null=True,
        ),
    ] = None
    positions: Annotated[
        Positions,
        Choice(
            "Type of positional encoding. Default: from `family`.",
            words_of(Positions),
            read=Positions,
        ),
    ] = _OF_FAMILY
    rotary: Annotated[
        float,
        Real(
            "Fraction of each head, counted from its first dimension, that gets rotary "
            "embeddings. Default: 1.",
            0.0,
            1.0,
            excludes_low=True,
            aka=("partial_rotary_factor", "rotary_pct"),
        ),
    ] = 1.0
    rope_base: Annotated[
        float,
        Real(
            "Base of the rotary frequencies (theta). Default: 10000.",
            0.0,
            1e12,
            excludes_low=True,
            aka=("rope_theta",),
        ),
    ] = 10000.0
    window_rope_base: Annotated[
        float | None,
        Real(
            "Base of the rotary frequencies in sliding-window layers, which are not scaled. "
            "Default: as in all other layers.",
            0.0,
            1e12,
            excludes_low=True,
            aka=("rope_local_base_freq",),
            accepts_null=True,
        ),
    ] = None
    rope_scaling: Annotated[
        RopeScaling,
        Choice(
            "How rotary frequencies are scaled for longer contexts. Default: none.",
            words_of(RopeScaling),
            read=RopeScaling,
        ),
    ] = RopeScaling.NONE
    rope_factor: Annotated[
        float, Real("Factor that divides the rotary frequencies. Default: 1.", 1.0, 1e6)
    ] = 1.0
    rope_low_factor: Annotated[
        float,
        Real(
            "llama3 and yarn: number of turns within `rope_original` below which frequencies "
            "are divided in full. Default: 1.",
            *_ABOVE_0,
            excludes_low=True,
        ),
    ] = 1.0
    rope_high_factor: Annotated[
        float,
        Real(
            "llama3 and yarn: number of turns within `rope_original` above which frequencies "
            "are unchanged. Default: 4.",
            *_ABOVE_0,
            excludes_low=True,
        ),
    ] = 4.0
    rope_original: Annotated[
        int,
        Integer(
            "llama3 and yarn: context length of the original training, in tokens. Default: 8192.",
            1,
            2**24,
        ),
    ] = 8192
    embedding_scale: Annotated[
        float | None,
        Real(
            "Factor that multiplies the embeddings. Default: 1.",
            *_ABOVE_0,
            excludes_low=True,
            accepts_null=True,
        ),
    ] = None
    residual_scale: Annotated[
        float | None,
        Real(
            "Factor that multiplies each sub-block's output before the residual addition "
            "(Granite). Default: 1.",
            *_ABOVE_0,
            excludes_low=True,
            aka=("residual_multiplier",),
            accepts_null=True,
        ),
    ] = None
    dropout: Annotated[
        float, Real("Default probability of the three dropout layers below. Default: 0.", *_RATE)
    ] = 0.0
    embedding_dropout: Annotated[
        float | None,
        Real(
            "Dropout probability after the embedding. Default: `dropout`.",
            *_RATE,
            aka=("embd_pdrop",),
            accepts_null=True,
        ),
    ] = None
    attention_dropout: Annotated[
        float | None,
        Real(
            "Dropout probability of the attention weights. Default: `dropout`.",
            *_RATE,
            aka=("attn_pdrop",),
            accepts_null=True,
        ),
    ] = None
    hidden_dropout: Annotated[
        float | None,
        Real(
            "Dropout probability of each sub-block's output. Default: `dropout`.",
            *_RATE,
            aka=("resid_pdrop", "residual_dropout"),
            accepts_null=True,
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
    """Declare a part of the grammar that also has the options of `BlockOptions`, before its key
    `hf`.

    The value of an option that a file leaves out is UNSAID; None is a written null.
    """
    own = dict(kind.__annotations__)
    at = list(own).index("hf")
    options = {spot.name: spot.type for spot in fields(BlockOptions)}
    rows = [*own.items()]
    kind.__annotations__ = dict([*rows[:at], *options.items(), *rows[at:]])
    for name in options:
        setattr(kind, name, field(default_factory=lambda: UNSAID))
    return grammar_dataclass(kind)
