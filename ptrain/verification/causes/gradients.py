"""Why parameter gradients are not those of one device: each cause is a statement about how the
gradient came from the samples' or the ranks' contributions, tested against the reference's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

import torch

from ptrain.report.finding import Moment, Subject
from ptrain.spec.axis import DATA_AXES
from ptrain.verification.causes.rounding import flipped_bit, odd_element, rounded_to
from ptrain.verification.causes.scene import EXACT, Cause, Scene
from ptrain.verification.contributions import Source, contributions
from ptrain.verification.factors import (
    absent,
    combination,
    factor_text,
    is_even,
    multiple,
    products,
    share_of_sum,
)
from ptrain.verification.parts import Part, held
from ptrain.verification.places import data_place

SUM_ONCE = "sum each sample's gradient once, over the global number of tokens"


def gradient_cause(scene: Scene) -> Cause | None:
    """The first that explains them; None where none does. Collective."""
    names = list(dict.fromkeys(each.name for each in scene.at(Moment.GRADIENTS, Subject.GRADIENTS)))
    if not names:
        return None
    causes: tuple[Callable[[Scene, list[str]], Cause | None], ...] = (
        _one_element,
        _multiple,
        _of_samples,
        _partial,
        _of_other_ranks,
        _of_another_operator,
        _rounded,
    )
    for cause in causes:
        if (found := cause(scene, names)) is not None:
            return found
    return None


def _own(scene: Scene, name: str) -> tuple[torch.Tensor, torch.Tensor, Part] | None:
    """This rank's part of a gradient, that of the reference, and where it is."""
    evidence = scene.evidence
    tensor = evidence.gradients.get(name)
    whole = evidence.expected_gradients.get(name)
    if tensor is None or whole is None:
        return None
    part = scene.own_part(tensor, whole)
    if part is None or not held(tensor).numel():
        return None
    return held(tensor) / evidence.clipped_by(), part.of(whole), part


def _one_element(scene: Scene, names: list[str]) -> Cause | None:
    """One element of one tensor is off, and nothing else."""
    if len(names) > 1:
        return None
    said = None
    if (own := _own(scene, names[0])) is not None:
        clipped = scene.evidence.clipped_by()
        odd = odd_element(own[0], own[1])
        if odd is not None:
            bit = flipped_bit(own[0] * clipped, own[1] * clipped)
            said = "one element" if bit is None else f"flipped bit {bit} of one element"
    found = [each for each in scene.exchange.gather(said) if each is not None]
    if not found:
        return None
    ranks = scene.ranks_of(scene.first)
    sentence = (
        f"one element of the gradient of {names[0]} is off on ranks {_listed(ranks)} and nothing "
        "else: suspect the memory there, or what writes to the buffer after the reduction"
    )
    return Cause(scene.axis_of(ranks), found[0], sentence)


def _multiple(scene: Scene, names: list[str]) -> Cause | None:
    """Every departing gradient is the same multiple of the right one."""
    own: dict[str, float] = {}
    for name in names:
        pair = _own(scene, name)
        if pair is None or not bool(pair[1].any()):
            continue
        if not bool(pair[0].any()):
            own[name] = 0.0
            continue
        fit = multiple(pair[0], pair[1])
        if not fit.holds(EXACT):
            own = {name: float("nan")}
            break
        own[name] = fit.factor
    everyone: list[dict[str, float]] = scene.exchange.gather(own)
    factors = [factor for its in everyone for factor in its.values()]
    wrong = [each for each in factors if abs(each - 1.0) > EXACT]
    if not wrong or any(each != each for each in factors) or not is_even(wrong):
        return None
    ratio = wrong[0]
    if abs(ratio) <= EXACT:
        sentence = f"no gradient reaches the update of {_family(names)}: reduce it before the step"
        return Cause("", "zero", sentence)
    return _ratio_cause(scene, ratio, names)


def _ratio_cause(scene: Scene, ratio: float, names: Sequence[str]) -> Cause:
    total = len(scene.evidence.expected_gradients)
    if len(names) == total and (cause := _of_clipping_or_scale(scene, ratio)) is not None:
        return cause
    some = f" of {_family(names)}" if len(names) < total else ""
    found = products(ratio, scene.degrees)
    if not found:
        text = factor_text(ratio, scene.degrees)
        return Cause("", text, f"gradients{some} are {text}: {SUM_ONCE}")
    axes = " or ".join(dict.fromkeys("·".join(each.axes) for each in found[:3]))
    axis = next((each.axes[0] for each in found if len(each.axes) == 1), found[0].axes[0])
    where = "accumulated micro-batches" if axis == "K" else f"the ranks of {axis}"
    done = "summed once too often or not averaged" if ratio > 1 else "divided once too often"
    sentence = f"gradients{some} are {found[0]} ({axes}): {done} over {where}; {SUM_ONCE}"
    return Cause("" if axis == "K" else axis, str(found[0]), sentence)


def _of_clipping_or_scale(scene: Scene, ratio: float) -> Cause | None:
    """The ratio is what clipping multiplies by, or the loss's scale."""
    evidence = scene.evidence
    clipped, scale = evidence.clipped_by(), evidence.scale
    known = {
        clipped: ("clipped twice", "the factor of clipping is applied twice: apply it once"),
        1 / clipped: (
            "not clipped",
            "the norm is computed and nothing is scaled by it: scale all gradients",
        ),
        scale: (
            f"× {scale:g}: the loss scale is not undone",
            "the optimizer is given gradients of the scaled loss: divide them before the update",
        ),
        1 / scale: (
            f"÷ {scale:g}: the loss scale is undone twice",
            "the optimizer divides gradients that are without the loss's scale: do it once",
        ),
    }
    for factor, (text, sentence) in known.items():
        if factor != 1.0 and abs(ratio / factor - 1.0) <= EXACT:
            return Cause("", text, sentence)
    return None


def _of_samples(scene: Scene, names: list[str]) -> Cause | None:
    """A combination of the samples' gradients other than their sum."""
    evidence = scene.evidence
    samples = scene.spec.batch.global_samples
    chosen = _chosen(scene, names, least=2 * (samples + 1))
    found = list(contributions(scene.reference, evidence.step, [chosen], evidence.scale))
    own = None
    if (pair := _own(scene, chosen)) is not None:
        tensor, _, part = pair
        basis = [part.of(each.gradients[chosen]) for each in found]
        earlier = evidence.earlier_gradients.get(chosen)
        basis += [part.of(earlier)] if earlier is not None else []
        if tensor.numel() >= 2 * len(basis) and bool(tensor.any()):
            fit = combination(tensor, basis)
            own = list(fit.coefficients) if fit.holds(EXACT) else None
    everyone = scene.exchange.gather([own, pair is not None])
    told = {rank: its for rank, (its, _) in enumerate(everyone) if its is not None}
    if not told or any(its is None and has for its, has in everyone):
        return None
    return _coefficients(scene, [each.source for each in found], told, names)


def _coefficients(
    scene: Scene, sources: list[Source], told: dict[int, list[float]], names: list[str]
) -> Cause | None:
    """What coefficients other than all 1 mean."""
    count = len(sources)
    if any(len(its) > count and abs(its[count]) > 1e-3 for its in told.values()):
        sentence = "gradients of the step before are still there: zero them before backward"
        return Cause("", "stale by 1 step added", sentence)
    by_rank = {rank: its[:count] for rank, its in told.items()}
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
    scene: Scene, sources: list[Source], present: dict[int, set[Source]]
) -> Cause | None:
    """The sum lacks what the ranks along some data axes have."""
    places = {source.data_place for source in sources}
    seen = {rank: {source.data_place for source in its} for rank, its in present.items()}
    if all(its == places for its in seen.values()):
        return None
    data = [axis for axis in scene.axes if axis in DATA_AXES]
    for number in range(len(data)):
        for kept in combinations(data, number):
            explains = all(
                its == {data_place(scene.spec, other) for other in scene.line(rank, *kept)}
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
        sentence = f"nothing of data rank {gone[0]} is in the gradient: reduce over all data ranks"
        return Cause(str(data[0]) if data else "", "missing rank", sentence)
    return None


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
    scene: Scene, sources: list[Source], by_rank: dict[int, list[float]], names: list[str]
) -> Cause | None:
    usual = _usual([each for its in by_rank.values() for each in its])
    odd = {
        source.sample: its[i] / usual
        for its in by_rank.values()
        for i, source in enumerate(sources)
        if abs(its[i] / usual - 1.0) > 1e-3
    }
    if not odd:
        return _ratio_cause(scene, usual, names) if abs(usual - 1.0) > EXACT else None
    shares = {source: its[i] for its in by_rank.values() for i, source in enumerate(sources)}
    for what, key in (
        ("data rank", lambda source: source.data_place),
        ("micro-batch", lambda source: (source.data_place, source.k)),
    ):
        groups: dict[object, list[float]] = {}
        for source, share in shares.items():
            groups.setdefault(key(source), []).append(share)
        if len(groups) < len(shares) and all(is_even(each) for each in groups.values()):
            sentence = f"each {what} divides by its own number of tokens: divide by the global one"
            axis = _data_axis(scene) if what == "data rank" else ""
            return Cause(axis, f"normalised per {what}", sentence)
    return _odd_samples(odd)


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


def _partial(scene: Scene, names: list[str]) -> Cause | None:
    """The sum, or the mean, of what the ranks of an axis have is right: they have their own
    addend."""
    name = _chosen(scene, names, least=2)
    own = _own(scene, name)
    parts = scene.gather_parts(*_raw(scene, name))
    votes: list[tuple[str, str]] = []
    if own is not None:
        tensor, expected, _ = own
        for axis, ranks in scene.partial_over(parts, tensor):
            values = [parts[rank].values / scene.evidence.clipped_by() for rank in ranks]
            fit = share_of_sum(values, expected.reshape(-1)[: len(values[0])])
            if fit.holds(EXACT):
                votes.append((str(axis), factor_text(fit.factor, scene.degrees)))
    return _elected(scene, votes, names)


def _elected(scene: Scene, votes: list[tuple[str, str]], names: Sequence[str]) -> Cause | None:
    everyone = [tuple(vote) for its in scene.exchange.gather(votes) for vote in its]
    if not everyone:
        return None
    (axis, factor), _ = Counter(everyone).most_common(1)[0]
    besides = "" if factor == "× 1" else f" ({factor})"
    sentence = (
        f"gradients of {_family(names)} are each rank's own addend{besides}: sum them over {axis} "
        "before the step"
    )
    return Cause(axis, f"missing all-reduce over {axis}", sentence)


def _of_other_ranks(scene: Scene, names: list[str]) -> Cause | None:
    """The contributions of other ranks than those of the data axes were summed, or the shard is
    another rank's."""
    name = _chosen(scene, names, least=2 * scene.spec.world_size)
    parts = scene.gather_parts(*_raw(scene, name))
    shares = _shares(scene, name)
    own = _own(scene, name)
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


def _shares(scene: Scene, name: str) -> dict[int, torch.Tensor]:
    """What the samples of each data rank make of a parameter's gradient together."""
    shares: dict[int, torch.Tensor] = {}
    for each in contributions(scene.reference, scene.evidence.step, [name], scene.evidence.scale):
        gradient = each.gradients[name]
        place = each.source.data_place
        shares[place] = shares[place] + gradient if place in shares else gradient
    return shares


_OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "MAX": lambda shares: shares.amax(0),
    "MIN": lambda shares: shares.amin(0),
    "PRODUCT": lambda shares: shares.prod(0),
}


def _of_another_operator(scene: Scene, names: list[str]) -> Cause | None:
    """The ranks' gradients were reduced, but not summed."""
    name = _chosen(scene, names, least=2)
    shares = _shares(scene, name)
    said: list[list[str]] = []
    own = _own(scene, name)
    data = [axis for axis in scene.axes if axis in DATA_AXES]
    if own is not None:
        tensor, _, part = own
        for axis in data:
            places = {data_place(scene.spec, rank) for rank in scene.line(scene.rank, axis)}
            stacked = torch.stack([part.of(shares[place]) for place in sorted(places)])
            for operator, reduce in _OPERATORS.items():
                fit = multiple(tensor, reduce(stacked))
                if fit.holds(EXACT) and abs(fit.factor - 1.0) <= EXACT:
                    said.append([operator, str(axis)])
    found = [tuple(each) for its in scene.exchange.gather(said) for each in its]
    if not found:
        return None
    (operator, along), _ = Counter(found).most_common(1)[0]
    sentence = f"gradients are reduced over {along} by {operator}: sum them"
    return Cause(along, f"{operator} for SUM", sentence)


def _summed_over(scene: Scene, everyone: list[list[int]]) -> Cause | None:
    data = tuple(axis for axis in scene.axes if axis in DATA_AXES)
    others = [axis for axis in scene.axes if axis not in DATA_AXES]
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


def _rounded(scene: Scene, names: list[str]) -> Cause | None:
    """It differs by the rounding of a coarser dtype."""
    found = [
        dtype
        for name in names[:8]
        if (own := _own(scene, name)) is not None and (dtype := rounded_to(own[0], own[1]))
    ]
    everyone = [dtype for its in scene.exchange.gather(found) for dtype in its]
    if not everyone:
        return None
    dtype = Counter(everyone).most_common(1)[0][0]
    ranks = scene.ranks_of(scene.first)
    sentence = f"gradients have the rounding of {dtype}: compute and reduce them in one dtype"
    return Cause(scene.axis_of(ranks), f"rounded to {dtype}", sentence)


def _raw(scene: Scene, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    evidence = scene.evidence
    return evidence.gradients.get(name), evidence.expected_gradients.get(name)


def _chosen(scene: Scene, names: Iterable[str], least: int) -> str:
    """The smallest parameter of which every rank has at least so many elements, else the largest;
    chosen by the first departure's kind of tensor, so that it is one that departs."""
    known = [name for name in names if name in scene.evidence.expected_gradients]
    sizes = {name: scene.evidence.expected_gradients[name].numel() for name in known}
    enough = [name for name in known if sizes[name] >= least * scene.spec.world_size]
    if enough:
        return min(enough, key=lambda name: sizes[name])
    return max(known, key=lambda name: sizes[name])


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _data_axis(scene: Scene) -> str:
    return next((str(axis) for axis in scene.axes if axis in DATA_AXES), "")


def _usual(shares: Iterable[float]) -> float:
    """The most frequent share that is not nothing."""
    rounded = Counter(round(share, 4) for share in shares if abs(share) > 1e-3)
    return rounded.most_common(1)[0][0] if rounded else 1.0


def _family(names: Sequence[str]) -> str:
    """`blocks.*.norm.weight` for many of one kind; of several kinds the first, and how many."""
    patterns = list(dict.fromkeys(".".join(_starred(name)) for name in names))
    more = f" and {len(patterns) - 1} more kinds" if len(patterns) > 1 else ""
    return patterns[0] + more


def _starred(name: str) -> list[str]:
    return ["*" if word.isdigit() else word for word in name.split(".")]
