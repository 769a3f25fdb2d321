"""What each key of a spec may be given, read off its declaration: all words of a closed set; of
numbers the lowest, the highest and some other. What the declaration says nothing executes yet is
left out until it does.

The values are read from the grammar (`ptrain.spec.leaf.section_keys`) and the JSON Schema of each
leaf and of each short form, so that a new key is drawn without a change here. Three tables add what
a schema cannot state: texts with a meaning (`texts`), ranges in which a simulation takes seconds
(LIMITS), and keys that are not drawn, with the reason (LEFT_OUT). A key without known values raises
LookupError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from ptrain.spec.check import schema
from ptrain.spec.cluster import Rates
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import Leaf, Section, section_keys
from ptrain.spec.names import list_files, load_strategy
from ptrain.spec.placement import DATA_AXES, EXPERT_AXES, OF_EXPERTS, Axis
from ptrain.spec.shorthand import POLICIES
from ptrain.spec.text import to_flow_yaml

Shape = Mapping[str, Any]  # a JSON Schema

# What takes seconds is small; the ranges of all other keys are those of their declarations.
LIMITS: Mapping[str, tuple[int, int]] = {
    "model.layers": (1, 6),
    "model.hidden": (2, 64),
    "model.heads": (1, 8),
    "model.kv_heads": (1, 8),
    "model.ffn": (1, 128),
    "model.vocab": (259, 400),
    "model.head_dim": (1, 32),
    "model.window": (1, 48),
    "model.global_every": (2, 6),
    "model.document_start": (0, 258),
    "model.document_end": (0, 258),
    "model.experts": (1, 8),
    "model.experts_per_token": (1, 4),
    "model.expert_ffn": (1, 64),
    "model.shared_experts": (0, 2),
    "model.dense_layers": (0, 3),
    "model.capacity_factor": (1, 4),
    "mesh.pp": (1, 4),
    "mesh.dp_replicate": (1, 4096),
    "mesh.dp_shard": (1, 4096),
    "mesh.dp": (1, 4096),
    "mesh.cp": (1, 4),
    "mesh.ep": (1, 4),
    "mesh.tp": (1, 8),
    "batch.global": (1, 4096),
    "batch.micro": (1, 4),
    "batch.sequence": (1, 48),
    "batch.accumulate": (1, 8),
    "pipeline.stages": (1, 8),
    "pipeline.split": (1, 6),
    "loss.chunk": (1, 64),
    "context.attention": (1, 2),
}

_OUTSIDE = "a model of somebody's own code: tests/unit/test_external.py and test_huggingface.py"
_FUNCTION = "a function of somebody's own: tests/unit/test_user_functions.py"
_FROZEN = "of parameters that a model of one's own freezes: tests/gloo/test_frozen.py"
_ROLES = "roles are of models that are not built in"
LEFT_OUT: Mapping[str, str] = {
    "model.hf": _OUTSIDE,
    "model.pretrained": "a folder of weights: tests/unit/test_pretrained.py",
    "model.config": _OUTSIDE,
    "model.target": _OUTSIDE,
    "model.arguments": _OUTSIDE,
    "model.folder": _OUTSIDE,
    "model.blocks": _OUTSIDE,
    **{
        f"{section}.{key}": _FUNCTION
        for section in ("data", "loss", "step")
        for key in ("target", "arguments", "folder")
    },
    **{
        f"cluster.rates.{key}": "of time alone: tests/pure/test_rates.py"
        for key in section_keys(Rates)
    },
    "data.path": "a simulation reads no data, and the file would have to be there",
    "data.loss_mask": "it stands beside data.path",
    "data.sources": "as data.path: tests/unit/test_mixture.py",
    **dict.fromkeys(("frozen.dp_replicate", "frozen.dp_shard"), _FROZEN),
    "optimizer.groups": "match names of parameters: tests/gloo/test_parameter_groups.py",
    "routing": "of ep without a capacity alone: tests/gloo/test_stated_routing.py",
}
# Kinds of value, by key and type, that are not drawn though others of the key are.
_NOT_DRAWN: Mapping[tuple[str, str], str] = {
    ("tensor.plan", "object"): _ROLES,
    ("frozen", "string"): _FROZEN,
    ("pipeline.schedule", "array"): "lists of one's own: tests/pure/test_listed_schedules.py",
    ("pipeline.schedule", "string"): "files of them",
}

_SIZE, _RATE = r"^[0-9.]+ *([kKMGT]i?B|B)?$", r"^[0-9.]+ *([kKMGT]i?B|B)?(/s)?$"


@cache
def texts() -> Mapping[str, tuple[str, ...]]:
    """Return the texts of keys that take any text, by key, and by pattern where it says it all."""
    strategies = tuple(sorted(list_files("strategies")))
    return {
        "name": ("drawn",),
        "model.preset": tuple(sorted(list_files("models"))),
        "placement": strategies,
        **{f"placement.{axis}": _tuples(strategies, {axis}) for axis in {*Axis} - {*EXPERT_AXES}},
        **dict.fromkeys(
            ("placement.dp", "placement.ep", "placement.ep.rest"),
            _tuples(strategies, {*DATA_AXES}),
        ),
        "placement.ep.experts": (str(OF_EXPERTS),),
        "batch.global": ("1k tokens", "0.5k tokens", "300 tokens"),
        "unit": ("1 blocks", "2 blocks", "3 blocks"),
        "offload.path": ("/nvme",),
        "cluster.preset": tuple(sorted(list_files("clusters"))),
        "cluster.name": ("drawn",),
        "activations": ("0", "1-", "0-1", "2-3"),
        _SIZE: ("2 KiB", "100 kB", "1 MiB", "80 GiB"),
        _RATE: ("50 GB/s", "1 MB/s"),
    }


def _tuples(strategies: tuple[str, ...], axes: Set[str]) -> tuple[str, ...]:
    """Return the strategies that are only a tuple on one of these axes."""
    roots = {name: load_strategy(name) or {} for name in strategies}
    return tuple(
        name
        for name, root in roots.items()
        if len(root["placement"]) == 1 and axes & {*root["placement"]} and not {*POLICIES} & {*root}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A kind of value of a key: its `label`, its draw function, and its predicate."""

    label: str
    draw: Callable[[Random], object]
    holds: Callable[[object], bool]


@cache
def values() -> Mapping[str, tuple[Value, ...]]:
    """Return the kinds of value of each key by dotted name, in the order of declaration; a section
    with a short form is a key too. Raises LookupError for a key without any."""
    kinds = {
        place: tuple(kinds_of_key(place, holds))
        for place, holds in declared_keys()
        if place not in LEFT_OUT
    }
    return {place: of for place, of in kinds.items() if of}


def declared_keys() -> Iterator[tuple[str, Leaf | Section]]:
    """Yield every key of the grammar by its dotted name."""
    return _walk_keys(SpecRaw, ())


def _walk_keys(kind: type, above: tuple[str, ...]) -> Iterator[tuple[str, Leaf | Section]]:
    for key, (_, holds) in section_keys(kind).items():
        place = ".".join((*above, key))
        yield place, holds
        if isinstance(holds, Section):
            yield from _walk_keys(holds.kind, (*above, key))


def kinds_of_key(place: str, holds: Leaf | Section) -> Iterator[Value]:
    """Yield the implemented kinds of value of a key; for a section, its short forms."""
    if isinstance(holds, Section):
        for shape in holds.other_schemas:
            yield from kinds_of_schema(place, shape)
    elif holds.supported is None:
        yield from kinds_of_schema(place, holds.schema())
    else:
        yield from map(_constant, holds.supported)


def kinds_of_schema(place: str, shape: Shape) -> Iterator[Value]:
    """Yield the kinds of value that a schema allows."""
    if (place, str(shape.get("type"))) in _NOT_DRAWN:
        return
    match shape:
        case {"anyOf": shapes} | {"oneOf": shapes}:
            for inner in shapes:
                yield from kinds_of_schema(place, inner)
        case {"const": word}:
            yield _constant(word)
        case {"type": "boolean"}:
            yield from (_constant(value) for value in (True, False))
        case {"type": "null"}:
            yield _constant(None)
        case {"type": "integer" | "number"}:
            yield from _numbers(place, shape)
        case {"type": "string"}:
            yield from map(_constant, _texts_of(place, shape))
        case {"type": "array"}:
            yield _list(place, shape)
        case {"type": "object", "patternProperties": patterns}:
            (inner,) = patterns.values()
            yield _mapping(place, inner)
        case {"type": "object", "properties": properties}:
            yield _record(place, properties)
        case {"$ref": reference}:
            yield from kinds_of_schema(place, _definitions()[reference.rpartition("/")[2]])
        case _:
            raise LookupError(f"{place}: nobody knows how to draw {dict(shape)}")


@cache
def _definitions() -> Mapping[str, Shape]:
    """Return schemas that others refer to, by name."""
    definitions: Mapping[str, Shape] = schema()["$defs"]
    return definitions


def _constant(value: object) -> Value:
    return Value(
        label=to_flow_yaml(value),
        draw=lambda _: value,
        holds=lambda other: type(other) is type(value) and other == value,
    )


def _texts_of(place: str, shape: Shape) -> tuple[str, ...]:
    known = texts().get(place) or texts().get(shape.get("pattern", ""))
    if not known:
        raise LookupError(f"{place}: any text will do, and none is in texts() of {__name__}")
    pattern = shape.get("pattern", "")
    assert all(re.search(pattern, text) for text in known) or place == "activations", place
    return known


def _numbers(place: str, shape: Shape) -> Iterator[Value]:
    is_whole = shape["type"] == "integer"
    kinds = (int,) if is_whole else (int, float)
    low, high = LIMITS.get(place) or _range(shape)

    def is_number(value: object) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool)

    def between(draw: Random) -> int | float:
        """Draw a number between the limits, small ones as often as large ones."""
        first = low + 1 if is_whole else low
        last = max(high - 1 if is_whole else high, first)
        shift = 1 - first
        drawn = math.exp(draw.uniform(0.0, math.log(last + shift))) - shift
        return min(max(round(drawn), first), last) if is_whole else round(drawn, 6) or low

    for label, end in (("low", low), ("high", high)):
        yield Value(
            label=label,
            draw=lambda _, end=end: end,
            holds=lambda value, end=end: is_number(value) and value == end,
        )
    yield Value(
        label="other",
        draw=between,
        holds=lambda value: is_number(value) and value not in (low, high),
    )


def _range(shape: Shape) -> tuple[int | float, int | float]:
    """Return the lowest and the highest number; for an open end, the next thousandth."""
    low = shape.get("minimum")
    if low is None:
        low = shape.get("exclusiveMinimum", 0) + 1e-3
    return low, shape.get("maximum", 1e6)


def _list(place: str, shape: Shape) -> Value:
    items = tuple(kinds_of_schema(place, shape["items"]))
    fewest, most = shape.get("minItems", 1), shape.get("maxItems", 4)

    def draw_list(draw: Random) -> list[object]:
        count = draw.randint(fewest, most)
        if shape.get("uniqueItems"):
            return [item.draw(draw) for item in draw.sample(items, min(count, len(items)))]
        return [draw.choice(items).draw(draw) for _ in range(count)]

    return Value(label="a list", draw=draw_list, holds=lambda value: isinstance(value, list))


def _mapping(place: str, inner: Shape) -> Value:
    kinds, names = tuple(kinds_of_schema(place, inner)), texts()[place]

    def draw_mapping(draw: Random) -> dict[str, object]:
        chosen = draw.sample(names, draw.randint(1, 2))
        return {name: draw.choice(kinds).draw(draw) for name in chosen}

    return Value(label="a mapping", draw=draw_mapping, holds=lambda value: isinstance(value, dict))


def _record(place: str, properties: Mapping[str, Shape]) -> Value:
    """Return a value with all of some keys."""
    kinds = {name: tuple(kinds_of_schema(place, inner)) for name, inner in properties.items()}

    def draw_record(draw: Random) -> dict[str, object]:
        return {name: draw.choice(of).draw(draw) for name, of in kinds.items()}

    return Value(
        label="a record",
        draw=draw_record,
        holds=lambda value: isinstance(value, dict) and value.keys() <= kinds.keys(),
    )
