"""Frozen parameters, which are used and trained by nobody: what executes them."""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.errors import SpecError, refused
from ptrain.steps.wraps import FlatUnits, Wrap


def require_unfrozen(wrap: Wrap, frozen: Sequence[str]) -> None:
    """Raises SpecError for frozen parameters in a flat unit: its tensors are views of one buffer,
    and their gradients of another."""
    if isinstance(wrap, FlatUnits) and frozen:
        raise _not_yet("in a flat unit", frozen, "take ddp's tuple of modes, or zero3's")


def require_uncut(frozen: Sequence[str]) -> None:
    """Raises SpecError for frozen parameters of a model that tp cuts: what comes before everything
    that is trained has no gradient for the ranks to sum, which nobody counts."""
    if frozen:
        raise _not_yet("over tp", frozen, "leave tp out")


def _not_yet(where: str, frozen: Sequence[str], remedy: str) -> SpecError:
    first, *others = frozen
    more = f" and {len(others)} more" if others else ""
    return refused("placement", f"not yet: frozen parameters {where}: {first}{more}", remedy)
