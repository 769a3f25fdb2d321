"""The measured claims of `paper.py`, as paper_cases.yaml has them, and what their figures are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from _claims import FIGURES, Case, Claim, Figure, Form, Source, View, claim

CLAIMED: dict[str, Callable[[list[View], list[View]], float]] = {
    "two_percent": lambda paper, exact: 0.02,
    "theorem_1": lambda paper, exact: paper[0].found.states + paper[0].found.transient,
    "shard_of_gradients": lambda paper, exact: paper[0].found.gradients,
    "share_of_activations": lambda paper, exact: (
        exact[1].found.activations / exact[0].spec.world_size
    ),
}


def figure(name: str) -> Figure:
    """Return the figure of this name: a function of this module, or a field of `Figures`."""
    if name in (*FIGURES, "states"):
        return lambda first, *others: getattr(first.found, name)
    return _OF_VIEWS[name]


def per_parameter(view: View) -> float:
    return view.found.states / view.facts.numel


def reduction(before: View, after: View) -> float:
    return before.found.states / after.found.states


def count(view: View) -> float:
    """P, from the bytes that an unsharded run holds."""
    return view.found.parameters / view.spec.precision.effective_layout.parameters.itemsize


def embeddings(view: View) -> float:
    """The share of the parameters that stands outside the blocks."""
    outside = sum(unit.numel for unit in view.facts.units if not unit.name)
    itemsize = view.spec.precision.effective_layout.parameters.itemsize
    return outside * itemsize / view.found.parameters


def gathered_at_the_peak(keeping: View, resharding: View) -> float:
    """Both peak where the logits live. There the first holds every unit whole, so what its peak
    has more is what the second does not hold."""
    return keeping.theta - (keeping.found.peak - resharding.found.peak)


def gradients_at_the_peak(reducing: View, waiting: View) -> float:
    """The first holds its shard of the sum; the second besides what its peak has more."""
    return reducing.found.gradients + waiting.found.peak - reducing.found.peak


def beside_activations(view: View) -> float:
    """What the device holds at its peak besides saved activations."""
    return view.found.peak - view.found.activations


def units(view: View) -> float:
    """Bytes sent in units of r|Θ|."""
    return view.found.sent / (view.ring * view.theta)


def more_units(before: View, after: View) -> float:
    return units(after) - units(before)


def times(before: View, after: View) -> float:
    return after.found.sent / before.found.sent


def approximate_count(paper: list[View], _: list[View]) -> float:
    shape = paper[0].shape
    return 12 * shape.layers * shape.hidden**2


def formula_unit(paper: list[View], _: list[View]) -> float:
    """12H² parameters in their bytes."""
    view = paper[0]
    return 12 * view.shape.hidden**2 * view.theta / view.facts.numel


def sum_of_terms(paper: list[View], exact: list[View]) -> float:
    """(6) with the s_unit of (9), and the |A| that it takes as given."""
    found = paper[0].found
    return found.states + found.transient + exact[0].found.activations


_OF_VIEWS: dict[str, Figure] = {
    function.__name__: function
    for function in (
        *(per_parameter, reduction, count, embeddings, beside_activations),
        *(gathered_at_the_peak, gradients_at_the_peak, units, more_units, times),
    )
}
CLAIMED |= {
    function.__name__: function for function in (approximate_count, formula_unit, sum_of_terms)
}


def source(written: str | Mapping[str, Any], at_70b: str) -> Source:
    """Return a spec of paper_cases.yaml."""
    parts = {"words": written} if isinstance(written, str) else dict(written)
    name, *overrides = parts.pop("words").replace("AT_70B", at_70b).split()
    small = tuple(parts.pop("small", "").split())
    return Source(name, tuple(overrides), small, **parts)


def claims(text: str) -> tuple[Claim, ...]:
    """Return the claims of paper_cases.yaml, in their order."""
    content = yaml.safe_load(text)
    named = content["sources"]

    def sources(names: str | list[str]) -> tuple[Source, ...]:
        listed = [names] if isinstance(names, str) else names
        return tuple(source(named.get(name, name), content["at_70b"]) for name in listed)

    def case(label: str, row: Mapping[str, Any]) -> Case:
        return Case(
            label=label,
            sources=sources(row["of"]),
            figure=figure(row["figure"]),
            form=Form(row["form"]),
            claimed_by=sources(row.get("by", [])),
            claimed=CLAIMED[row["claimed"]] if "claimed" in row else None,
            at_most=row.get("at_most", False),
            loose=row.get("loose", False),
        )

    def cases(shared: dict[str, Any]) -> tuple[Case, ...]:
        rows = shared.pop("cases").items()
        return tuple(
            case(label, shared | (row if isinstance(row, dict) else {"of": row}))
            for label, row in rows
        )

    return tuple(claim(title, cases=cases(rest)) for title, rest in content["claims"].items())


CLAIMS = claims(Path(__file__).with_name("paper_cases.yaml").read_text(encoding="utf-8"))
