"""The kinds of value that a spec may hold, modes included (Definition 2), each with its check,
message and JSON Schema.

A leaf is an annotation: `steps: Annotated[int, Whole("…", 1, 10**9)]`. `ptrain.spec.check` calls
its `take`, `ptrain.spec.schema` its `schema` and `ptrain.spec.write` its `say`, so that all three
agree. A check refuses with a finding and a remedy of its own; numbers always name their range.
"""

from __future__ import annotations

import itertools
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
def declared(kind: type[Kind]) -> type[Kind]:
    """Declare a part of the grammar: a dataclass that mypy takes for frozen. Nothing compares or
    prints its values, and each method that is not generated saves time at every start."""
    return dataclass(kw_only=True, eq=False, repr=False)(kind)


def describe(value: object) -> str:
    """Return what was found, in words: `the text '1e-5'`, `the boolean true`, `a list`."""
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


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return the one of `known` that the user meant, or "" for none."""
    return slips.close(word, known, cutoff=slips.NEAR)


class Refused(Exception):
    """What a check finds in a value, and what would be right; who walks the tree adds the place."""

    def __init__(self, finding: str, remedy: str) -> None:
        super().__init__(finding)
        self.finding, self.remedy = finding, remedy


def refuse(finding: str, remedy: str = "") -> NoReturn:
    """Ends a check: the value is not taken."""
    raise Refused(finding, remedy)


class Dial(NamedTuple):
    """What a key that not every placement obeys is asked, in values as a file has them: `free` is
    obeyed by all of them; `other`, where there is one, is refused where none is obeyed."""

    free: object
    other: object = None


UNFIT: Any = object()  # what a value becomes that is not taken


class OwnFile(NamedTuple):
    """A file of the user's that stands for what is in it: how its name ends; `read` returns that or
    why it cannot be read, `slip` finding and remedy of what is wrong in it; `remedy`: what to use
    instead of a file that cannot be read."""

    suffix: str
    read: Callable[[Path], object]
    slip: Callable[[Any], tuple[str, str] | None]
    remedy: str


@declared
class Leaf:
    """One kind of value; `about` is the hover text of its key.

    `read` makes of a checked value what the spec holds, and `write` the other way round; `key` is
    how a file calls the field, where that is not its name; `aka` what others call it. `follows`:
    what stands for a key that is left out depends on others. `executed`: the values that something
    executes by now, where the grammar knows more; `why` not the others. `dial`: of a key that the
    wrapper of units obeys, and not every one. `words` are taken as they are (`auto`), and so is
    null where it may be.
    """

    about: str = field(kw_only=False)
    follows: bool = False
    executed: tuple[object, ...] | None = None
    why: str = ""
    dial: Dial | None = None
    aka: tuple[str, ...] = ()
    read: Callable[[Any], object] | None = None
    write: Callable[[Any], object] | None = None
    key: str = ""
    null: bool = False
    words: Collection[str] = ()
    file: OwnFile | None = None
    shows_lists: ClassVar[bool] = False  # of a list that is refused, what is in it

    def take(self, value: object) -> object:
        """The value as the spec holds it. Refuses what does not fit."""
        checked = self.check(value)
        return checked if self.read is None or checked is None else self.read(checked)

    def say(self, value: object) -> object:
        """The value as a file says it."""
        return plain(value) if self.write is None or value is None else self.write(value)

    def check(self, value: Any) -> object:
        """The value as it is written. Refuses what does not fit."""
        is_word = isinstance(value, str) and value in self.words
        fitting = value if is_word or (value is None and self.null) else self.fit(value)
        if fitting is UNFIT:
            got = value if isinstance(value, list) and self.shows_lists else describe(value)
            refuse(f"must be {self.takes()}; got {got}", self.meant(value))
        return fitting

    def takes(self) -> str:
        """Return what a value must be, as a phrase."""
        raise NotImplementedError

    def fit(self, value: Any) -> object:
        """Return a value that is no word as it is kept; UNFIT where it does not fit."""
        return UNFIT

    def meant(self, value: Any) -> str:
        """Return what was meant by a value that does not fit, as a remedy."""
        return ""

    def schema(self) -> Shape:
        """The JSON Schema of what `check` accepts."""
        words = ({"const": word} for word in self.words)
        return one_of(*self.shapes(), *words, *[_NULL] * self.null)

    def shapes(self) -> tuple[Shape, ...]:
        """Return the schemas of what `fit` accepts."""
        raise NotImplementedError


@declared
class Whole(Leaf):
    """An integer in `low..high`."""

    low: int = field(default=1, kw_only=False)
    high: int = field(default=10**9, kw_only=False)

    def takes(self) -> str:
        words = "".join(f" or {word}" for word in self.words)
        return f"an integer in {self.low}..{self.high}{words}{_OR_NULL * self.null}"

    def fit(self, value: Any) -> object:
        return value if type(value) is int and self.low <= value <= self.high else UNFIT

    def meant(self, value: Any) -> str:
        is_near = isinstance(value, float) and self.low <= value <= self.high
        whole = f"Use `{value:.0f}`." if is_near and value == round(value) else ""
        return whole or (slips.null(value) if self.null else "") or slips.unquote(value)

    def shapes(self) -> tuple[Shape, ...]:
        return ({"type": "integer", "minimum": self.low, "maximum": self.high},)


@declared
class Real(Leaf):
    """A finite number in `low..high`, without `low` itself when it is `open`."""

    low: float = field(default=0.0, kw_only=False)
    high: float = field(default=math.inf, kw_only=False)
    open: bool = False

    def takes(self) -> str:
        low = f"{'>' if self.open else '>='} {self.low:g}"
        high = "" if self.high == math.inf else f" and <= {self.high:g}"
        return f"a finite number {low}{high}{_OR_NULL * self.null}"

    def fit(self, value: Any) -> object:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return UNFIT
        above = value > self.low if self.open else value >= self.low
        return float(value) if above and value <= self.high and abs(value) < 10**300 else UNFIT

    def meant(self, value: Any) -> str:
        return (slips.null(value) if self.null else "") or slips.unquote(value)

    def shapes(self) -> tuple[Shape, ...]:
        low = {"exclusiveMinimum" if self.open else "minimum": self.low}
        high = {} if self.high == math.inf else {"maximum": self.high}
        return ({"type": "number", **low, **high},)


@declared
class Truth(Leaf):
    """true or false. YAML 1.2: `on`, `off`, `yes` and `no` are texts."""

    def takes(self) -> str:
        return "true or false"

    def fit(self, value: Any) -> object:
        return value if isinstance(value, bool) else UNFIT

    def meant(self, value: Any) -> str:
        return "Use `true` or `false`."

    def shapes(self) -> tuple[Shape, ...]:
        return ({"type": "boolean"},)


@declared
class Choice(Leaf):
    """One word of a closed set; the mapping gives each word its meaning. `slips` are other words
    for them, which are not taken, but understood."""

    words: Mapping[str, str] = field(kw_only=False)
    slips: Mapping[str, str] = field(default_factory=dict)

    def takes(self) -> str:
        return f"one of {', '.join(self.words)}{_OR_NULL * self.null}"

    def word(self, value: str) -> str:
        """The word that the value is, or is another word for; nothing of others."""
        word = value if value in self.words else self.slips.get(value.lower(), "")
        return word if word in self.words else ""

    def meant(self, value: object) -> str:
        """The question whether another of the words was meant."""
        text = str(value).lower() if isinstance(value, str | bool) else ""
        if self.slips.get(text, text) not in self.words and text in self.slips:
            return ""  # what it stands for is not to be had here
        slipped = {slip: word for slip, word in self.slips.items() if word in self.words}
        known = {word: word for word in self.words} | slipped
        guess = nearest(text, tuple(known)) if isinstance(value, str) else text
        return slips.ask(known.get(guess, ""))

    def schema(self) -> Shape:
        return one_of(meanings(self.words), *[_NULL] * self.null)


@declared
class Text(Leaf):
    """A text that matches `pattern`, which `kind` describes."""

    pattern: str = field(default=r"[^\x00-\x1f]{1,500}", kw_only=False)
    kind: str = field(default="a text", kw_only=False)

    def takes(self) -> str:
        return self.kind

    def fit(self, value: Any) -> object:
        return value if isinstance(value, str) and re.fullmatch(self.pattern, value) else UNFIT

    def meant(self, value: Any) -> str:
        return slips.quote(value)

    def shapes(self) -> tuple[Shape, ...]:
        return ({"type": "string", "pattern": f"^{self.pattern}$"},)


@declared
class Size(Leaf):
    """Bytes, as a number or with a unit; `rate` reads `450 GB/s` too."""

    low: int = 1
    high: int = 10**18
    rate: bool = False
    example: str = "80 GiB"

    def takes(self) -> str:
        example = "450 GB/s" if self.rate else self.example
        words = "".join(f"{word}, " for word in self.words)
        or_ = "or " if words else ""
        return f"{words}{or_}a size like {example} in {self.low}..{self.high} bytes"

    def fit(self, value: Any) -> object:
        size = as_bytes(value, rate=self.rate)
        return size if size is not None and self.low <= size <= self.high else UNFIT

    def meant(self, value: Any) -> str:
        size = as_bytes(value, rate=self.rate)
        return (
            slips.small_size(value, size, self.low, self.words)
            or slips.near_word(value, self.words)
            or "Use a number of bytes, or a number with a unit: kB, MB, GB, TB (powers of 1000), "
            "KiB, MiB, GiB or TiB."
        )

    def shapes(self) -> tuple[Shape, ...]:
        rate = "(/s)?" if self.rate else ""
        text = {"type": "string", "pattern": f"^[0-9.]+ *([kKMGT]i?B|B)?{rate}$"}
        return text, {"type": "integer", "minimum": self.low, "maximum": self.high}


@declared
class Numbers(Leaf):
    """A list of `count` numbers (any count when 0) in `low..high`; whole ones if `whole`."""

    low: float = field(default=0, kw_only=False)
    high: float = field(default=1, kw_only=False)
    count: int = 0
    whole: bool = False
    shows_lists = True

    def takes(self) -> str:
        kind = f"{self.count} " * bool(self.count) + "whole " * self.whole + "numbers"
        alone = ", or one" * (self.whole and self.count < 2)
        return f"a list of {kind} in {self.low:g}..{self.high:g}{alone}"

    def fit(self, value: Any) -> object:
        values = value if isinstance(value, list) else [value]
        kinds = (int,) if self.whole else (int, float)
        right = all(type(v) in kinds and self.low <= v <= self.high for v in values)
        if right and (isinstance(value, list) or self.whole) and self.count in (0, len(values)):
            return tuple(v if self.whole else float(v) for v in values)
        return UNFIT

    def shapes(self) -> tuple[Shape, ...]:
        kind = "integer" if self.whole else "number"
        items = {"type": kind, "minimum": self.low, "maximum": self.high}
        size = {"minItems": self.count, "maxItems": self.count} if self.count else {}
        return {"type": "array", "items": items, **size}, *[items] * self.whole


@declared
class Free(Leaf):
    """A mapping whose keys are not ours; `values` checks each value, if given."""

    values: Leaf | None = None

    def takes(self) -> str:
        return "a mapping"

    def fit(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return UNFIT
        if self.values is None:
            return dict(value)
        return {key: checked(self.values.check, inner, key) for key, inner in value.items()}

    def shapes(self) -> tuple[Shape, ...]:
        values = {"additionalProperties": self.values.schema()} if self.values else {}
        return ({"type": "object", **values},)


def checked(check: Callable[[Any], object], value: object, part: object, remedy: str = "") -> Any:
    """Return what a check makes of a part of a value. Its fault names the part."""
    try:
        return check(value)
    except Refused as error:
        refuse(f"{part}: {error.finding}", error.remedy or remedy)


@declared
class Either(Leaf):
    """What one of `options` takes; `wanted` says it in one phrase. `hint` guesses what was meant,
    in place of the options' own guesses."""

    wanted: str = field(kw_only=False)
    options: tuple[Leaf, ...] = field(kw_only=False)
    hint: Callable[[object], str] | None = None

    def takes(self) -> str:
        return self.wanted + _OR_NULL * self.null

    def fit(self, value: Any) -> object:
        for option in self.options:
            if isinstance(option, Free) and isinstance(value, dict):
                return option.take(value)  # it was meant, and says which entry is at fault
            try:
                return option.take(value)
            except Refused:
                continue
        return UNFIT

    def meant(self, value: Any) -> str:
        choices = [option.meant for option in self.options if isinstance(option, Choice)]
        guesses = (guess(value) for guess in ([self.hint] if self.hint else choices))
        return next((guess for guess in guesses if guess), "")

    def shapes(self) -> tuple[Shape, ...]:
        return tuple(option.schema() for option in self.options)


def plain(value: object) -> object:
    """Return what YAML has for a value: texts for enums, lists for tuples."""
    match value:
        case Enum():
            return value.value
        case tuple():
            return [plain(part) for part in value]
        case _:
            return value


def meanings(words: Mapping[str, str]) -> dict[str, Any]:
    """Words that an editor completes, each with its meaning as hover text."""
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
KEPT_MEANINGS = MODE_MEANINGS | {
    "M@host": "recomputed, with block inputs in host memory",
    "M@file": "recomputed, with block inputs in a file (NVMe)",
}


@declared
class ModeText(Leaf):
    """A mode of Definition 2 with its tier."""

    modes: ClassVar[Mapping[str, str]] = MODE_MEANINGS  # what may be written, and what it means

    def takes(self) -> str:
        return "a mode: R, S, S*, M or O, or with a tier (R@host, S@file)"

    def fit(self, value: Any) -> object:
        try:
            mode = Mode.parse(value) if isinstance(value, str) else value
        except ValueError:
            return UNFIT
        return mode if isinstance(mode, Mode) and str(mode) in self.modes else UNFIT

    def say(self, value: object) -> object:
        return None if value is None else str(value)

    def meant(self, value: Any) -> str:
        """The question whether another mode was meant."""
        mode = slips.mode(value) if isinstance(value, str) else ""
        return f"Did you mean `{mode}`?" if mode in self.modes else slips.quote(value)

    def schema(self) -> Shape:
        return meanings(self.modes)


@declared
class KeptText(ModeText):
    """A mode of A, which knows one more: the inputs of blocks that are recomputed may lie apart."""

    modes = KEPT_MEANINGS

    def meant(self, value: Any) -> str:
        return super().meant(_IN_WORDS.get(str(value).lower(), "") or value)


@declared
class ModesByBlock(Free):
    """`{"0-7": M, "8-": R}`: blocks from 0, the last one included; a number alone is one block."""

    values: Leaf | None = KeptText("")

    def fit(self, value: Any) -> Any:
        checked = super().fit(value)
        ranges = sorted((_range(key), key) for key in checked) if checked is not UNFIT else ()
        for ((_, last), key), ((first, _), other) in itertools.pairwise(ranges):
            if last >= first:
                refuse(
                    f"the block ranges {key!r} and {other!r} overlap",
                    "Give each block one mode. Blocks without a range are `R`.",
                )
        return checked

    def shapes(self) -> tuple[Shape, ...]:
        assert self.values is not None, "modes"
        blocks = {f"^{_BLOCKS}$": self.values.schema()}
        return ({"type": "object", "patternProperties": blocks, "additionalProperties": False},)


_IN_WORDS = {
    **dict.fromkeys(("recompute", "recomputed", "checkpoint", "checkpointing", "full"), "M"),
    **dict.fromkeys(("offload", "offloaded", "host", "cpu"), "O"),
    **dict.fromkeys(("keep", "none"), "R"),
}


def blocks_of(text: str) -> tuple[int, int | None]:
    """(first, last) of `0-7`, `3` and `8-`, whose last one is None: all that follow."""
    first, dash, last = text.partition("-")
    return int(first), int(last) if last else None if dash else int(first)


_BLOCKS = r"[0-9]{1,5}(-([0-9]{1,5})?)?"


def _range(text: str) -> tuple[int, float]:
    """(first, last) of a range that is written as it should be."""
    if not re.fullmatch(_BLOCKS, text):
        refuse(
            f"{text!r} is not a range of blocks",
            'Use `first-last`, counted from 0: `{"0-7": M, "8-": R}`.',
        )
    first, last = blocks_of(text)
    if last is not None and last < first:
        refuse(f"the range {text!r} ends before it starts", f'Use `"{last}-{first}"`.')
    return first, math.inf if last is None else last


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def section(kind: type[Kind]) -> type[Kind]:
    """A section of a spec whose values are at once those that a file says and those that ptrain
    reads: each field is declared here alone."""
    return dataclass(frozen=True, kw_only=True)(kind)


@declared
class Section:
    """A nested mapping of the grammar; `also` is what may stand for it in a file. What
    `is_partial` may lack what the section needs, which a preset gives; of what `is_sparse` only
    what is not the default is written. `alone` returns what a value that is no mapping stands for
    in the section of a whole spec, or nothing."""

    kind: type = field(kw_only=False)
    about: str = field(kw_only=False)
    also: tuple[dict[str, Any], ...] = ()
    null: bool = False
    key: str = ""
    is_partial: bool = False
    is_sparse: bool = False
    executed: tuple[object, ...] | None = None
    dial: Dial | None = None
    aka: tuple[str, ...] = ()
    file: OwnFile | None = None
    alone: Callable[[Any, Mapping[str, Any]], dict[str, Any]] | None = None


def by_word(key: str) -> Callable[[Any, object], dict[str, Any]]:
    """Return the short form of a section in which a word alone is that key."""
    return lambda value, _: {key: value} if isinstance(value, str | bool | int | float) else {}


@cache
def keys(kind: type) -> Mapping[str, tuple[Field[Any], Leaf | Section]]:
    """The keys of a section as they are written, each with its field and what it holds: the
    annotations of a section are evaluated, not texts. A field without one is no key."""
    declared_as: Mapping[str, Any] = {spot.name: spot.type for spot in fields(kind)}
    holds = {
        spot: declared_as[spot.name].__metadata__[0]
        for spot in fields(kind)
        if hasattr(declared_as[spot.name], "__metadata__")
    }
    return {leaf.key or spot.name: (spot, leaf) for spot, leaf in holds.items()}


def walk(kind: type, above: Route = ()) -> Iterator[tuple[Route, Field[Any], Leaf | Section]]:
    """Yield every key of a section and of those in it, in the order of the declaration."""
    for key, (spot, holds) in keys(kind).items():
        yield (*above, key), spot, holds
        if isinstance(holds, Section):
            yield from walk(holds.kind, (*above, key))


@cache
def is_required(spot: Field[Any]) -> bool:
    """Return whether there is no section without this field."""
    return spot.default is MISSING and spot.default_factory is MISSING
