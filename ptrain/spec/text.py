"""YAML 1.2 (core schema) with source positions: text to a tree of plain values, with all faults.

PyYAML's C parser delivers events, and this module builds the tree. PyYAML's constructors are not
used, because they read YAML 1.1 (`3e-4` as a string, `on` as a boolean, `1:30` as ninety), keep the
last of two equal keys, and follow aliases. Anchors, aliases and tags are rejected: a spec is a
plain tree.
"""

from __future__ import annotations

import errno
import json
import math
import os.path
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import yaml

from ptrain.errors import Fault, SpecError
from ptrain.spec.leaf import Route

MAX_BYTES = 2**20  # a spec has a few kB; a larger file is not one
MAX_DEPTH = 32  # a spec has a few levels; the builder recurses once per level
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels", "specs are flat"

COMMAND_LINE = "command line: "  # prefix of the source of an override

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_OF_NUMBERS = frozenset("+-.0123456789")  # the first characters of numbers
_WORDS: dict[str, object] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **{sign + word: float("inf") for sign in ("", "+") for word in (".inf", ".Inf", ".INF")},
    **{"-" + word: float("-inf") for word in (".inf", ".Inf", ".INF")},
}


class SourceMark(NamedTuple):
    """A position in a source. Lines and columns count from 1; 0 means that the source is not a
    file."""

    source: str
    line: int = 0
    column: int = 0
    text: str = ""

    def make_fault(self, place: str, finding: str, remedy: str = "") -> Fault:
        """Return a fault at this position."""
        return Fault(
            place=place,
            finding=finding,
            remedy=remedy,
            source=self.source,
            line=self.line,
            column=self.column,
            text=self.text,
        )


@dataclass(slots=True, kw_only=True)
class Tree:
    """A tree of plain values with the position of each key and value, and the faults of its
    syntax."""

    root: object
    source: str
    keys: dict[Route, SourceMark] = field(default_factory=dict)
    values: dict[Route, SourceMark] = field(default_factory=dict)
    faults: dict[Route, Fault] = field(default_factory=dict)

    def value_at(self, route: Route) -> object:
        """Return the value at `route`, or None."""
        node = self.root
        for key in route:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def copy(self) -> Tree:
        """Return a copy that can be changed without changing this tree."""
        return Tree(
            root=_deep_copy(self.root),
            source=self.source,
            keys=dict(self.keys),
            values=dict(self.values),
            faults=dict(self.faults),
        )

    def locate(self, route: Route, *, key: bool = False) -> SourceMark:
        """Return the position of the value (or the key) at `route`, or of the nearest section
        around it."""
        table = self.keys if key else self.values
        while route and route not in table:
            route = route[:-1]
            table = self.keys  # a section around a missing value is shown at its key
        return table.get(route, SourceMark(source=self.source))

    def move_marks(self, route: Route, to: Route) -> None:
        """Give the key and value at `to` the positions recorded for `route`."""
        for table in (self.keys, self.values):
            if route in table:
                table[to] = table[route]

    def resolve_path(self, route: Route, file: str) -> Path:
        """Return the path of a file named at `route`, relative to the spec's folder.

        If the name comes from the command line, it is relative to the working directory.
        """
        is_in_file = self.source and self.locate(route).source == self.source
        return (Path(self.source).parent if is_in_file else Path()) / file

    def has_key(self, *route: str) -> bool:
        """Return True if a key is present, whatever its value."""
        section = self.value_at(route[:-1])
        return isinstance(section, dict) and route[-1] in section


@dataclass(slots=True, kw_only=True)
class Findings:
    """The collected faults of a tree, at most one per route: the first."""

    tree: Tree
    faults: dict[Route, Fault] = field(default_factory=dict)

    def add(
        self,
        where: str | Route,
        finding: str,
        remedy: str = "",
        *,
        at: Route = (),
        key: bool = False,
        part: str = "",
    ) -> None:
        """Add a fault, unless its route already has one.

        Args:
            where: The route or dotted key at fault.
            finding: The problem.
            remedy: The fix.
            at: The route whose position is shown instead.
            key: True if the key is at fault and not its value.
            part: The part of the value that is at fault, so that one value can have several faults.
        """
        route = tuple(where.split(".")) if isinstance(where, str) else where
        fault = self.tree.locate(at or route, key=key).make_fault(".".join(route), finding, remedy)
        self.faults.setdefault((*route, part) if part else route, fault)


def read_bytes(path: Path, most: int) -> bytes | str:
    """Return the first `most` + 1 bytes of a file, or the reason why it cannot be read.

    The extra byte shows that a file is larger than `most`.
    """
    try:
        require_file(path)
        with path.open("rb") as file:
            return file.read(most + 1)
    except (OSError, ValueError) as error:
        return (getattr(error, "strerror", None) or str(error)).lower()


def require_file(path: Path, most: float = math.inf) -> None:
    """Check that reading a path ends soon: it is no pipe or device, and not too large.

    A pipe of the shell, `<(command)`, and a folder pass.

    Args:
        path: The file.
        most: The largest size in bytes.

    Raises:
        OSError: It is missing, a pipe, a device or a socket, or larger than `most`.
    """
    status = path.stat()
    is_of_shell = stat.S_ISFIFO(status.st_mode) and path.parts[1:2] in (("dev",), ("proc",))
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or is_of_shell):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    if stat.S_ISREG(status.st_mode) and status.st_size > most:
        raise OSError(errno.EFBIG, f"it has {status.st_size} bytes; at most {most:.0f} are read")


def _deep_copy(value: object) -> object:
    """Return a copy of nested mappings and lists; other YAML values are immutable."""
    match value:
        case dict():
            return {key: _deep_copy(inner) for key, inner in value.items()}
        case list():
            return [_deep_copy(inner) for inner in value]
        case _:
            return value


def to_flow_yaml(value: object) -> str:
    """Return a value as one line of YAML."""
    match value:
        case dict():
            return (
                "{"
                + ", ".join(f"{key}: {to_flow_yaml(inner)}" for key, inner in value.items())
                + "}"
            )
        case list() | tuple():
            return f"[{', '.join(map(to_flow_yaml, value))}]"
        case None | bool():
            return json.dumps(value)
        case str() if not re.fullmatch(r"[\w./@*-]+", value):
            return json.dumps(value, ensure_ascii=False)
        case _:
            return str(value)


def parse_scalar(text: str) -> object:
    """Return the value of a plain (unquoted) scalar in the core schema of YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _OF_NUMBERS:
        return text
    if _INTEGER.fullmatch(text):
        if len(text) > 400:
            # Python converts at most 4300 digits, and 400 exceed every float
            return float("-inf" if text[0] == "-" else "inf")
        return int(text, 0 if text[:2] in ("0x", "0o") else 10)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def read(path: Path) -> Tree:
    """Read a YAML file into a tree.

    Raises:
        SpecError: The file cannot be read, is larger than 1 MiB, or is not a plain YAML mapping.
    """
    source = str(path)
    data = read_bytes(path, MAX_BYTES)
    if isinstance(data, str):
        if os.path.isdir(source):
            raise _unreadable_error(source, "it is a directory", "Use a YAML file in it.")
        raise _unreadable_error(source, data, "Run `ptrain specs` to list the built-in specs.")
    if len(data) > MAX_BYTES:
        raise _unreadable_error(
            source, "it is larger than 1 MiB", "Use a YAML file of at most 1 MiB."
        )
    if b"\0" in data:
        raise _unreadable_error(source, "it is a binary file", "Use a YAML file.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable_error(
            source, f"byte {error.start} is not UTF-8", "Save it as UTF-8."
        ) from None
    return parse(text, source)


def _unreadable_error(source: str, finding: str, remedy: str) -> SpecError:
    return SpecError(
        SourceMark(source=source).make_fault("", f"cannot read the spec: {finding}", remedy)
    )


def parse(text: str, source: str) -> Tree:
    """Parse a text whose top level must be a mapping.

    Raises:
        SpecError: The text is empty, is not a mapping, or is not valid YAML.
    """
    tree = parse_value(text, source)
    if tree.root is None and not tree.faults:
        raise SpecError(
            SourceMark(source=source).make_fault(
                "",
                "the spec is empty",
                "Run `ptrain specs show zero3` to print a spec to start from.",
            )
        )
    if not isinstance(tree.root, dict):
        mark = tree.values.get((), SourceMark(source=source))
        kind = "list" if isinstance(tree.root, list) else "single value"
        raise SpecError(
            *tree.faults.values(),
            mark.make_fault("", f"a spec must be a mapping; got a {kind}", "Use `key: value`."),
        )
    return tree


def parse_value(text: str, source: str) -> Tree:
    """Parse any YAML value, such as the right side of an override. Raises SpecError for bad
    syntax."""
    return _parse_cached(text, source).copy()


@lru_cache(maxsize=2**8)
def _parse_cached(text: str, source: str) -> Tree:
    """Parse a text into a shared tree.

    Cached, because a command that tries many variants of a spec parses the same few texts a hundred
    times.
    """
    tree = Tree(root=None, source=source)
    builder = _Builder(tree, text)
    try:
        tree.root = builder.build_document()
    except yaml.MarkedYAMLError as error:
        tree.faults[("",)] = builder.of_syntax(error)
    except yaml.YAMLError as error:
        finding = f"not valid YAML: {str(error).splitlines()[0]}"
        tree.faults[("",)] = SourceMark(source=source).make_fault("", finding)
    except _NestingError:
        pass
    else:
        return tree
    raise SpecError(*tree.faults.values())


class _NestingError(Exception):
    """Stops the parser at values nested deeper than MAX_DEPTH."""


def _is_no_end(event: yaml.Event) -> bool:
    return not isinstance(event, yaml.CollectionEndEvent)


class _Builder:
    """Builds the tree in one pass over the parser's events, with positions and faults."""

    def __init__(self, tree: Tree, text: str) -> None:
        self.tree, self.lines = tree, text.splitlines()
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=_LOADER)

    def build_document(self) -> object:
        """Return the value of the only document."""
        root, num_documents = None, 0
        for event in self.events:
            num_documents += isinstance(event, yaml.DocumentStartEvent)
            if num_documents > 1:
                self._add_fault(
                    event,
                    (),
                    "a second YAML document starts here",
                    "Remove `---`: a file contains one spec.",
                )
                break
            if isinstance(event, yaml.NodeEvent):
                root = self._build_value(event, ())
        return root

    def _build_value(self, event: yaml.Event, route: Route) -> object:
        self.tree.values[route] = self._mark_of(event)
        if isinstance(event, yaml.ScalarEvent):
            if event.anchor or event.tag:
                self._report_non_plain(event, route)
            return parse_scalar(event.value) if event.implicit[0] else event.value
        self._report_non_plain(event, route)
        if isinstance(event, yaml.AliasEvent):
            return None
        if len(route) >= MAX_DEPTH:
            self._add_fault(event, route, *_TOO_DEEP)
            raise _NestingError
        if isinstance(event, yaml.SequenceStartEvent):
            return self._build_list(route)
        return self._build_mapping(route)

    def _build_list(self, route: Route) -> list[object]:
        values: list[object] = []
        for event in takewhile(_is_no_end, self.events):
            values.append(self._build_value(event, (*route, str(len(values)))))
        return values

    def _build_mapping(self, route: Route) -> dict[str, object]:
        """Build a mapping; of two equal keys the second is reported, and its value kept."""
        values: dict[str, object] = {}
        for event in takewhile(_is_no_end, self.events):
            key = self._build_key(event, route)
            inner = (*route, key)
            first = self.tree.keys.get(inner) if key in values else None
            if first:
                self._add_fault(
                    event,
                    inner,
                    f"the key {key!r} appears twice (first in line {first.line})",
                    "Remove one of the two.",
                )
            else:
                self.tree.keys[inner] = self._mark_of(event)
            values[key] = self._build_value(next(self.events), inner)
        return values

    def _build_key(self, event: yaml.Event, route: Route) -> str:
        if isinstance(event, yaml.ScalarEvent):
            if event.anchor or event.tag:
                self._report_non_plain(event, route)
            return str(event.value)
        if not isinstance(event, yaml.AliasEvent):
            self._add_fault(
                event,
                route,
                "a key must be a single word; got a list or a mapping",
                "Put the string in quotes: `{` and `[` start a value.",
            )
        self._build_value(event, (*route, "?"))
        return "?"

    def _report_non_plain(self, event: yaml.Event, route: Route) -> None:
        """Report an alias, an anchor or a tag."""
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent):
            self._add_fault(
                event,
                route,
                f"aliases (*{anchor}) are not allowed in specs",
                f'Repeat the value. A mode is written `S*`; a string `"*{anchor}"`.',
            )
        elif anchor:
            self._add_fault(
                event,
                route,
                f"anchors (&{anchor}) are not allowed in specs",
                "Write the value in full. A string that starts with & needs quotes: "
                f'`"&{anchor}"`.',
            )
        if tag:
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            self._add_fault(
                event,
                route,
                f"tags ({shown}) are not allowed in specs",
                "Write the value without a tag.",
            )

    def of_syntax(self, error: yaml.MarkedYAMLError) -> Fault:
        """Return the fault for a syntax error of the parser."""
        mark = error.problem_mark or error.context_mark
        place = (
            self._mark_at(mark.line, mark.column) if mark else SourceMark(source=self.tree.source)
        )
        problem = error.problem or error.context or "it cannot be parsed"
        remedy = ""
        if "\t" in place.text[: place.column]:
            remedy = "Indent with spaces; YAML does not allow tabs."
        elif "alias" in f"{error.context}":
            remedy = "The mode is written `S*`; put other strings that contain `*` in quotes."
        finding = f"not valid YAML: {problem}"
        if "nesting depth" in problem:  # PyYAML 6.0.4 has a limit that the parser reaches first
            finding, remedy = _TOO_DEEP
        return place.make_fault("", finding, remedy)

    def _add_fault(self, event: yaml.Event, route: Route, finding: str, remedy: str) -> None:
        place = ".".join(route)
        self.tree.faults[route] = self._mark_of(event).make_fault(place, finding, remedy)

    def _mark_of(self, event: yaml.Event) -> SourceMark:
        mark = event.start_mark
        assert mark is not None, "the parser marks every event"
        return self._mark_at(mark.line, mark.column)

    def _mark_at(self, line: int, column: int) -> SourceMark:
        text = self.lines[line] if line < len(self.lines) else ""
        column, text = _clip_line(column, text)
        return SourceMark(source=self.tree.source, line=line + 1, column=column + 1, text=text)


def _clip_line(column: int, text: str) -> tuple[int, str]:
    """Return the column and the text of a line; a long line is truncated after the column."""
    return column, text.replace("\t", " ")[: max(160, column + 40)] if len(text) > 160 else text
