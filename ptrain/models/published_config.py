"""The config of a class of transformers as a spec gives it: some fields of the class, or the whole
config.json that somebody has published, which `architectures` or `model_type` tells.

Of a whole file all is taken that the class has a field for, or that its code reads. What ptrain
says itself (dtypes, attention, whether keys and values are kept) is left out, and so is what
nothing reads; both are named. A word that is nearly that of a field which is missing is refused: it
may be meant.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ptrain.errors import refused
from ptrain.models.experts import EXPERTS
from ptrain.spec.slips import near_word

_OF_FILE = ("architectures", "model_type", "_name_or_path", "transformers_version")
_SAID_BY = {
    "use_cache": "training",
    "dtype": "precision",
    "torch_dtype": "precision",
    "attn_implementation": "attention",
    "_attn_implementation": "attention",
}
_OLD_NAMES = ("rope_theta", "rope_scaling")  # taken for the sake of configs that are published
_READ = re.compile(r"""getattr\((?:self\.)?config, ["'](\w+)["']""")
_CONVERTED = re.compile(r"""kwargs\.(?:pop|get)\(["'](\w+)["']""")  # into fields of today's names
_BASE = "transformers.configuration_utils"  # takes what loading a file takes


@dataclass(frozen=True, slots=True)
class TakenConfig:
    """`fields` are what the class is given; `ignored` says of others in one phrase each why they
    are not."""

    fields: Mapping[str, object]
    ignored: tuple[str, ...] = ()


def taken(named: Any, config: Mapping[str, object]) -> TakenConfig:
    """Return what a class takes of a spec's config. Raises SpecError for what it does not."""
    kind = named.config_class
    if is_whole(config):
        return _of_file(named, kind, config)
    known = _fields(named)
    for field in config:
        if field in _SAID_BY:
            _refuse_said(field)
        if field not in known:
            near = near_word(field, known)
            finding = f"{kind.__name__} has no field {field!r}"
            raise refused(f"model.config.{field}", finding, near or _some(known))
    return TakenConfig(config)


def is_whole(config: Mapping[str, object]) -> bool:
    """Return whether it is a published file."""
    return "architectures" in config or "model_type" in config


def require_one_model(config: Mapping[str, object]) -> None:
    """Raises SpecError for a file of several models, and for one that names code or weights that
    are not transformers' own."""
    for field, value in config.items():
        if field == "auto_map":
            finding = "code that comes with the weights would be the model, and it never runs"
            remedy = "remove it, if transformers has this class by itself"
            raise refused("model.config.auto_map", finding, remedy)
        if field == "quantization_config":
            finding = "the weights would be quantized, and those of a training are precision's"
            raise refused(f"model.config.{field}", finding, "remove it")
        if isinstance(value, Mapping) and field.endswith("_config"):
            finding = f"{field} is a model of its own: one of several, as multimodal models have "
            remedy = "give the config of its language model alone, with hf: its class"
            raise refused(f"model.config.{field}", f"not yet: {finding}them", remedy)


def _of_file(named: Any, kind: Any, config: Mapping[str, object]) -> TakenConfig:
    given = config.get("model_type", kind.model_type)
    if given != kind.model_type:
        finding = f"{given!r}, and {named.__name__} is {kind.model_type!r}"
        raise refused("model.config.model_type", finding, f"write hf: {given}, or remove hf")
    known = _fields(named)
    fields: dict[str, object] = {}
    ignored: list[str] = []
    for field, value in config.items():
        if field in _SAID_BY:
            ignored.append(f"{field} ({_SAID_BY[field]} says it)")
        elif field in known and field not in _OF_FILE:
            fields[field] = value
        elif field not in _OF_FILE:
            missing = [name for name in known if name not in config]
            if near := near_word(field, missing):
                finding = f"{kind.__name__} has no field {field!r}"
                raise refused(f"model.config.{field}", finding, near)
            ignored.append(f"{field} (nothing reads it)")
    return TakenConfig(fields, tuple(ignored))


def _refuse_said(field: str) -> None:
    by = _SAID_BY[field]
    remedy = "remove it"
    if by == "attention":
        remedy += ", and write attention: eager, sdpa or flex at the top of the spec"
    raise refused(f"model.config.{field}", f"{field} is given by {by}, not by the config", remedy)


@cache
def _fields(named: Any) -> tuple[str, ...]:
    """Names that a class's config takes, its own first; then those that it converts
    (`rotary_pct`), and those that the class reads where they are there (`head_dim` of some)."""
    kind = named.config_class
    return tuple(
        dict.fromkeys([*kind().to_dict(), *kind.attribute_map, *_OLD_NAMES, *_read(named), EXPERTS])
    )


def _read(named: Any) -> Iterator[str]:
    for kind in named.config_class.__mro__:
        if kind.__module__.startswith("transformers.") and kind.__module__ != _BASE:
            yield from _CONVERTED.findall(inspect.getsource(kind))
    yield from _READ.findall(inspect.getsource(sys.modules[named.__module__]))


def _some(known: tuple[str, ...]) -> str:
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    named = [field for field in usual if field in known]
    return f"write fields of that class, like {', '.join(named)}" if named else "remove it"
