"""Legality checks of many specs that differ in a few fields, with each rule evaluated as rarely as
possible.

The fields that a rule reads are not declared but observed. A rule is a function of the spec alone,
so it takes the same path through two specs that are equal in the fields that it has read so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NoReturn

from ptrain.algebra.legality import LEGALITY_CHECKS, SUPPORT_CHECKS, FaultsOf, breaks_none
from ptrain.spec.batch import Batch
from ptrain.spec.spec import Spec

_READ, _BATCH = "fields that were read", "batch."


@dataclass(frozen=True, slots=True)
class OpenSpec:
    """A spec without cluster that has undecided fields, and the `rules` that read some of them.

    All other rules have been checked already; `rules` is None if one of those is broken.
    """

    spec: Spec
    rules: tuple[FaultsOf, ...] | None

    @classmethod
    def with_open_fields(cls, spec: Spec, names: Iterable[str]) -> OpenSpec:
        """Return the open spec in which the fields `names` are undecided.

        Args:
            spec: The spec that provides all other fields.
            names: Names of fields such as `unit`, or of batch fields such as `batch.accumulate`.
        """
        # A cluster limits the number of devices, which undecided degrees would exceed or not.
        spec = spec.with_fields(cluster=None)
        return cls(spec, _find_open_rules(spec, frozenset(names)))

    def is_sound(self, **changes: Any) -> bool:
        """Return True if the spec with these values for its undecided fields is legal and
        can run."""
        return self.rules is not None and breaks_none(self.spec.with_fields(**changes), self.rules)


class Memo:
    """A memoized claim about specs that differ only in the fields `names`.

    It is evaluated once per combination of values of the fields that it reads.
    """

    def __init__(self, claim: Callable[[Spec], bool], names: Iterable[str]) -> None:
        self._claim, self._names = claim, frozenset(names)
        # By the fields that were read, then by the ids of their values. The values are stored, too,
        # because the id of a freed object can be reused.
        self._known: dict[tuple[str, ...], dict[tuple[int, ...], tuple[bool, list[Any]]]] = {}

    def holds_of(self, spec: Spec, values: Mapping[str, Any]) -> bool:
        """Return True if the claim holds for `spec` with other `values` for the fields of this
        memo.

        Args:
            spec: The spec that provides all other fields, which must be equal in all calls.
            values: The values of all fields of this memo. They are compared by identity.
        """
        # A rule takes few different paths, so that a few sets of names cover all calls.
        for names, known in self._known.items():
            answer = known.get(tuple([id(values[name]) for name in names]))
            if answer is not None:
                return answer[0]
        noting = _copy_as(_recording_spec(self._names), spec)
        read: list[str] = []
        noting.__dict__.update(values, **{_READ: read})
        is_so = self._claim(noting)
        names = tuple(dict.fromkeys(read))
        answer = is_so, [values[name] for name in names]
        self._known.setdefault(names, {})[tuple(map(id, answer[1]))] = answer
        return answer[0]


def make_memos(rules: Iterable[FaultsOf], names: Iterable[str]) -> list[Memo]:
    """Return a memo per rule: the claim that specs which differ in these fields do not break it."""

    def claim(faults: FaultsOf) -> Callable[[Spec], bool]:
        return lambda spec: breaks_none(spec, (faults,))

    return [Memo(claim(faults), names) for faults in rules]


def _find_open_rules(spec: Spec, names: frozenset[str]) -> tuple[FaultsOf, ...] | None:
    """Return the rules that read an undecided field, or None if another rule is broken.

    A rule that reads no undecided field has the same result for all values of these fields.
    """
    silent, looking = _hide_fields(spec, names), []
    for faults in (*LEGALITY_CHECKS, *SUPPORT_CHECKS):
        try:
            if not breaks_none(silent, (faults,)):
                return None
        except _WithheldError:
            looking.append(faults)
    return tuple(looking)


def _copy_as(kind: type[Spec], spec: Spec) -> Spec:
    """Return a copy of the spec as an instance of a subclass, without calling `__init__`."""
    other = object.__new__(kind)
    other.__dict__.update(spec.__dict__)
    return other


class _WithheldError(Exception):
    """Raised when a rule reads an undecided field."""


def _hide_fields(spec: Spec, names: frozenset[str]) -> Spec:
    """Return the spec with undecided fields, of it or of its batch, that raise when they
    are read."""
    of_batch = {name for name in names if name.startswith(_BATCH)}
    silent = _copy_as(_silent_spec(names - of_batch), spec)
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
    return type("_SilentSpec", (Spec,), _hidden_properties(names))


@cache
def _silent_batch(names: frozenset[str]) -> type[Batch]:
    return type("_SilentBatch", (Batch,), _hidden_properties(names))


def _hidden_properties(names: Iterable[str]) -> dict[str, Any]:
    """Return properties for these names that raise `_WithheldError`."""

    def refuse(_: object) -> NoReturn:
        raise _WithheldError

    return dict.fromkeys(names, property(refuse))


@cache
def _recording_spec(names: frozenset[str]) -> type[Spec]:
    """Return a subclass of Spec that records reads of these fields."""

    def noted(name: str) -> property:
        def value(spec: Spec) -> Any:
            spec.__dict__[_READ].append(name)
            return spec.__dict__[name]

        return property(value)

    return type("_NotingSpec", (Spec,), {name: noted(name) for name in names})
