"""The config of a class of transformers as a spec gives it: some fields of the class, or the whole
config.json that somebody has published, which `architectures` or `model_type` tells.

Of a whole file all is taken that the class has a field for, or that its code reads. Fields that
ptrain sets itself are left out, and so are fields that nothing reads. All of them are named, except
those that `specs/published.yaml` lists as silent. A word that is nearly that of a field which is
missing is refused: it may be meant. All faults of a config are reported at once.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ptrain.errors import Fault
from ptrain.models.experts import EXPERTS
from ptrain.spec.config_fields import find_refused, list_ignored
from ptrain.spec.slips import ask, close, near_word

_OF_FILE = ("architectures", "model_type", "_name_or_path", "transformers_version")
_SAID_BY = {
    "use_cache": "training",
    "dtype": "precision",
    "torch_dtype": "precision",
    "attn_implementation": "attention",
    "_attn_implementation": "attention",
}
_TYPO = 0.85  # how alike a slip is: a letter or two; fields of other classes are less so
_OLD_NAMES = ("rope_theta", "rope_scaling")  # taken for the sake of configs that are published
_READ = re.compile(r"""getattr\((?:self\.)?config, ["'](\w+)["']""")
_CONVERTED = re.compile(r"""kwargs\.(?:pop|get)\(["'](\w+)["']""")  # into fields of today's names
_PLACE = "model.config."
_COMPUTING = tuple(  # not the modules that document fields, generate text or add MTP layers to it
    f"transformers.{name}"
    for name in ("models.", "integrations.", "masking_", "modeling_rope_", "modeling_utils")
)
_BASE = "transformers.configuration_utils"  # takes what loading a file takes


@dataclass(frozen=True, slots=True)
class TakenConfig:
    """The `fields` that a class is given, one phrase for each field without effect, and all faults
    of the config."""

    fields: Mapping[str, object]
    ignored: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


def taken(named: Any, config: Mapping[str, object]) -> TakenConfig:
    """Select the fields of a spec's config that a class takes.

    Args:
        named: the class of transformers.
        config: fields of its config, or a whole published file.

    Returns:
        The fields, and the faults of those that the class does not take.
    """
    kind, known, faults = named.config_class, _fields(named), [*faults_of_class(config)]
    fields = {**config}
    unread: dict[str, object] = {}
    if is_whole(config):
        given = config.get("model_type", kind.model_type)
        if given != kind.model_type:
            finding = f"{given!r}, and {named.__name__} is {kind.model_type!r}"
            faults.append(_fault("model_type", finding, f"write model.hf={given}, or remove hf"))
        else:  # fields of another class are not compared
            faults += _slips(kind, known, config)
        fields = {name: value for name, value in config.items() if _is_taken(name, known)}
        unread = {
            name: value
            for name, value in config.items()
            if name not in (EXPERTS, *_SAID_BY) and not (name in fields and _is_read(named, name))
        }
    else:
        passed = {fault.place.removeprefix(_PLACE) for fault in faults}
        faults += _unknown(kind, known, [name for name in config if name not in passed])
    bad = {fault.place for fault in faults}
    fields = {name: value for name, value in fields.items() if _PLACE + name not in bad}
    said = (name for name, by in _SAID_BY.items() if by == "attention" and config.get(name))
    ignored = (*(f"{name} (attention says it)" for name in said), *list_ignored(unread))
    return TakenConfig(fields, ignored, tuple(faults))


def is_whole(config: Mapping[str, object]) -> bool:
    """Return whether it is a published file."""
    return "architectures" in config or "model_type" in config


def faults_of_class(config: Mapping[str, object]) -> Iterator[Fault]:
    """Yield the faults that a config has for every class: several models, foreign code or quantized
    weights."""
    for fault in find_refused(config):
        yield _fault(fault.field, fault.finding.removeprefix(f"{fault.field}: "), fault.remedy)
    for field, value in config.items():
        is_model = isinstance(value, Mapping) and value and field.endswith("_config")
        if is_model and field != "quantization_config":
            finding = f"not yet: {field} is a model of its own: one of several, as multimodal "
            remedy = "give the config of its language model alone, with model.hf=its class"
            yield _fault(field, f"{finding}models have them", remedy)


def _is_taken(field: str, known: tuple[str, ...]) -> bool:
    """Return True if a class is given this field of a whole file."""
    return field == EXPERTS or (field in known and field not in (*_OF_FILE, *_SAID_BY))


def _slips(kind: Any, known: tuple[str, ...], config: Mapping[str, object]) -> Iterator[Fault]:
    """Yield the fields of a whole file that are nearly a field of the class which is missing."""
    missing = [name for name in known if name not in config]
    for field in config:
        if field in (*known, *_OF_FILE, *_SAID_BY, EXPERTS):
            continue
        if near := ask(close(field, missing, cutoff=_TYPO)):
            yield _fault(field, f"{kind.__name__} has no field {field!r}", near)


def _unknown(kind: Any, known: tuple[str, ...], fields: Iterable[str]) -> Iterator[Fault]:
    """Yield the fields that the class does not have, or that ptrain sets itself."""
    for field in fields:
        if by := _SAID_BY.get(field):
            remedy = "remove it"
            if by == "attention":
                remedy += ", and write attention: eager, sdpa or flex at the top of the spec"
            yield _fault(field, f"{field} is given by {by}, not by the config", remedy)
        elif field not in known and field != EXPERTS:
            near = near_word(field, known)
            finding = f"{kind.__name__} has no field {field!r}"
            yield _fault(field, finding, near or _some(known))


def _fault(field: str, finding: str, remedy: str) -> Fault:
    return Fault(place=f"{_PLACE}{field}", finding=finding, remedy=remedy)


@cache
def _fields(named: Any) -> tuple[str, ...]:
    """Names that a class's config takes, its own first; then those that it converts
    (`rotary_pct`), and those that the class reads where they are there (`head_dim` of some)."""
    kind = named.config_class
    return tuple(
        dict.fromkeys([*kind().to_dict(), *kind.attribute_map, *_OLD_NAMES, *_read(named)])
    )


def _read(named: Any) -> Iterator[str]:
    for kind in named.config_class.__mro__:
        if kind.__module__.startswith("transformers.") and kind.__module__ != _BASE:
            yield from _CONVERTED.findall(inspect.getsource(kind))
    yield from _READ.findall(inspect.getsource(sys.modules[named.__module__]))


@cache
def _is_read(named: Any, field: str) -> bool:
    """Return True if the class, or a module that it imports from, may read a field. Its word in
    their sources, or in an attribute that the config computes, counts as reading it."""
    kind = named.config_class
    if field in (*_OLD_NAMES, *_read(named)):
        return True
    names = (field, *(name for name, other in kind.attribute_map.items() if other == field))
    if any(re.search(rf"\b{re.escape(name)}\b", _sources(named)) for name in names):
        return True
    own = inspect.getsource(sys.modules[kind.__module__])
    return re.search(rf"self\.{re.escape(field)}\b(?! *=[^=])", own) is not None


@cache
def _sources(named: Any) -> str:
    """Return the sources of a class's module and of the modules of transformers that it uses."""
    module = sys.modules[named.__module__]
    used = {getattr(value, "__module__", None) for value in vars(module).values()}
    modules = {name for name in used if name and name.startswith(_COMPUTING)}
    modules -= {named.config_class.__module__}  # where fields are declared
    return "".join(map(inspect.getsource, {module, *map(sys.modules.__getitem__, modules)}))


def _some(known: tuple[str, ...]) -> str:
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    named = [field for field in usual if field in known]
    return f"write fields of that class, like {', '.join(named)}" if named else "remove it"
