"""Why a rank's slice of the tokens has other outputs than on one device, or other gradients: its
positions, the mask, which keys it attended to, which heads; and what came home of the gradients of
its keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ptrain.axes.context.attention import all_spans, context_of
from ptrain.axes.context.draw import spans_text
from ptrain.axes.context.tokens import Span
from ptrain.facts.parameters import OF_TOKENS
from ptrain.models.attention import Core
from ptrain.models.transformer import LearnedPositions
from ptrain.report.finding import Moment
from ptrain.steps.context import ContextParallel
from ptrain.verification.causes.order import order_of_slices
from ptrain.verification.causes.positions import positions_text, runs
from ptrain.verification.causes.rerun import (
    Heads,
    core_of,
    gradient_with,
    inputs_of,
    output_with,
)
from ptrain.verification.causes.scene import EXACT, Cause, Investigation
from ptrain.verification.factors import ABSENT, combination
from ptrain.verification.own_tokens import own_spans, tokens_in
from ptrain.verification.parts import TensorBox, held, relative

_BY_GLOBAL = "number tokens as in the whole sequence (Transformer.place_tokens)"


class Explanation(NamedTuple):
    """What one rank says: the factor, of which ranks that is, and what to do."""

    factor: str
    sentence: str
    whose: str = ""


def context_cause(scene: Investigation) -> Cause | None:
    """Explain a module's output, or the gradient of it, that departs where cp cuts the tokens: by
    what most ranks say, each of which may have several explanations. Collective."""
    step = context_of(scene.spec)
    if step is None:
        return None
    said: list[Explanation] = []
    if (own := _own(scene)) is not None:
        layout = TokenLayout.of(step)
        causes = _FORWARD if scene.first.moment is Moment.FORWARD else _BACKWARD
        said = next(filter(None, (list(cause(scene, layout, own)) for cause in causes)), [])
    everyone = [
        [Explanation(*explanation) for explanation in its]
        for its in scene.exchange.gather(list(map(list, said)))
    ]
    factors = Counter(factor for its in everyone for factor in {why.factor: why for why in its})
    if not factors:
        return None
    usual, _ = factors.most_common(1)[0]
    explanation = next(its for said in everyone for its in said if its.factor == usual)
    return Cause(str(step.axis), usual + explanation.whose, explanation.sentence)


@dataclass(frozen=True, slots=True)
class Own:
    """What this rank has of the departing tensor, and should have: the part `box` of its tokens."""

    scene: Investigation
    tensor: Tensor
    expected: Tensor
    box: TensorBox

    def part(self, whole: Tensor, spans: Sequence[Span] | None = None) -> Tensor:
        """Return this rank's part of a whole tensor, of its tokens or of those in `spans`."""
        return self.box.of(self.scene.as_held(self.scene.first.name, whole, spans))

    def fits(self, whole: Tensor | None) -> bool:
        """Return whether what the rank has is its part of this."""
        return whole is not None and relative(self.tensor, self.part(whole)) <= EXACT


def _own(scene: Investigation) -> Own | None:
    """None where this rank has none of it, or has it right."""
    key = scene.first.name, scene.first.index
    is_forward, evidence = scene.first.moment is Moment.FORWARD, scene.evidence
    tensor, wanted = (
        (outputs.forward if is_forward else outputs.backward).get(key)
        for outputs in (evidence.outputs, evidence.expected_outputs)
    )
    if tensor is None or wanted is None:
        return None
    box = scene.own_part(tensor, wanted)
    if box is None or relative(held(tensor), box.of(wanted)) <= EXACT:
        return None
    return Own(scene, held(tensor), box.of(wanted), box)


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


# forward


def _positions(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
    """The vectors that were added are those of other positions, or the angles of queries and
    keys."""
    module, spans = scene.reference.module, own_spans(scene.spec, scene.rank)
    at_fault = module.get_submodule(scene.first.name)
    if isinstance(at_fault, LearnedPositions):
        table = at_fault.weight.detach()
        right = torch.cat([table[first:behind] for first, behind in spans])
        rows = (own.tensor - own.expected)[0] + right
        yield from _of_positions(positions_text(rows, table, spans))
    tables = {name: table for name, table in module.named_buffers() if name.endswith(OF_TOKENS)}
    if not tables or not isinstance(at_fault, Core):
        return
    for numbers, text in _other_positions(layout, spans):
        if own.fits(output_with(scene, {name: table[numbers] for name, table in tables.items()})):
            yield from _of_positions(text)


def _of_positions(text: str) -> Iterator[Explanation]:
    if text:
        yield Explanation(text, f"tokens have {text}: {_BY_GLOBAL}")


def _other_positions(layout: TokenLayout, spans: Sequence[Span]) -> Iterator[tuple[Tensor, str]]:
    """Yield a position for each token, where all ranks or the one with these `spans` alone count
    from 0, or as if they had other slices."""
    right, tokens = torch.arange(layout.step.sequence), tokens_in(spans)
    for numbers in (layout.places, *layout.otherwise()):
        if torch.equal(numbers[tokens], tokens):
            continue
        alone = right.clone()
        alone[tokens] = numbers[tokens]
        claimed = spans_text(tuple(runs(numbers[tokens].tolist())))
        text = f"positions {claimed} for {spans_text(spans)}"
        yield from ((numbers, text), (alone, text))


def _heads(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
    """Ulysses put heads together in another order, or gave a rank the keys of other heads."""
    count, path = layout.step.ulysses, scene.first.name
    if count == 1 or core_of(scene) != path:
        return
    order = order_of_slices(own.tensor, own.expected, count, dims=(1,))
    if order is not None:
        text = ", ".join(map(str, order))
        sentence = (
            f"the heads of {path} are those of Ulysses' ranks in the order {text}: put them "
            "together by rank, as they were sent"
        )
        yield Explanation("heads in another order", sentence)
    inputs = inputs_of(scene, path)
    assert inputs is not None, "a core that departs was run"
    (queries, *others), mask = inputs
    for shift in range(1, count):
        keys, values = (_rolled(tensor, shift, count) for tensor in others)
        if own.fits(_attended(scene, (queries, keys, values), mask)):
            sentence = (
                f"{path} attends with the queries of one rank's heads to the keys of another's: "
                "cut queries, keys and values by heads in one order"
            )
            yield Explanation("keys of other heads", sentence)


def _rolled(tensor: Tensor, shift: int, count: int) -> Tensor:
    return tensor.roll(shift * (tensor.shape[1] // count), 1)


def _attended(scene: Investigation, heads: Heads, mask: Tensor | None) -> Tensor:
    with torch.no_grad():
        core = scene.reference.module.get_submodule(scene.first.name)
        result: Tensor = core.forward(*heads, mask)
    return result


def _masks(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
    """The rank attended to other keys."""
    path = scene.first.name
    if core_of(scene) != path or (inputs := inputs_of(scene, path)) is None:
        return
    heads, window = inputs
    for seen, explanation in _other_masks(scene, layout):
        mask = torch.zeros_like(seen, dtype=heads[0].dtype).masked_fill_(~seen, -torch.inf)
        mask = mask if window is None else mask + window[: len(mask), : len(mask)]
        if own.fits(_attended(scene, heads, mask)):
            yield explanation


def _other_masks(scene: Investigation, layout: TokenLayout) -> Iterator[tuple[Tensor, Explanation]]:
    """Yield which keys queries might see, bool [S, S]."""
    path, numbers = scene.first.place, torch.arange(layout.step.sequence)
    causal = numbers[:, None] >= numbers
    by_index = f"{path} masks by the index that tokens have on a rank: mask by that in the sequence"
    unmasked = f"{path} sees tokens that are still to come: mask blocks of keys by their place"
    for own in layout.rings():
        before = own.owners[:, None] >= own.owners
        is_own = own.owners[:, None] == own.owners
        local = own.places[:, None] >= own.places
        yield local, Explanation("mask by local index", by_index)
        yield local & before, Explanation("mask by local index", by_index)
        yield torch.ones_like(causal), Explanation("no causal mask", unmasked)
        yield causal | ~is_own, Explanation("no causal mask between ranks", unmasked)
        yield from _of_other_slices(path, own)
        for hidden in _hidden(own):
            keys = _ranks_of(scene, layout, own, hidden)
            sentence = (
                f"{path} on rank {scene.rank} sees no keys of {keys}: pass keys and values on "
                "until every rank has had all of them"
            )
            explanation = Explanation("missing keys", sentence, f" of {keys}")
            yield causal & ~_any_of(own, hidden), explanation


def _of_other_slices(path: str, layout: TokenLayout) -> Iterator[tuple[Tensor, Explanation]]:
    """Yield what queries see if slices are taken for contiguous, or for early and late chunks."""
    kinds = "contiguous slices", "early and late chunks"
    right, wrong = reversed(kinds) if layout.step.is_balanced else kinds
    sentence = f"{path} takes {right} for {wrong}: let loader and attention permute tokens alike"
    for numbers in layout.otherwise():
        yield numbers[:, None] >= numbers, Explanation(f"mask of {wrong}", sentence)


def _hidden(layout: TokenLayout) -> Iterator[tuple[int, ...]]:
    """Yield whose keys a rank might not have seen, as distances along the ring: those of the last
    hops, and those of single ones."""
    count = layout.degree
    yield from (tuple(range(1, hops + 1)) for hops in range(1, count))
    yield from ((distance,) for distance in range(2, count))


def _any_of(layout: TokenLayout, distances: Sequence[int]) -> Tensor:
    """Return of queries and keys, bool [S, S], whether the keys' owner is so far ahead."""
    ahead = (layout.owners - layout.owners[:, None]) % layout.degree
    return torch.isin(ahead, torch.tensor(distances))


def _ranks_of(
    scene: Investigation, layout: TokenLayout, ring: TokenLayout, distances: Sequence[int]
) -> str:
    """Return the ranks of cp so far ahead of this one, in words: a place of a ring may be some."""
    members = layout.degree // ring.degree
    own = scene.place(scene.rank)[layout.step.axis] // members
    places = sorted((own + distance) % ring.degree for distance in distances)
    ranks = [place * members + member for place in places for member in range(members)]
    return _listed(scene, ranks)


def _listed(scene: Investigation, ranks: Sequence[int]) -> str:
    step = context_of(scene.spec)
    assert step is not None, "there are slices"
    return f"{step.axis} rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


# backward


def _not_home(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
    """Of the gradients of keys and values some ranks' share has not come, or another rank's has."""
    path = core_of(scene)
    if not path or path == scene.first.name:
        return
    shares: list[Tensor] = []
    for owner in range(layout.degree):
        share = gradient_with(scene, path, partial(_seen_by, layout.owners == owner))
        if share is None:
            return
        shares.append(share)
    yield from _share_missing(scene, own, shares)
    yield from _of_other_tokens(scene, layout, own, shares)


def _seen_by(rows: Tensor, core: Core, heads: Heads, mask: Tensor | None) -> Tensor:
    """Return what is attended to; gradients reach keys and values from these queries alone."""
    queries, keys, values = heads
    whole: Tensor = core.forward(queries, keys, values, mask)
    apart: Tensor = core.forward(queries, keys.detach(), values.detach(), mask)
    return torch.where(rows[:, None], whole, apart)


def _share_missing(
    scene: Investigation, own: Own, shares: Sequence[Tensor]
) -> Iterator[Explanation]:
    parts = [own.part(share) for share in shares]
    known = [owner for owner, part in enumerate(parts) if bool(part.any())]
    fit = combination(own.tensor, [parts[owner] for owner in known])
    if not fit.holds(EXACT):
        return
    usual = max(map(abs, fit.coefficients))
    lacking = [
        owner
        for owner, share in zip(known, fit.coefficients, strict=True)
        if abs(share) <= ABSENT * usual
    ]
    if not lacking:
        return
    ranks = _listed(scene, lacking)
    sentence = (
        f"rank {scene.rank} has no gradient of its keys and values from the queries of {ranks}: "
        "send every share of dK and dV home, and add them"
    )
    yield Explanation("missing dK and dV", sentence, f" from {ranks}")


def _of_other_tokens(
    scene: Investigation, layout: TokenLayout, own: Own, shares: Sequence[Tensor]
) -> Iterator[Explanation]:
    whole = torch.stack(list(shares)).sum(0)
    for owner, spans in enumerate(layout.spans):
        if relative(own.tensor, own.part(whole, spans)) <= EXACT:
            its = _listed(scene, [owner])
            sentence = (
                f"rank {scene.rank} has the gradients of the keys and values of {its}: send dK and "
                "dV on to the rank whose tokens they are of"
            )
            yield Explanation("dK and dV", sentence, f" of {its}")


_FORWARD = (_heads, _masks, _positions)
_BACKWARD = (_not_home,)
