"""Facts as plain data, which JSON has words for, and back: a dataclass is the list of its fields'
values, one of several kinds bears its name in front.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def to_plain(value: Any, kind: Any) -> Any:
    """Return a value of this type as numbers, texts, truths and lists. Raises TypeError for a type
    that no facts have."""
    if value is None or kind in (int, str, bool, float):
        return value
    arguments = get_args(kind)
    match _form(kind):
        case "union":
            kinds = _kinds(kind)
            if len(kinds) == 1:
                return to_plain(value, *kinds)
            return [type(value).__name__, to_plain(value, type(value))]
        case "tuple":
            pairs = zip(value, _types_of_items(arguments, len(value)), strict=True)
            return [to_plain(item, item_kind) for item, item_kind in pairs]
        case "mapping":
            key, item = arguments
            return [[to_plain(k, key), to_plain(v, item)] for k, v in value.items()]
        case "enum":
            return value.value
        case _:
            return [
                to_plain(getattr(value, name), field_kind) for name, field_kind in _fields(kind)
            ]


def from_plain(plain: Any, kind: Any) -> Any:
    """Return what `to_plain` was given. Raises TypeError or ValueError for what it never gave."""
    if plain is None or kind in (int, str, bool, float):
        if plain is not None and type(plain) is not kind:
            raise TypeError(f"{plain!r} is no {kind.__name__}")
        return plain
    arguments = get_args(kind)
    match _form(kind):
        case "union":
            kinds = _kinds(kind)
            if len(kinds) == 1:
                return from_plain(plain, *kinds)
            name, inner = plain
            return from_plain(inner, {known.__name__: known for known in kinds}[name])
        case "tuple":
            pairs = zip(plain, _types_of_items(arguments, len(plain)), strict=True)
            return tuple(from_plain(item, item_kind) for item, item_kind in pairs)
        case "mapping":
            key, item = arguments
            return {from_plain(k, key): from_plain(v, item) for k, v in plain}
        case "enum":
            return kind(plain)
        case _:
            named = zip(_fields(kind), plain, strict=True)
            return kind(**{name: from_plain(item, type_) for (name, type_), item in named})


def _form(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return "union"
    if origin is tuple:
        return "tuple"
    if origin is not None and issubclass(origin, Mapping):
        return "mapping"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "enum"
    if is_dataclass(kind):
        return "fields"
    raise TypeError(f"{kind} is no type of facts")


def _kinds(union: Any) -> list[Any]:
    """Return the types of a union, but for None, which stands for itself."""
    return [kind for kind in get_args(union) if kind is not NoneType]


def _types_of_items(arguments: tuple[Any, ...], length: int) -> list[Any]:
    """Return the type of each item of a tuple: all alike (`tuple[X, ...]`), or by their places."""
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return [arguments[0]] * length
    if len(arguments) != length:
        raise ValueError(f"{length} items, and there are {len(arguments)} types")
    return list(arguments)


@cache
def _fields(kind: type) -> list[tuple[str, Any]]:
    """Return name and type of each field that a constructor takes."""
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in fields(kind) if field.init]
