"""The options of experts and of multi-head latent attention, declared once."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from ptrain.spec.leaf import Choice, Real, Truth, Whole


@dataclass(frozen=True, slots=True, kw_only=True, init=False, eq=False, repr=False)
class LatentOptions:
    """Of blocks whose queries, keys and values are made of few features, the latent ones, which all
    heads share (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    kv_lora_rank: Annotated[
        int | None,
        Whole(
            "latent features that a token's keys and values of all heads are made of (MLA); "
            "without: keys and values are made of the stream",
            1,
            2**20,
            aka=("kv_compression_dim",),
            null=True,
        ),
    ] = None
    q_lora_rank: Annotated[
        int | None,
        Whole(
            "latent features that queries are made of; without: queries are made of the stream",
            1,
            2**20,
            aka=("q_compression_dim",),
            null=True,
        ),
    ] = None
    qk_nope_head_dim: Annotated[
        int,
        Whole("features of a head's query and key that do not turn; without: 128", 1, 2**14),
    ] = 128
    qk_rope_head_dim: Annotated[
        int,
        Whole(
            "features that turn by their place, of which all heads have one key; without: 64",
            2,
            2**14,
        ),
    ] = 64
    v_head_dim: Annotated[
        int, Whole("features of a head's value, of latent ones; without: 128", 1, 2**14)
    ] = 128


class Router(StrEnum):
    """What makes scores of a router's logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True, init=False, eq=False, repr=False)
class ExpertOptions(LatentOptions):
    """Of blocks whose feed-forward part is several, of which a router chooses some for a token."""

    experts: Annotated[
        int | None,
        Whole(
            "feed-forward parts of a block, of which a router chooses some for every token; "
            "without: one that takes all tokens",
            1,
            2**16,
            aka=("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
            null=True,
        ),
    ] = None
    experts_per_token: Annotated[
        int,
        Whole(
            "experts that a token goes to; without: 1",
            1,
            2**16,
            aka=("num_experts_per_tok", "top_k", "moe_router_topk", "moe_top_k"),
        ),
    ] = 1
    expert_ffn: Annotated[
        int | None,
        Whole(
            "width inside an expert; without: ffn",
            1,
            2**22,
            aka=("moe_intermediate_size", "moe_ffn_hidden_size"),
            null=True,
        ),
    ] = None
    shared_experts: Annotated[
        int,
        Whole(
            "experts beside the chosen ones that take all tokens, as one of so many times "
            "expert_ffn; without: 0",
            0,
            2**10,
            aka=("n_shared_experts", "num_shared_experts"),
        ),
    ] = 0
    expert_groups: Annotated[
        int | None,
        Whole(
            "groups of neighbouring experts, of which a router first chooses some for a token: "
            "those whose two best scores have the largest sum; without: none",
            2,
            2**15,
            aka=("n_group", "n_expert_groups", "moe_router_num_groups"),
            null=True,
        ),
    ] = None
    groups_per_token: Annotated[
        int,
        Whole(
            "groups among whose experts a token's are chosen; without: 1",
            1,
            2**15,
            aka=("topk_group", "n_limited_groups", "moe_router_group_topk"),
        ),
    ] = 1
    dense_layers: Annotated[
        int,
        Whole(
            "first layers without experts, of width ffn; without: 0",
            0,
            10_000,
            aka=("first_k_dense_replace",),
        ),
    ] = 0
    router: Annotated[
        Router,
        Choice(
            "what makes scores of a router's logits, in at least fp32; without: softmax",
            {
                "softmax": "over all experts, as Mixtral's and Qwen3's",
                "sigmoid": "of each expert by itself, as DeepSeek-V3's",
            },
            aka=("scoring_func", "moe_router_score_function"),
            read=Router,
        ),
    ] = Router.SOFTMAX
    router_norm: Annotated[
        bool,
        Truth(
            "the scores of a token's experts are divided by their sum; without: true",
            aka=("norm_topk_prob",),
        ),
    ] = True
    router_scale: Annotated[
        float | None,
        Real(
            "what the experts' weights are multiplied by; without: 1",
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
            "an expert has a bias, added to its scores where experts are chosen and not to what "
            "they count; after a step it rises by this where the step's tokens chose the expert "
            "less often than the mean, and falls where more often; without: none has one",
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
            "an expert takes at most so many times its even share of a sample's tokens, first "
            "choices before second ones; the rest passes it by. Without: all that is sent to it",
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
            "weight of the loss that balances the experts, of each sample's tokens and in every "
            "layer that has some; without: 0",
            0.0,
            1e3,
            aka=("router_aux_loss_coef", "moe_aux_loss_coeff", "aux_loss_alpha"),
        ),
    ] = 0.0
    z_loss: Annotated[
        float,
        Real(
            "weight of the loss that keeps a router's logits small, in every layer that has one; "
            "without: 0",
            0.0,
            1e3,
            aka=("router_z_loss_coef", "moe_z_loss_coeff"),
        ),
    ] = 0.0
