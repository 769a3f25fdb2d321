"""The text of the API's values when they are printed: the tables of the command line.

A spec prints like `ptrain specs show`, a derivation like `ptrain predict`, a plan like `ptrain
plan`, and an estimate as its column. A printed spec leaves out keys that have no effect with its
placement, and lists them in a comment.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ptrain.algebra.legality import check
from ptrain.axes.data.form import data_factors, frozen_factors, tier_of
from ptrain.cost import PLACED, Estimate, State
from ptrain.derivation.estimate import Derivation
from ptrain.errors import SpecError
from ptrain.plan.show import format_plan
from ptrain.report.predict import estimate_tables, prediction_of, prediction_screen
from ptrain.report.selection import selection_text
from ptrain.selection.ranking import PlacementRanking
from ptrain.spec.foreign_files import iter_leaves
from ptrain.spec.keys import data_axis_dials
from ptrain.spec.load import load
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_yaml
from ptrain.steps.step import Plan
from ptrain.wording import to_text

to_text.register(Estimate, estimate_tables)


@to_text.register(Spec)
def _(spec: Spec) -> str:
    return minimal_spec(spec).as_yaml().rstrip()


@to_text.register(Derivation)
def _(derivation: Derivation) -> str:
    return prediction_screen(prediction_of(derivation))


@to_text.register(Plan)
def _(plan: Plan) -> str:
    return format_plan(plan.spec, plan)


@to_text.register(PlacementRanking)
def _(selection: PlacementRanking) -> str:
    return selection_text(selection)


_STATED = ("name", "mesh", "placement", "batch")
_WRAPPER_DEFAULTS = ("unit", "overlap", "prefetch", "gather_after_update")


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimalSpec:
    """A mapping that loads to the same spec, and comments on the keys that it leaves out."""

    mapping: dict[str, object]
    left_out: tuple[str, ...]

    def as_yaml(self) -> str:
        """Return the mapping as YAML, followed by the comments.

        Returns:
            YAML that `ptrain.load` accepts.
        """
        return to_yaml(self.mapping) + "".join(f"# {line}\n" for line in self.left_out)


def minimal_spec(spec: Spec) -> MinimalSpec:
    """Return the resolved spec without keys that have no effect with its placement.

    Args:
        spec: A resolved spec.

    Returns:
        The mapping and its comments.
    """
    # A key has no effect with a placement if the legality check rejects every other value of it.
    unheard = [
        place
        for place, probe in _probe_options(spec)
        if any(fault.place == place for fault in check(probe))
    ]
    mapping: dict[str, Any] = copy.deepcopy(spec.resolved)
    for place in unheard:
        section, _, key = place.partition(".")
        if key:
            del mapping[section][key]
        if not key or not mapping[section]:
            del mapping[section]
    return MinimalSpec(mapping=mapping, left_out=tuple(_omission_comments(spec, unheard)))


def sparse_mapping(spec: Spec) -> dict[str, Any]:
    """Return a mapping that loads to the same spec, without the keys that are set to their default.

    Args:
        spec: A resolved spec.

    Returns:
        The mapping. The name, the mesh, the placement and the batch stay.
    """
    mapping = minimal_spec(spec).mapping
    placement: Any = mapping["placement"]
    mapping["placement"] = {
        axis: modes if "rest" in modes else ",".join(modes.values())
        for axis, modes in placement.items()
    }
    leaves = [route for route, _ in iter_leaves((), mapping) if route[0] not in _STATED]
    # From the last key, sections first: a preset comes before the sizes that follow from it. The
    # family is the first, because a shape has only the options that differ from it.
    routes = {leaf[:size]: 0 for leaf in leaves[::-1] for size in range(1, len(leaf) + 1)}
    for route in sorted(routes, key=lambda route: route[-1] != "family"):
        trial = copy.deepcopy(mapping)
        section: dict[str, Any] = trial
        for key in route[:-1]:
            section = section.get(key, {})
        section.pop(route[-1], None)
        with suppress(SpecError):  # others need the key
            if replace(load(trial).spec, resolved=spec.resolved) == spec:
                mapping = trial
    return mapping


def _probe_options(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """Yield each option at its default, with a spec that sets it to another value."""
    for key in data_axis_dials():
        if key.dial.other is not None and key.is_free(spec):
            yield key.place, key.replace_value(spec, key.dial.other)


def _omission_comments(spec: Spec, unheard: list[str]) -> Iterator[str]:
    """Yield the comments on keys that are left out: their defaults, or that they have no effect."""
    sync, factors = spec.resolved.get("sync"), data_factors(spec)
    has_wrapper = bool(factors) or spec.world_size == 1
    if has_wrapper and isinstance(sync, dict) and "gradients" not in sync:
        yield f"sync.gradients: {spec.sync.gradients} (from the placement)"
    by_itself = [key for key in _WRAPPER_DEFAULTS if getattr(spec, key) is None]
    if has_wrapper and by_itself:
        yield f"{', '.join(by_itself)}: default of the wrapper"
    if not has_wrapper:
        unheard = ["sync.gradients", *by_itself, *unheard]
    tiers = {tier_of(factors, state) for state in PLACED} | spec.activations.tiers
    tiers.add(tier_of(frozen_factors(spec), State.PARAMETERS))
    if spec.offload.path is None and Tier.FILE in tiers:
        yield "offload.path: system temporary folder"
    if unheard:
        yield f"no effect with this placement: {', '.join(unheard)}"
