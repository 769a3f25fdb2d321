"""Which model: the shape of a built-in family, a transformers class or the user's own function."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from math import ceil
from typing import Annotated, Any

from ptrain.spec.block import (
    OF_VALUES,
    Activation,
    Bias,
    BlockOptions,
    Dropouts,
    Norm,
    Positions,
    with_options,
)
from ptrain.spec.function import ARGUMENTS, FORM, PATH, UserFunction
from ptrain.spec.leaf import Choice, Either, Free, Text, Whole

NAME_OR_FILE = r"[^\x00-\x1f]{1,300}"


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


# Whose options stand for those that a shape does not say; tied, for what a file does not.
FAMILIES: Mapping[Family, Mapping[str, Any]] = {
    Family.LLAMA: {
        "norm": Norm.RMS,
        "activation": Activation.SWIGLU,
        "bias": Bias.NONE,
        "positions": Positions.ROPE,
        "tied": False,
    },
    Family.GPT: {
        "norm": Norm.LAYER,
        "activation": Activation.GELU,
        "bias": Bias.ALL,
        "positions": Positions.LEARNED,
        "tied": True,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(BlockOptions):
    """Everything that fixes the tensors of a built-in model. Sizes in elements. `preset` is the
    name of the preset that has this very shape, where the spec gave one; `pretrained` the folder of
    the weights that it begins with, None where they are drawn; `family` is whose options
    stand for those that are not given, and `tabulated` whose operators the blocks have, which the
    committed tables tell of: None of any other composition. `ignored`: fields of the folder's
    config without effect."""

    family: Family = field(compare=False)
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    attention: Attention = Attention.SDPA
    preset: str = field(default="", compare=False)
    pretrained: str | None = None
    ignored: tuple[str, ...] = field(default=(), compare=False, repr=False)
    tabulated: Family | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, value in FAMILIES[self.family].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        whose = (family for family in Family if _has_operators_of(self, family))
        object.__setattr__(self, "tabulated", next(whose, None))

    @property
    def blocks(self) -> None:
        """No pattern: they are known."""

    @property
    def has_documents(self) -> bool:
        """Whether samples are of several, each of which attends to itself alone."""
        return self.document_start is not None or self.document_end is not None

    @property
    def document_key(self) -> str:
        """The key that says which token tells documents apart."""
        return "document_end" if self.document_start is None else "document_start"

    @property
    def head_dim(self) -> int:
        """Features of a head's query, and of its key."""
        if self.is_latent:
            return self.qk_rope_head_dim + self.qk_nope_head_dim
        return self.own_head_dim or self.hidden // self.heads

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are made of latent features."""
        return self.kv_lora_rank is not None

    @property
    def value_width(self) -> int:
        """Features of all heads' values together, each with one of its own."""
        return self.heads * (self.v_head_dim if self.is_latent else self.head_dim)

    @property
    def query_width(self) -> int:
        """Features of all heads' queries together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Features of a head that turn by their place; 0 where none do."""
        if self.positions is not Positions.ROPE:
            return 0
        return self.qk_rope_head_dim if self.is_latent else int(self.head_dim * self.rotary)

    @property
    def dropouts(self) -> Dropouts:
        own = (self.embedding_dropout, self.attention_dropout, self.hidden_dropout)
        return Dropouts(*(self.dropout if rate is None else rate for rate in own))

    @property
    def width_of_expert(self) -> int:
        """Features inside one of the experts."""
        return self.expert_ffn or self.ffn

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer's tokens go to experts that a router chooses."""
        return self.experts is not None and layer >= self.dense_layers

    def capacity(self, num_tokens: int) -> int:
        """Return how many of a sample's tokens an expert takes at most: ceil(c k T / E), and never
        more than there are."""
        assert self.experts is not None and self.capacity_factor is not None, "experts are full"
        share = self.capacity_factor * self.experts_per_token * num_tokens / self.experts
        return min(num_tokens, ceil(share))

    @property
    def drops(self) -> bool:
        """Whether something is dropped out."""
        return any(self.dropouts)

    @property
    def is_fused(self) -> bool:
        """Whether attention is torch's scaled_dot_product_attention, which has no soft cap."""
        return self.attention is Attention.SDPA and self.attention_soft_cap is None

    @property
    def vocabulary(self) -> Vocabulary:
        return self.vocab, "model.vocab"

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, and of the output head: those of tokens, and the padding."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def vocab_padding(self) -> int:
        """Rows of the embedding, and of the output head, that belong to no token."""
        return self.vocab_rows - self.vocab

    def without_dropout(self) -> "ModelShape":
        """Return the shape that drops nothing out."""
        return replace(
            self, dropout=0.0, embedding_dropout=None, attention_dropout=None, hidden_dropout=None
        )

    def is_local(self, layer: int) -> bool:
        """Return whether a layer has a window."""
        is_global = self.global_every is not None and (layer + 1) % self.global_every == 0
        return self.window is not None and not is_global


def _has_operators_of(shape: ModelShape, family: Family) -> bool:
    """Whether the tables of a family tell what a shape's blocks allocate."""
    row = FAMILIES[family]
    activation = Activation.GELU if shape.activation is Activation.GELU_TANH else shape.activation
    if activation is not row["activation"] or shape.head_dim * shape.heads != shape.hidden:
        return False
    if family is Family.LLAMA and shape.drops:
        return False
    if family is Family.GPT and (shape.kv_heads != shape.heads or len({*shape.dropouts}) > 1):
        return False
    return all(getattr(shape, name) == row.get(name, default) for name, default in _FIXED)


# Options of which a table tells one alone: the family's, or else the default.
_FIXED = tuple(
    (option.name, option.default)
    for option in fields(BlockOptions)
    if option.name not in (*OF_VALUES, "tied", "activation", "own_head_dim", "vocab_multiple")
    and not option.name.endswith("dropout")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalModel:
    """`{target: package.module:function}`: the function is called with `arguments`. `blocks` is a
    pattern of the names of its blocks; None: as the module has them. `folder` is searched for the
    target after everything that is installed: that of the file that names it. The model is the same
    one wherever its file lies. `pretrained`: the folder of the weights that it begins with."""

    target: str
    arguments: dict[str, object] = field(default_factory=dict)
    blocks: str | None = None
    folder: str | None = field(default=None, compare=False, repr=False)
    pretrained: str | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        return None, "model.arguments"

    @property
    def function(self) -> UserFunction:
        """Return what builds it."""
        return UserFunction(
            section="model", target=self.target, arguments=self.arguments, folder=self.folder
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceModel:
    """`{hf: LlamaForCausalLM, config: {...}}`. `blocks` as of the user's own. `attention` is None
    where the spec does not say it: sdpa, of a class that has it, else eager. `pretrained`: the
    folder of the weights that it begins with, whose config is in `config`."""

    hf: str
    config: dict[str, object] = field(default_factory=dict)
    blocks: str | None = None
    attention: Attention | None = None
    pretrained: str | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        size = self.config.get("vocab_size")
        return size if isinstance(size, int) else None, "model.config.vocab_size"


ModelSpec = ModelShape | ExternalModel | HuggingFaceModel


@with_options
class ModelRaw:
    """Which model: a preset and shape fields that override it; or hf; or target."""

    preset: Annotated[
        str | None,
        Text("Name of a model in specs/models, or a YAML file with shape fields.", NAME_OR_FILE),
    ] = None
    pretrained: Annotated[
        str | None,
        Text(
            "Folder with the config.json and safetensors files of a published model. Training "
            "starts from its weights. Replaces `preset`; next to `hf`, the config is read from "
            "it; next to `target`, only the weights are.",
            NAME_OR_FILE,
            null=True,
        ),
    ] = None
    family: Annotated[
        str | None,
        Choice(
            "Model family that supplies defaults for omitted options. Default: llama.",
            {
                "llama": "norm: rms, activation: swiglu, bias: none, positions: rope",
                "gpt": "norm: layer, activation: gelu, bias: all, positions: learned, tied: true",
            },
        ),
    ] = None
    layers: Annotated[
        int | None,
        Whole(
            "Number of transformer blocks.",
            1,
            10_000,
            aka=("n_layers", "num_layers", "num_hidden_layers", "depth"),
        ),
    ] = None
    hidden: Annotated[
        int | None,
        Whole(
            "Width of the residual stream.",
            1,
            2**20,
            aka=("hidden_size", "d_model", "n_embd", "dim"),
        ),
    ] = None
    heads: Annotated[
        int | None,
        Whole(
            "Number of query heads; must divide `hidden` unless `head_dim` is set.",
            1,
            2**14,
            aka=("n_heads", "num_heads", "num_attention_heads"),
        ),
    ] = None
    kv_heads: Annotated[
        int | None,
        Whole(
            "Number of key and value heads; must divide `heads`. Default: `heads`.",
            1,
            2**14,
            aka=("n_kv_heads", "num_key_value_heads", "num_query_groups"),
        ),
    ] = None
    ffn: Annotated[
        int | None,
        Whole(
            "Inner width of the feed-forward layer. Required for gated activations; otherwise "
            "the default is 4 x `hidden`.",
            1,
            2**22,
            aka=("ffn_hidden_size", "intermediate_size", "d_ff"),
        ),
    ] = None
    vocab: Annotated[
        int | None, Whole("Number of tokens in the vocabulary.", 2, 2**24, aka=("vocab_size",))
    ] = None
    hf: Annotated[
        str | None,
        Text(
            "A causal language model of Transformers, by class name or model type.",
            r"[A-Za-z][A-Za-z0-9_-]*",
            "a class or a model type, like LlamaForCausalLM or llama",
        ),
    ] = None
    config: Annotated[
        dict[str, object] | str | None,
        Either(
            "Config fields of the `hf` class, or the name of a config.json file.",
            "a mapping, or the name of a JSON file",
            (Free(""), Text("", NAME_OR_FILE)),
        ),
    ] = None
    target: Annotated[
        str | None,
        Text(
            "Function that builds and returns an nn.Module; runs only with --allow-import.",
            PATH,
            FORM,
        ),
    ] = None
    arguments: Annotated[dict[str, object] | None, ARGUMENTS] = None
    folder: Annotated[
        str | None,
        Text(
            "Folder in which `target` is searched after the installed packages: `.` is the "
            "folder of the spec, null disables the search.",
            NAME_OR_FILE,
            null=True,
        ),
    ] = BESIDE
    blocks: Annotated[
        str | None,
        Text(
            "Names of the modules that are the model's blocks, with * for a number. Default: "
            "the blocks that the model names itself, or else its largest ModuleList.",
            r"[A-Za-z0-9_*]+(\.[A-Za-z0-9_*]+)*",
            "names of modules, like encoder.layers.*",
        ),
    ] = None
