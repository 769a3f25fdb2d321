"""A program's step in the form in which the gradients of any loop are explained: what its
optimizers took, what one device has, and what each rank's micro-batches give by themselves."""

from __future__ import annotations

from itertools import islice

from torch import Tensor

from ptrain.verification.causes.scene import Investigation
from ptrain.verification.contributions import of_given, of_micro_batches
from ptrain.verification.jobs.evidence import (
    MOST,
    JobEvidence,
    KnownFactors,
    OwnGradients,
    sampled,
)
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import held
from ptrain.verification.places import data_place, token_place


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
            (clipped, "clipped twice", "The factor of clipping is applied twice: apply it once."),
            (
                1 / clipped, "not clipped",
                "The norm is computed and nothing is scaled by it: scale all gradients.",
            ),
            (
                scale, f"× {scale:g}: the loss scale is not undone",
                "The optimizer is given gradients of the scaled loss: divide them before the "
                "update.",
            ),
            (
                1 / scale, f"÷ {scale:g}: the loss scale is undone twice",
                "The optimizer divides gradients that are without the loss's scale: do it once.",
            ),
        ),
    )  # fmt: skip
