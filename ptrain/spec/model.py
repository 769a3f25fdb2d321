"""The model of a spec: a built-in shape, a Transformers class or the user's function; and the
functions that a spec names: `{target: package.module:function, arguments: …}`.
"""

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
from ptrain.spec.leaf import Choice, Either, FreeMapping, Integer, Text, grammar_dataclass

PATH = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
FORM = "package.module:function"
ARGUMENTS = FreeMapping("Keyword arguments of `target`.")
FOLDER = Text(
    "Folder in which `target` is searched after the installed packages. Default: the folder of "
    "the spec.",
    r"[^\x00-\x1f]{1,300}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction:
    """A function that a section of the spec names, with its keyword arguments.

    It is imported from the installed packages, or else from `folder`. The folder does not take part
    in comparisons, so that the same function in a moved file is equal.
    """

    section: str
    target: str
    arguments: dict[str, object] = field(default_factory=dict)
    folder: str | None = field(default=None, compare=False, repr=False)

    @property
    def target_key(self) -> str:
        """The dotted key that names the function."""
        return f"{self.section}.target"

    def __hash__(self) -> int:
        """Hash the compared fields; arguments by their repr, because they may be unhashable."""
        return hash((self.section, self.target, repr(self.arguments)))


@grammar_dataclass
class StepRaw:
    """User-defined function that runs a micro-batch through the model."""

    target: Annotated[
        str,
        Text(
            "Function (model, batch) that returns the mean loss of a micro-batch; runs only "
            "with --allow-import.",
            PATH,
            FORM,
        ),
    ]
    arguments: Annotated[dict[str, object] | None, ARGUMENTS] = None
    folder: Annotated[str | None, FOLDER] = None


NAME_OR_FILE = r"[^\x00-\x1f]{1,300}"


BESIDE = "."  # the folder of the spec's file, in which a target is searched
Vocabulary = tuple[int | None, str]  # the number of tokens, if the spec has it, and its key


class Family(StrEnum):
    LLAMA = "llama"
    GPT = "gpt"


class Attention(StrEnum):
    """The implementation of attention."""

    SDPA = "sdpa"  # torch's scaled_dot_product_attention
    SDPA_GQA = "sdpa-gqa"  # the same, with enable_gqa instead of copies of keys and values
    EAGER = "eager"  # operator by operator, the scores in memory
    FLEX = "flex"  # torch's flex_attention


# Defaults of options that a shape does not set; `tied` only of files.
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
    """The sizes and options of a built-in model, which determine all of its tensors. Sizes are in
    elements.

    Attributes:
        family: The family whose defaults apply to options that are not set.
        preset: The name of the preset with exactly this shape, if the spec named one.
        pretrained: The folder of the initial weights; None for random weights.
        ignored: Fields of that folder's config without effect.
        tabulated: The family whose operators the blocks have, so that the committed tables cover
            them; None for other combinations of options.
    """

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
        """None: the names of a built-in model's blocks are known."""

    @property
    def has_documents(self) -> bool:
        """True if a sample contains several documents, and tokens attend only to their own
        document."""
        return self.document_start is not None or self.document_end is not None

    @property
    def document_key(self) -> str:
        """The key that sets the token at which documents begin or end."""
        return "document_end" if self.document_start is None else "document_start"

    @property
    def head_dim(self) -> int:
        """Features of a head's query, and of its key."""
        if self.is_latent:
            return self.qk_rope_head_dim + self.qk_nope_head_dim
        return self.own_head_dim or self.hidden // self.heads

    @property
    def is_latent(self) -> bool:
        """True if keys and values are computed from latent vectors (MLA)."""
        return self.kv_lora_rank is not None

    @property
    def value_width(self) -> int:
        """The elements of all heads' values for one token."""
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
        """The features of a head with rotary embedding; 0 without rotary embeddings."""
        if self.positions is not Positions.ROPE:
            return 0
        return self.qk_rope_head_dim if self.is_latent else int(self.head_dim * self.rotary)

    @property
    def dropouts(self) -> Dropouts:
        own = (self.embedding_dropout, self.attention_dropout, self.hidden_dropout)
        return Dropouts(*(self.dropout if rate is None else rate for rate in own))

    @property
    def width_of_expert(self) -> int:
        """The inner features of one expert."""
        return self.expert_ffn or self.ffn

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer has routed experts."""
        return self.experts is not None and layer >= self.dense_layers

    def capacity(self, num_tokens: int) -> int:
        """Return the largest number of a sample's tokens that one expert takes: ceil(c k T / E), at
        most T.

        Args:
            num_tokens: Tokens T of the sample.
        """
        assert self.experts is not None and self.capacity_factor is not None, "experts are full"
        share = self.capacity_factor * self.experts_per_token * num_tokens / self.experts
        return min(num_tokens, ceil(share))

    @property
    def has_dropout(self) -> bool:
        """True if any dropout probability is positive."""
        return any(self.dropouts)

    @property
    def is_fused(self) -> bool:
        """True if attention is torch's scaled_dot_product_attention, which does not support a soft
        cap."""
        is_torchs = self.attention in (Attention.SDPA, Attention.SDPA_GQA)
        return is_torchs and self.attention_soft_cap is None

    def attention_by(self, said: Attention | None) -> Attention:
        """Return the attention of this shape, by the `attention` of a spec. With as many heads of
        keys as of queries there is nothing to group."""
        is_needless = said is Attention.SDPA_GQA and self.kv_heads == self.heads
        return Attention.SDPA if said is None or is_needless else said

    @property
    def is_grouped(self) -> bool:
        """True if a kernel reads each head of keys and values for several heads of queries."""
        is_chosen = self.attention is Attention.SDPA_GQA and self.is_fused
        return is_chosen and self.kv_heads < self.heads

    @property
    def vocabulary(self) -> Vocabulary:
        return self.vocab, "model.vocab"

    @property
    def vocab_rows(self) -> int:
        """The rows of the embedding and of the output head: one for each token, and the padding."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def vocab_padding(self) -> int:
        """Rows of the embedding, and of the output head, that belong to no token."""
        return self.vocab_rows - self.vocab

    def without_dropout(self) -> "ModelShape":
        """Return the shape without dropout."""
        return replace(
            self, dropout=0.0, embedding_dropout=None, attention_dropout=None, hidden_dropout=None
        )

    def is_local(self, layer: int) -> bool:
        """Return True if a layer has a sliding window."""
        is_global = self.global_every is not None and (layer + 1) % self.global_every == 0
        return self.window is not None and not is_global


def _has_operators_of(shape: ModelShape, family: Family) -> bool:
    """Return True if the tables of a family cover the allocations of a shape's blocks."""
    row = FAMILIES[family]
    # The tanh approximation is one operator with the same tensors, so it has the tables of the
    # exact function.
    activation = Activation.GELU if shape.activation is Activation.GELU_TANH else shape.activation
    if activation is not row["activation"] or shape.head_dim * shape.heads != shape.hidden:
        return False
    if family is Family.LLAMA and (shape.has_dropout or shape.is_grouped):
        return False
    if family is Family.GPT and (shape.kv_heads != shape.heads or len({*shape.dropouts}) > 1):
        return False
    return all(getattr(shape, name) == row.get(name, default) for name, default in _FIXED)


# Options for which tables have only one value: the family's, or else the default.
_FIXED = tuple(
    (option.name, option.default)
    for option in fields(BlockOptions)
    if option.name not in (*OF_VALUES, "tied", "activation", "own_head_dim", "vocab_multiple")
    and not option.name.endswith("dropout")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalModel:
    """A model that a user's function builds: `{target: package.module:function}`.

    Attributes:
        target: The function.
        arguments: Its arguments.
        blocks: A pattern of the names of its blocks. None if the module determines them.
        folder: The folder in which the target is searched after all installed packages. Models are
            equal whatever their folder is.
        pretrained: The folder of the initial weights.
    """

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
        """The function that builds the model."""
        return UserFunction(
            section="model", target=self.target, arguments=self.arguments, folder=self.folder
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceModel:
    """A Transformers model: `{hf: LlamaForCausalLM, config: {...}}`.

    Attributes:
        hf: The class name.
        config: The fields of its config, including those of the `pretrained` folder.
        blocks: A pattern of the blocks' names; None for the elements of the largest ModuleList.
        attention: The implementation; None if the spec does not set it: sdpa if the class supports
            it, else eager.
        pretrained: The folder of the initial weights.
    """

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
    """The model: a preset and shape fields that override it, a Transformers class (`hf`), or a
    function (`target`)."""

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
            accepts_null=True,
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
        Integer(
            "Number of transformer blocks.",
            1,
            10_000,
            aka=("n_layers", "num_layers", "num_hidden_layers", "depth"),
        ),
    ] = None
    hidden: Annotated[
        int | None,
        Integer(
            "Width of the residual stream.",
            1,
            2**20,
            aka=("hidden_size", "d_model", "n_embd", "dim"),
        ),
    ] = None
    heads: Annotated[
        int | None,
        Integer(
            "Number of query heads; must divide `hidden` unless `head_dim` is set.",
            1,
            2**14,
            aka=("n_heads", "num_heads", "num_attention_heads"),
        ),
    ] = None
    kv_heads: Annotated[
        int | None,
        Integer(
            "Number of key and value heads; must divide `heads`. Default: `heads`.",
            1,
            2**14,
            aka=("n_kv_heads", "num_key_value_heads", "num_query_groups"),
        ),
    ] = None
    ffn: Annotated[
        int | None,
        Integer(
            "Inner width of the feed-forward layer. Required for gated activations; otherwise "
            "the default is 4 x `hidden`.",
            1,
            2**22,
            aka=("ffn_hidden_size", "intermediate_size", "d_ff"),
        ),
    ] = None
    vocab: Annotated[
        int | None, Integer("Number of tokens in the vocabulary.", 2, 2**24, aka=("vocab_size",))
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
            (FreeMapping(""), Text("", NAME_OR_FILE)),
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
            accepts_null=True,
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
