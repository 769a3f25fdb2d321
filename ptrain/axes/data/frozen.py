"""Frozen parameters, which are used and trained by nobody: what executes them."""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.errors import SpecError, refused
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits, Wrap


def require_executed(plan: Plan, frozen: Sequence[str]) -> None:
    """Raises SpecError for frozen parameters as `require_unfrozen`, and where ranks of tp have
    slices of the tokens: what of them is gathered for no gradient, nobody counts."""
    require_unfrozen(plan.wrap, frozen)
    if plan.tensor is not None and plan.tensor.is_sequence and frozen:
        raise _not_yet("where tp slices the tokens", frozen, "write placement.tp=S,S,S,R")


def require_unfrozen(wrap: Wrap, frozen: Sequence[str]) -> None:
    """Raises SpecError for frozen parameters in a flat unit: its tensors are views of one buffer,
    and their gradients of another."""
    if isinstance(wrap, FlatUnits) and frozen:
        raise _not_yet("in a flat unit", frozen, "take ddp's tuple of modes, or zero3's")


def _not_yet(where: str, frozen: Sequence[str], remedy: str) -> SpecError:
    first, *others = frozen
    more = f" and {len(others)} more" if others else ""
    return refused("placement", f"not yet: frozen parameters {where}: {first}{more}", remedy)
