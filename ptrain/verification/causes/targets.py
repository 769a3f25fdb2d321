"""Which targets a loss was computed with: the gradient of the logits tells. Cross entropy's is the
probabilities less 1 at the target, times a positive number: there and nowhere else it is negative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import Tensor

from ptrain.verification.causes.scene import Cause, Investigation
from ptrain.verification.causes.trials import directly
from ptrain.verification.own_tokens import TokensOfRank
from ptrain.verification.parts import held
from ptrain.verification.places import data_place

_MOST = 0.99  # of the tokens that agree, where the ends of rows may not


def targets_cause(scene: Investigation) -> Cause | None:
    """The logits are right and the loss is not: it has other targets. Collective."""
    said = next(_said(scene), None)
    everyone = scene.exchange.gather(said)
    counts = Counter(answer for answer in everyone if answer)
    if not counts:
        return None
    targets = counts.most_common(1)[0][0]
    ranks = [rank for rank, answer in enumerate(everyone) if answer == targets]
    sentence = (
        f"the logits are right, and the loss compares them with {targets}: look at the loader"
    )
    tried = "nearly all positions are asked for these, as the gradient of the logits tells"
    lacking = [rank for rank, answer in enumerate(everyone) if answer not in ("", None, targets)]
    cause = Cause(scene.axis_of(ranks), targets, sentence, "loss")
    return directly(cause, tried, by_all=not lacking)


def _said(scene: Investigation) -> Iterator[str]:
    wanted = _targets(scene)
    for (path, k), whole in scene.evidence.expected_outputs.forward.items():
        gradient = scene.evidence.outputs.backward.get((path, k))
        vocabulary = scene.spec.model.vocabulary[0]
        if gradient is None or whole.shape[-1] != vocabulary or k not in wanted:
            continue
        own = held(gradient)
        if own.shape == whole.shape:
            yield from _other(own.argmin(-1), wanted, k)


def _targets(scene: Investigation) -> dict[int, Tensor]:
    """Return the targets of this rank's tokens, by micro-batch."""
    place = data_place(scene.spec, scene.rank)
    step = scene.evidence.step
    micro_batches = scene.reference.micro_batches(step)
    own = TokensOfRank(scene.spec, scene.rank)
    return {
        micro_batch.k: own.of_output(micro_batch.samples.targets)
        for micro_batch in micro_batches
        if micro_batch.data_index == place
    }


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
