"""Which addends a gradient is made of: those of samples, of micro-batches, of ranks, each tested
against what the reference says that they contribute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

import torch

from ptrain.spec.axis import REDUCED_AXES, SAMPLE_AXES
from ptrain.verification.causes.common import (
    SUM_ONCE,
    chosen,
    family,
    own_part_of,
    ratio_cause,
    raw,
)
from ptrain.verification.causes.scene import EXACT, Cause, Investigation
from ptrain.verification.contributions import Source, contributions, slices_of_tokens
from ptrain.verification.factors import (
    absent,
    combination,
    factor_text,
    is_even,
    multiple,
    share_of_sum,
)
from ptrain.verification.places import data_place, token_place


def of_samples(scene: Investigation, names: list[str]) -> Cause | None:
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
        earlier = evidence.earlier_gradients.get(one)
        basis += [part.of(earlier)] if earlier is not None else []
        if tensor.numel() >= 2 * len(basis) and bool(tensor.any()):
            fit = combination(tensor, basis)
            own = list(fit.coefficients) if fit.holds(EXACT) else None
    everyone = scene.exchange.gather([own, pair is not None])
    coefficients = {rank: its for rank, (its, _) in enumerate(everyone) if its is not None}
    if not coefficients or any(its is None and has for its, has in everyone):
        return None
    return _coefficients(scene, [addend.source for addend in addends], coefficients, names)


def _coefficients(
    scene: Investigation,
    sources: list[Source],
    coefficients: dict[int, list[float]],
    names: list[str],
) -> Cause | None:
    """Explain what coefficients other than all 1 mean."""
    count = len(sources)
    if any(len(its) > count and abs(its[count]) > 1e-3 for its in coefficients.values()):
        sentence = "gradients of the step before are still there: zero them before backward"
        return Cause("", "stale by 1 step added", sentence)
    by_rank = {rank: its[:count] for rank, its in coefficients.items()}
    ranks_lacking = {rank: set(absent(its)) for rank, its in by_rank.items()}
    present = {
        rank: {source for i, source in enumerate(sources) if i not in lacking}
        for rank, lacking in ranks_lacking.items()
    }
    if (cause := _missing_ranks(scene, sources, present)) is not None:
        return cause
    if (cause := _missing_micro_batches(sources, present)) is not None:
        return cause
    return _uneven(scene, sources, by_rank, names)


def _missing_ranks(
    scene: Investigation, sources: list[Source], present: dict[int, set[Source]]
) -> Cause | None:
    """The sum lacks what the ranks along some of the axes have that gradients are summed over."""
    places = {source.place for source in sources}
    seen = {rank: {source.place for source in its} for rank, its in present.items()}
    if all(its == places for its in seen.values()):
        return None
    data = [axis for axis in scene.axes if axis in REDUCED_AXES]
    for number in range(len(data)):
        for kept in combinations(data, number):
            explains = all(
                its == {_place(scene, other) for other in scene.line(rank, *kept)}
                for rank, its in seen.items()
                if its != places
            )
            if explains:
                missing = [str(axis) for axis in data if axis not in kept]
                text = " and ".join(missing)
                sentence = f"gradients are not summed over {text}: all-reduce them before the step"
                return Cause(missing[0], f"missing all-reduce over {text}", sentence)
    gone = sorted(places - {place for its in seen.values() for place in its})
    if gone:
        data_rank, number = gone[0]
        of_tokens = f"{scene.token_axis} rank {number} of " if scene.token_axis else ""
        sentence = (
            f"nothing of {of_tokens}data rank {data_rank} is in the gradient: reduce over all "
            "ranks that have samples or tokens"
        )
        return Cause(str(data[0]) if data else "", "missing rank", sentence)
    return None


def _place(scene: Investigation, rank: int) -> tuple[int, int]:
    """Return which sources are this rank's own."""
    return data_place(scene.spec, rank), token_place(scene.spec, rank)


def _missing_micro_batches(sources: list[Source], present: dict[int, set[Source]]) -> Cause | None:
    every = {source.k for source in sources}
    seen = {source.k for its in present.values() for source in its}
    if seen == every:
        return None
    if seen == {max(every)}:
        sentence = "only the last micro-batch counts: accumulate, and zero after the step alone"
        return Cause("", "last micro-batch only", sentence)
    gone = ", ".join(map(str, sorted(every - seen)))
    sentence = f"micro-batches {gone} are in no gradient: accumulate all of them"
    return Cause("", f"missing micro-batches {gone}", sentence)


def _uneven(
    scene: Investigation, sources: list[Source], by_rank: dict[int, list[float]], names: list[str]
) -> Cause | None:
    usual = _usual([coefficient for its in by_rank.values() for coefficient in its])
    odd = {
        source.sample: its[i] / usual
        for its in by_rank.values()
        for i, source in enumerate(sources)
        if abs(its[i] / usual - 1.0) > 1e-3
    }
    if not odd:
        return ratio_cause(scene, usual, names) if abs(usual - 1.0) > EXACT else None
    shares = {source: its[i] for its in by_rank.values() for i, source in enumerate(sources)}
    for what, (axis, key) in _dividing(scene).items():
        groups: dict[object, list[float]] = {}
        for source, share in shares.items():
            groups.setdefault(key(source), []).append(share)
        if len(groups) < len(shares) and all(is_even(group) for group in groups.values()):
            sentence = f"each {what} divides by its own number of tokens: divide by the global one"
            return Cause(axis, f"normalised per {what}", sentence)
    return _odd_samples(odd)


def _dividing(scene: Investigation) -> dict[str, tuple[str, Callable[[Source], object]]]:
    """Return who may divide by tokens of its own, with its axis and what its sources share."""
    tokens = scene.token_axis
    return {
        "data rank": (_data_axis(scene), lambda source: source.data_place),
        f"rank of {tokens}": (tokens, lambda source: source.place),
        "micro-batch": ("", lambda source: (source.data_place, source.k)),
        f"micro-batch of a rank of {tokens}": (tokens, lambda source: (source.place, source.k)),
    }


def _odd_samples(odd: dict[int, float]) -> Cause:
    missing = [sample for sample, share in odd.items() if abs(share) < 1e-3]
    doubled = [sample for sample, share in odd.items() if abs(share - 2.0) < 1e-3]
    if missing:
        what = ", ".join(map(str, missing))
        return Cause("", "missing sample", f"sample {what} is in no gradient: {SUM_ONCE}")
    if doubled:
        what = ", ".join(map(str, doubled))
        return Cause("", "duplicate sample", f"sample {what} counts twice: {SUM_ONCE}")
    sample, share = next(iter(odd.items()))
    return Cause("", f"sample × {share:.4g}", f"sample {sample} counts {share:.4g}: {SUM_ONCE}")


def partial(scene: Investigation, names: list[str]) -> Cause | None:
    """The sum, or the mean, of what the ranks of an axis have is right: they have their own
    addend."""
    name = chosen(scene, names, least=2)
    own = own_part_of(scene, name)
    parts = scene.gather_parts(*raw(scene, name))
    votes: list[tuple[str, str]] = []
    if own is not None:
        _, expected, _ = own
        for axes, ranks in scene.partial_over(parts):
            values = [parts[rank].values for rank in ranks]
            fit = share_of_sum(values, expected.reshape(-1)[: len(values[0])])
            if fit.holds(EXACT):
                votes.append((" and ".join(axes), factor_text(fit.factor, scene.degrees)))
    return _elected(scene, votes, names)


def _elected(
    scene: Investigation, votes: list[tuple[str, str]], names: Sequence[str]
) -> Cause | None:
    everyone = [tuple(vote) for its in scene.exchange.gather(votes) for vote in its]
    if not everyone:
        return None
    (axes, factor), _ = Counter(everyone).most_common(1)[0]
    besides = "" if factor == "× 1" else f" ({factor})"
    sentence = (
        f"gradients of {family(names)} are each rank's own addend{besides}: sum them over {axes} "
        "before the step"
    )
    return Cause(axes.partition(" ")[0], f"missing all-reduce over {axes}", sentence)


def of_other_ranks(scene: Investigation, names: list[str]) -> Cause | None:
    """The contributions of other ranks than those of the data axes were summed, or the shard is
    another rank's."""
    name = chosen(scene, names, least=2 * scene.spec.world_size)
    parts = scene.gather_parts(*raw(scene, name))
    shares = _shares(scene, name)
    own = own_part_of(scene, name)
    said: list[int] = []
    if own is not None:
        tensor, _, part = own
        alike = [rank for rank, its in parts.items() if its.part.shape == part.shape]
        if tensor.numel() >= 2 * len(alike):
            basis = [parts[rank].part.of(shares[data_place(scene.spec, rank)]) for rank in alike]
            fit = combination(tensor, basis)
            if fit.holds(EXACT):
                lacking = absent(fit.coefficients)
                said = [rank for i, rank in enumerate(alike) if i not in lacking]
    return _summed_over(scene, scene.exchange.gather(said))


def _shares(scene: Investigation, name: str) -> dict[int, torch.Tensor]:
    """Return what the samples of each data rank make of a parameter's gradient together."""
    shares: dict[int, torch.Tensor] = {}
    for contribution in contributions(
        scene.reference, scene.evidence.step, [name], scene.evidence.scale
    ):
        gradient = contribution.gradients[name]
        place = contribution.source.data_place
        shares[place] = shares[place] + gradient if place in shares else gradient
    return shares


_OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "MAX": lambda shares: shares.amax(0),
    "MIN": lambda shares: shares.amin(0),
    "PRODUCT": lambda shares: shares.prod(0),
}


def of_another_operator(scene: Investigation, names: list[str]) -> Cause | None:
    """The ranks' gradients were reduced, but not summed."""
    name = chosen(scene, names, least=2)
    shares = _shares(scene, name)
    said: list[list[str]] = []
    own = own_part_of(scene, name)
    data = [axis for axis in scene.axes if axis in SAMPLE_AXES]
    if own is not None:
        tensor, _, part = own
        for axis in data:
            places = {data_place(scene.spec, rank) for rank in scene.line(scene.rank, axis)}
            stacked = torch.stack([part.of(shares[place]) for place in sorted(places)])
            for operator, reduce in _OPERATORS.items():
                fit = multiple(tensor, reduce(stacked))
                if fit.holds(EXACT) and abs(fit.factor - 1.0) <= EXACT:
                    said.append([operator, str(axis)])
    reductions = [tuple(reduction) for its in scene.exchange.gather(said) for reduction in its]
    if not reductions:
        return None
    (operator, along), _ = Counter(reductions).most_common(1)[0]
    sentence = f"gradients are reduced over {along} by {operator}: sum them"
    return Cause(along, f"{operator} for SUM", sentence)


def _summed_over(scene: Investigation, everyone: list[list[int]]) -> Cause | None:
    data = tuple(axis for axis in scene.axes if axis in REDUCED_AXES)
    others = [axis for axis in scene.axes if axis not in REDUCED_AXES]
    for rank, said in enumerate(everyone):
        if not said or set(said) == set(scene.line(rank, *data)):
            continue
        for axis in others:
            if set(said) == set(scene.line(rank, axis)):
                right = " and ".join(map(str, data)) or "no axis"
                sentence = f"gradients are summed over {axis}; they belong summed over {right}"
                return Cause(str(axis), f"summed over {axis} for {right}", sentence)
        names = ", ".join(map(str, said))
        sentence = f"rank {rank} has what ranks {names} contribute: its groups are wrong"
        return Cause(scene.axis_of([rank]), f"contributions of ranks {names}", sentence)
    return None


def _data_axis(scene: Investigation) -> str:
    return next((str(axis) for axis in scene.axes if axis in SAMPLE_AXES), "")


def _usual(shares: Iterable[float]) -> float:
    """The most frequent share that is not nothing."""
    rounded = Counter(round(share, 4) for share in shares if abs(share) > 1e-3)
    return rounded.most_common(1)[0][0] if rounded else 1.0
