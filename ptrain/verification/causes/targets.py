"""Which targets a loss was computed with: the gradient of the logits tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ptrain.models.objective import IGNORED, SampleBatch, TokenPair
from ptrain.report.finding import Culprit
from ptrain.verification.causes.rerun import EXACT, Investigation, directly
from ptrain.verification.jobs.metamorphic import targets_of
from ptrain.verification.parts import held, relative
from ptrain.verification.places import TokensOfRank

_MOST = 0.99  # of the tokens that agree, where the ends of rows may not


def targets_cause(scene: Investigation) -> Culprit | None:
    """The logits are right and the loss is not: it has other targets. Collective."""
    answers = scene.ranks.gather(next(_said(scene), ["", True]))
    everyone = [targets for targets, _ in answers]
    counts = Counter(answer for answer in everyone if answer)
    if not counts:
        return None
    targets = counts.most_common(1)[0][0]
    ranks = [rank for rank, answer in enumerate(everyone) if answer == targets]
    sentence = (
        f"the logits are right, and the loss compares them with {targets}: look at the loader"
    )
    lacking = [rank for rank, answer in enumerate(everyone) if answer not in ("", targets)]
    cause = scene.culprit(scene.axis_of(ranks), targets, sentence, place="loss")
    if not all(is_made for _, is_made in answers):
        tried = "nearly all positions are asked for these, as the gradient of the logits tells"
        return replace(cause, tried=tried)
    tried = "with these, the loss of one device's logits has the gradient that the ranks' has"
    return directly(cause, tried, by_all=not lacking)


def _said(scene: Investigation) -> Iterator[list[Any]]:
    """Yield which targets the loss had, and whether one device's loss of these has the gradient
    that is there."""
    wanted = _targets(scene)
    for (path, k), whole in scene.evidence.expected.outputs.forward.items():
        gradient = scene.evidence.seen.outputs.backward.get((path, k))
        vocabulary = scene.spec.model.vocabulary[0]
        if gradient is None or whole.shape[-1] != vocabulary or k not in wanted:
            continue
        own = held(gradient)
        if own.shape == whole.shape:
            _, used = targets_of(own)
            for targets in _other(used, wanted, k):
                labels = used.where(wanted[k] != IGNORED, wanted[k])
                yield [targets, _is_made(scene, k, (whole, own), labels)]


def _is_made(scene: Investigation, k: int, sides: tuple[Tensor, Tensor], labels: Tensor) -> bool:
    """Return whether the loss of one device's logits with these labels has the gradient that is
    there. `sides`: these logits, and that gradient, of this rank's tokens."""
    (micro_batch,) = (its for its in scene.own_micro_batches() if its.k == k)
    inputs, _ = micro_batch.samples.data
    own = TokensOfRank(scene.spec, scene.rank)
    samples = SampleBatch(TokenPair(own.of_output(inputs), labels))
    objective, logits = scene.reference.objective, sides[0].detach().requires_grad_()
    loss = objective.of(logits, samples) / objective.divisor(micro_batch.batch, samples)
    (gradient,) = torch.autograd.grad(loss * scene.evidence.scale, [logits])
    return relative(sides[1], gradient) <= EXACT


def _targets(scene: Investigation) -> dict[int, Tensor]:
    """Return the targets of this rank's tokens, by micro-batch."""
    own = TokensOfRank(scene.spec, scene.rank)
    return {its.k: own.of_output(its.samples.targets) for its in scene.own_micro_batches()}


def _other(used: Tensor, wanted: dict[int, Tensor], k: int) -> Iterator[str]:
    """What `used` are, if not those of micro-batch k."""
    if _same(used, wanted[k]):
        return
    for other, targets in wanted.items():
        if other != k and _same(used, targets):
            yield f"targets of micro-batch {other} for {k}"
    for by in range(1, used.shape[1] // 2):
        if _same(used[:, :-by], wanted[k][:, by:]):
            yield f"targets shifted {by} too far"
        if _same(used[:, by:], wanted[k][:, :-by]):
            yield f"targets shifted {by} too little"


def _same(one: Tensor, other: Tensor) -> bool:
    return float((one == other).double().mean()) >= _MOST
