"""Theorem 6: when tensor and data parallelism compose.

What its conditions ask is asked of ranks and names alone, so that it can be put to the groups of a
plan and to those that a meter saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ptrain.algebra.layout import groups
from ptrain.plan.step import Plan
from ptrain.spec.axis import DATA_AXES
from ptrain.spec.spec import Spec

Groups = Sequence[tuple[int, ...]]
_FEW_GROUPS = 2
_FEW_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One of a theorem's conditions, whether a plan obeys it, and what that was read off."""

    name: str
    holds: bool
    why: str


def theorem_6(spec: Spec, plan: Plan) -> tuple[Condition, ...]:
    """Its three conditions; none where there is no tp, or no data axis beside it."""
    data = tuple(axis for axis in plan.mesh.axes if axis in DATA_AXES)
    if plan.tensor is None or not data:
        return ()
    within = tuple(groups(spec, (plan.tensor.axis,)))
    across = tuple(group for axis in data for group in groups(spec, (axis,)))
    names = " and ".join(data)
    return (
        Condition(
            name="Theorem 6.1",
            holds=are_consecutive(within),
            why=f"a tp group is consecutive ranks: {_shown(within)}",
        ),
        Condition(
            name="Theorem 6.2",
            holds=plan.steps.index(plan.tensor) < plan.steps.index(plan.wrap),
            why="by construction, operators are cut before units are wrapped: a unit's sums over "
            f"tp end in its own backward pass, its gradients are reduced over {names} after it",
        ),
        Condition(
            name="Theorem 6.3",
            holds=have_one_of_each(across, within),
            why=f"gradients are reduced over {names}: {_shown(across)}, never two of a tp group",
        ),
    )


def are_consecutive(tensor_groups: Groups) -> bool:
    """Theorem 6.1: group i of T ranks is {iT, iT + 1, …, (i + 1)T - 1}."""
    return all(
        tuple(sorted(group)) == tuple(range(index * len(group), (index + 1) * len(group)))
        for index, group in enumerate(sorted(tensor_groups, key=min))
    )


def have_one_of_each(data_groups: Groups, tensor_groups: Groups) -> bool:
    """Theorem 6.3: a data group has ranks of several tp groups, and of each at most one."""
    return all(
        len(group) > 1 and all(len({*group} & {*other}) <= 1 for other in tensor_groups)
        for group in data_groups
    )


def ranks_text(group: Sequence[int]) -> str:
    """`[0 1 2 3]`, `[0 1 … 31]`."""
    if len(group) <= _FEW_RANKS:
        return "[" + " ".join(map(str, group)) + "]"
    return f"[{group[0]} {group[1]} … {group[-1]}]"


def condition_lines(conditions: Iterable[Condition]) -> list[str]:
    """`Theorem 6.1 holds: …`, a line each."""
    return [f"{each.name} {'holds' if each.holds else 'FAILS'}: {each.why}" for each in conditions]


def _shown(found: Groups) -> str:
    rest = f" … {len(found)} groups" if len(found) > _FEW_GROUPS else ""
    return " ".join(map(ranks_text, found[:_FEW_GROUPS])) + rest
