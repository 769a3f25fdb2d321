"""Members that are private in torch, by version: what stands in for a contract that torch does not
give. `tests/unit/test_internals.py` asks the installed torch for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

FIRST, LAST = "2.11", "2.15"  # of the versions for which this folder is written


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivatePart:
    """`members` of a class, module or instance of torch, and the `arguments` that it takes where it
    is called, in the versions from `since` to `until`, both included; in others it has neither."""

    owner: Any
    members: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    since: str = FIRST
    until: str = LAST

    @property
    def name(self) -> str:
        """What torch calls it."""
        return str(getattr(self.owner, "__qualname__", getattr(self.owner, "__name__", self.owner)))

    def is_of(self, torch: str) -> bool:
        """Return whether this version of torch has it."""
        return _numbers(self.since) <= _numbers(torch) <= _numbers(self.until)

    def faults(self, torch: str) -> Iterator[str]:
        """Yield a sentence for whatever this version, which is installed, has otherwise."""
        is_due = self.is_of(torch)
        taken = inspect.signature(self.owner).parameters if self.arguments else ()
        known = [(name, hasattr(self.owner, name), "has") for name in self.members]
        known += [(name, name in taken, "takes") for name in self.arguments]
        for name, is_there, verb in known:
            if is_due and not is_there:
                yield f"{self.name} has no {name} in torch {torch}"
            if not is_due and is_there:
                span = f"{self.since} to {self.until}"
                yield f"{self.name} {verb} {name} in torch {torch} too; expected {span}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Temporarily give an object these attributes in place of its own."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
