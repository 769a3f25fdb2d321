"""Settings of other tools for placements (`specs/flags.yaml`), and the rows that
apply to a config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from ptrain.spec.leaf import Route
from ptrain.spec.names import load_strategy, load_table
from ptrain.spec.placement import DATA_AXES
from ptrain.spec.text import parse_value, to_flow_yaml

Config = Mapping[str, object]  # the values of a file, by dotted key in small letters

STATE_NAMES = ("parameters", "optimizer", "gradients", "activations")
_WRAPS = {"auto_wrap"}  # a word of `fsdp`: the units are blocks
DATA_NAMES = tuple(axis.value for axis in DATA_AXES)


def key_text(key: str) -> str:
    return key.lower().replace("-", "_")


def parts_of(route: Route) -> Iterator[str]:
    """Yield the names of a key and of its sections, each with and without those around it."""
    words = [key_text(part) for part in route]
    yield from (".".join(words[at:end]) for end in range(len(words), 0, -1) for at in range(end))


def value_text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(value_text, value))
    return to_flow_yaml(value).strip('"').lower()


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_case(case: str, value: object, config: Config | None) -> bool:
    """Return True if a case applies: `full`, or `bf16 & KEY=fsdp`, which also depends on KEY of
    the file, and never applies without one."""
    if case == "else":
        return True
    for part in case.split(" & "):
        key, equals, pattern = part.partition("=")
        if equals and config is None:
            return False
        written = look_up(config or {}, key) if equals else value
        if not is_match(pattern if equals else part, written):
            return False
    return True


def is_match(pattern: str, value: object) -> bool:
    """Return True if a value fits: N is a number that is neither 0 nor 1. Words and lists of words
    fit in any order; `auto_wrap`, which each of Trainer's needs, is not compared."""
    if pattern == "N":
        return is_number(value) and value not in (0, 1)
    written, wanted = value_text(value), pattern.lower()
    return written == wanted or set(written.split()) - _WRAPS == set(wanted.split()) - _WRAPS


def look_up(config: Config, key: str) -> object:
    """Return the value of a key that is written with or without its outer sections, or None."""
    word = key_text(key)
    if word in config:
        return config[word]
    return next((value for name, value in config.items() if name.endswith(f".{word}")), None)


class PlacementRow(NamedTuple):
    """A row of `specs/flags.yaml` for one tool.

    `family` is the part of a placement that it decides; a row applies if all settings of one of
    `cases` are in the file.
    """

    family: str
    name: str
    tuples: Mapping[str, tuple[str, ...]]
    settings: Mapping[Route, object]
    cases: tuple[Mapping[str, str], ...]

    def join_settings(self, rows: Sequence[PlacementRow]) -> PlacementRow:
        """Return this row with the settings of one of the rows too, where the two agree."""
        joined = [
            {**case, **other}
            for case in self.cases
            for row in rows
            for other in row.cases
            if {**case, **other} == {**other, **case}
        ]
        return self._replace(cases=tuple(joined))


@cache
def placement_rows(column: str) -> tuple[PlacementRow, ...]:
    """Return the rows of a tool whose settings can be in a file."""
    rows = []
    for row in load_table("flags.yaml")["placements"]:
        alternatives = [_parse_case(text) for text in row.get(column, "").split(";")]
        cases = tuple(case for case in alternatives if case is not None)
        if not cases or not row.get(column):
            continue
        name, *overrides = row["spec"]
        tuples, settings = _strategy_parts(name, overrides)
        rows.append(PlacementRow(family_of(tuples), " ".join(row["spec"]), tuples, settings, cases))
    return tuple(rows)


def _parse_case(text: str) -> Mapping[str, str] | None:
    """Return the settings in backticks, or None if one of them is not a setting of a file."""
    settings: dict[str, str] = {}
    for quoted in re.findall(r"`([^`]+)`", re.sub(r"\([^)]*\)", "", text)):
        if quoted.startswith("--"):
            words = [part.partition(" ") for part in quoted[2:].split(" --")]
            settings |= {key_text(name): value or "true" for name, _, value in words}
        elif match := re.fullmatch(r"([\w.]+)(?:: | = )\"?([^\"]*)\"?", quoted):
            settings[key_text(match[1])] = match[2]
        else:
            return None
    return settings


def _strategy_parts(
    name: str, overrides: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], dict[Route, object]]:
    """Return the tuples of a strategy by axis, and its other settings, with overrides of both."""
    strategy = load_strategy(name)
    assert strategy is not None, f"flags.yaml names a strategy: {name}"
    tuples = {axis: as_tuple(modes) for axis, modes in strategy["placement"].items()}
    sections = ("context", "pipeline", "tensor", "recompute")
    settings: dict[Route, object] = {}
    settings |= {(key,): strategy[key] for key in sections if key in strategy}
    if "sync" in strategy:
        settings[("reshard",)] = strategy["sync"]["reshard_after_forward"]
    for override in overrides:
        left, _, right = override.partition("=")
        key, *route = left.split(".")
        if key != "placement":
            settings[(key, *route)] = parse_value(right, "").root
        elif len(route) == 2:
            at = STATE_NAMES.index(route[1])
            tuples[route[0]] = (*tuples[route[0]][:at], right, *tuples[route[0]][at + 1 :])
        elif route:
            tuples[route[0]] = tuple(right.split(","))
    return tuples, settings


def family_of(tuples: Mapping[str, Sequence[str]]) -> str:
    """Return the part of a placement that tuples decide: the data axes, their offloads, casts or
    activations, another axis, or a product of several axes."""
    if not set(tuples) <= set(DATA_NAMES):
        return next(iter(tuples)) if len(tuples) == 1 else "product"
    modes = tuples.get("dp_shard", tuples.get("dp_replicate", ()))
    if modes[3] != "R":
        return "activations"
    if modes[0] == "M":
        return "cast"
    return "offload" if any("O" in mode or "@" in mode for mode in modes) else "data"


def choose_rows(columns: Sequence[str], config: Config) -> dict[str, PlacementRow]:
    """Return the row of each family that applies with the most settings; of equals, the last."""
    chosen: dict[str, tuple[int, PlacementRow]] = {}
    for row in (row for column in columns for row in placement_rows(column)):
        fitting = [
            len(case)
            for case in row.cases
            if all(is_match(wanted, look_up(config, key)) for key, wanted in case.items())
        ]
        if fitting and max(fitting) >= chosen.get(row.family, (0, row))[0]:
            chosen[row.family] = max(fitting), row
    return {family: row for family, (_, row) in chosen.items()}


def as_tuple(modes: Any) -> tuple[str, ...]:
    if isinstance(modes, dict):
        return as_tuple(modes["rest"]) if "rest" in modes else tuple(map(str, modes.values()))
    return tuple(map(str, modes if isinstance(modes, list) else str(modes).split(",")))
