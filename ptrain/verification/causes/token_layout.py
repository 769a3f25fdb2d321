"""Which rank of cp has which tokens, and what a rank has and says of a tensor of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptrain.axes.context.attention import all_spans, context_of
from ptrain.axes.context.tokens import Span
from ptrain.report.finding import Culprit, Moment
from ptrain.steps.step import ContextParallel
from ptrain.verification.causes.scene import EXACT, Investigation
from ptrain.verification.causes.trials import directly
from ptrain.verification.causes.values import Explanation, Sides
from ptrain.verification.own_tokens import tokens_in
from ptrain.verification.parts import TensorBox, held, relative


def agreed(
    scene: Investigation, explanations: Callable[[Own], Iterable[Explanation]], axis: str = ""
) -> Culprit | None:
    """Return the culprit that most ranks where the first departure is say of it, of several
    explanations each; None where nobody says anything. `axis`: along which ranks depart, where the
    explanation does not say it. Collective."""
    own = Own.departing(scene)
    said = [] if own is None else explanations(own)
    everyone = scene.ranks.gather(list(said), list[Explanation])
    factors = Counter(factor for its in everyone for factor in {why.factor: why for why in its})
    if not factors:
        return None
    usual, _ = factors.most_common(1)[0]
    named = Counter(its for said in everyone for its in said if its.factor == usual)
    explanation, _ = named.most_common(1)[0]  # ranks may see one factor in several ways
    axis = explanation.axis or axis
    cause = scene.culprit(axis or None, usual + explanation.whose, explanation.sentence)
    what = "returns" if scene.first.moment is Moment.FORWARD else "hands back"
    tried = f"one device's {scene.first.place}, computed so, {what} what the ranks have"
    return directly(cause, tried, by_all=scene.by_all(everyone))


def departing(scene: Investigation) -> Sides | None:
    """Return both sides of the first departure, a module's output or its gradient; None where this
    rank has none of it."""
    key, evidence = (scene.first.name, scene.first.index), scene.evidence
    is_forward = scene.first.moment is Moment.FORWARD
    tensor, whole = (
        (outputs.forward if is_forward else outputs.backward).get(key)
        for outputs in (evidence.seen.outputs, evidence.expected.outputs)
    )
    part = None if tensor is None or whole is None else scene.own_part(tensor, whole)
    if tensor is None or whole is None or part is None:
        return None
    return Sides(held(tensor), whole, part)


@dataclass(frozen=True, slots=True)
class Own:
    """What this rank has of the departing tensor, and should have: the part `box` of its tokens."""

    scene: Investigation
    tensor: Tensor
    expected: Tensor
    box: TensorBox

    @classmethod
    def departing(cls, scene: Investigation) -> Own | None:
        """None where this rank has none of it, or has it right."""
        sides = departing(scene)
        if sides is None or relative(sides.own, sides.expected) <= EXACT:
            return None
        return cls(scene, sides.own, sides.expected, sides.part)

    def part(self, whole: Tensor, spans: Sequence[Span] | None = None) -> Tensor:
        """Return this rank's part of a whole tensor, of its tokens or of those in `spans`."""
        return self.box.of(self.scene.as_held(self.scene.first.name, whole, spans))

    def fits(self, whole: Tensor | None) -> bool:
        """Return whether what the rank has is its part of this."""
        return whole is not None and relative(self.tensor, self.part(whole)) <= EXACT


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Whose the tokens of a sample are: `owners` and `places`, int64 [S], are the rank of cp that
    has a token, and its index there."""

    step: ContextParallel
    spans: tuple[tuple[Span, ...], ...]
    owners: Tensor
    places: Tensor

    @classmethod
    def of(cls, step: ContextParallel) -> TokenLayout:
        spans = tuple(all_spans(step))
        owners, places = (torch.empty(step.sequence, dtype=torch.long) for _ in range(2))
        for owner, its in enumerate(spans):
            tokens = tokens_in(its)
            owners[tokens], places[tokens] = owner, torch.arange(len(tokens))
        return cls(step, spans, owners, places)

    @property
    def degree(self) -> int:
        return len(self.spans)

    def rings(self) -> Iterator[TokenLayout]:
        """Yield the layout over the ring's places, each of which several ranks may be, and this."""
        if self.step.ulysses > 1:
            yield TokenLayout.of(replace(self.step, ulysses=1))
        yield self

    def otherwise(self) -> Iterator[Tensor]:
        """Yield the number of each token, int64 [S], if contiguous slices were early and late
        chunks, or the reverse; nothing where there is no such way."""
        step = self.step
        if step.ring == 1 or step.sequence % (2 * self.degree):
            return
        numbers = torch.empty_like(self.places)
        claimed = all_spans(replace(step, is_balanced=not step.is_balanced))
        for own, claims in zip(self.spans, claimed, strict=True):
            numbers[tokens_in(own)] = tokens_in(claims)
        yield numbers


def ranks_text(scene: Investigation, ranks: Sequence[int]) -> str:
    step = context_of(scene.spec)
    assert step is not None, "there are slices"
    return f"{step.axis} rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
