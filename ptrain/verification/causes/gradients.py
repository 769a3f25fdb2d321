"""Explain why parameter gradients differ from those of one device, as those of any loop are: a
program is a job that shows more evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from ptrain.axes.context.attention import all_spans, context_of
from ptrain.models.objective import IGNORED, SampleBatch, StepBatch, TokenPair
from ptrain.report.finding import Certainty, Moment, RootCause, Subject
from ptrain.spec.spec import Spec
from ptrain.verification.causes.scene import Investigation
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
from ptrain.verification.parts import held
from ptrain.verification.places import data_place, token_place, tokens_in
from ptrain.verification.reference import MicroBatch, ReferenceTraining


def of_micro_batches(
    reference: ReferenceTraining, step: int, scale: float, place: tuple[int, int]
) -> Iterator[dict[str, Tensor]]:
    """Yield what each micro-batch of a data rank gives to the gradients of all parameters; where
    ranks of cp have some of the tokens, the losses at those of one. `place`: the data rank's, and
    that among the ranks of cp."""
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


def _of_each_slice(spec: Spec, sample: MicroBatch) -> Iterator[MicroBatch]:
    """Yield it with the losses at one rank's tokens alone, for each rank of cp."""
    step = context_of(spec)
    if step is None:
        yield sample
    for spans in all_spans(step) if step else ():
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


def gradient_cause(scene: Investigation) -> RootCause | None:
    """Explain gradients as those of any loop are; None where that finds nothing. Collective."""
    mismatches, lost = scene.at(Moment.GRADIENTS, Subject.GRADIENTS), _lost(scene)
    gone = [replace(scene.first, subject=Subject.GRADIENTS, name=name) for name in lost]
    if not mismatches:
        return None
    root_cause = explain_gradients(
        [*mismatches, *gone], as_job(scene), scene.ranks, TOLERANCES[torch.float64]
    )
    if root_cause.certainty is not Certainty.UNEXPLAINED:
        return replace(root_cause, state=scene.one.subject)  # a program shows its loss
    if not lost:
        return None
    sentence = f"No gradient reaches {families(lost)}, and one does in the reference."
    tried = "whether all other differences follow from it was not tested"
    return scene.root_cause("", "no gradient", sentence, place=families(lost), tried=tried)


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


def _lost(scene: Investigation) -> list[str]:
    """Return what has a gradient on one device, and on no rank, or zeros."""
    evidence = scene.evidence
    own = [name for name, its in evidence.seen.gradients.items() if bool(held(its).any())]
    reached = {name for its in scene.ranks.gather(own) for name in its}
    expected = evidence.expected.gradients.items()
    return [name for name, whole in expected if name not in reached and bool(whole.any())]
