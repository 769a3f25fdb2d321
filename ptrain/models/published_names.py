"""How files of published models have the tensors of a built-in one: under which names, and cut in
which way. By ptrain's name of a module theirs; {} is a block's number, and of experts a second one
is the expert's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ptrain.models.window import Window
from ptrain.spec.model import ModelShape

Names = Mapping[str, str]

_QKV = ("query", "key", "value")
_BLOCK, _THEIRS = "blocks.{}", "model.layers.{}"
_ATTENTION = {
    f"{_BLOCK}.attention.{own}": f"{_THEIRS}.self_attn.{other}"
    for own, other in (
        ("query", "q_proj"),
        ("query_norm", "q_norm"),
        ("key", "k_proj"),
        ("key_norm", "k_norm"),
        ("value", "v_proj"),
        ("output", "o_proj"),
    )
}
LLAMA: Names = {
    "embed": "model.embed_tokens",
    f"{_BLOCK}.attention_norm": f"{_THEIRS}.input_layernorm",
    **_ATTENTION,
    f"{_BLOCK}.mlp_norm": f"{_THEIRS}.post_attention_layernorm",
    **{f"{_BLOCK}.mlp.{part}": f"{_THEIRS}.mlp.{part}_proj" for part in ("gate", "up", "down")},
    "norm": "model.norm",
    "head": "lm_head",
}
SANDWICH: Names = {
    **LLAMA,
    f"{_BLOCK}.attention_post_norm": f"{_THEIRS}.post_attention_layernorm",
    f"{_BLOCK}.mlp_norm": f"{_THEIRS}.pre_feedforward_layernorm",
    f"{_BLOCK}.mlp_post_norm": f"{_THEIRS}.post_feedforward_layernorm",
}
_STARCODER2: Names = {
    **{own: other for own, other in LLAMA.items() if ".mlp." not in own},
    f"{_BLOCK}.mlp.up": f"{_THEIRS}.mlp.c_fc",
    f"{_BLOCK}.mlp.down": f"{_THEIRS}.mlp.c_proj",
}
GPT2: Names = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    f"{_BLOCK}.attention_norm": "transformer.h.{}.ln_1",
    **dict.fromkeys(
        (f"{_BLOCK}.attention.{part}" for part in _QKV),
        "transformer.h.{}.attn.c_attn",
    ),
    f"{_BLOCK}.attention.output": "transformer.h.{}.attn.c_proj",
    f"{_BLOCK}.mlp_norm": "transformer.h.{}.ln_2",
    f"{_BLOCK}.mlp.up": "transformer.h.{}.mlp.c_fc",
    f"{_BLOCK}.mlp.down": "transformer.h.{}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_MIXTRAL: Names = {
    **LLAMA,
    f"{_BLOCK}.mlp.router": f"{_THEIRS}.block_sparse_moe.gate",
    **{
        f"{_BLOCK}.mlp.experts.{own}": f"{_THEIRS}.block_sparse_moe.experts.{{}}.{other}"
        for own, other in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
_QWEN3_MOE: Names = {
    **LLAMA,
    f"{_BLOCK}.mlp.router": f"{_THEIRS}.mlp.gate",
    **{
        f"{_BLOCK}.mlp.experts.{part}": f"{_THEIRS}.mlp.experts.{{}}.{part}_proj"
        for part in ("gate", "up", "down")
    },
}
_PHI3: Names = {
    **LLAMA,
    **{f"{_BLOCK}.attention.{own}": f"{_THEIRS}.self_attn.qkv_proj" for own in _QKV},
    **{f"{_BLOCK}.mlp.{own}": f"{_THEIRS}.mlp.gate_up_proj" for own in ("gate", "up")},
}
# By the kinds of spec.published.
NAMES: Mapping[str, Names] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text"), SANDWICH),
    "starcoder2": _STARCODER2,
    "phi3": _PHI3,
    "gpt2": GPT2,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
}
_SIDE_BY_SIDE = {"gpt2": _QKV, "phi3": (*_QKV, "gate", "up")}  # parts of one of theirs


class StoredPiece(NamedTuple):
    """A window of one of theirs, and the place that takes it."""

    name: str
    window: Window
    place: Tensor


class JoinedRows(NamedTuple):
    """Which rows of a tensor that is several of ours are this one: the `number`th part, from row
    `first`, of `total` rows."""

    number: int
    first: int
    total: int


@dataclass(frozen=True)
class StoredTensor:
    """One of ours in files: the only one of `names`, or all of them stacked (`is_stacked`).
    `is_transposed`: theirs has inputs first. `section`: where it stands in theirs, as ours has its
    dimensions."""

    names: tuple[str, ...]
    is_stacked: bool = False
    is_transposed: bool = False
    section: JoinedRows | None = None

    def pieces(self, part: Tensor, window: Window) -> Iterator[StoredPiece]:
        """Yield what `part` takes of theirs. It is this window of ours."""
        (first, count), *others = window
        if self.is_stacked:
            for name, place in zip(self.names[first : first + count], part, strict=True):
                yield StoredPiece(name, tuple(others), place)
            return
        if self.section is not None:
            window = ((first + self.section.first, count), *others)
        if self.is_transposed:
            window, part = window[::-1], part.T
        yield StoredPiece(self.names[0], window, part)

    def write(self, tensor: Tensor) -> Mapping[str, Tensor]:
        """Return theirs of this one by name; of a section, its part."""
        if self.is_stacked:
            return dict(zip(self.names, tensor.unbind(), strict=True))
        return {self.names[0]: tensor.T if self.is_transposed else tensor}


def stored(kind: str, name: str, shape: ModelShape) -> StoredTensor:
    """Return how files of a `kind` have a parameter of ours, of a model of this shape."""
    module, _, leaf = name.rpartition(".")
    numbers = re.findall(r"\d+", module)
    theirs = NAMES[kind][re.sub(r"\d+", "{}", module)]
    is_of_experts = theirs.count("{}") > len(numbers)
    own = [[*numbers, str(n)] for n in range(shape.experts or 0)] if is_of_experts else [numbers]
    part = module.rpartition(".")[2]
    is_turned = kind == "gpt2" and bool(numbers)
    return StoredTensor(
        names=tuple(f"{theirs.format(*places)}.{leaf}" for places in own),
        is_stacked=is_of_experts,
        is_transposed=is_turned and leaf == "weight" and "norm" not in part,
        section=_section(kind, part, shape),
    )


def _section(kind: str, part: str, shape: ModelShape) -> JoinedRows | None:
    """Return where a module's rows stand in theirs, if that has those of others too."""
    widths = {"query": shape.query_width, "key": shape.kv_width, "value": shape.kv_width}
    for parts in (widths, {"gate": shape.ffn, "up": shape.ffn}):
        if part in parts and part in _SIDE_BY_SIDE.get(kind, ()):
            number, rows = [*parts].index(part), [*parts.values()]
            return JoinedRows(number, sum(rows[:number]), sum(rows))
    return None
