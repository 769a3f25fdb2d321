"""Whether many specs are sound that differ in few fields: a rule says the same of all that are
alike in what it looks at, and is asked once for these.

Which fields that are nobody declares. A rule is a function of the spec alone, so that it takes the
same way through specs which are alike in the fields that it reads on this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NoReturn

from ptrain.algebra.legality import CHECKED, EXECUTED, FaultsOf, obeys
from ptrain.spec.batch import Batch
from ptrain.spec.spec import Spec

_READ, _BATCH = "fields that were read", "batch."


@dataclass(frozen=True, slots=True)
class OpenSpec:
    """A spec on no cluster, and the `rules` that look at fields of it that are still to be chosen:
    all others are asked once. None where one of these is broken."""

    spec: Spec
    rules: tuple[FaultsOf, ...] | None

    @classmethod
    def of(cls, spec: Spec, names: Iterable[str]) -> OpenSpec:
        """Return one of a spec whose fields with these names are to be chosen: `unit`, or of its
        batch `batch.accumulate`."""
        spec = spec.but(cluster=None)
        return cls(spec, _undecided(spec, frozenset(names)))

    def is_sound(self, **changes: Any) -> bool:
        """Return whether the spec with these values is legal and runs."""
        return self.rules is not None and obeys(self.spec.but(**changes), self.rules)


class Memo:
    """A claim about specs that differ in fields with these `names` alone, which is checked once for
    those that are alike in what it looks at."""

    def __init__(self, claim: Callable[[Spec], bool], names: Iterable[str]) -> None:
        self._claim, self._names = claim, frozenset(names)
        # By which fields were read, and by their values' identities: what was read stays alive.
        self._known: dict[tuple[str, ...], dict[tuple[int, ...], tuple[bool, list[Any]]]] = {}

    def holds_of(self, spec: Spec, values: Mapping[str, Any]) -> bool:
        """Return whether a spec is as is claimed with other values of all these fields: it is made
        where nobody knows it."""
        for names, known in self._known.items():
            answer = known.get(tuple([id(values[name]) for name in names]))
            if answer is not None:
                return answer[0]
        noting = _with(_noting(self._names), spec)
        read: list[str] = []
        noting.__dict__.update(values, **{_READ: read})
        is_so = self._claim(noting)
        names = tuple(dict.fromkeys(read))
        answer = is_so, [values[name] for name in names]
        self._known.setdefault(names, {})[tuple(map(id, answer[1]))] = answer
        return answer[0]


def memos(rules: Iterable[FaultsOf], names: Iterable[str]) -> list[Memo]:
    """Return of each of the rules that it is not broken, of specs that differ in these fields."""

    def claim(faults: FaultsOf) -> Callable[[Spec], bool]:
        return lambda spec: obeys(spec, (faults,))

    return [Memo(claim(faults), names) for faults in rules]


def _undecided(spec: Spec, names: frozenset[str]) -> tuple[FaultsOf, ...] | None:
    """The rules that look at fields of a spec with these names, None where another one is broken:
    what the others say they say of every spec that differs from this one in these fields alone."""
    silent, looking = _silenced(spec, names), []
    for faults in (*CHECKED, *EXECUTED):
        try:
            if not obeys(silent, (faults,)):
                return None
        except _WithheldError:
            looking.append(faults)
    return tuple(looking)


def _with(kind: type[Spec], spec: Spec) -> Spec:
    """The same spec of another kind."""
    other = object.__new__(kind)
    other.__dict__.update(spec.__dict__)
    return other


class _WithheldError(Exception):
    """A rule looks at a field that is not to be known."""


def _silenced(spec: Spec, names: frozenset[str]) -> Spec:
    """The spec without fields of it, or of its batch."""
    of_batch = {name for name in names if name.startswith(_BATCH)}
    silent = _with(_silent_spec(names - of_batch), spec)
    if of_batch:
        parts = frozenset(name.removeprefix(_BATCH) for name in of_batch)
        batch = object.__new__(_silent_batch(parts))
        for part in fields(Batch):
            if part.name not in parts:
                object.__setattr__(batch, part.name, getattr(spec.batch, part.name))
        silent.__dict__["batch"] = batch
    return silent


@cache
def _silent_spec(names: frozenset[str]) -> type[Spec]:
    return type("_SilentSpec", (Spec,), _withheld(names))


@cache
def _silent_batch(names: frozenset[str]) -> type[Batch]:
    return type("_SilentBatch", (Batch,), _withheld(names))


def _withheld(names: Iterable[str]) -> dict[str, Any]:
    """Fields that nobody can read."""

    def refuse(_: object) -> NoReturn:
        raise _WithheldError

    return dict.fromkeys(names, property(refuse))


@cache
def _noting(names: frozenset[str]) -> type[Spec]:
    """A spec that notes which of these fields are read."""

    def noted(name: str) -> property:
        def value(spec: Spec) -> Any:
            spec.__dict__[_READ].append(name)
            return spec.__dict__[name]

        return property(value)

    return type("_NotingSpec", (Spec,), {name: noted(name) for name in names})
