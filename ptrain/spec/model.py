"""Which model: the shape of a built-in family, a transformers class or the user's own function."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

BESIDE = "."  # a target's folder is that of the spec's file
Vocabulary = tuple[int | None, str]  # how many tokens there are, if the spec says so, and where


class Family(StrEnum):
    LLAMA = "llama"
    GPT = "gpt"


class Attention(StrEnum):
    """How attention is computed."""

    SDPA = "sdpa"  # torch's scaled_dot_product_attention
    EAGER = "eager"  # operator by operator, the scores in memory
    FLEX = "flex"  # torch's flex_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Everything that fixes the tensors of a built-in model. Sizes in elements. `preset` is the
    name of the preset that has this very shape, where the spec gave one."""

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = False
    dropout: float = 0.0
    rope_base: float = 10000.0
    attention: Attention = Attention.SDPA
    preset: str = field(default="", compare=False)

    @property
    def blocks(self) -> None:
        """No pattern: they are known."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def vocabulary(self) -> Vocabulary:
        return self.vocab, "model.vocab"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalModel:
    """`{target: package.module:function}`: the function is called with `arguments`. `blocks` is a
    pattern of the names of its blocks; None: as the module has them. `folder` is searched for the
    target after everything that is installed: that of the file that names it. The model is the same
    one wherever its file lies."""

    target: str
    arguments: dict[str, object] = field(default_factory=dict)
    blocks: str | None = None
    folder: str | None = field(default=None, compare=False, repr=False)

    @property
    def vocabulary(self) -> Vocabulary:
        return None, "model.arguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceModel:
    """`{hf: LlamaForCausalLM, config: {...}}`. `blocks` as of the user's own."""

    hf: str
    config: dict[str, object] = field(default_factory=dict)
    blocks: str | None = None
    attention: Attention = Attention.SDPA

    @property
    def vocabulary(self) -> Vocabulary:
        size = self.config.get("vocab_size")
        return size if isinstance(size, int) else None, "model.config.vocab_size"


ModelSpec = ModelShape | ExternalModel | HuggingFaceModel
