"""The kinds of value in a spec, modes (Definition 2) included, each with its check, message and
JSON Schema.

A leaf is an annotation: `steps: Annotated[int, Integer("…", 1, 10**9)]`. `ptrain.spec.check` calls
its `parse`, `ptrain.spec.check` its `schema` and `ptrain.spec.write` its `dump`, so that all three
agree. A failed check raises `RejectedValue` with a finding and a remedy; for numbers the finding
contains the range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar, dataclass_transform

from ptrain.spec import slips
from ptrain.spec.placement import Mode
from ptrain.units import as_bytes

Kind = TypeVar("Kind")

Shape = dict[str, Any]  # a JSON Schema
Route = tuple[str, ...]  # keys and list positions from the root
_NULL = {"type": "null"}
_OR_NULL = ", or null"


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def grammar_dataclass(kind: type[Kind]) -> type[Kind]:
    """Declare a part of the grammar: a dataclass that mypy treats as frozen. Without `eq` and
    `repr`, which its values never need, every start is faster."""
    return dataclass(kw_only=True, eq=False, repr=False)(kind)


def describe(value: object) -> str:
    """Return a description of a value for messages: `the string '1e-5'`, `the boolean true`, `a
    list`."""
    match value:
        case None:
            return "nothing"
        case bool():
            return f"the boolean {str(value).lower()}"
        case str():
            shown = value if len(value) <= 60 else value[:57] + "..."
            return f"the string {shown!r}"
        case int() | float():
            return f"the number {value}"
        case list():
            return "a list"
        case _:
            return "a mapping"


def find_similar(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return the most similar word of `known`, or "" if none is similar enough."""
    return slips.closest_word(word, known, cutoff=slips.NEAR)


class RejectedValue(Exception):
    """Raised for a value that fails its check; the code that walks the tree adds the position."""

    def __init__(self, finding: str, remedy: str) -> None:
        super().__init__(finding)
        self.finding, self.remedy = finding, remedy


def reject(finding: str, remedy: str = "") -> NoReturn:
    """Raise `RejectedValue`."""
    raise RejectedValue(finding, remedy)


class Dial(NamedTuple):
    """The support that a key needs from the placement. Every placement supports the value `free`;
    `other`, if given, is rejected by a placement that supports only `free`."""

    free: object
    other: object = None


INVALID: Any = object()  # the result of `convert` for a value that does not fit


class UserFile(NamedTuple):
    """A user's file whose name may replace its contents in a spec. `read` returns the contents, or
    a reason as a string; `slip` returns the finding and the remedy for wrong contents; `remedy` is
    for a file that cannot be read."""

    suffix: str
    read: Callable[[Path], object]
    slip: Callable[[Any], tuple[str, str] | None]
    remedy: str


@grammar_dataclass
class Leaf:
    """One kind of value; `description` is the hover text of its key.

    Attributes:
        has_derived_default: The default depends on other keys.
        supported: The values that run, if the grammar accepts more; `reason` explains the rest.
        dial: The support that the key needs from the wrapper of units.
        aka: Other tools' names for the key.
        read: Converts a checked value to the value in the spec; `write` converts it back.
        key: The name in files, if it differs from the field's.
        accepts_null: Null is accepted unchanged, and so are `words` (`auto`).
        file: The user's file that may replace the value.
        allows_auto_micro: `batch.micro=auto` supports all values, not only the default.
    """

    description: str = field(kw_only=False)
    has_derived_default: bool = False
    supported: tuple[object, ...] | None = None
    reason: str = ""
    dial: Dial | None = None
    aka: tuple[str, ...] = ()
    read: Callable[[Any], object] | None = None
    write: Callable[[Any], object] | None = None
    key: str = ""
    accepts_null: bool = False
    words: Collection[str] = ()
    file: UserFile | None = None
    allows_auto_micro: bool = True
    shows_lists: ClassVar[bool] = False  # True if messages show the contents of a rejected list

    def parse(self, value: object) -> object:
        """Check a value and convert it to the value in the spec. Raises RejectedValue if it does
        not fit."""
        checked = self.check(value)
        return checked if self.read is None or checked is None else self.read(checked)

    def dump(self, value: object) -> object:
        """Convert a value of the spec back to file syntax."""
        return to_yaml_value(value) if self.write is None or value is None else self.write(value)

    def check(self, value: Any) -> object:
        """Return the value as written if it fits. Raises RejectedValue otherwise."""
        is_word = isinstance(value, str) and value in self.words
        fitting = value if is_word or (value is None and self.accepts_null) else self.convert(value)
        if fitting is INVALID:
            got = value if isinstance(value, list) and self.shows_lists else describe(value)
            reject(f"must be {self.describe_values()}; got {got}", self.suggest(value))
        return fitting

    def describe_values(self) -> str:
        """Return a phrase that describes the accepted values."""
        raise NotImplementedError

    def convert(self, value: Any) -> object:
        """Return the stored form of a value, or UNFIT; `words` and null are handled before."""
        return INVALID

    def suggest(self, value: Any) -> str:
        """Return a remedy for a value that does not fit, or ""."""
        return ""

    def schema(self) -> Shape:
        """Return the JSON Schema of the values that `check` accepts."""
        words = ({"const": word} for word in self.words)
        return one_of(*self.value_schemas(), *words, *[_NULL] * self.accepts_null)

    def value_schemas(self) -> tuple[Shape, ...]:
        """Return the JSON Schemas of the values that `convert` accepts."""
        raise NotImplementedError


@grammar_dataclass
class Integer(Leaf):
    """An integer in `low..high`."""

    low: int = field(default=1, kw_only=False)
    high: int = field(default=10**9, kw_only=False)

    def describe_values(self) -> str:
        words = "".join(f" or {word}" for word in self.words)
        return f"an integer in {self.low}..{self.high}{words}{_OR_NULL * self.accepts_null}"

    def convert(self, value: Any) -> object:
        # `type`, because bool is a subclass of int: `true` must not count as 1.
        return value if type(value) is int and self.low <= value <= self.high else INVALID

    def suggest(self, value: Any) -> str:
        is_near = isinstance(value, float) and self.low <= value <= self.high
        whole = f"Use `{value:.0f}`." if is_near and value == round(value) else ""
        return (
            whole
            or (slips.suggest_null(value) if self.accepts_null else "")
            or slips.suggest_unquoted(value)
        )

    def value_schemas(self) -> tuple[Shape, ...]:
        return ({"type": "integer", "minimum": self.low, "maximum": self.high},)


@grammar_dataclass
class Real(Leaf):
    """A finite number in `low..high`, without `low` itself if `excludes_low`."""

    low: float = field(default=0.0, kw_only=False)
    high: float = field(default=math.inf, kw_only=False)
    excludes_low: bool = False

    def describe_values(self) -> str:
        low = f"{'>' if self.excludes_low else '>='} {self.low:g}"
        high = "" if self.high == math.inf else f" and <= {self.high:g}"
        return f"a finite number {low}{high}{_OR_NULL * self.accepts_null}"

    def convert(self, value: Any) -> object:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return INVALID
        above = value > self.low if self.excludes_low else value >= self.low
        # Integers beyond the range of float would overflow in the conversion.
        return float(value) if above and value <= self.high and abs(value) < 10**300 else INVALID

    def suggest(self, value: Any) -> str:
        return (slips.suggest_null(value) if self.accepts_null else "") or slips.suggest_unquoted(
            value
        )

    def value_schemas(self) -> tuple[Shape, ...]:
        low = {"exclusiveMinimum" if self.excludes_low else "minimum": self.low}
        high = {} if self.high == math.inf else {"maximum": self.high}
        return ({"type": "number", **low, **high},)


@grammar_dataclass
class Boolean(Leaf):
    """true or false. In YAML 1.2, `on`, `off`, `yes` and `no` are strings."""

    def describe_values(self) -> str:
        return "true or false"

    def convert(self, value: Any) -> object:
        return value if isinstance(value, bool) else INVALID

    def suggest(self, value: Any) -> str:
        return "Use `true` or `false`."

    def value_schemas(self) -> tuple[Shape, ...]:
        return ({"type": "boolean"},)


@grammar_dataclass
class Choice(Leaf):
    """One word of a closed set, each with its meaning. `slips` maps other words to these; they are
    rejected with the right word as a remedy."""

    words: Mapping[str, str] = field(kw_only=False)
    slips: Mapping[str, str] = field(default_factory=dict)

    def describe_values(self) -> str:
        return f"one of {', '.join(self.words)}{_OR_NULL * self.accepts_null}"

    def find_word(self, value: str) -> str:
        """Return the word of the set that `value` is or abbreviates, or ""."""
        word = value if value in self.words else self.slips.get(value.lower(), "")
        return word if word in self.words else ""

    def suggest(self, value: object) -> str:
        """Return the question whether a similar word of the set was meant, or ""."""
        text = str(value).lower() if isinstance(value, str | bool) else ""
        if self.slips.get(text, text) not in self.words and text in self.slips:
            return ""  # the abbreviated word is not allowed here
        slipped = {slip: word for slip, word in self.slips.items() if word in self.words}
        known = {word: word for word in self.words} | slipped
        guess = find_similar(text, tuple(known)) if isinstance(value, str) else text
        return slips.did_you_mean(known.get(guess, ""))

    def schema(self) -> Shape:
        return one_of(words_schema(self.words), *[_NULL] * self.accepts_null)


@grammar_dataclass
class Text(Leaf):
    """A string that matches `pattern`; `kind` describes it in messages."""

    pattern: str = field(default=r"[^\x00-\x1f]{1,500}", kw_only=False)
    kind: str = field(default="a text", kw_only=False)

    def describe_values(self) -> str:
        return self.kind

    def convert(self, value: Any) -> object:
        return value if isinstance(value, str) and re.fullmatch(self.pattern, value) else INVALID

    def suggest(self, value: Any) -> str:
        return slips.suggest_quotes(value)

    def value_schemas(self) -> tuple[Shape, ...]:
        return ({"type": "string", "pattern": f"^{self.pattern}$"},)


@grammar_dataclass
class Size(Leaf):
    """A number of bytes, with or without a unit; with `rate`, also `450 GB/s`."""

    low: int = 1
    high: int = 10**18
    rate: bool = False
    example: str = "80 GiB"

    def describe_values(self) -> str:
        example = "450 GB/s" if self.rate else self.example
        words = "".join(f"{word}, " for word in self.words)
        or_ = "or " if words else ""
        return f"{words}{or_}a size like {example} in {self.low}..{self.high} bytes"

    def convert(self, value: Any) -> object:
        size = as_bytes(value, rate=self.rate)
        return size if size is not None and self.low <= size <= self.high else INVALID

    def suggest(self, value: Any) -> str:
        size = as_bytes(value, rate=self.rate)
        return (
            slips.suggest_size(value, size, self.low, self.words)
            or slips.suggest_word(value, self.words)
            or "Use a number of bytes, or a number with a unit: kB, MB, GB, TB (powers of 1000), "
            "KiB, MiB, GiB or TiB."
        )

    def value_schemas(self) -> tuple[Shape, ...]:
        rate = "(/s)?" if self.rate else ""
        text = {"type": "string", "pattern": f"^[0-9.]+ *([kKMGT]i?B|B)?{rate}$"}
        return text, {"type": "integer", "minimum": self.low, "maximum": self.high}


@grammar_dataclass
class Numbers(Leaf):
    """A list of `count` numbers (0: any count) in `low..high`; integers if `is_integer`."""

    low: float = field(default=0, kw_only=False)
    high: float = field(default=1, kw_only=False)
    count: int = 0
    is_integer: bool = False
    shows_lists = True

    def describe_values(self) -> str:
        kind = f"{self.count} " * bool(self.count) + "whole " * self.is_integer + "numbers"
        alone = ", or one" * (self.is_integer and self.count < 2)
        return f"a list of {kind} in {self.low:g}..{self.high:g}{alone}"

    def convert(self, value: Any) -> object:
        values = value if isinstance(value, list) else [value]
        kinds = (int,) if self.is_integer else (int, float)
        right = all(type(v) in kinds and self.low <= v <= self.high for v in values)
        if (
            right
            and (isinstance(value, list) or self.is_integer)
            and self.count in (0, len(values))
        ):
            return tuple(v if self.is_integer else float(v) for v in values)
        return INVALID

    def value_schemas(self) -> tuple[Shape, ...]:
        kind = "integer" if self.is_integer else "number"
        items = {"type": kind, "minimum": self.low, "maximum": self.high}
        size = {"minItems": self.count, "maxItems": self.count} if self.count else {}
        return {"type": "array", "items": items, **size}, *[items] * self.is_integer


@grammar_dataclass
class FreeMapping(Leaf):
    """A mapping with arbitrary keys; `values`, if given, checks each value."""

    values: Leaf | None = None

    def describe_values(self) -> str:
        return "a mapping"

    def convert(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return INVALID
        if self.values is None:
            return dict(value)
        return {key: check_part(self.values.check, inner, key) for key, inner in value.items()}

    def value_schemas(self) -> tuple[Shape, ...]:
        values = {"additionalProperties": self.values.schema()} if self.values else {}
        return ({"type": "object", **values},)


def check_part(
    check: Callable[[Any], object], value: object, part: object, remedy: str = ""
) -> Any:
    """Return the result of `check` for a part of a value. A fault names the part."""
    try:
        return check(value)
    except RejectedValue as error:
        reject(f"{part}: {error.finding}", error.remedy or remedy)


@grammar_dataclass
class Either(Leaf):
    """A value that one of `options` accepts; `values_text` describes it. `hint`, if given,
    replaces the guesses of the options in remedies."""

    values_text: str = field(kw_only=False)
    options: tuple[Leaf, ...] = field(kw_only=False)
    hint: Callable[[object], str] | None = None

    def describe_values(self) -> str:
        return self.values_text + _OR_NULL * self.accepts_null

    def convert(self, value: Any) -> object:
        for option in self.options:
            # No other option accepts a mapping, and a fault that names the entry helps more than
            # the list of options.
            if isinstance(option, FreeMapping) and isinstance(value, dict):
                return option.parse(value)  # its fault names the entry
            try:
                return option.parse(value)
            except RejectedValue:
                continue
        return INVALID

    def suggest(self, value: Any) -> str:
        choices = [option.suggest for option in self.options if isinstance(option, Choice)]
        guesses = (guess(value) for guess in ([self.hint] if self.hint else choices))
        return next((guess for guess in guesses if guess), "")

    def value_schemas(self) -> tuple[Shape, ...]:
        return tuple(option.schema() for option in self.options)


def to_yaml_value(value: object) -> object:
    """Return the YAML form of a value: text for enums, lists for tuples."""
    match value:
        case Enum():
            return value.value
        case tuple():
            return [to_yaml_value(part) for part in value]
        case _:
            return value


def words_schema(words: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON Schema of words that an editor completes, with their meanings as
    hover text."""
    return {"oneOf": [{"const": word, "description": text} for word, text in words.items()]}


def one_of(*shapes: dict[str, Any]) -> dict[str, Any]:
    return dict(shapes[0]) if len(shapes) == 1 else {"anyOf": list(shapes)}


MODE_MEANINGS = {
    "R": "replicated: every rank of the axis holds the full state",
    "S": "sharded: each rank holds a shard (for parameters on a data axis use S*)",
    "S*": "sharded and gathered: each rank stores a shard, the full state is all-gathered for use",
    "M": "materialized: made when needed and not stored (parameters: cast from the master copy;"
    " gradients: consumed unit by unit; activations: recomputed)",
    "O": "offloaded: a shard in host memory, short for S@host",
    "R@host": "a full copy in host memory",
    "S*@host": "a shard in host memory, all-gathered for use",
    "R@file": "a full copy in a file (NVMe)",
    "S@file": "a shard in a file (NVMe)",
    "S*@file": "a shard in a file (NVMe), all-gathered for use",
    "S@host": "a shard in host memory, the long form of O",
}


@grammar_dataclass
class ModeText(Leaf):
    """A mode of Definition 2, with an optional tier."""

    modes: ClassVar[Mapping[str, str]] = MODE_MEANINGS  # the allowed texts and their meanings

    def describe_values(self) -> str:
        return "a mode: R, S, S*, M or O, or with a tier (R@host, S@file)"

    def convert(self, value: Any) -> object:
        try:
            mode = Mode.parse(value) if isinstance(value, str) else value
        except ValueError:
            return INVALID
        return mode if isinstance(mode, Mode) and str(mode) in self.modes else INVALID

    def dump(self, value: object) -> object:
        return None if value is None else str(value)

    def suggest(self, value: Any) -> str:
        """Return the question whether a similar mode was meant, or a remedy about quotes."""
        mode = slips.normalize_mode(value) if isinstance(value, str) else ""
        return f"Did you mean `{mode}`?" if mode in self.modes else slips.suggest_quotes(value)

    def schema(self) -> Shape:
        return words_schema(self.modes)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def section_dataclass(kind: type[Kind]) -> type[Kind]:
    """Declare a section whose fields are both the file's keys and the values that ptrain reads."""
    return dataclass(frozen=True, kw_only=True)(kind)


@grammar_dataclass
class Section:
    """A nested mapping of the grammar; `other_schemas` are JSON Schemas of its other forms. If
    `is_partial`, required keys may be missing, because a preset provides them. If `is_sparse`, only
    keys that differ from the default are written. `alone` converts a value that is no mapping to
    the section's mapping, or to {}."""

    kind: type = field(kw_only=False)
    description: str = field(kw_only=False)
    other_schemas: tuple[dict[str, Any], ...] = ()
    accepts_null: bool = False
    key: str = ""
    is_partial: bool = False
    is_sparse: bool = False
    supported: tuple[object, ...] | None = None
    dial: Dial | None = None
    aka: tuple[str, ...] = ()
    file: UserFile | None = None
    alone: Callable[[Any, Mapping[str, Any]], dict[str, Any]] | None = None


def by_word(key: str) -> Callable[[Any, object], dict[str, Any]]:
    """Return a short form for a section, in which a value alone sets this key."""
    return lambda value, _: {key: value} if isinstance(value, str | bool | int | float) else {}


@cache
def section_keys(kind: type) -> Mapping[str, tuple[Field[Any], Leaf | Section]]:
    """Return the keys of a section by their name in files, each with its field and leaf. Fields
    that are not Annotated are no keys; annotations must be evaluated, not strings."""
    declared_as: Mapping[str, Any] = {spot.name: spot.type for spot in fields(kind)}
    holds = {
        spot: declared_as[spot.name].__metadata__[0]
        for spot in fields(kind)
        if hasattr(declared_as[spot.name], "__metadata__")
    }
    return {leaf.key or spot.name: (spot, leaf) for spot, leaf in holds.items()}


def iter_keys(kind: type, above: Route = ()) -> Iterator[tuple[Route, Field[Any], Leaf | Section]]:
    """Yield each key of a section and of the sections in it, in the order of declaration."""
    for key, (spot, holds) in section_keys(kind).items():
        yield (*above, key), spot, holds
        if isinstance(holds, Section):
            yield from iter_keys(holds.kind, (*above, key))


@cache
def is_required(spot: Field[Any]) -> bool:
    """Return True if the field has no default."""
    return spot.default is MISSING and spot.default_factory is MISSING
