"""Which modules with roles stand in a sub-block that makes its input whole for all of them."""

from __future__ import annotations

from collections.abc import Iterable

from ptrain.spec.role import Role


def standing_alone(named: Iterable[tuple[str, Role]]) -> frozenset[str]:
    """Return the names of those that are in none: what such a column is given it makes whole for
    itself."""
    roles = dict(named)
    opened = tuple(f"{name}." for name, role in roles.items() if role is Role.WHOLE_INPUT)
    return frozenset(name for name in roles if not name.startswith(opened))
