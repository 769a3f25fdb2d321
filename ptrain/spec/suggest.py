"""The remedy for an unknown key: another tool's name of a key, or a slip of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ptrain.spec import slips
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import Leaf, nearest
from ptrain.spec.names import root
from ptrain.spec.section import Section, keys
from ptrain.spec.text import Route, flow, read

_MOST_LISTED = 12  # keys in a remedy
_MOST_MEANT = 4  # places in a question
_ALIKE = 0.85  # two words, as `step` and `steps` are: a slip, whatever another section has

_ANSWER = re.compile(r"([a-z0-9_.]+)=(.+?)(?:; (.+))?")  # key=value, then more about it
_OF_SPECS = frozenset(("mesh", "placement", "batch"))

Show = Callable[[Route, str], str]  # a key and its value's text, in the syntax that the user typed
Places = Mapping[Route, tuple[str, ...]]  # a key's names: its own, and what others call it


@cache
def hints() -> Mapping[str, Any]:
    """Return the tables of `specs/hints.yaml`: answers by tool and key, and files by tool."""
    table = read(root() / "hints.yaml").root
    assert isinstance(table, dict), "specs/hints.yaml is a mapping"
    return table


@cache
def foreign_keys() -> Mapping[str, str | Mapping[str, str]]:
    """Return the answers for keys of other tools: a text, or texts by value."""
    return {key: said for tool in hints()["keys"].values() for key, said in tool.items()}


def for_foreign(route: Route, value: object, show: Show) -> str:
    """Return the remedy for another tool's key.

    Args:
        route: the key with the sections that it was written in.
        value: the value that was written.
        show: writes a key and its value in the syntax of the user.

    Returns:
        The remedy; "" if no tool has such a key.
    """
    word = ".".join(route).lower().replace("-", "_")
    while not (answer := foreign_keys().get(word)) and "." in word:
        word = word.partition(".")[2]  # without its outermost section
    if isinstance(answer, Mapping):
        text = flow(value).strip('"').lower()
        answer = answer.get(text, answer["else"])
    if not (match := _ANSWER.fullmatch(answer or "")):
        return answer or ""
    key, right, more = match.groups()
    if isinstance(value, int | float) and not isinstance(value, bool):
        right = re.sub(r"\bN\b", str(value), right)
    return f"Use `{show(tuple(key.split('.')), right)}`.{f' {more}' if more else ''}"


def foreign_leaves(route: Route, value: object) -> Iterator[tuple[Route, object]]:
    """Yield the keys within another tool's section, with their values."""
    if not isinstance(value, dict) or not value:
        yield route, value
        return
    for key, inner in value.items():
        yield from foreign_leaves((*route, key), inner)


def for_foreign_file(path: Path, root: Mapping[str, object]) -> tuple[str, str] | None:
    """Return finding and remedy for another tool's file that is given as a spec.

    Args:
        path: the file.
        root: the mapping that it holds.

    Returns:
        None for a spec, and for a YAML or JSON file that no tool is known to have.
    """
    is_toml = path.suffix == ".toml"
    if not is_toml and not _OF_SPECS.isdisjoint(root):
        return None  # as every spec, without reading the hints
    counts = [len(root.keys() & {*row["keys"]}) for row in hints()["files"]]
    row = hints()["files"][counts.index(max(counts))] if max(counts) > 1 else {}
    if not is_toml and not row:
        return None
    kind = ": ".join(filter(None, ["a TOML file" * is_toml, row.get("is", "")]))
    finding = f"this is {kind}. A spec is a YAML file with other keys"
    if "next" in row:
        return finding, f"Use `{row['next'].replace('FILE', flow(str(path.resolve())))}`."
    leaves = foreign_leaves((), dict(root))
    answers = (for_foreign(*leaf, lambda key, text: f"{'.'.join(key)}={text}") for leaf in leaves)
    settings = filter(None, (re.match(r"Use `((?!.*=[A-Z]{2})[^`]+)`", said) for said in answers))
    keys = " ".join(dict.fromkeys(match[1] for match in settings))
    remedy = "Use `ptrain specs show zero3 > spec.yaml`, and edit it."
    remedy += f" Corresponding keys: {keys}." if keys else ""
    return finding, f"{remedy} `ptrain help {row.get('topic', 'other-tools')}` lists more."


def for_unknown(key: str, kind: type, route: Route) -> str:
    """Return the remedy for a key that the section at `route`, of this kind, does not have."""
    if "." in key and tuple(key.split(".")) in _places(SpecRaw, ()):
        section, _, rest = key.partition(".")
        return f"Use `{section}: {{{rest}: …}}`."
    meant = _meant(key, kind, route)
    if route and (key,) in meant:
        return f"{key!r} belongs to the top level of the spec, not to {'.'.join(route)}"
    shown = [".".join(place).removeprefix(".".join((*route, ""))) for place in meant]
    return _question(shown) or listed("Keys here", kind, route)


def of_any_section(key: str) -> str:
    """Return the remedy for another name of a key of any section; "" if none has it. The name of
    a key itself is none: the section around it may be misspelled."""
    word = key.lower().replace("-", "_")
    places = _called(word, _places(SpecRaw, ()))
    return _question([".".join(place) for place in places if place[-1] != word])


def _question(shown: list[str]) -> str:
    return f"Did you mean {' or '.join(map(repr, shown))}?" if shown else ""


def listed(what: str, kind: type, route: Route) -> str:
    """The keys of a section, or the command that lists them."""
    known = tuple(keys(kind))
    if len(known) <= _MOST_LISTED:
        return f"{what}: {', '.join(known)}."
    return f"Run `ptrain help {'.'.join(route) or 'keys'}` to list all keys."


def _meant(key: str, kind: type, route: Route) -> list[Route]:
    """The places that may have been meant: what is called so in this section, or but for a letter
    (below the top, whose `devices` are the cluster's); what is called so anywhere; then what is
    nearly called so."""
    word = key.lower().replace("-", "_")
    here = {(*route, name): (name, *_others(holds)) for name, (_, holds) in keys(kind).items()}
    known = tuple(name for name, (_, holds) in keys(kind).items() if _is_executed(holds))
    everywhere = _places(SpecRaw, ())
    if exact := _called(word, here):
        return exact
    if route and (slip := slips.close(word, known, cutoff=_ALIKE)):
        return [(*route, slip)]
    if exact := _called(word, everywhere):
        return exact
    section, _, rest = word.partition("_")
    if (section, rest) in everywhere:  # log_every is log.every
        return [(section, rest)]
    if near := slips.whole_part(key, known) or nearest(key, known):
        return [(*route, near)]
    if route:
        return []
    names = {place[-1] for place in everywhere}
    guess = nearest(word, tuple(sorted(names)))
    return [place for place in everywhere if place[-1] == guess][:_MOST_MEANT]


def is_called(key: str, kind: type, route: Route) -> bool:
    """Return True if a key of the section below the top has this other name."""
    word = key.lower().replace("-", "_")
    return bool(route) and any(word in _others(holds) for _, holds in keys(kind).values())


def _called(word: str, places: Places) -> list[Route]:
    return [place for place, names in places.items() if word in names][:_MOST_MEANT]


def _places(kind: type, above: Route) -> Places:
    """Every key of the grammar that something executes, with its names; not those of tuples, which
    are all alike."""
    return dict(_walked(kind, above))


def _walked(kind: type, above: Route) -> Iterator[tuple[Route, tuple[str, ...]]]:
    for key, (_, holds) in keys(kind).items():
        place = (*above, key)
        if isinstance(holds, Section):
            yield place, (key,)
            if place[0] != "placement":
                yield from _walked(holds.kind, place)
        elif _is_executed(holds):
            yield place, (key, *holds.aka)


def _is_executed(holds: Leaf | Section) -> bool:
    return isinstance(holds, Section) or holds.executed != ()


def _others(holds: Leaf | Section) -> tuple[str, ...]:
    return holds.aka if isinstance(holds, Leaf) else ()
