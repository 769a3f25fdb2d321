"""Which model: the shape of a built-in family, a transformers class or the user's own function."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from ptrain.spec.function import ARGUMENTS, FORM, PATH, UserFunction
from ptrain.spec.leaf import Choice, Either, Free, Real, Text, Truth, Whole, declared

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

    @property
    def function(self) -> UserFunction:
        """Return what builds it."""
        return UserFunction(
            section="model", target=self.target, arguments=self.arguments, folder=self.folder
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceModel:
    """`{hf: LlamaForCausalLM, config: {...}}`. `blocks` as of the user's own. `attention` is None
    where the spec does not say it: sdpa, of a class that has it, else eager."""

    hf: str
    config: dict[str, object] = field(default_factory=dict)
    blocks: str | None = None
    attention: Attention | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        size = self.config.get("vocab_size")
        return size if isinstance(size, int) else None, "model.config.vocab_size"


ModelSpec = ModelShape | ExternalModel | HuggingFaceModel


@declared
class ModelRaw:
    """Which model: a preset and shape fields that override it; or hf; or target."""

    preset: Annotated[
        str | None, Text("a model of specs/models, or a file of shape fields", NAME_OR_FILE)
    ] = None
    family: Annotated[
        str | None,
        Choice(
            "which architecture; without: llama",
            {
                "llama": "RMSNorm, rotary positions, SwiGLU, grouped queries",
                "gpt": "LayerNorm, learned positions, GELU, dropout",
            },
        ),
    ] = None
    layers: Annotated[
        int | None,
        Whole("blocks", 1, 10_000, aka=("n_layers", "num_layers", "num_hidden_layers", "depth")),
    ] = None
    hidden: Annotated[
        int | None,
        Whole(
            "width of the residual stream",
            1,
            2**20,
            aka=("hidden_size", "d_model", "n_embd", "dim"),
        ),
    ] = None
    heads: Annotated[
        int | None,
        Whole(
            "query heads; divides hidden",
            1,
            2**14,
            aka=("n_heads", "num_heads", "num_attention_heads"),
        ),
    ] = None
    kv_heads: Annotated[
        int | None,
        Whole(
            "key and value heads; divides heads; without: as many",
            1,
            2**14,
            aka=("n_kv_heads", "num_key_value_heads", "num_query_groups"),
        ),
    ] = None
    ffn: Annotated[
        int | None,
        Whole(
            "width inside the feed-forward part; without: 4 x hidden, of gpt",
            1,
            2**22,
            aka=("ffn_hidden_size", "intermediate_size", "d_ff"),
        ),
    ] = None
    vocab: Annotated[
        int | None, Whole("tokens in the vocabulary", 2, 2**24, aka=("vocab_size",))
    ] = None
    tied: Annotated[
        bool | None,
        Truth(
            "the head is the transposed embedding; without: false, and true of gpt",
            aka=("tie_word_embeddings",),
        ),
    ] = None
    dropout: Annotated[float | None, Real("probability of dropout; without: 0", 0.0, 0.99)] = None
    rope_base: Annotated[
        float | None,
        Real(
            "base of the rotary positions; without: 10000",
            0.0,
            1e12,
            open=True,
            aka=("rope_theta",),
        ),
    ] = None
    experts: Annotated[int | None, Whole("experts per block", 1, 2**16, executed=())] = None
    experts_per_token: Annotated[
        int | None, Whole("experts a token visits", 1, 2**16, executed=())
    ] = None
    hf: Annotated[
        str | None,
        Text(
            "a causal language model of transformers: its class, or its model type",
            r"[A-Za-z][A-Za-z0-9_-]*",
            "a class or a model type, like LlamaForCausalLM or llama",
        ),
    ] = None
    config: Annotated[
        dict[str, object] | str | None,
        Either(
            "fields of the hf class's config, or a whole config.json: written here, or the name of "
            "its file",
            "a mapping, or the name of a JSON file",
            (Free(""), Text("", NAME_OR_FILE)),
        ),
    ] = None
    target: Annotated[
        str | None,
        Text(
            "a function that returns the module; runs with --allow-import only",
            PATH,
            FORM,
        ),
    ] = None
    arguments: Annotated[dict[str, object] | None, ARGUMENTS] = None
    folder: Annotated[
        str | None,
        Text(
            "where target is looked for after what is installed: . is the spec's own folder, and "
            "null is nowhere",
            NAME_OR_FILE,
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
