"""Dataclasses as plain data and back: every form of type hint, older records, and bad input."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ptrain.codec import FLAT, RARE, Malformed, decode, encode


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 0
    HIGH = 1


class Pair(NamedTuple):
    color: Color
    count: int = 0


@dataclass(frozen=True, kw_only=True)
class Key:
    name: str
    via: str | None = field(default=None, metadata=RARE)


@dataclass(frozen=True, kw_only=True)
class Row:
    key: Key = field(metadata=FLAT)
    size: int
    seconds: float = field(default=0.0, metadata={"key": "duration"})


@dataclass(frozen=True, kw_only=True)
class Tree:
    level: Level
    children: tuple[Tree, ...] = ()


@dataclass(frozen=True)
class Circle:
    radius: float


@dataclass(frozen=True)
class Square:
    side: float


TREE = Tree(level=Level.HIGH, children=(Tree(level=Level.LOW),))


@pytest.mark.parametrize(
    ("value", "kind", "plain"),
    [
        (Color.RED, Color, "red"),
        (Pair(Color.BLUE, 2), Pair, {"color": "blue", "count": 2}),
        (TREE, Tree, {"level": 1, "children": [{"level": 0, "children": []}]}),
        ((Color.RED, 3), tuple[Color, int], ["red", 3]),
        ([Pair(Color.RED)], list[Pair], [{"color": "red", "count": 0}]),
        ((1, 2), Sequence[int], [1, 2]),
        ({Color.RED: (1,)}, Mapping[Color, tuple[int, ...]], {"red": [1]}),
        ({(1, "a"): 2.5}, dict[tuple[int, str], float], [[[1, "a"], 2.5]]),
        ({3: True}, dict[int, bool], [[3, True]]),
        (None, Pair | None, None),
        (4, int | float | None, 4),
        (Square(2.0), Circle | Square, ["Square", {"side": 2.0}]),
        ("word", Circle | str, "word"),
        (Path("a/b"), Path, "a/b"),
        ({"any": [1, None]}, Any, {"any": [1, None]}),
    ],
    ids=str,
)
def test_a_value_of_each_type_is_encoded_and_decoded_as_it_was(value, kind, plain) -> None:
    assert encode(value, kind) == plain
    again = decode(json.loads(json.dumps(plain)), kind)
    assert again == value and type(again) is type(value)


def test_flat_fields_are_inline_and_optional_ones_last_if_they_differ() -> None:
    usual, rare = Row(key=Key(name="a"), size=1), Row(key=Key(name="a", via="b"), size=1)
    assert list(encode(usual).items()) == [("name", "a"), ("size", 1), ("duration", 0.0)]
    assert list(encode(rare)) == ["name", "size", "duration", "via"]
    assert [decode(encode(row), Row) for row in (usual, rare)] == [usual, rare]


def test_a_missing_key_is_its_default_and_an_unknown_one_is_ignored() -> None:
    assert decode({"name": "a", "size": 1, "later": 2}, Row) == Row(key=Key(name="a"), size=1)


@pytest.mark.parametrize(
    ("plain", "kind", "message"),
    [
        (
            {"level": 0, "children": [{"level": 7}]},
            Tree,
            "children.0.level: 7 is not a valid Level",
        ),
        ({"level": 0, "children": [{}]}, Tree, "children.0: the key level is missing"),
        ({"level": 0, "children": {}}, Tree, "children: {} is not a list"),
        ({"name": 1, "size": 1}, Row, "name: 1 is not of type str"),
        ({"red": ["x"]}, Mapping[Color, tuple[int, ...]], "red.0: 'x' is not of type int"),
        ([["Oval", {}]], list[Circle | Square], r"0: \['Oval', {}\] is not one of"),
        ([True], tuple[int, ...], "0: True is not of type int"),
        ([[1, 2, 3]], list[tuple[int, int]], r"0: \[1, 2, 3\] is not a list of 2"),
        ([5], list[Path], "0: 5 is not of type str"),
        ({"pink": [1]}, Mapping[Color, tuple[int, ...]], "pink: 'pink' is not a valid Color"),
    ],
    ids=str,
)
def test_malformed_data_is_named_by_its_place(plain, kind, message) -> None:
    with pytest.raises(Malformed, match=message):
        decode(plain, kind)


@pytest.mark.parametrize("kind", [set[int], object()], ids=["set", "no type"])
def test_a_type_without_a_plain_form_is_a_type_error(kind) -> None:
    with pytest.raises(TypeError, match="cannot be converted to JSON"):
        encode({1}, kind)
