"""The conditions under which parallelisms compose: tensor with data (Theorem 6), pipeline with data
(Theorem 7), and Theorem 3 for sharded tokens and experts.

The conditions use only ranks and names, so they can be checked both for the groups of a plan and
for the groups that a meter observed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ptrain.axes.context.attention import is_partition
from ptrain.spec.placement import SAMPLE_AXES
from ptrain.spec.spec import Spec, indices_in_groups, rank_groups
from ptrain.steps.step import Parallelize, Plan
from ptrain.steps.wraps import ExecutedStep, WrapStep
from ptrain.units import group_by_key

Groups = Sequence[tuple[int, ...]]
_FEW_GROUPS = 2  # groups shown as evidence: all others follow the same pattern
_FEW_RANKS = 8  # ranks shown in full: the devices of a usual node


class Condition(NamedTuple):
    """A condition of a theorem: its name, whether a plan satisfies it, and the evidence."""

    name: str
    holds: bool
    why: str


def theorem_3(spec: Spec, plan: Plan) -> tuple[Condition, ...]:
    """Return the conditions of Theorem 3 for ranks with shards of the tokens; none without cp.

    The paper does not cover this case.
    """
    if (step := plan.context) is None:
        return ()
    within = tuple(rank_groups(spec, (step.axis,)))
    places = indices_in_groups(spec, plan.sample_axes)
    across = tuple(rank_groups(spec, plan.summed_axes))
    return (
        Condition(
            name="Theorem 3 of samples",
            holds=all(len({places[rank] for rank in group}) == 1 for group in within),
            why=f"all ranks of a {step.axis} group have the same samples: {_groups_text(within)}",
        ),
        Condition(
            name="Theorem 3 of tokens",
            holds=is_partition(step),
            why=(
                f"their token shards are disjoint and cover all {step.sequence} tokens; "
                "positions are those in the full sequence"
            ),
        ),
        Condition(
            name="Theorem 3 of gradients",
            holds=are_within(within, across),
            why=(
                "by construction, the loss is a sum over the local tokens, divided by the "
                f"global count; gradients are summed over {' × '.join(plan.summed_axes)}: "
                f"{_groups_text(across)}"
            ),
        ),
    )


def theorem_3_of_experts(spec: Spec, plan: Plan) -> tuple[Condition, ...]:
    """Return the conditions of Theorem 3 for ranks with different experts; none without ep.

    The paper does not cover this case.
    """
    if (step := plan.experts) is None:
        return ()
    within, names = tuple(rank_groups(spec, step.axes)), " × ".join(step.axes)
    summed = plan.wrap_of(step.modules).summed_axes
    across = tuple(rank_groups(spec, summed)) if summed else ()
    whole = tuple(rank_groups(spec, plan.summed_axes))
    places = indices_in_groups(spec, step.axes)
    why = (
        f"it is summed over {' × '.join(summed)}, whose ranks hold the same experts: "
        f"{_groups_text(across)}"
    )
    return (
        Condition(
            name="Theorem 3 of routed tokens",
            holds=step.number % len(within[0]) == 0,
            why=(
                f"each of {step.number} experts is on one rank of a {names} group, which "
                f"receives every token routed to the expert: {_groups_text(within)}"
            ),
        ),
        Condition(
            name="Theorem 3 of experts' gradients",
            holds=all(len({places[rank] for rank in group}) == 1 for group in across),
            why=f"the gradient of an expert includes the tokens of all ranks of {names}; "
            + (why if summed else "no other rank holds the expert, so its gradient is not reduced"),
        ),
        Condition(
            name="Theorem 3 of the rest's gradients",
            holds=are_within(rank_groups(spec, (step.axis,)), whole),
            why=(
                "gradients of replicated parameters are summed over "
                f"{' × '.join(plan.summed_axes)}: {_groups_text(whole)}; by construction, both are "
                "sums over tokens, divided by the global count"
            ),
        ),
    )


def theorem_6(spec: Spec, plan: Plan, ran: Sequence[ExecutedStep] = ()) -> tuple[Condition, ...]:
    """Return the three conditions of Theorem 6; none without tp, or without a summed axis.

    Args:
        spec: The spec.
        plan: Its plan.
        ran: The steps that a rank has executed, in order; by default, those of the plan.
    """
    data = plan.summed_axes
    if plan.tensor is None or not data:
        return ()
    within = tuple(rank_groups(spec, (plan.tensor.axis,)))
    across = tuple(group for axis in data for group in rank_groups(spec, (axis,)))
    names = " and ".join(data)
    is_cut_first = cuts_before_wraps(ran or tuple(map(ExecutedStep, plan.steps)))
    return (
        Condition(
            name="Theorem 6.1",
            holds=are_consecutive(within),
            why=f"a tp group has consecutive ranks: {_groups_text(within)}",
        ),
        Condition(
            name="Theorem 6.2",
            holds=is_cut_first,
            why=(
                "by construction, operators are sharded before units are wrapped: the sums "
                "of a unit over tp end within its backward pass, and its gradients are then "
                f"reduced over {names}"
            )
            if is_cut_first
            else (
                "units are wrapped before operators are sharded: gradients reduced over "
                f"{names} are not summed over tp yet"
            ),
        ),
        Condition(
            name="Theorem 6.3",
            holds=have_one_of_each(across, within),
            why=(
                f"gradients are reduced over {names}: {_groups_text(across)}, never over two ranks "
                "of a tp group"
            ),
        ),
    )


def theorem_7(spec: Spec, plan: Plan) -> tuple[Condition, ...]:
    """Return the three conditions of Theorem 7; none without pp, or without a summed axis.

    Theorem 7 places pp outside the data axes, and Remark 4 inside. The first condition is named
    after the one that applies.
    """
    data = plan.summed_axes
    if plan.pipeline is None or not data:
        return ()
    within = tuple(rank_groups(spec, (plan.pipeline.axis,)))
    others = tuple(axis for axis in plan.mesh.axes if axis is not plan.pipeline.axis)
    stages = tuple(rank_groups(spec, others))
    across = tuple(group for axis in data for group in rank_groups(spec, (axis,)))
    names = " and ".join(data)
    is_outermost = are_consecutive(stages)
    order = "consecutive ranks" if is_outermost else "not consecutive, as in Remark 4"
    return (
        Condition(
            name="Theorem 7.1" if is_outermost else "Remark 4",
            holds=len({len(stage) for stage in stages}) == 1,
            why=f"the ranks with the same stages are {order}: {_groups_text(stages)}",
        ),
        Condition(
            name="Theorem 7.2",
            holds=are_within(across, stages),
            why=f"gradients are reduced over {names}: {_groups_text(across)}, among replicas of "
            "the same stages",
        ),
        Condition(
            name="Theorem 7.3",
            holds=have_one_of_each(within, stages),
            why=(
                f"activations are sent along {plan.pipeline.axis}: {_groups_text(within)}, one "
                "rank per stage, with the same samples"
            ),
        ),
    )


def explain_compositions(spec: Spec, plan: Plan) -> Iterator[tuple[str, tuple[Condition, ...]]]:
    """Yield a heading and the conditions for each theorem that applies to the plan."""
    has_samples = any(axis in plan.summed_axes for axis in SAMPLE_AXES)
    others = "data axes" if has_samples else " and ".join(plan.summed_axes)
    if plan.context is not None:
        yield f"why {plan.context.axis} computes the same as a single device", theorem_3(spec, plan)
    if plan.experts is not None:
        heading = f"why {plan.experts.axis} computes the same as a single device"
        yield heading, theorem_3_of_experts(spec, plan)
    if conditions := theorem_6(spec, plan):
        yield f"why tp and {others} compose", conditions
    if conditions := theorem_7(spec, plan):
        yield f"why pp and {others} compose", conditions


def all_conditions(spec: Spec, plan: Plan) -> tuple[Condition, ...]:
    """Return the conditions of all theorems that apply to the plan.

    Args:
        spec: A legal spec.
        plan: Its plan, from `lower`.

    Returns:
        Conditions with their theorem and result.
    """
    return tuple(c for _, conditions in explain_compositions(spec, plan) for c in conditions)


def cuts_before_wraps(ran: Sequence[ExecutedStep]) -> bool:
    """Return True if Theorem 6.2 holds for the executed steps.

    Every model or stage with wrapped units must have had its operators sharded before. The result
    is False if no step wraps units.
    """
    cut: set[int | None] = set()
    wrapped: set[int | None] = set()
    for executed in ran:
        if isinstance(executed.step, Parallelize):
            cut.add(executed.piece)
        elif isinstance(executed.step, WrapStep):
            wrapped.add(executed.piece)
        # Checked after every step: an operator that is sharded after the wrap would look correct at
        # the end.
        if executed.piece in wrapped - cut:
            return False
    return bool(wrapped)


def are_within(data_groups: Groups, stage_groups: Groups) -> bool:
    """Return True if Theorem 7.2 holds: all ranks of each data group have the same stages.

    Args:
        data_groups: Ranks of each inner group, such as a group over the data axes.
        stage_groups: Ranks of each group with equal stages, in which an inner group must lie.
    """
    stages = [{*stage} for stage in stage_groups]
    return all(any(stage.issuperset(group) for stage in stages) for group in data_groups)


def are_consecutive(tensor_groups: Groups) -> bool:
    """Return True if group i of T ranks is {iT, iT + 1, …, (i + 1)T - 1} (Theorems 6.1 and 7.1)."""
    return all(
        tuple(sorted(group)) == tuple(range(index * len(group), (index + 1) * len(group)))
        for index, group in enumerate(sorted(tensor_groups, key=min))
    )


def have_one_of_each(data_groups: Groups, tensor_groups: Groups) -> bool:
    """Return True if each data group has several ranks, at most one per tp group (Theorem 6.3).

    Theorem 7.3 makes the same demand of pipelines and the groups of ranks that share stages.

    Args:
        data_groups: Ranks of each group over the data axes.
        tensor_groups: Ranks of each tp group, or each pipeline for Theorem 7.3.
    """
    groups_of = group_by_key(
        (rank, index) for index, other in enumerate(tensor_groups) for rank in {*other}
    )

    def has_two_of_none(group: tuple[int, ...]) -> bool:
        indices = [index for rank in {*group} for index in groups_of.get(rank, ())]
        return len(indices) == len({*indices})

    return all(len(group) > 1 and has_two_of_none(group) for group in data_groups)


def ranks_text(group: Sequence[int]) -> str:
    """Return ranks as text, `[0 1 2 3]` or `[0 1 … 31]`."""
    if len(group) <= _FEW_RANKS:
        return "[" + " ".join(map(str, group)) + "]"
    return f"[{group[0]} {group[1]} … {group[-1]}]"


def condition_lines(conditions: Iterable[Condition]) -> list[str]:
    """Return a line per condition, `Theorem 6.1 holds: …`.

    Args:
        conditions: Conditions of one theorem or several.

    Returns:
        One line per condition.
    """
    return [
        f"{condition.name} {'holds' if condition.holds else 'FAILS'}: {condition.why}"
        for condition in conditions
    ]


def _groups_text(groups: Groups) -> str:
    rest = f" … {len(groups)} groups" if len(groups) > _FEW_GROUPS else ""
    return " ".join(map(ranks_text, groups[:_FEW_GROUPS])) + rest
