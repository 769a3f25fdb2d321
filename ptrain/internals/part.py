"""Descriptions of private torch members by version, which torch does not document.

`tests/unit/test_internals.py` checks all of them against the installed torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

FIRST, LAST = "2.11", "2.15"  # the torch versions that this package supports


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivatePart:
    """Private members of a torch class, module or instance, or arguments of a torch function.

    Attributes:
        owner: The class, module, instance or function.
        members: Names of its members.
        arguments: Names of its arguments.
        since: First torch version that has them.
        until: Last torch version that has them. All other versions must lack them.
    """

    owner: Any
    members: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    since: str = FIRST
    until: str = LAST

    @property
    def name(self) -> str:
        """The owner's name in torch."""
        return str(getattr(self.owner, "__qualname__", getattr(self.owner, "__name__", self.owner)))

    def exists_in(self, torch: str) -> bool:
        """Return True if this torch version has the part."""
        return (
            _version_numbers(self.since) <= _version_numbers(torch) <= _version_numbers(self.until)
        )

    def find_differences(self, torch: str) -> Iterator[str]:
        """Yield a sentence for every difference from the installed torch of version `torch`."""
        is_due = self.exists_in(torch)
        taken = inspect.signature(self.owner).parameters if self.arguments else ()
        known = [(name, hasattr(self.owner, name), "has") for name in self.members]
        known += [(name, name in taken, "takes") for name in self.arguments]
        for name, is_there, verb in known:
            if is_due and not is_there:
                yield f"{self.name} has no {name} in torch {torch}"
            if not is_due and is_there:
                span = f"{self.since} to {self.until}"
                yield f"{self.name} {verb} {name} in torch {torch} too; expected {span}"


def _version_numbers(version: str) -> tuple[int, ...]:
    """Return major and minor version as numbers."""
    return tuple(map(int, version.split(".")[:2]))


@contextmanager
def replace_attributes(owner: Any, **attributes: Any) -> Iterator[None]:
    """Temporarily replace attributes of an object."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
