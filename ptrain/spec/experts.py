"""The options of experts and of multi-head latent attention, declared once."""

from dataclasses import dataclass
from typing import Annotated

from ptrain.spec.leaf import Choice, Real, Truth, Whole
from ptrain.word import MeantWord, words_of


@dataclass(frozen=True, slots=True, kw_only=True, init=False, eq=False, repr=False)
class LatentOptions:
    """Of blocks whose queries, keys and values are made of few features, the latent ones, which all
    heads share (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    kv_lora_rank: Annotated[
        int | None,
        Whole(
            "Rank of the latent vector from which all keys and values are computed (MLA). "
            "Default: no latent vector.",
            1,
            2**20,
            aka=("kv_compression_dim",),
            null=True,
        ),
    ] = None
    q_lora_rank: Annotated[
        int | None,
        Whole(
            "Rank of the latent vector from which queries are computed (MLA). Default: no "
            "latent vector.",
            1,
            2**20,
            aka=("q_compression_dim",),
            null=True,
        ),
    ] = None
    qk_nope_head_dim: Annotated[
        int,
        Whole(
            "Dimensions of each query and key head without rotary embedding (MLA). Default: 128.",
            1,
            2**14,
        ),
    ] = 128
    qk_rope_head_dim: Annotated[
        int,
        Whole(
            "Dimensions of each query and key head with rotary embedding; all heads share one "
            "rotary key (MLA). Default: 64.",
            2,
            2**14,
        ),
    ] = 64
    v_head_dim: Annotated[
        int, Whole("Dimension of each value head (MLA). Default: 128.", 1, 2**14)
    ] = 128


class Router(MeantWord):
    """What makes scores of a router's logits."""

    SOFTMAX = "softmax", "softmax over all experts (Mixtral, Qwen3)"
    SIGMOID = "sigmoid", "independent score per expert (DeepSeek-V3)"


@dataclass(frozen=True, slots=True, kw_only=True, init=False, eq=False, repr=False)
class ExpertOptions(LatentOptions):
    """Of blocks whose feed-forward part is several, of which a router chooses some for a token."""

    experts: Annotated[
        int | None,
        Whole(
            "Number of routed experts per MoE layer. Default: dense feed-forward layers.",
            1,
            2**16,
            aka=("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
            null=True,
        ),
    ] = None
    experts_per_token: Annotated[
        int,
        Whole(
            "Number of experts that process each token (top-k). Default: 1.",
            1,
            2**16,
            aka=("num_experts_per_tok", "top_k", "moe_router_topk", "moe_top_k"),
        ),
    ] = 1
    expert_ffn: Annotated[
        int | None,
        Whole(
            "Inner width of one expert. Default: `ffn`.",
            1,
            2**22,
            aka=("moe_intermediate_size", "moe_ffn_hidden_size"),
            null=True,
        ),
    ] = None
    shared_experts: Annotated[
        int,
        Whole(
            "Number of shared experts, which process every token; built as one expert of this "
            "multiple of `expert_ffn`. Default: 0.",
            0,
            2**10,
            aka=("n_shared_experts", "num_shared_experts"),
        ),
    ] = 0
    expert_groups: Annotated[
        int | None,
        Whole(
            "Number of groups of neighbouring experts for group-limited routing. The router "
            "first picks the groups with the largest sum of their two best scores. Default: no "
            "groups.",
            2,
            2**15,
            aka=("n_group", "n_expert_groups", "moe_router_num_groups"),
            null=True,
        ),
    ] = None
    groups_per_token: Annotated[
        int,
        Whole(
            "Number of expert groups from which a token's experts are picked. Default: 1.",
            1,
            2**15,
            aka=("topk_group", "n_limited_groups", "moe_router_group_topk"),
        ),
    ] = 1
    dense_layers: Annotated[
        int,
        Whole(
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
        Truth(
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
            open=True,
            aka=("routed_scaling_factor", "moe_router_topk_scaling_factor"),
            null=True,
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
            open=True,
            aka=("bias_update_speed", "moe_router_bias_update_rate", "expert_bias_update_rate"),
            null=True,
        ),
    ] = None
    capacity_factor: Annotated[
        float | None,
        Real(
            "Limit of tokens per expert, as a multiple of its even share of each sample; tokens"
            " beyond it skip the expert, second choices first. Default: no limit (dropless).",
            0.0,
            1e6,
            open=True,
            aka=("moe_expert_capacity_factor", "expert_capacity_factor"),
            null=True,
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
