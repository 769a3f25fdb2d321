"""Which addends a gradient is made of: those of samples, of micro-batches, of ranks, each tested
against what the reference says that they contribute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from ptrain.report.finding import Culprit
from ptrain.spec.axis import REDUCED_AXES, SAMPLE_AXES, Axis
from ptrain.verification.causes.scene import EXACT, Investigation
from ptrain.verification.causes.trials import (
    SUM_ONCE,
    Hypothesis,
    chosen,
    instead,
    own_part_of,
    proven,
)
from ptrain.verification.contributions import Source, contributions, slices_of_tokens
from ptrain.verification.factors import (
    absent,
    combination,
    is_even,
)
from ptrain.verification.parts import TensorBox
from ptrain.verification.places import data_place


def of_samples(scene: Investigation, names: list[str]) -> Culprit | None:
    """The gradient is a combination of the samples' gradients other than their sum."""
    evidence = scene.evidence
    samples = scene.spec.batch.global_samples
    addends_each = len(slices_of_tokens(scene.spec)) or 1
    one = chosen(scene, names, least=2 * (samples * addends_each + 1))
    addends = list(contributions(scene.reference, evidence.step, [one], evidence.scale))
    own = None
    if (pair := own_part_of(scene, one)) is not None:
        tensor, _, part = pair
        basis = [part.of(addend.gradients[one]) for addend in addends]
        if tensor.numel() >= 2 * len(basis) and bool(tensor.any()):
            fit = combination(tensor, basis)
            own = list(fit.coefficients) if fit.holds(EXACT) else None
    everyone = scene.ranks.gather([own, pair is not None])
    coefficients = {rank: its for rank, (its, _) in enumerate(everyone) if its is not None}
    if not coefficients or any(its is None and has for its, has in everyone):
        return None
    cause = _uneven(scene, [addend.source for addend in addends], coefficients)
    if cause is None:
        return None
    own = coefficients.get(scene.rank, next(iter(coefficients.values())))
    sums = _weighed(scene, names, own)
    words = "each sample's gradient with the weight that it has in these"
    return proven(scene, cause, words, instead(sums))


def _weighed(
    scene: Investigation, names: Sequence[str], weights: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Return the sums of all samples' gradients with these weights."""
    evidence, sums = scene.evidence, dict[str, torch.Tensor]()
    known = [name for name in names if name in evidence.expected.gradients]
    addends = contributions(scene.reference, evidence.step, known, evidence.scale)
    for addend, weight in zip(addends, weights, strict=True):
        for name, gradient in addend.gradients.items():
            sums[name] = sums.get(name, 0.0) + weight * gradient
    return sums


def _uneven(
    scene: Investigation, sources: list[Source], by_rank: dict[int, list[float]]
) -> Culprit | None:
    """Explain what coefficients other than all the same mean."""
    usual = _usual([coefficient for its in by_rank.values() for coefficient in its])
    odd = {
        source.sample: its[i] / usual
        for its in by_rank.values()
        for i, source in enumerate(sources)
        if abs(its[i] / usual - 1.0) > 1e-3
    }
    if not odd:
        return None
    shares = {source: its[i] for its in by_rank.values() for i, source in enumerate(sources)}
    for what, (axis, key) in _dividing(scene).items():
        groups: dict[object, list[float]] = {}
        for source, share in shares.items():
            groups.setdefault(key(source), []).append(share)
        if len(groups) < len(shares) and all(is_even(group) for group in groups.values()):
            sentence = f"each {what} divides by its own number of tokens: divide by the global one"
            return scene.culprit(axis, f"normalised per {what}", sentence)
    return _odd_samples(scene, odd)


def _dividing(scene: Investigation) -> dict[str, tuple[str, Callable[[Source], object]]]:
    """Return who may divide by tokens of its own, with its axis and what its sources share."""
    tokens = scene.token_axis
    return {
        "data rank": (_data_axis(scene), lambda source: source.data_place),
        f"rank of {tokens}": (tokens, lambda source: source.place),
        "micro-batch": ("", lambda source: (source.data_place, source.k)),
        f"micro-batch of a rank of {tokens}": (tokens, lambda source: (source.place, source.k)),
    }


def _odd_samples(scene: Investigation, odd: dict[int, float]) -> Culprit:
    kinds = (0.0, "missing", "is in no gradient"), (2.0, "duplicate", "counts twice")
    for share, factor, words in kinds:
        if which := [sample for sample, its in odd.items() if abs(its - share) < 1e-3]:
            listed = ", ".join(map(str, which))
            return scene.culprit("", f"{factor} sample", f"sample {listed} {words}: {SUM_ONCE}")
    sample, share = next(iter(odd.items()))
    return scene.culprit(
        "", f"sample × {share:.4g}", f"sample {sample} counts {share:.4g}: {SUM_ONCE}"
    )


def of_other_ranks(scene: Investigation, names: list[str]) -> Culprit | None:
    """The contributions of other ranks than those of the data axes were summed, or the shard is
    another rank's."""
    name = chosen(scene, names, least=2 * scene.spec.world_size)
    pairs = {n: pair for n in names if (pair := own_part_of(scene, n)) is not None}
    boxes = scene.boxes({n: part for n, (_, _, part) in pairs.items()})
    shares = _shares(scene, [name])[name]
    said: dict[int, float] = {}
    if name in pairs:
        tensor, _, part = pairs[name]
        alike = [rank for rank, its in boxes[name].items() if its.shape == part.shape]
        if tensor.numel() >= 2 * len(alike):
            basis = [boxes[name][rank].of(shares[data_place(scene.spec, rank)]) for rank in alike]
            fit = combination(tensor, basis)
            if fit.holds(EXACT):
                lacking = absent(fit.coefficients)
                weights = enumerate(zip(alike, fit.coefficients, strict=True))
                said = {rank: weight for i, (rank, weight) in weights if i not in lacking}
    everyone = scene.ranks.gather(list(said))
    cause = _summed_over(scene, everyone)
    if cause is None:
        return None
    every = _shares(scene, names)

    def summed(name: str, whole: torch.Tensor, part: TensorBox) -> torch.Tensor:
        parts = [
            weight * boxes[name][rank].of(every[name][data_place(scene.spec, rank)])
            for rank, weight in said.items()
            if name in every and rank in boxes.get(name, {})
        ]
        return torch.stack(parts).sum(0) if parts else part.of(whole)

    tried = f"it is so of {name}, and not of all that depart"
    words = "what these ranks contribute"
    return proven(scene, cause, words, summed) or replace(cause, tried=tried)


def _shares(scene: Investigation, names: Sequence[str]) -> dict[str, dict[int, torch.Tensor]]:
    """Return by name and data rank what its samples make of a parameter's gradient together."""
    shares: dict[str, dict[int, torch.Tensor]] = {name: {} for name in names}
    addends = contributions(scene.reference, scene.evidence.step, names, scene.evidence.scale)
    for addend in addends:
        place = addend.source.data_place
        for name, gradient in addend.gradients.items():
            known = shares[name].get(place)
            shares[name][place] = gradient if known is None else known + gradient
    return shares


def _nearest(addends: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return addends.gather(0, (addends - own).abs().argmin(0, keepdim=True))[0]


# What the ranks' addends [ranks, ...] and this rank's gradient make of a sum; how that is called.
_OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "MAX": lambda addends, own: addends.amax(0),
    "MIN": lambda addends, own: addends.amin(0),
    "PRODUCT": lambda addends, own: addends.prod(0),
    "": _nearest,
}


def of_another_operator(scene: Investigation, names: list[str]) -> Culprit | None:
    """The ranks' gradients were reduced, but not summed; or cut and put together without a
    reduction, so that every element is what one rank contributes."""
    shares = _shares(scene, names)
    for axis in (axis for axis in scene.axes if axis in SAMPLE_AXES):
        for operator, reduce in _OPERATORS.items():
            factor, sentence = f"{operator} for SUM", f"by {operator}: sum them"
            words = f"{operator} over {axis}"
            if not operator:
                factor, words = f"missing reduction over {axis}", f"one rank of {axis} alone"
                sentence = "by nothing, and an element is one rank's: reduce-scatter them"
            cause = scene.culprit(
                str(axis), factor, f"gradients are reduced over {axis} {sentence}"
            )
            reduced = proven(scene, cause, words, _reduced(scene, axis, shares, reduce))
            if reduced is not None:
                return reduced
    return None


def _reduced(
    scene: Investigation,
    axis: Axis,
    shares: Mapping[str, Mapping[int, torch.Tensor]],
    reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Hypothesis:
    of_places: dict[int, set[int]] = {}
    for rank in range(scene.spec.world_size):
        of_places.setdefault(scene.place(rank)[axis], set()).add(data_place(scene.spec, rank))

    def hypothesis(name: str, whole: torch.Tensor, part: TensorBox) -> torch.Tensor:
        pair = own_part_of(scene, name)
        if name not in shares or pair is None:
            return part.of(whole)
        rows = (
            torch.stack([part.of(shares[name][place]) for place in places]).sum(0)
            for places in of_places.values()
        )
        return reduce(torch.stack(list(rows)), pair[0])

    return hypothesis


def _summed_over(scene: Investigation, everyone: list[list[int]]) -> Culprit | None:
    data = tuple(axis for axis in scene.axes if axis in REDUCED_AXES)
    others = [axis for axis in scene.axes if axis not in REDUCED_AXES]
    for rank, said in enumerate(everyone):
        if not said or set(said) == set(scene.line(rank, *data)):
            continue
        for axis in others:
            if set(said) == set(scene.line(rank, axis)):
                right = " and ".join(map(str, data)) or "no axis"
                sentence = f"gradients are summed over {axis}; they belong summed over {right}"
                return scene.culprit(str(axis), f"summed over {axis} for {right}", sentence)
        names = ", ".join(map(str, said))
        sentence = f"rank {rank} has what ranks {names} contribute: its groups are wrong"
        return scene.culprit(scene.axis_of([rank]), f"contributions of ranks {names}", sentence)
    return None


def _data_axis(scene: Investigation) -> str:
    return next((str(axis) for axis in scene.axes if axis in SAMPLE_AXES), "")


def _usual(shares: Iterable[float]) -> float:
    """The most frequent share that is not nothing."""
    rounded = Counter(round(share, 4) for share in shares if abs(share) > 1e-3)
    return rounded.most_common(1)[0][0] if rounded else 1.0
