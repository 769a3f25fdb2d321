"""The update rule of each parameter: an optimizer with the hyperparameters of a group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from ptrain.errors import input_error
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.spec.groups import ALL, KINDS, ParameterGroup, is_decayed
from ptrain.spec.job import OPTIMIZERS, OptimizerSpec


class Rule(NamedTuple):
    """The update rule of some parameters, which one torch optimizer executes.

    Attributes:
        name: The optimizer, a key of `OPTIMIZERS`.
        lr_factor: The factor of each step's learning rate.
        hyper: The hyperparameters; its `name`, `groups` and `decay` are not read.
    """

    name: str
    lr_factor: float
    hyper: OptimizerSpec

    def __hash__(self) -> int:
        # A search hashes the rules of all tensors many times; few rules differ in `hyper` only.
        return hash((self.name, self.lr_factor))


# An update's rules: by group of targets, by target, and by tensor of the target.
TargetRules = Sequence[Sequence[Rule]]


def uniform_rule(spec: OptimizerSpec) -> Rule:
    """Return the rule of all parameters that no group matches, except matrices within the model."""
    return Rule(spec.properties.remainder or spec.name, 1.0, spec)


@lru_cache(maxsize=2**16)
def rule_of(spec: OptimizerSpec, name: str, dims: int, is_inner: bool) -> Rule:
    """Return the update rule of a parameter.

    Args:
        spec: The optimizer with its groups. An optimizer for matrices only, such as Muon, updates
            the matrices within the model; its row names the optimizer of the remainder.
        name: The parameter's dotted name.
        dims: Its number of dimensions.
        is_inner: True if the parameter is in a unit other than the root, for example a block.
    """
    group = next((group for group in spec.groups if group.selects(name, dims)), None)
    chosen, is_inner = spec.name, is_inner or bool(group and group.name)
    if group is not None and group.name is not None:
        chosen = group.name
    if not (is_inner and dims == 2):
        chosen = OPTIMIZERS[chosen].remainder or chosen
    hyper, factor = spec, 1.0
    if chosen not in (spec.name, spec.properties.remainder):
        hyper = replace(hyper, **OPTIMIZERS[chosen].keys)
    if spec.weight_decay and not is_decayed(spec.decay, name, dims):
        hyper = replace(hyper, weight_decay=0.0)
    if group is not None:
        hyper = replace(hyper, **_overrides(group))
        if group.lr is not None:
            factor = group.lr / spec.lr
        elif group.lr_factor is not None:
            factor = group.lr_factor
    if not spec.is_uniform:
        hyper = replace(hyper, groups=(), decay=ALL)  # so that equal rules are equal
    return Rule(chosen, factor, hyper)


_OVERRIDDEN = ("betas", "eps", "weight_decay", "momentum")


def _overrides(group: ParameterGroup) -> dict[str, Any]:
    """Return the hyperparameters that a group sets, apart from the learning rate."""
    values = {key: getattr(group, key) for key in _OVERRIDDEN}
    return {key: value for key, value in values.items() if value is not None}


def rules_of_unit(spec: OptimizerSpec, unit: UnitFacts) -> tuple[Rule, ...]:
    """Return the rule of each trained tensor of a unit, in order.

    Args:
        spec: The optimizer with its groups.
        unit: The unit.
    """
    if spec.is_uniform and spec.is_elementwise:  # fast path: a search calls this often
        return (uniform_rule(spec),) * len(unit.trained)
    return tuple([rule_of(spec, t.name, len(t.shape), not unit.is_root) for t in unit.trained])


def describe_groups(spec: OptimizerSpec) -> str:
    """Return the weight decay and the groups of an optimizer as a phrase for the plan."""
    parts = [] if spec.decay == ALL else [f"weight decay on {spec.decay}"]
    for group in spec.groups:
        keys = ("name", "lr", "lr_factor", *_OVERRIDDEN)
        texts = [f"{key} {value}" for key in keys if (value := getattr(group, key)) is not None]
        parts.append(f"{' and '.join(group.match)} with {', '.join(texts)}")
    return "; ".join(parts)


class RuleRange(NamedTuple):
    """Consecutive elements of a flat target that have one rule."""

    rule: Rule
    start: int
    numel: int


def split_by_rule(rules: Sequence[Rule], numels: Iterable[int]) -> list[RuleRange]:
    """Return the runs of tensors with equal rules within a flat target.

    All ranks get as many segments; on a rank that has no element of a run, it is empty.

    Args:
        rules: The rule of each tensor of the target.
        numels: The elements of each tensor in this rank's part of the target.
    """
    segments: list[RuleRange] = []
    start = 0
    for rule, numel in zip(rules, numels, strict=True):
        if segments and segments[-1].rule == rule:
            segments[-1] = segments[-1]._replace(numel=segments[-1].numel + numel)
        else:
            segments.append(RuleRange(rule, start, numel))
        start += numel
    return segments


def require_matches(spec: OptimizerSpec, facts: ModelFacts) -> None:
    """Require that each word of each group selects a trained parameter.

    Raises:
        SpecError: A word selects none.
    """
    for number, word in _unmatched(spec, facts):
        finding = f"group {number}: no trained parameter is named {word}"
        if word in KINDS:
            finding = f"group {number}: the model has no {word} that are trained ({KINDS[word]})"
        names = ", ".join(dict.fromkeys(t.name for t in facts.trained[:3]))
        remedy = f"Remove it, or use one of {', '.join(KINDS)}, or a name as in {names}."
        raise input_error("optimizer.groups", finding, remedy)


def require_equal_copies(spec: OptimizerSpec, tied: Iterable[tuple[str, str]]) -> None:
    """Require that a weight that two pipeline stages hold has one update rule.

    Args:
        spec: The optimizer with its groups.
        tied: Each such tensor's name on the first stage, and on the last one.

    Raises:
        SpecError: The copies have different rules, with which they would diverge.
    """
    for name, copy in tied:
        if rule_of(spec, name, 2, is_inner=False) != rule_of(spec, copy, 2, is_inner=False):
            finding = f"{name} and {copy} are one tied weight with different rules"
            remedy = "Give embeddings and head the same rule, or use `model.tied=false`."
            raise input_error("optimizer.groups", finding, remedy)


def _unmatched(spec: OptimizerSpec, facts: ModelFacts) -> Iterator[tuple[int, str]]:
    for number, group in enumerate(spec.groups, 1):
        for word in group.match:
            alone = group._replace(match=(word,))
            if not any(alone.selects(t.name, len(t.shape)) for t in facts.trained):
                yield number, word
