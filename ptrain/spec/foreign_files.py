"""Files of other tools as nested mappings, and mappings as such files: YAML, JSON, TOML, the
arguments of a shell script, and a dictionary in Python."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from ptrain.errors import SpecError
from ptrain.spec.leaf import Route
from ptrain.spec.slips import parse_toml
from ptrain.spec.text import MAX_BYTES, SourceMark, Tree, parse_scalar, read, read_bytes

_SCRIPTS = (".sh", ".bash", ".sbatch", ".args", ".txt")
_ASSIGNED = re.compile(r"\s*(?:export\s+)?(\w+)=(\S.*)")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_PRODUCT = re.compile(r"\$\(\(\s*(\d+)\s*\*\s*(\d+)\s*\)\)")


def read_tree(path: Path) -> Tree:
    """Read a file that holds a mapping: YAML or JSON, by its suffix TOML, the arguments of a shell
    script, or a dictionary in Python.

    Raises:
        SpecError: The file cannot be read, or is not valid in its format.
    """
    formats = {".toml": ("TOML", parse_toml), ".py": ("a dictionary in Python", parse_dictionary)}
    formats |= dict.fromkeys(_SCRIPTS, ("a script with arguments", parse_arguments))
    if path.suffix not in formats:
        return read(path)
    kind, parse = formats[path.suffix]
    data = read_bytes(path, MAX_BYTES)
    if isinstance(data, str) or len(data) > MAX_BYTES or b"\0" in data:
        return read(path)  # which reports it
    try:
        root = parse(data.decode("utf-8-sig"))
    except (ValueError, RecursionError, MemoryError, SyntaxError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _invalid_error(path, f"not valid: {kind} was expected ({line})") from None
    if not root:
        raise _invalid_error(path, f"there are no keys in it: {kind} was expected")
    return Tree(root=root, source=str(path))


def _invalid_error(path: Path, finding: str) -> SpecError:
    remedy = "Run `ptrain specs show zero3` to print a spec to start from."
    return SpecError(SourceMark(source=str(path)).make_fault("", finding, remedy))


def parse_dictionary(text: str) -> dict[str, object]:
    """Return the last dictionary of literals in a Python text, such as `vars(args)` printed.

    Raises:
        ValueError: There is none.
        SyntaxError: The text is not Python.
    """
    for statement in reversed(ast.parse(text).body):
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Dict):
            return {str(key): inner for key, inner in ast.literal_eval(value).items()}
    raise ValueError("no dictionary of literals")


def parse_arguments(text: str) -> dict[str, object]:
    """Return the arguments `--name value` of a shell script or a list of arguments.

    Variables that the text sets are substituted; a value with another variable is None. A name
    without a value is true, and one with several values is a list.
    """
    variables: dict[str, str] = {}
    found: dict[str, object] = {}
    for line in text.replace("\\\n", " ").splitlines():
        words = list(_split_words(line))
        if (match := _ASSIGNED.fullmatch(line)) and not match[2].startswith("("):
            value = match[2].partition(" #")[0].strip().strip("\"'")
            variables[match[1]] = _substitute(value, variables)
        for name, values in _named_values(words, variables):
            if name not in found or values:
                found[name] = _argument_value(values)
    return found


def _split_words(line: str) -> Iterator[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quote that continues on the next line
        words = line.partition(" #")[0].split()
    for word in words:
        yield from re.sub(r"^\w+\+?=\(|^\(|(?<!\$\()\)$", "", word).split()


def _named_values(
    words: list[str], variables: Mapping[str, str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield each name of a line with its values."""
    places = [at for at, word in enumerate(words) if re.match(r"--[a-zA-Z][\w.-]*(=|$)", word)]
    for at, end in zip(places, [*places[1:], len(words)], strict=False):
        name, equals, first = words[at][2:].partition("=")
        values = [first] * bool(equals) + words[at + 1 : end]
        # An array or a file that follows the last option is no value of it.
        kept = [value for value in values if not re.search(r"\[@\]|\.py$|^[|&;<>]", value)]
        yield name, [_substitute(value, variables) for value in kept]


def _substitute(word: str, variables: Mapping[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, default if default is not None else match[0])

    for _ in range(4):  # a default may name another variable
        word = _VARIABLE.sub(replace, word)
    return _PRODUCT.sub(lambda match: str(int(match[1]) * int(match[2])), word)


def _argument_value(values: list[str]) -> object:
    parsed = [None if "$" in value else parse_scalar(value) for value in values]
    return True if not parsed else parsed[0] if len(parsed) == 1 else parsed


def iter_leaves(route: Route, value: object) -> Iterator[tuple[Route, object]]:
    """Yield the keys within a section of another tool, with their values."""
    if not isinstance(value, dict) or not value:
        yield route, value
        return
    for key, inner in value.items():
        yield from iter_leaves((*route, str(key)), inner)
