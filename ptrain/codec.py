"""Conversion of dataclasses to plain data for JSON, and back by their type hints.

A dataclass becomes an object with one key per field. Field metadata changes this:

- `FLAT`: the fields of the value are merged into the enclosing object.
- `RARE`: the field is written last, and only if it differs from its default.
- `{"key": ...}`: the field is written under another key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from itertools import repeat
from operator import attrgetter
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

FLAT, RARE = {"flat": True}, {"rare": True}
_SCALARS = (int, str, bool, float)


class Malformed(ValueError):
    """Plain data that does not match its type.

    Args:
        place: The path of the faulty value, as keys and indices joined by dots.
        finding: The fault.
    """

    def __init__(self, place: str, finding: object) -> None:
        self.place, self.finding = place, finding
        super().__init__(f"{place}: {finding}")


class _Codec(NamedTuple):
    """A pair of functions that converts values of one type to plain data and back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def encode(value: Any, kind: Any = Any) -> Any:
    """Convert a value to plain data: None, numbers, strings, booleans, lists and dicts.

    Args:
        value: A dataclass or named tuple, or a container of them.
        kind: The type hint of the value. Required if the hint is a union of several classes.
            Default: the class of each value.

    Raises:
        TypeError: A type has no plain form.

    Example:
        >>> encode(Footprint(state=State.GRADIENTS, rank=0, device_bytes=8))
        {'state': 'gradients', 'rank': 0, 'device_bytes': 8, 'host_bytes': 0, 'file_bytes': 0}
    """
    return _codec_of(kind).encode(value)


def decode(plain: Any, kind: Any) -> Any:
    """Rebuild the value that `encode` converted.

    Records of other versions have fewer or more keys, so a missing key takes the default of its
    field and an unknown key is ignored.

    Args:
        plain: Plain data, from JSON or from another rank.
        kind: The class or type hint of the value.

    Raises:
        ValueError: The data does not match the type. `Malformed`, with the path, if the fault is
            inside a container.

    Example:
        >>> decode({"state": "gradients", "rank": 0, "device_bytes": 8}, Footprint).host_bytes
        0
    """
    return _codec_of(kind).decode(plain)


def _encode_any(value: Any) -> Any:
    """Encode a value by its class."""
    if value is None or (isinstance(value, _SCALARS) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Mapping):
        return {_encode_any(key): _encode_any(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str) and not hasattr(value, "_fields"):
        return [_encode_any(item) for item in value]
    return encode(value, type(value))


@cache
def _codec_of(kind: Any) -> _Codec:
    """Return the codec of a type hint.

    Raises:
        TypeError: The type has no plain form.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return _Codec(_encode_any, _identity)
    # By identity: a subclass such as a StrEnum is handled as an enum below.
    if kind in _SCALARS:
        return _Codec(_identity, partial(_require_type, kind))
    if origin in (Union, UnionType):
        return _union_codec(arguments)
    base = origin or kind
    if not isinstance(base, type):
        raise TypeError(f"{kind} cannot be converted to JSON")
    # Enums and named tuples come before sequences: a StrEnum is a str, a named tuple a tuple.
    if issubclass(base, Enum):
        return _Codec(attrgetter("value"), base)
    if is_dataclass(base) or hasattr(base, "_fields"):
        return _Codec(partial(_encode_fields, base), partial(_decode_fields, base))
    if issubclass(base, PurePath):
        return _Codec(str, lambda plain: base(_require_type(str, plain)))
    if issubclass(base, Mapping):
        return _mapping_codec(*(arguments or (str, Any)))
    if issubclass(base, Sequence):
        items = arguments if base is tuple and arguments else (*(arguments or (Any,)), ...)
        return _sequence_codec(list if issubclass(base, list) else tuple, items)
    raise TypeError(f"{kind} cannot be converted to JSON")


def _identity(value: Any) -> Any:
    return value


def _require_type(kind: type, plain: Any) -> Any:
    """Return `plain` if it has this type. An int is accepted for a float: JSON writes 1.0 as 1."""
    if type(plain) is not kind and not (kind is float and type(plain) is int):
        raise ValueError(f"{plain!r:.60} is not of type {kind.__name__}")
    return plain


def _decode_at(place: object, decode: Callable[[Any], Any], plain: Any) -> Any:
    """Decode the value at `place`, and prefix the path of any error with `place`."""
    try:
        return decode(plain)
    except Malformed as error:
        raise Malformed(f"{place}.{error.place}", error.finding) from None
    except ValueError as error:
        raise Malformed(str(place), error) from None


def _sequence_codec(container: type, kinds: tuple[Any, ...]) -> _Codec:
    """Return the codec of a list or tuple.

    Its items share one type (`tuple[X, ...]`), or have one type per position (`tuple[X, Y]`).
    """
    codecs = [_codec_of(kind) for kind in kinds if kind is not Ellipsis]
    is_fixed = kinds[-1] is not Ellipsis

    def paired(items: Any) -> Iterator[tuple[_Codec, Any]]:
        return zip(codecs if is_fixed else repeat(codecs[0]), items, strict=is_fixed)

    def decode_items(plain: Any) -> Any:
        if not isinstance(plain, list | tuple):
            raise ValueError(f"{plain!r:.60} is not a list")
        if is_fixed and len(plain) != len(codecs):
            raise ValueError(f"{plain!r:.60} is not a list of {len(codecs)}")
        return container(
            _decode_at(at, its.decode, item) for at, (its, item) in enumerate(paired(plain))
        )

    return _Codec(lambda items: [its.encode(item) for its, item in paired(items)], decode_items)


def _mapping_codec(key_kind: Any, item_kind: Any) -> _Codec:
    """Return the codec of a mapping: an object if its keys are strings, else a list of pairs."""
    key, item = _codec_of(key_kind), _codec_of(item_kind)
    if not (isinstance(key_kind, type) and issubclass(key_kind, str)):
        pairs = _codec_of(tuple[tuple[key_kind, item_kind], ...])
        return _Codec(
            lambda rows: pairs.encode(rows.items()), lambda rows: dict(pairs.decode(rows))
        )
    return _Codec(
        lambda rows: {key.encode(name): item.encode(its) for name, its in rows.items()},
        lambda rows: {
            _decode_at(name, key.decode, name): _decode_at(name, item.decode, its)
            for name, its in _require_object(rows).items()
        },
    )


def _require_object(plain: Any) -> Mapping[str, Any]:
    """Return `plain` if it is a mapping. Raises ValueError otherwise."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"{plain!r:.60} is not an object")
    return plain


def _union_codec(kinds: Sequence[Any]) -> _Codec:
    """Return the codec of a union.

    None and scalars are encoded as themselves. A class is encoded directly if it is the only one,
    else as the pair `[class name, value]`.
    """
    scalars = {NoneType, *(kind for kind in kinds if kind in _SCALARS)}
    scalars |= {int} if float in scalars else set()  # JSON may hold an int for a float
    codecs = {
        getattr(kind, "__name__", ""): _codec_of(kind) for kind in kinds if kind not in scalars
    }
    only = next(iter(codecs.values())) if len(codecs) == 1 else None

    def encode_union(value: Any) -> Any:
        if type(value) in scalars:
            return value
        name = type(value).__name__
        return only.encode(value) if only else [name, codecs[name].encode(value)]

    def decode_union(plain: Any) -> Any:
        if type(plain) in scalars:
            return plain
        if only:
            return only.decode(plain)
        if not isinstance(plain, list) or len(plain) != 2 or plain[0] not in codecs:
            raise ValueError(f"{plain!r:.60} is not one of {', '.join(map(str, kinds))}")
        return codecs[plain[0]].decode(plain[1])

    return _Codec(encode_union, decode_union)


@cache
def _field_codecs(kind: Any) -> list[tuple[str, _Codec, Field[Any]]]:
    """Return the name, codec and field of each constructor argument."""
    hints = get_type_hints(kind)
    if is_dataclass(kind):
        return [(its.name, _codec_of(hints[its.name]), its) for its in fields(kind) if its.init]
    defaults = {name: kind._field_defaults.get(name, MISSING) for name in kind._fields}
    return [(name, _codec_of(hints[name]), field(default=its)) for name, its in defaults.items()]


def _encode_fields(kind: Any, value: Any) -> dict[str, Any]:
    plain, rare = dict[str, Any](), dict[str, Any]()
    _add_fields(kind, value, plain, rare)
    return plain | rare


def _add_fields(kind: Any, value: Any, plain: dict[str, Any], rare: dict[str, Any]) -> None:
    """Add the encoded fields of a value to `plain`, or to `rare` if they are written last."""
    for name, codec, its in _field_codecs(kind):
        item, marks = getattr(value, name), its.metadata
        if "flat" in marks:
            _add_fields(type(item), item, plain, rare)
        elif "rare" not in marks:
            plain[marks.get("key", name)] = codec.encode(item)
        elif item != its.default:
            rare[name] = codec.encode(item)


def _decode_fields(kind: Any, plain: Any) -> Any:
    """Decode a dataclass or named tuple. Raises ValueError if a required field is missing."""
    values = {}
    for name, codec, its in _field_codecs(kind):
        key = its.metadata.get("key", name)
        if "flat" in its.metadata:
            values[name] = codec.decode(plain)
        elif key in _require_object(plain):
            values[name] = _decode_at(key, codec.decode, plain[key])
        elif its.default is MISSING and its.default_factory is MISSING:
            raise ValueError(f"the key {key} is missing")
    return kind(**values)
