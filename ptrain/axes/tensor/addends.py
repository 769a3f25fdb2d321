"""What a rank of tp has an addend of while layers with experts or with latent features run: it is
summed behind them, once, and until then it is not what one device has."""

from __future__ import annotations

from functools import lru_cache

from ptrain.facts.model import prefixes
from ptrain.facts.stages import is_within
from ptrain.spec.role import Role, Roles, fits

Patterns = tuple[str, ...]


def gives_addend(roles: Roles, module: str) -> bool:
    """Return whether the ranks' outputs of a module add up to one device's."""
    return any(fits(pattern, module) for pattern in _giving(roles))


def gets_addend(roles: Roles, module: str) -> bool:
    """Return whether the ranks' gradients of a module's output add up to one device's."""
    return any(fits(pattern, name) for pattern in _getting(roles) for name in prefixes(module))


@lru_cache(maxsize=16)
def _giving(roles: Roles) -> Patterns:
    """Return the modules whose inputs are cut, and those around them but the one that sums."""
    sums = tuple(pattern for pattern, role in roles if role is Role.EXPERTS)
    rows = (pattern for pattern, role in roles if role is Role.INNER_ROW)
    around = (name for row in rows for name in prefixes(row) if is_within(name, sums))
    return tuple(name for name in dict.fromkeys(around) if name not in sums)


@lru_cache(maxsize=16)
def _getting(roles: Roles) -> Patterns:
    """Return the modules that weigh a rank's addends, and those whose outputs all heads share, of
    which a rank has its own."""
    sums = tuple(pattern for pattern, role in roles if role is Role.EXPERTS)
    return tuple(
        name
        for name, role in roles
        if role is Role.LATENT or (role is Role.SHARED and is_within(name, sums))
    )
