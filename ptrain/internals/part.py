"""Descriptions of private torch members by version, which torch does not document.

`tests/unit/test_internals.py` checks all of them against the installed torch.
"""

from __future__ import annotations

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
