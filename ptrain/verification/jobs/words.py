"""Parameters, modules and axes in words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ptrain.verification.jobs.ranks import RANKS


def family(name: str) -> str:
    """Return `blocks.*.norm.weight` for one of numbered layers."""
    return re.sub(r"\b\d+\b", "*", name)


def families(names: Iterable[str]) -> str:
    """Return names as `blocks.*.norm.weight, head.weight`: numbered layers count once."""
    kinds: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        kinds.setdefault(family(name), []).append(name)
    shown = [kind if len(members) > 1 else members[0] for kind, members in kinds.items()]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def over_axis(axis: str) -> str:
    return "over all ranks" if axis == RANKS else f"over {axis.replace('+', ' and ')}"
