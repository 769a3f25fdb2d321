"""Explain why parameter gradients differ from those of one device: which samples, micro-batches and
ranks each is the sum of, tested against what the reference says that these contribute.

What every sample contributes to a parameter's gradient. Theorem 3 says that the gradient is the
sum of all, each once; one that is another combination of them tells by its coefficients what went
wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from ptrain.axes.context.attention import Span, all_spans, context_of
from ptrain.models.objective import IGNORED, SampleBatch, StepBatch, TokenPair
from ptrain.report.copies import listed
from ptrain.report.finding import Certainty, Moment, RootCause, Subject
from ptrain.spec.placement import REDUCED_AXES, SAMPLE_AXES, Axis
from ptrain.spec.spec import Spec
from ptrain.verification.causes.activations import of_router_losses
from ptrain.verification.causes.experts import of_experts
from ptrain.verification.causes.rerun import (
    EXACT,
    LIKE_ROUNDINGS,
    SUM_ONCE,
    Hypothesis,
    Investigation,
    chosen,
    directly,
    instead,
    own_part_of,
    proven,
)
from ptrain.verification.jobs.diagnosis import by_given, explain_gradients, with_trial
from ptrain.verification.jobs.evidence import (
    MOST,
    JobEvidence,
    KnownFactors,
    OwnGradients,
    sampled,
)
from ptrain.verification.jobs.job import TOLERANCES
from ptrain.verification.jobs.root_causes import families
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.jobs.symptoms import SymptomKind
from ptrain.verification.parts import (
    TensorBox,
    absent,
    combination,
    flipped_bit,
    held,
    is_even,
    odd_element,
    rounded_to,
)
from ptrain.verification.places import data_place, token_place, tokens_in
from ptrain.verification.reference import MicroBatch, ReferenceTraining


@dataclass(frozen=True, slots=True)
class Source:
    """Whose gradient: the tokens of a rank of cp (0 where there is one) of a sample of a data
    rank's k-th micro-batch."""

    data_place: int
    k: int
    sample: int
    token_place: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Which ranks have it, along the axes over which gradients are summed."""
        return self.data_place, self.token_place


@dataclass(frozen=True, slots=True)
class Contribution:
    source: Source
    gradients: dict[str, Tensor]


def contributions(
    reference: ReferenceTraining, step: int, names: Sequence[str], scale: float
) -> Iterator[Contribution]:
    """Yield each sample's share of the gradients of these parameters, with the reference's weights
    as they are; where ranks of cp have some of its tokens, that of the losses at these. It costs a
    forward and a backward pass each."""
    for micro_batch in reference.micro_batches(step):
        for row, sample in enumerate(micro_batch.sample_ids):
            for place, part in enumerate(_of_each_slice(reference.spec, micro_batch.row(row))):
                source = Source(micro_batch.data_index, micro_batch.k, sample, place)
                yield Contribution(source, _gradients(reference, part, names, scale))


def of_micro_batches(
    reference: ReferenceTraining, step: int, scale: float, place: tuple[int, int]
) -> Iterator[dict[str, Tensor]]:
    """Yield what each micro-batch of a data rank gives to the gradients of all parameters; where
    ranks of cp have some of the tokens, the losses at those of one. `place` is a source's."""
    for micro_batch in reference.micro_batches_of(place[0], step):
        part = list(_of_each_slice(reference.spec, micro_batch))[place[1]]
        yield _of_all_parameters(reference, part, scale)


def of_given(
    reference: ReferenceTraining, given: StepBatch, scale: float, place: int
) -> Iterator[dict[str, Tensor]]:
    """Yield what each micro-batch that a rank was given makes of the gradients of all parameters,
    on one device."""
    for k, samples in enumerate(given.micro_batches(reference.spec.batch.micro)):
        part = MicroBatch(data_index=place, k=k, samples=samples, batch=given, sample_ids=())
        yield _of_all_parameters(reference, part, scale)


def _of_all_parameters(
    reference: ReferenceTraining, part: MicroBatch, scale: float
) -> dict[str, Tensor]:
    names = [n for n, tensor in reference.module.named_parameters() if tensor.requires_grad]
    return _gradients(reference, part, names, scale)


def _gradients(
    reference: ReferenceTraining, part: MicroBatch, names: Sequence[str], scale: float
) -> dict[str, Tensor]:
    parameters = dict(reference.module.named_parameters())
    loss = part.loss(reference.objective, reference.module) * scale
    rows = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    return {
        name: torch.zeros_like(parameters[name]) if row is None else row / scale
        for name, row in zip(names, rows, strict=True)
    }


def slices_of_tokens(spec: Spec) -> tuple[tuple[Span, ...], ...]:
    """Return the tokens of every rank of cp; nothing where there is one."""
    step = context_of(spec)
    return tuple(all_spans(step)) if step else ()


def _of_each_slice(spec: Spec, sample: MicroBatch) -> Iterator[MicroBatch]:
    """Yield it with the losses at one rank's tokens alone, for each rank of cp."""
    slices = slices_of_tokens(spec)
    if not slices:
        yield sample
    for spans in slices:
        inputs, whole = sample.samples.data
        targets, own = torch.full_like(whole, IGNORED), tokens_in(spans)
        targets[:, own] = whole[:, own]
        yield replace(sample, samples=SampleBatch(TokenPair(inputs, targets)))


def as_job(scene: Investigation, *, as_given: bool = False) -> JobEvidence:
    """Gather what explains gradients of any loop, and what a program alone shows; `as_given`: with
    the micro-batches that each rank was given, which may be others than its own. Of these the first
    MOST alone. Collective."""
    evidence = scene.evidence
    truths = evidence.expected.gradients
    taken = {name: held(its).flatten() for name, its in evidence.seen.gradients.items()}
    reached = {name for its in scene.ranks.gather(sorted(taken)) for name in its}
    holds = {
        name: shard
        for name, whole in truths.items()
        if (shard := _shard(scene, name, whole, is_reached=name in reached)) is not None
    }
    place = data_place(scene.spec, scene.rank), token_place(scene.spec, scene.rank)
    micro_batches = (
        of_given(scene.reference, evidence.batch, evidence.scale, place[0])
        if as_given
        else of_micro_batches(scene.reference, evidence.step, evidence.scale, place)
    )
    given = list(islice(micro_batches, MOST))  # each is as large as all parameters
    own = OwnGradients(
        holds=holds, truths=truths, taken={n: row for n, row in taken.items() if n in holds},
        given=given, before=evidence.earlier_gradients,
        micro_batches=max(scene.ranks.gather(len(given))),  # as many rows on all ranks
    )  # fmt: skip
    return sampled(scene.ranks, own, _known(scene))


def _shard(
    scene: Investigation, name: str, whole: Tensor, *, is_reached: bool
) -> ParameterShard | None:
    """Return which elements this rank's gradient is of; of one that no rank has, all of them."""
    gradient = scene.evidence.seen.gradients.get(name)
    if gradient is None:
        return None if is_reached else ParameterShard(name, whole, whole.shape)
    return scene.shard(name, gradient, whole)


def _known(scene: Investigation) -> KnownFactors:
    evidence = scene.evidence
    clipped, scale = scene.clipped_by, evidence.scale
    loss = evidence.seen.loss / evidence.expected.loss if evidence.expected.loss else 1.0
    return KnownFactors(
        loss=loss,
        factors=(
            (clipped, "clipped twice", "The clipping factor is applied twice. Apply it once."),
            (
                1 / clipped, "not clipped",
                "The norm is computed, but the gradients are not scaled. Scale all gradients.",
            ),
            (
                scale, f"× {scale:g}: the loss scale is not undone",
                "The optimizer takes gradients of the scaled loss. Divide them by the loss "
                "scale before the update.",
            ),
            (
                1 / scale, f"÷ {scale:g}: the loss scale is undone twice",
                "The optimizer divides gradients that no longer have the loss scale. Divide "
                "them once.",
            ),
        ),
    )  # fmt: skip


def of_samples(scene: Investigation, names: list[str]) -> RootCause | None:
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
    return proven(scene, cause, "each sample's gradient weighted this way", instead(sums))


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
) -> RootCause | None:
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
            sentence = (
                f"Each {what} divides by its local number of tokens. Divide by the global number."
            )
            return scene.root_cause(axis, f"normalised per {what}", sentence)
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


def _odd_samples(scene: Investigation, odd: dict[int, float]) -> RootCause:
    kinds = (0.0, "missing", "is in no gradient"), (2.0, "duplicate", "counts twice")
    for share, factor, words in kinds:
        if which := [sample for sample, its in odd.items() if abs(its - share) < 1e-3]:
            listed = ", ".join(map(str, which))
            return scene.root_cause("", f"{factor} sample", f"Sample {listed} {words}. {SUM_ONCE}")
    sample, share = next(iter(odd.items()))
    return scene.root_cause(
        "", f"sample × {share:.4g}", f"Sample {sample} counts {share:.4g} times. {SUM_ONCE}"
    )


def of_other_ranks(scene: Investigation, names: list[str]) -> RootCause | None:
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

    tried = f"this holds for {name}, but not for everything that differs"
    return proven(scene, cause, "the contributions of these ranks", summed) or replace(
        cause, tried=tried
    )


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


def of_another_operator(scene: Investigation, names: list[str]) -> RootCause | None:
    """The ranks' gradients were reduced, but not summed; or cut and put together without a
    reduction, so that every element is what one rank contributes."""
    shares = _shares(scene, names)
    for axis in (axis for axis in scene.axes if axis in SAMPLE_AXES):
        for operator, reduce in _OPERATORS.items():
            factor, sentence = f"{operator} for SUM", f"by {operator}. Sum them."
            words = f"{operator} over {axis}"
            if not operator:
                factor, words = f"missing reduction over {axis}", f"one rank of {axis} only"
                sentence = (
                    "without a reduction, so each element is from one rank. Reduce-scatter them."
                )
            cause = scene.root_cause(
                str(axis), factor, f"The gradients are combined over {axis} {sentence}"
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


def _summed_over(scene: Investigation, everyone: list[list[int]]) -> RootCause | None:
    data = tuple(axis for axis in scene.axes if axis in REDUCED_AXES)
    others = [axis for axis in scene.axes if axis not in REDUCED_AXES]
    for rank, said in enumerate(everyone):
        if not said or set(said) == set(scene.line(rank, *data)):
            continue
        for axis in others:
            if set(said) == set(scene.line(rank, axis)):
                right = " and ".join(map(str, data)) or "no axis"
                sentence = f"The gradients are summed over {axis}. Sum them over {right} instead."
                return scene.root_cause(str(axis), f"summed over {axis} for {right}", sentence)
        names = ", ".join(map(str, said))
        sentence = f"Rank {rank} has the contributions of ranks {names}. Check its process groups."
        return scene.root_cause(scene.axis_of([rank]), f"contributions of ranks {names}", sentence)
    return None


def _data_axis(scene: Investigation) -> str:
    return next((str(axis) for axis in scene.axes if axis in SAMPLE_AXES), "")


def _usual(shares: Iterable[float]) -> float:
    """The most frequent share that is not nothing."""
    rounded = Counter(round(share, 4) for share in shares if abs(share) > 1e-3)
    return rounded.most_common(1)[0][0] if rounded else 1.0


RULED_OUT = (
    "one element, one multiple, a sum over some axes, other micro-batches, other samples or "
    "sample weights, the previous step, another operator, other ranks, a rounding"
)
_ENOUGH = 8  # tensors that tell of roundings


def gradient_cause(scene: Investigation) -> RootCause | None:
    """Return the first root cause that explains them; None where none does. Collective."""
    differing = (mismatch.name for mismatch in scene.at(Moment.GRADIENTS, Subject.GRADIENTS))
    trained = scene.evidence.expected.gradients
    names = [name for name in dict.fromkeys(differing) if name in trained]
    lost = _lost(scene)
    names += [name for name in lost if name not in names]
    return next(_causes(scene, names, lost), None) if names else None


def given_samples(scene: Investigation, cause: RootCause) -> RootCause:
    """Return the cause of a batch that is not one device's, proven where one device makes the
    program's gradients of the samples that its ranks were given. Collective."""
    tried = "the inputs of each rank's model were compared with the batch, row by row"
    if scene.token_axis:  # pieces of samples: by themselves they are none
        return replace(cause, tried=tried)
    evidence = as_job(scene, as_given=True)
    limit = TOLERANCES[torch.float64]
    trial = with_trial(cause, by_given(evidence), evidence, scene.ranks, limit)
    return trial if trial.certainty is Certainty.PROVEN else replace(cause, tried=tried)


def _causes(scene: Investigation, names: list[str], lost: Sequence[str]) -> Iterator[RootCause]:
    before: tuple[Callable[[Investigation, list[str]], RootCause | None], ...] = (
        _one_element,
        of_experts,
    )
    behind = of_router_losses, of_samples, of_another_operator, of_other_ranks
    yield from filter(None, (cause(scene, names) for cause in before))
    # a sample, or a rank of cp, says more of uneven weights than a micro-batch
    evidence, limit = as_job(scene), TOLERANCES[torch.float64]
    mismatches = [
        *scene.at(Moment.GRADIENTS, Subject.GRADIENTS),
        *(replace(scene.first, subject=Subject.GRADIENTS, name=name) for name in lost),
    ]
    for without in ((SymptomKind.UNEVEN,), ()):
        root_cause = explain_gradients(mismatches, evidence, scene.ranks, limit, without)
        if root_cause.certainty is Certainty.PROVEN:
            yield replace(root_cause, state=scene.one.subject)  # a program shows its loss
        if without:
            yield from filter(None, (cause(scene, names) for cause in behind))
    yield from filter(None, [_without_gradient(scene, lost), _rounded(scene, names)])


def _lost(scene: Investigation) -> list[str]:
    """Return what has a gradient on one device, and on no rank, or zeros."""
    evidence = scene.evidence
    own = [name for name, its in evidence.seen.gradients.items() if bool(held(its).any())]
    reached = {name for its in scene.ranks.gather(own) for name in its}
    expected = evidence.expected.gradients.items()
    return [name for name, whole in expected if name not in reached and bool(whole.any())]


def _without_gradient(scene: Investigation, gone: Sequence[str]) -> RootCause | None:
    """No rank has a gradient of some parameters, and others differ, which may follow from it."""
    if not gone:
        return None
    sentence = (
        f"No gradient reaches {families(gone)}. Find where its output leaves the graph "
        "(detach, no_grad, an index instead of a value), or why it is missing from the "
        "reduction."
    )
    tried = "whether all other differences follow from it was not tested"
    return scene.root_cause("", "no gradient", sentence, place=families(gone), tried=tried)


def _one_element(scene: Investigation, names: list[str]) -> RootCause | None:
    """One element of one tensor is off, and nothing else."""
    if len(names) > 1:
        return None
    said = None
    if (own := own_part_of(scene, names[0])) is not None:
        clipped = scene.clipped_by
        odd = odd_element(own[0], own[1])
        if odd is not None:
            bit = flipped_bit(own[0] * clipped, own[1] * clipped)
            said = "one element" if bit is None else f"flipped bit {bit} of one element"
    everyone = scene.ranks.gather(said)
    factors = [factor for factor in everyone if factor is not None]
    if not factors:
        return None
    ranks = scene.ranks_of(scene.at(Moment.GRADIENTS, Subject.GRADIENTS)[0])
    sentence = (
        f"One element of the gradient of {names[0]} differs on {listed(ranks)}, and nothing "
        "else. Suspect the memory there, or a write to the buffer after the reduction."
    )
    tried = "with the reference value of this element, all gradients match the reference"
    by_all = all(everyone[rank] == factors[0] for rank in ranks)
    return directly(scene.root_cause(None, factors[0], sentence), tried, by_all=by_all)


def _rounded(scene: Investigation, names: list[str]) -> RootCause | None:
    """It differs by the rounding of a coarser dtype, in size and evenness alone."""
    pairs = [pair for name in names[:_ENOUGH] if (pair := own_part_of(scene, name)) is not None]
    dtypes = [dtype for own, right, _ in pairs if (dtype := rounded_to(own, right))]
    if (elected := scene.elected(dtypes)) is None:
        return None
    dtype, _ = elected
    sentence = f"The gradients have the rounding of {dtype}. Compute and reduce them in one dtype."
    axis = scene.axis_of(scene.ranks_of(scene.first))
    return scene.root_cause(axis, f"rounded to {dtype}", sentence, tried=LIKE_ROUNDINGS)
