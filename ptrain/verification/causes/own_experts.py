"""Why what ranks keep of experts, of which each has some, is not what one device has: their
gradients count as if all ranks had them, or different experts are taken for copies of one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from ptrain.axes.expert.form import factor_of
from ptrain.facts.parameters import expert_modules
from ptrain.facts.stages import is_within
from ptrain.report.finding import Culprit
from ptrain.spec.placement import REDUCED_AXES, Axis
from ptrain.spec.spec import Spec, ranks_over
from ptrain.verification.causes.rerun import (
    EXACT,
    Hypothesis,
    Investigation,
    instead,
    own_part_of,
    proven,
)
from ptrain.verification.jobs.culprits import families
from ptrain.verification.parts import (
    DegreeProduct,
    TensorBox,
    is_even,
    multiple,
    products,
    relative,
)


def expert_axis(spec: Spec) -> Axis | None:
    """Return the axis whose ranks have different experts."""
    factor = factor_of(spec)
    return None if factor is None else factor.axis


def is_of_experts(spec: Spec, name: str) -> bool:
    """Return whether a parameter, or what is kept beside one, is of the experts of a layer."""
    return is_within(name, expert_modules(spec))


def of_experts(scene: Investigation, names: list[str]) -> Culprit | None:
    """Gradients of experts alone depart: they count otherwise than all others, or are reduced over
    ranks that have other experts, or other features of them. Collective."""
    axis = expert_axis(scene.spec)
    if axis is None or not all(is_of_experts(scene.spec, name) for name in names):
        return None
    return _counted(scene, axis, names) or _of_different_ones(scene, axis, names)


def _counted(scene: Investigation, axis: Axis, names: list[str]) -> Culprit | None:
    pairs = [pair for name in names if (pair := own_part_of(scene, name)) is not None]
    own = 0.0
    if pairs:
        rows = torch.cat([tensor.flatten() for tensor, _, _ in pairs])
        fit = multiple(rows, torch.cat([right.flatten() for _, right, _ in pairs]))
        own = fit.factor if fit.holds(EXACT) else 0.0
    ratios = [its for its in scene.ranks.gather(own) if abs(its - 1.0) > EXACT]
    ratio = ratios[0] if ratios and is_even(ratios) else 0.0
    fits = [
        its
        for its in products(ratio or 1.0, scene.degrees)
        if str(Axis.PP) not in its.axes  # whose ranks have no part of a sum
    ]
    of_experts = [str(axis) for axis in scene.spec.expert_axes]
    if all({*its.axes}.isdisjoint(of_experts) for its in fits):
        return None
    text, axes = several(fits, axis)
    sentence = (
        f"gradients of experts alone, {families(names)}, are {text} ({axes}): an expert's is of "
        f"the tokens of all ranks of {' × '.join(of_experts)} when backward is over; reduce it "
        f"over {_others(scene, axis)}, and divide it by what all others are divided by, the global "
        "number of tokens"
    )
    cause, all_names = scene.culprit(axes, text, sentence), set(names)
    truths = scene.evidence.expected.gradients.items()
    factors = {n: g * ratio for n, g in truths if n in all_names}
    return proven(scene, cause, f"{text} of the experts' alone", instead(factors))


def several(fits: Sequence[DegreeProduct], first: Axis) -> tuple[str, str]:
    """Return a factor and the axes that it may come from, `first` before others."""
    own = [its for its in fits if its.axes == (str(first),)]
    fits = [*own, *fits]
    single = dict.fromkeys(its.axes[0] for its in fits if len(its.axes) == 1)
    return str(fits[0]), " or ".join(single) or "·".join(fits[0].axes)


def _others(scene: Investigation, axis: Axis) -> str:
    degrees = {its.axis: its.degree for its in scene.spec.factors if its.axis in REDUCED_AXES}
    axes = [its for its, degree in degrees.items() if degree > 1 and its is not axis]
    return f"{' and '.join(map(str, axes))} alone" if axes else "no axis"


def _of_different_ones(scene: Investigation, axis: Axis, names: list[str]) -> Culprit | None:
    """Return whose parts were added to each other. Collective."""
    of_experts = scene.spec.expert_axes
    for along in (axis, Axis.TP):
        degree = scene.spec.degree(along)
        which, dims = ("experts", (0,)) if along in of_experts else ("features of experts", (1, 2))
        outer = ranks_over(scene.spec, ahead(of_experts, along))
        for what, factor in (("summed", 1.0), ("averaged", 1.0 / degree)) if degree > 1 else ():
            sentence = (
                f"gradients of {families(names)} are {what} over {along}, whose ranks have "
                f"different {which}: reduce them over {_others(scene, axis)}"
            )
            hypothesis = _summed(scene, names, (outer, degree), factor, dims)
            cause = scene.culprit(along, f"{what} over {along}", sentence)
            if (
                one := proven(scene, cause, f"its parts {what} over {along}", hypothesis)
            ) is not None:
                return one
    return None


def _summed(
    scene: Investigation,
    names: Collection[str],
    ranks: tuple[int, int],
    factor: float,
    dims: Sequence[int],
) -> Hypothesis:
    """Return what sums the parts of an axis' ranks, along the dimension that a gradient tells:
    matrices of experts are cut along either."""

    def hypothesis(name: str, whole: Tensor, part: TensorBox) -> Tensor:
        pair = own_part_of(scene, name)
        count = math.prod(ranks)
        cut = [dim for dim in dims if whole.dim() > dim and whole.shape[dim] % count == 0]
        if name not in names or pair is None or not cut:
            return part.of(whole)
        sums = []
        for dim in cut:
            parts = whole.unflatten(dim, (*ranks, -1))
            summed = parts.sum(dim + 1, keepdim=True).expand_as(parts).flatten(dim, dim + 2)
            sums.append(part.of(summed) * factor)
        return min(sums, key=lambda its: relative(its, pair[0]))

    return hypothesis


def ahead(axes: Sequence[Axis], axis: Axis) -> Sequence[Axis]:
    """Return those of these axes that stand outside an axis that is one of them; none of others."""
    return axes[: axes.index(axis)] if axis in axes else ()


def copies(scene: Investigation, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield for each place along the axes of experts what all ranks together have if each has that
    rank's."""
    degree = ranks_over(scene.spec, scene.spec.expert_axes)
    if whole.dim() and degree > 1 and whole.shape[0] % degree == 0:
        for place, part in enumerate(whole.chunk(degree)):
            yield place, part.repeat(degree, *[1] * (whole.dim() - 1))
