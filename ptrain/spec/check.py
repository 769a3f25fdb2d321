"""The grammar of specs in use: a tree is validated, with faults by position, to a raw section; the
JSON Schema, from which editors complete keys and modes, and the reference of all keys are generated
from the same declarations.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass
from functools import cache
from typing import Any

from ptrain.errors import Fault
from ptrain.spec import slips
from ptrain.spec.batch import BatchRaw
from ptrain.spec.foreign import for_foreign
from ptrain.spec.foreign_files import iter_leaves
from ptrain.spec.grammar import EXPERTS_TUPLE, ExpertTupleRaw, MeshRaw, SpecRaw, TupleRaw
from ptrain.spec.leaf import (
    Boolean,
    Choice,
    Leaf,
    RejectedValue,
    Route,
    Section,
    Size,
    describe,
    find_similar,
    is_required,
    iter_keys,
    one_of,
    section_keys,
)
from ptrain.spec.model import ModelRaw
from ptrain.spec.names import list_files, load_table
from ptrain.spec.shorthand import REST
from ptrain.spec.text import COMMAND_LINE, Findings, Tree, to_flow_yaml

_MOST_LISTED = 12  # keys in a remedy: more fill several lines
_MOST_MEANT = 4  # places in a question
_ALIKE = 0.85  # words this similar (`step`, `steps`) are a typo, even if another section has it

Places = Mapping[Route, tuple[str, ...]]  # a key's name and aliases


def for_unknown(key: str, kind: type, route: Route) -> str:
    """Return the remedy for a key that the section of type `kind` at `route` does not have."""
    if "." in key and tuple(key.split(".")) in _key_aliases(SpecRaw, ()):
        section, _, rest = key.partition(".")
        return f"Use `{section}: {{{rest}: …}}`."
    meant = _guess_routes(key, kind, route)
    if route and (key,) in meant:
        return f"{key!r} belongs to the top level of the spec, not to {'.'.join(route)}"
    shown = [".".join(place).removeprefix(".".join((*route, ""))) for place in meant]
    return _did_you_mean(shown) or list_keys("Keys here", kind, route)


def of_any_section(key: str) -> str:
    """Return the remedy for an alias of a key in any section, or "" if there is none.

    Exact names of keys do not count, because the section around the key may be misspelled.
    """
    word = key.lower().replace("-", "_")
    places = _routes_named(word, _key_aliases(SpecRaw, ()))
    return _did_you_mean([".".join(place) for place in places if place[-1] != word])


def _did_you_mean(shown: list[str]) -> str:
    return f"Did you mean {' or '.join(map(repr, shown))}?" if shown else ""


def list_keys(what: str, kind: type, route: Route) -> str:
    """Return the list of a section's keys, or a command that lists them if there are many."""
    known = tuple(section_keys(kind))
    if len(known) <= _MOST_LISTED:
        return f"{what}: {', '.join(known)}."
    return f"Run `ptrain help {'.'.join(route) or 'keys'}` to list all keys."


def _guess_routes(key: str, kind: type, route: Route) -> list[Route]:
    """Return the routes that may have been meant by an unknown key.

    The order is: exact names and aliases in this section; names that differ by a letter (not at the
    top level, where `devices` means the cluster's); exact names and aliases in any section; similar
    names.
    """
    word = key.lower().replace("-", "_")
    here = {(*route, name): (name, *holds.aka) for name, (_, holds) in section_keys(kind).items()}
    known = tuple(name for name, (_, holds) in section_keys(kind).items() if holds.supported != ())
    everywhere = _key_aliases(SpecRaw, ())
    if exact := _routes_named(word, here):
        return exact
    if route and (slip := slips.closest_word(word, known, cutoff=_ALIKE)):
        return [(*route, slip)]
    if exact := _routes_named(word, everywhere):
        return exact
    section, _, rest = word.partition("_")
    if (section, rest) in everywhere:  # log_every is log.every
        return [(section, rest)]
    if near := slips.find_by_part(key, known) or find_similar(key, known):
        return [(*route, near)]
    if route:
        return []
    names = {place[-1] for place in everywhere}
    guess = find_similar(word, tuple(sorted(names)))
    return [place for place in everywhere if place[-1] == guess][:_MOST_MEANT]


def is_called(key: str, kind: type, route: Route) -> bool:
    """Return True if `key` is an alias of a key of a section below the top level."""
    word = key.lower().replace("-", "_")
    return bool(route) and any(word in holds.aka for _, holds in section_keys(kind).values())


def _routes_named(word: str, places: Places) -> list[Route]:
    return [place for place, names in places.items() if word in names][:_MOST_MEANT]


@cache
def _key_aliases(kind: type, above: Route) -> Places:
    """Return the supported keys of the grammar with their names and aliases.

    Keys inside placement tuples are left out, because all tuples have the same ones.
    """
    return {
        place: (place[-1], *holds.aka)
        for place, _, holds in iter_keys(kind, above)
        if holds.supported != () and (place[0] != "placement" or len(place) == 1)
    }


# Stand-ins for required sections that are faulty, so that they cause no further faults.
_NEEDED: dict[Route, object] = {
    ("model",): ModelRaw(),
    ("mesh",): MeshRaw(),
    ("batch",): BatchRaw(sequence=1),
    ("batch", "sequence"): 1,
}
_EXAMPLES = {
    "model": "{preset: llama-tiny}",
    "mesh": "{dp_shard: 2}",
    "batch": "{global: 16, micro: 2, sequence: 128}",
    "sequence": "128",
    "target": "package.module:function",
    "attention": "zigzag",
    "last": "3",
}
_GIVEN_BY: dict[Route, Route] = {("batch", "sequence"): ("data", "target")}


def validate(
    tree: Tree, kind: type = SpecRaw, *, is_partial: bool = False
) -> tuple[Any, dict[Route, Fault]]:
    """Check a tree against the grammar.

    Faulty values are left out of the section, and so are mappings that require them, so that the
    next stage can still check the others.

    Args:
        tree: The tree.
        kind: The type of the section at its root.
        is_partial: True to return a mapping of only the values that are written.

    Returns:
        The raw section, or None if too much of it is faulty; and the faults by route.
    """
    checked = _TreeChecker(tree=tree)
    raw = checked.check_section(kind, tree.root, (), is_partial=is_partial)
    return (None if raw is MISSING else raw), checked.faults


class _TreeChecker(Findings):
    """Checks a tree against the grammar in one pass. MISSING replaces a faulty value."""

    def check_section(
        self, kind: type, written: object, route: Route, *, is_partial: bool = False
    ) -> object:
        """Check a mapping against a section; return the section, or MISSING if a required key is
        faulty."""
        if not isinstance(written, dict):
            self._report_no_mapping(kind, written, route)
            return MISSING
        known = section_keys(kind)
        values: dict[str, object] = {}
        for key, (spot, holds) in known.items():
            inner = (*route, key)
            value: object = MISSING
            if key in written:
                value = self._check_value(holds, written[key], inner)
            elif (
                is_required(spot)
                and not is_partial
                and self.tree.value_at(_GIVEN_BY.get(inner, inner)) is None
            ):
                self.add(inner, *_describe_missing(inner), at=route, key=True)
            values[spot.name] = _NEEDED.get(inner, value) if value is MISSING else value
        for key in written:
            if key not in known:
                self._report_unknown(key, kind, route, written[key])
        sound = {name: value for name, value in values.items() if value is not MISSING}
        if is_partial:
            return sound
        if any(spot.name not in sound for spot, _ in known.values() if is_required(spot)):
            return MISSING
        return kind(**sound)

    def _check_value(self, holds: Leaf | Section, value: object, route: Route) -> object:
        if isinstance(holds, Section):
            if value is None and holds.accepts_null:
                return None
            return self.check_section(holds.kind, value, route, is_partial=holds.is_partial)
        try:
            return holds.parse(value)
        except RejectedValue as error:
            if not isinstance(value, dict) or not self._report_unknown_section(route, value):
                self.add(route, error.finding, error.remedy)
            return MISSING

    def _report_no_mapping(self, kind: type, value: object, route: Route) -> None:
        remedy = (
            (slips.suggest_recompute(value) if route == ("checkpoint",) else "")
            or self._bare_value_remedy(kind, value, route)
            or (self._foreign_remedy(route, value) if route else "")
            or list_keys("its keys", kind, route)
        )
        self.add(route, f"must be a mapping; got {describe(value)}", remedy)

    def _report_unknown(self, key: str, kind: type, route: Route, value: object) -> None:
        place, finding = (*route, key), f"unknown key {key!r}"
        waits, remedy = slips.UNSUPPORTED.get(place, ("", ""))
        if waits:
            finding += f"; not supported yet: {waits}"
        elif not is_called(key, kind, route):
            if isinstance(value, dict) and self._report_unknown_section(place, value):
                return
            remedy = self._foreign_remedy(place, value)
        self.add(place, finding, remedy or for_unknown(key, kind, route), key=True)

    def _report_unknown_section(self, route: Route, value: dict[str, object]) -> bool:
        """Report the keys of another tool's section; return False if no tool has any of them."""
        leaves = iter_leaves(route, value)
        remedies = {
            inner: self._foreign_remedy(inner, leaf) or of_any_section(inner[-1])
            for inner, leaf in leaves
        }
        if not any(remedies.values()):
            return False
        for inner, remedy in remedies.items():
            self.add(
                inner,
                f"unknown key {'.'.join(inner)!r}",
                remedy or "Remove it: no key stands for it.",
                key=True,
            )
        return True

    def _foreign_remedy(self, route: Route, value: object) -> str:
        """Return the remedy for a key of another tool, or "" if no tool has it."""
        return for_foreign(route, value, lambda key, text: self._format_setting(key, text, route))

    def _bare_value_remedy(self, kind: type, value: object, route: Route) -> str:
        """Return the remedy for a value that one key of the section would accept:
        `precision=fp16`."""
        if not isinstance(value, str):
            return ""
        known = section_keys(kind)
        for key, (_, holds) in known.items():
            if isinstance(holds, Choice) and (word := holds.find_word(value)):
                return f"Use `{self._format_setting((*route, key), to_flow_yaml(word), route)}`."
        folder = f"{route[-1].removesuffix('s')}s" if route else ""  # of models, clusters, rates
        preset = find_similar(value, tuple(list_files(folder))) if "preset" in known else ""
        return (
            f"Use `{self._format_setting((*route, 'preset'), to_flow_yaml(preset), route)}`."
            if preset
            else ""
        )

    def _format_setting(self, route: Route, text: str, at: Route) -> str:
        """Return a key and its value's text in the syntax of the faulty key: command line
        or file."""
        if self.tree.locate(at, key=True).source.startswith(COMMAND_LINE):
            return f"{'.'.join(route)}={text}"
        section, *inner = route
        if not inner:
            return f"{section}: {text}"
        return f"{section}: {{{': {'.join(inner)}: {text}{'}' * len(inner)}"


def _describe_missing(route: Route) -> tuple[str, str]:
    """Return the finding and the remedy for a required key that is missing."""
    if route[0] == "placement" and route[-1] == REST:
        finding = "the placement of all non-expert tensors is missing"
        return finding, f"Add `{REST}`: a strategy name or four modes."
    if route[0] == "placement":
        return f"all four states are required; {route[-1]!r} is missing", (
            f"Add `{route[-1]}`: R, S or S*."
        )
    section = f" in {'.'.join(route[:-1])}" if len(route) > 1 else ""
    example = f"{'.'.join(route)}{'=' if section else ': '}{_EXAMPLES[route[-1]]}"
    return f"the required key {route[-1]!r} is missing{section}", f"Add `{example}`."


FILE = "ptrain.schema.json"
Shape = dict[str, Any]


def schema() -> Shape:
    """Return the JSON Schema of specs, in draft 7, which all common editors support."""
    definitions: dict[str, Shape] = {}
    top = _section_schema(SpecRaw, definitions)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "ptrain spec",
        "$defs": {name: definitions[name] for name in sorted(definitions)},
        **top,
    }


def schema_text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _section_schema(
    kind: type, definitions: dict[str, Shape], *, is_partial: bool = False
) -> Shape:
    """Return the schema of a section; the schemas of nested sections are added to `definitions`.

    Nested keys that may be left out do not accept `null` for it.
    """
    needed = [
        key
        for key, (spot, holds) in section_keys(kind).items()
        if is_required(spot) and not getattr(holds, "has_derived_default", False) and not is_partial
    ]
    return {
        "additionalProperties": False,
        "description": inspect.getdoc(kind),
        "properties": {
            key: _sort_keywords(
                _default_schema(holds, spot.default)
                | _key_schema(holds, definitions, null=kind is SpecRaw and not is_required(spot))
            )
            for key, (spot, holds) in section_keys(kind).items()
        },
        **({"required": needed} if needed else {}),
        "type": "object",
    }


def _key_schema(holds: Leaf | Section, definitions: dict[str, Shape], *, null: bool) -> Shape:
    """Return the schema of a key; `null` permits null for a section that is left out."""
    if isinstance(holds, Leaf):
        return {**holds.schema(), "description": holds.description}
    name = holds.kind.__name__
    if name not in definitions:
        definitions[name] = _section_schema(holds.kind, definitions, is_partial=holds.is_partial)
    nothing = [{"type": "null"}] if null or holds.accepts_null else []
    shape = one_of({"$ref": f"#/$defs/{name}"}, *nothing, *holds.other_schemas)
    return {**shape, "description": holds.description}


def _default_schema(holds: Leaf | Section, value: object) -> Shape:
    """Return the schema's `default` of a key, or {} if there is none or it depends on other
    keys."""
    if value in (None, MISSING) or not isinstance(holds, Leaf) or holds.has_derived_default:
        return {}
    return {"default": holds.dump(value)}


def _sort_keywords(node: Any) -> Any:
    """Return a schema with sorted keywords, so that its text does not depend on the leaves'
    order."""
    if isinstance(node, list):
        return [_sort_keywords(inner) for inner in node]
    return (
        {key: _sort_keywords(node[key]) for key in sorted(node)} if isinstance(node, dict) else node
    )


FOLLOWS, NONE, NEEDED = "follows", "–", "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """A key of a spec.

    `default` is in file syntax: `follows` if it depends on other keys, and `required` if every
    spec, or the preset of its section, must set the key. `example` is an override, or "" for a
    section or a table of measurements.
    """

    place: str
    takes: str
    default: str
    about: str
    example: str = ""
    is_section: bool = False


_OF_TUPLES = "a strategy name, or a mode for each state"


def _load_examples() -> Mapping[str, str]:
    """Read the example values of specs/examples.yaml by dotted key."""
    return load_table("examples.yaml")


def iter_key_rows(kind: type = SpecRaw, above: str = "") -> Iterator[KeyRow]:
    """Yield every key in the order of the grammar, each section before its keys."""
    for key, (spot, holds) in section_keys(kind).items():
        place = f"{above}{key}"
        if isinstance(holds, Section):
            is_tuple = holds.kind is TupleRaw
            takes = _OF_TUPLES if is_tuple or holds.kind is ExpertTupleRaw else "section"
            if holds is EXPERTS_TUPLE:  # which no strategy is
                takes = "a mode for each state"
            yield KeyRow(
                place=place,
                takes=takes,
                default=NEEDED if is_required(spot) else NONE,
                about=holds.description,
                example=f"{place}={_load_examples()[place]}" if place in _load_examples() else "",
                is_section=True,
            )
            if not is_tuple:
                yield from iter_key_rows(holds.kind, f"{place}.")
        else:
            yield KeyRow(
                place=place,
                takes=_describe_supported(holds),
                default=_written_default(spot, holds),
                about=holds.description,
                example=_example_override(place, holds, spot.default),
            )


def _example_override(place: str, leaf: Leaf, default: object) -> str:
    """Return an override that differs from the default, or "" if the key has none."""
    if place in _load_examples():
        value = _load_examples()[place]
    elif isinstance(leaf, Choice):
        words = leaf.supported or leaf.words
        value = str(next(word for word in words if word != leaf.dump(default)))
    elif isinstance(leaf, Boolean) and leaf.supported is None:
        value = "false" if default is True else "true"
    elif isinstance(leaf, Size):
        value = leaf.example.replace(" ", "")
    else:
        return ""
    return f"{place}={value}"


def _describe_supported(leaf: Leaf) -> str:
    """Describe the accepted values, and reserved values that are not supported yet."""
    if leaf.supported is None:
        return leaf.describe_values()
    works = [to_flow_yaml(value) for value in leaf.supported]
    planned = f"not supported yet: {leaf.describe_values()}"
    return f"{' or '.join(works)}; {planned}" if works else planned


def _written_default(spot: Field[Any], leaf: Leaf) -> str:
    if is_required(spot):
        return NEEDED
    if leaf.has_derived_default:
        return FOLLOWS
    value = leaf.dump(None if spot.default is MISSING else spot.default)
    return NONE if value is None else to_flow_yaml(value)
