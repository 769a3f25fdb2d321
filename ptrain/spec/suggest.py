"""Which key was meant by a word that is none: the remedy for an unknown key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ptrain.spec import slips
from ptrain.spec.grammar import SpecRaw
from ptrain.spec.leaf import Leaf, nearest
from ptrain.spec.section import Section, keys
from ptrain.spec.text import Route

_MOST_LISTED = 12  # keys in a remedy
_MOST_MEANT = 4  # places in a question
_ALIKE = 0.85  # two words, as `step` and `steps` are: a slip, whatever another section has

Places = Mapping[Route, tuple[str, ...]]  # a key's names: its own, and what others call it


def for_unknown(key: str, kind: type, route: Route) -> str:
    """The remedy for a key that the section at `route`, of this kind, does not have."""
    other = slips.other_key(key) if not route else ""
    if other:
        return f"did you mean {other!r}?"
    if "." in key and tuple(key.split(".")) in _places(SpecRaw, ()):
        section, _, rest = key.partition(".")
        return f"write {section}: {{{rest}: …}}"
    meant = _meant(key, kind, route)
    if route and (key,) in meant:
        return f"{key!r} stands at the top of the spec, not in {'.'.join(route)}"
    shown = [".".join(place).removeprefix(".".join((*route, ""))) for place in meant]
    if shown:
        return f"did you mean {' or '.join(map(repr, shown))}?"
    return listed("known here", kind, route)


def listed(what: str, kind: type, route: Route) -> str:
    """The keys of a section, or the command that lists them."""
    known = tuple(keys(kind))
    if len(known) <= _MOST_LISTED:
        return f"{what}: {', '.join(known)}"
    return f"`ptrain help {'.'.join(route) or 'keys'}` lists what there is"


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
