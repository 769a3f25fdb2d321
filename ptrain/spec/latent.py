"""What multi-head latent attention is: each option is declared here, once."""

from dataclasses import dataclass
from typing import Annotated

from ptrain.spec.leaf import Whole


@dataclass(frozen=True, slots=True, kw_only=True)
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
