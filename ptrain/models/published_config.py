"""Configs of Transformers classes as a spec gives them, and tensor names of published weights.

A config is either some fields of the class, or a full published config.json, which is recognized by
`architectures` or `model_type`. From a full file the class gets all fields that it declares or that
its code reads. Fields that ptrain sets and fields that nothing reads are left out. They are
reported, unless `specs/published.yaml` lists them as silent. A field name that nearly matches a
missing field is rejected as a likely typo. All faults of a config are reported at once.

If a spec does not choose an implementation of MoE layers, transformers' default is used: torch's
grouped product, whose sizes depend on no token. Where torch has none (in fp64, and for rows that do
not fill 16 bytes) experts run one by one.

Legend of shape suffixes: N tokens, D hidden.

The tables of names map ptrain's module names to the names in files of published weights. `{}` is
the number of a block; a second `{}` is the number of an expert.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ptrain.errors import Fault, input_error
from ptrain.models.window import Window, has_overlapping_rows
from ptrain.spec.model import ModelShape
from ptrain.spec.published import find_refused, list_ignored
from ptrain.spec.slips import closest_word, did_you_mean, suggest_word

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
    """A window of a tensor in a file, and the tensor that receives it."""

    name: str
    window: Window
    place: Tensor


class JoinedRows(NamedTuple):
    """The rows of a parameter within a fused tensor of a file.

    Attributes:
        number: Index of the parameter among the fused ones.
        first: First of its rows.
        total: Number of rows of the fused tensor.
    """

    number: int
    first: int
    total: int


@dataclass(frozen=True)
class StoredTensor:
    """The representation of a built-in model's parameter in files.

    Attributes:
        names: Names of the tensors in files; several only if stacked.
        is_stacked: True if the parameter stacks one file tensor per expert.
        is_transposed: True if the file has inputs in the first dimension.
        section: Rows of the parameter in a fused file tensor; None if it is not fused.
    """

    names: tuple[str, ...]
    is_stacked: bool = False
    is_transposed: bool = False
    section: JoinedRows | None = None

    def window_pieces(self, part: Tensor, window: Window) -> Iterator[StoredPiece]:
        """Yield the windows of file tensors that fill a window of the parameter.

        Args:
            part: Receives the values; its shape is the window's size.
            window: Offset and size along each dimension of the parameter, in elements.

        Yields:
            The file tensor's name, a window of the file tensor, and the view of `part` that it
            fills. The view is transposed if the file's tensor is.
        """
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

    def to_file_tensors(self, tensor: Tensor) -> Mapping[str, Tensor]:
        """Return the file tensors of this parameter by name; for a fused one, only its rows."""
        if self.is_stacked:
            return dict(zip(self.names, tensor.unbind(), strict=True))
        return {self.names[0]: tensor.T if self.is_transposed else tensor}


def stored_tensor(kind: str, name: str, shape: ModelShape) -> StoredTensor:
    """Return the representation of a parameter in files.

    Args:
        kind: Format of the files, a key of `NAMES`.
        name: Name of the parameter in ptrain.
        shape: The model.
    """
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
        section=_fused_rows(kind, part, shape),
    )


def _fused_rows(kind: str, part: str, shape: ModelShape) -> JoinedRows | None:
    """Return the rows of a module in the fused file tensor; None if the tensor is not fused."""
    widths = {"query": shape.query_width, "key": shape.kv_width, "value": shape.kv_width}
    for parts in (widths, {"gate": shape.ffn, "up": shape.ffn}):
        if part in parts and part in _SIDE_BY_SIDE.get(kind, ()):
            number, rows = [*parts].index(part), [*parts.values()]
            return JoinedRows(number, sum(rows[:number]), sum(rows))
    return None


Experts = Callable[..., Tensor]  # (module, hidden_ND, indices, weights) -> output_ND
Register = Callable[[str, Experts], None]

EXPERTS = "experts_implementation"  # a setting of every config, which no config writes down
_GROUPED_MM = "grouped_mm"
_BY_DTYPE, _GROUPED_OR_REFUSED = "ptrain_by_dtype", "ptrain_grouped_or_refused"
_ALIGNED = 16  # bytes of a row
_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


def experts_setting(register: Register, product: Experts, given: object) -> dict[str, object]:
    """Register forward passes for MoE layers, and return the config field that selects one.

    Args:
        register: transformers' function to register an implementation by name.
        product: transformers' implementation by grouped products.
        given: Value of the field in the spec's config, or None.

    Returns:
        The field with the name of the implementation. If `grouped_mm` was given, a forward pass
            that torch cannot compute by grouped products raises SpecError.
    """

    def grouped(module: nn.Module, hidden_ND: Tensor, *routing: Tensor) -> Tensor:
        if not _is_grouped(module, hidden_ND):
            kind = str(hidden_ND.dtype).removeprefix("torch.")
            finding = (
                f"torch has no grouped matrix product in {kind} with these widths, "
                "only in float32, "
            )
            finding += f"bfloat16 and float16 with rows that are a multiple of {_ALIGNED} bytes"
            raise input_error(
                f"model.config.{EXPERTS}", finding, "Use `eager`, or remove the field."
            )
        return product(module, hidden_ND, *routing)

    def by_dtype(module: nn.Module, hidden_ND: Tensor, *routing: Tensor) -> Tensor:
        by_expert = type(module).forward.__wrapped__
        run = grouped if _is_grouped(module, hidden_ND) else by_expert
        output_ND: Tensor = run(module, hidden_ND, *routing)
        return output_ND

    register(_BY_DTYPE, by_dtype)
    register(_GROUPED_OR_REFUSED, grouped)
    own: dict[object, object] = {None: _BY_DTYPE, _GROUPED_MM: _GROUPED_OR_REFUSED}
    return {EXPERTS: own.get(given, given)}


def _is_grouped(module: nn.Module, hidden_ND: Tensor) -> bool:
    """Return True if torch has forward and backward grouped products for these weights and rows."""
    weights = [*module.parameters()]
    widths = (width for weight in weights for width in weight.shape[1:])
    aligned = all(width * hidden_ND.itemsize % _ALIGNED == 0 for width in widths)
    return aligned and hidden_ND.dtype in _GROUPED and not any(map(has_overlapping_rows, weights))


_OF_FILE = ("architectures", "model_type", "_name_or_path", "transformers_version")
_SAID_BY = {
    "use_cache": "training",
    "dtype": "precision",
    "torch_dtype": "precision",
    "attn_implementation": "attention",
    "_attn_implementation": "attention",
}
# Minimum similarity of a typo: a letter or two. Fields of other classes are less similar.
_TYPO = 0.85
_OLD_NAMES = ("rope_theta", "rope_scaling")  # accepted because published configs have them
_READ = re.compile(r"""getattr\((?:self\.)?config, ["'](\w+)["']""")
_CONVERTED = re.compile(
    r"""kwargs\.(?:pop|get)\(["'](\w+)["']"""
)  # old names that a config class converts
_PLACE = "model.config."
_COMPUTING = tuple(  # not modules that document fields, generate text or add MTP layers
    f"transformers.{name}"
    for name in ("models.", "integrations.", "masking_", "modeling_rope_", "modeling_utils")
)
_BASE = "transformers.configuration_utils"  # its kwargs are arguments of loading a file, not fields


@dataclass(frozen=True, slots=True)
class TakenConfig:
    """The selection from a config.

    Attributes:
        fields: Fields that the class is built with.
        ignored: Phrases that name fields without effect.
        faults: All faults of the config.
    """

    fields: Mapping[str, object]
    ignored: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


def select_fields(named: Any, config: Mapping[str, object]) -> TakenConfig:
    """Select the fields of a spec's config that a class accepts.

    Args:
        named: The class of transformers.
        config: Fields of its config, or a full published file.

    Returns:
        The fields, the ignored ones, and all faults.
    """
    kind, known, faults = named.config_class, _accepted_fields(named), [*faults_of_class(config)]
    fields = {**config}
    unread: dict[str, object] = {}
    if is_whole(config):
        given = config.get("model_type", kind.model_type)
        if given != kind.model_type:
            faults.append(
                _field_fault(
                    "model_type",
                    f"{given!r}, but {named.__name__} has model_type {kind.model_type!r}",
                    f"Use `model.hf={given}`, or remove `model.hf`.",
                )
            )
        else:  # fields of another class are not compared
            faults += _misspelled_fields(kind, known, config)
        fields = {name: value for name, value in config.items() if _is_taken(name, known)}
        unread = {
            name: value
            for name, value in config.items()
            if name not in (EXPERTS, *_SAID_BY) and not (name in fields and _is_read(named, name))
        }
    else:
        passed = {fault.place.removeprefix(_PLACE) for fault in faults}
        faults += _unknown_fields(kind, known, [name for name in config if name not in passed])
        # a class may declare a field that it never reads
        taken = {name: value for name, value in config.items() if _is_taken(name, known)}
        unread = {name: value for name, value in taken.items() if not _is_read(named, name)}
    bad = {fault.place for fault in faults}
    fields = {name: value for name, value in fields.items() if _PLACE + name not in bad}
    said = (name for name, by in _SAID_BY.items() if by == "attention" and config.get(name))
    ignored = (*(f"{name} (set by attention)" for name in said), *list_ignored(unread))
    return TakenConfig(fields, ignored, tuple(faults))


def is_whole(config: Mapping[str, object]) -> bool:
    """Return True if the config is a full published file."""
    return "architectures" in config or "model_type" in config


def faults_of_class(config: Mapping[str, object]) -> Iterator[Fault]:
    """Yield the faults that a config has for every class.

    These are nested models, custom code and quantized weights.
    """
    for fault in find_refused(config):
        yield _field_fault(
            fault.field, fault.finding.removeprefix(f"{fault.field}: "), fault.remedy
        )
    for field, value in config.items():
        is_model = isinstance(value, Mapping) and value and field.endswith("_config")
        if is_model and field != "quantization_config":
            finding = f"not supported yet: {field} is a nested model, as in multimodal "
            yield _field_fault(
                field,
                f"{finding}models",
                "Use the config of its language model only, and set `model.hf` to the "
                "class of that model.",
            )


def _is_taken(field: str, known: tuple[str, ...]) -> bool:
    """Return True if this field of a full file is passed to the class."""
    return field == EXPERTS or (field in known and field not in (*_OF_FILE, *_SAID_BY))


def _misspelled_fields(
    kind: Any, known: tuple[str, ...], config: Mapping[str, object]
) -> Iterator[Fault]:
    """Yield a fault for each unknown field of a full file that nearly matches a missing field."""
    missing = [name for name in known if name not in config]
    for field in config:
        is_known = field in (*known, *_OF_FILE, *_SAID_BY, EXPERTS)
        if not is_known and (near := did_you_mean(closest_word(field, missing, cutoff=_TYPO))):
            yield _field_fault(field, f"{kind.__name__} has no field {field!r}", near)


def _unknown_fields(kind: Any, known: tuple[str, ...], fields: Iterable[str]) -> Iterator[Fault]:
    """Yield a fault for each field that the class lacks or that another part of the spec sets."""
    for field in fields:
        if by := _SAID_BY.get(field):
            remedy = "Remove it."
            if by == "attention":
                remedy += " Use `attention=eager`, `attention=sdpa` or `attention=flex`."
            yield _field_fault(field, f"{field} is set by {by}, not by the config", remedy)
        elif field not in known and field != EXPERTS:
            near = suggest_word(field, known)
            yield _field_fault(
                field,
                f"{kind.__name__} has no field {field!r}",
                near or _usual_fields_remedy(known),
            )


def _field_fault(field: str, finding: str, remedy: str) -> Fault:
    return Fault(place=f"{_PLACE}{field}", finding=finding, remedy=remedy)


@cache
def _accepted_fields(named: Any) -> tuple[str, ...]:
    """Return the field names that a class's config accepts.

    First come declared fields, then aliases, old names, and names that the code reads if present
    (`head_dim` in some classes).
    """
    kind = named.config_class
    return tuple(
        dict.fromkeys([*kind().to_dict(), *kind.attribute_map, *_OLD_NAMES, *_fields_read(named)])
    )


def _fields_read(named: Any) -> Iterator[str]:
    """Yield field names that the config classes convert or that the model's module reads by
    getattr."""
    for kind in named.config_class.__mro__:
        if kind.__module__.startswith("transformers.") and kind.__module__ != _BASE:
            yield from _CONVERTED.findall(inspect.getsource(kind))
    yield from _READ.findall(inspect.getsource(sys.modules[named.__module__]))


@cache
def _is_read(named: Any, field: str) -> bool:
    """Return True if the class, or a module that it imports from, may read a field.

    An occurrence of the name in their sources, or in a computed attribute of the config, counts.
    """
    kind = named.config_class
    if field in (*_OLD_NAMES, *_fields_read(named)):
        return True
    names = (field, *(name for name, other in kind.attribute_map.items() if other == field))
    if any(re.search(rf"\b{re.escape(name)}\b", _source_text(named)) for name in names):
        return True
    own = inspect.getsource(sys.modules[kind.__module__])
    return re.search(rf"self\.{re.escape(field)}\b(?! *=[^=])", own) is not None


@cache
def _source_text(named: Any) -> str:
    """Return the sources of a class's module and of the transformers modules that it uses."""
    module = sys.modules[named.__module__]
    used = {getattr(value, "__module__", None) for value in vars(module).values()}
    modules = {name for name in used if name and name.startswith(_COMPUTING)}
    modules -= {named.config_class.__module__}  # where fields are declared
    return "".join(map(inspect.getsource, {module, *map(sys.modules.__getitem__, modules)}))


def _usual_fields_remedy(known: tuple[str, ...]) -> str:
    """Return a remedy that lists usual fields of the class."""
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    named = [field for field in usual if field in known]
    return f"Use fields of that class, such as {', '.join(named)}." if named else "Remove it."
