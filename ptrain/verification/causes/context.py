"""Explain why a rank's slice of the tokens has other outputs or gradients than on one device: its
positions, the mask, the keys it attended to, its heads; for gradients, the missing queries or keys
of other ranks.

A tensor that differs is identified by its values as a part of one device's tensor. A table with one
row per position shows which positions the tokens were given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ptrain.axes.context.attention import Span, all_spans, context_of
from ptrain.axes.context.draw import spans_text
from ptrain.facts.parameters import OF_TOKENS
from ptrain.models.attention import Core
from ptrain.models.transformer import LearnedPositions
from ptrain.report.finding import Moment, RootCause
from ptrain.spec.model import ModelShape
from ptrain.steps.step import ContextParallel
from ptrain.verification.causes.rerun import (
    EXACT,
    Heads,
    Investigation,
    core_of,
    directly,
    gradient_with,
    inputs_of,
    output_with,
)
from ptrain.verification.parts import (
    TensorBox,
    factor_text,
    held,
    lacking,
    multiple,
    products,
    relative,
    rounded,
    rounded_to,
)
from ptrain.verification.places import own_spans, tokens_in


def positions_text(rows: Tensor, table: Tensor, own: Sequence[Span]) -> str:
    """Return which positions' rows of `table` [S, ...] these are, in words, beside those that they
    should be; "" where some are no position's, or all are right."""
    table, rows = table.double().flatten(1), rows.double().flatten(1)
    distances = torch.cdist(rows, table)
    least, positions = distances.min(1)
    size = float(torch.linalg.vector_norm(table)) / len(table) ** 0.5
    spans = tuple(runs(positions.tolist()))
    if float(least.max()) > EXACT * size or spans == tuple(own):
        return ""
    return f"positions {spans_text(spans)} for {spans_text(own)}"


def runs(positions: Sequence[int]) -> Iterator[Span]:
    """Yield the spans that these are, one after the other."""
    first = 0
    for place in range(1, len(positions) + 1):
        if place == len(positions) or positions[place] != positions[place - 1] + 1:
            yield positions[first], positions[place - 1] + 1
            first = place


ALIKE = EXACT * 1e-4  # relative: what is closer than this is the same
_MOST = 8  # slices that are tried one by one
OF_VALUES = (
    "another rank's shard, shards in another order, a rounding, a multiple, permuted elements"
)


class Explanation(NamedTuple):
    """What one rank says of its part: the factor, what to do, what came of undoing it ("" where
    that was not tried), the axis where it is one's whichever ranks differ, and of which ranks the
    factor is."""

    factor: str
    sentence: str
    tried: str = ""
    axis: str = ""
    whose: str = ""


@dataclass(frozen=True, slots=True)
class Sides:
    """What this rank has, the reference's whole tensor, and which part of it this should be."""

    own: Tensor
    whole: Tensor
    part: TensorBox

    @property
    def expected(self) -> Tensor:
        return self.part.of(self.whole)

    @property
    def wrong(self) -> Tensor:
        """Which elements are: a rank's rows may be made of several ranks' shards."""
        expected = self.expected.double()
        return (self.own.double() - expected).abs() > ALIKE * expected.abs()


def of_values(
    scene: Investigation, what: str, sides: Sides, places: Mapping[int, TensorBox]
) -> Explanation | None:
    """Return what it is, in words about `what`; `places` are other ranks' parts. None where nothing
    is known of it."""
    own, expected = sides.own, sides.expected
    for rank, part in places.items():
        there = part.of(sides.whole)
        if part != sides.part and there.shape == own.shape and relative(own, there) <= EXACT:
            sentence = (
                f"{what} is the shard of rank {rank}. Check rank coordinates and process groups."
            )
            tried = "the reference values of that rank are the values on this rank"
            axis = scene.ranks.axis_of([scene.rank, rank])
            return Explanation(f"shard of rank {rank}", sentence, tried, axis)
    for axis in scene.axes:
        if (order := order_of_slices(own, expected, scene.spec.degree(axis))) is not None:
            sentence = (
                f"{what} concatenates the right shards of {axis} in the order "
                f"{', '.join(map(str, order))}. Gather them by rank."
            )
            tried = "in rank order they match the reference"
            return Explanation("shards in another order", sentence, tried, str(axis))
    if dtype := rounded_to(own, expected):
        sentence = f"{what} has the rounding of {dtype}. Compute and store it in the spec's dtype."
        its = rounded(expected, getattr(torch, dtype))
        is_it = torch.equal(its, own.to(expected.dtype))
        tried = f"the reference rounded to {dtype} has the same values" if is_it else ""
        return Explanation(f"rounded to {dtype}", sentence, tried)
    fit = multiple(own, expected)
    if fit.holds(EXACT) and abs(fit.factor - 1.0) > EXACT:
        text = factor_text(fit.factor, scene.degrees)
        axes = (n for its in products(fit.factor, scene.degrees) for n in its.axes if n != "K")
        sentence = f"{what} is the reference {text}. Scale, average or sum it over ranks once."
        tried = f"divided by {fit.factor:.4g} it matches the reference"
        return Explanation(text, sentence, tried, next(axes, ""))
    one_sorted, other = (tensor.double().reshape(-1).sort().values for tensor in (own, expected))
    if relative(one_sorted, other) <= EXACT:
        sentence = f"{what} has permuted elements. Load and gather shards by rank."
        return Explanation("elements in another order", sentence)
    return None


def order_of_slices(
    actual: Tensor, expected: Tensor, count: int, dims: Iterable[int] | None = None
) -> tuple[int, ...] | None:
    """Return where each of `count` slices along some dimension belongs (of `dims`, or of all), if
    that is not where it is; None where `actual` is not `expected` cut and put together again. The
    innermost dimensions are last."""
    if actual.shape != expected.shape or not 1 < count <= _MOST:
        return None
    for dim in range(actual.dim()) if dims is None else dims:
        if actual.shape[dim] % count or actual.shape[dim] < count:
            continue
        slices, wanted = actual.chunk(count, dim), expected.chunk(count, dim)
        order = [place for piece in slices if (place := _belongs(piece, wanted)) is not None]
        if sorted(order) == list(range(count)) != order:
            return tuple(order)
    return None


def _belongs(part: Tensor, wanted: tuple[Tensor, ...]) -> int | None:
    """Return the place of the slice that it is; None of what is none."""
    same = (place for place, candidate in enumerate(wanted) if relative(part, candidate) <= EXACT)
    return next(same, None)


def agreed(
    scene: Investigation, explanations: Callable[[Own], Iterable[Explanation]], axis: str = ""
) -> RootCause | None:
    """Return the root cause that most ranks where the first mismatch is say of it, of several
    explanations each; None where nobody says anything. `axis`: along which ranks differ, where the
    explanation does not say it. Collective."""
    own = Own.differing(scene)
    said = [] if own is None else explanations(own)
    everyone = scene.ranks.gather(list(said), list[Explanation])
    factors = Counter(factor for its in everyone for factor in {why.factor: why for why in its})
    if not factors:
        return None
    usual, _ = factors.most_common(1)[0]
    named = Counter(its for said in everyone for its in said if its.factor == usual)
    explanation, _ = named.most_common(1)[0]  # ranks may see one factor in several ways
    axis = explanation.axis or axis
    cause = scene.root_cause(axis or None, usual + explanation.whose, explanation.sentence)
    what = "returns" if scene.first.moment is Moment.FORWARD else "passes back"
    tried = (
        f"{scene.first.place} of the reference, computed this way, {what} the values on the ranks"
    )
    return directly(cause, tried, by_all=scene.by_all(everyone))


def differing(scene: Investigation) -> Sides | None:
    """Return both sides of the first mismatch, a module's output or its gradient; None where this
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
    """What this rank has of the differing tensor, and should have: the part `box` of its tokens."""

    scene: Investigation
    tensor: Tensor
    expected: Tensor
    box: TensorBox

    @classmethod
    def differing(cls, scene: Investigation) -> Own | None:
        """None where this rank has none of it, or has it right."""
        sides = differing(scene)
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


def shares_of(
    scene: Investigation,
    layout: TokenLayout,
    attend: Callable[[Tensor, Core, Heads, Tensor | None], Tensor],
) -> list[Tensor]:
    """Return what the tokens of each rank, `attend`'s first argument, have a share of the differing
    gradient; nothing where no attention stands beside it."""
    path, shares = core_of(scene), []
    for owner in range(layout.degree) if path and path != scene.first.name else ():
        share = gradient_with(scene, path, partial(attend, layout.owners == owner))
        if share is None:
            return []
        shares.append(share)
    return shares


def not_home(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
    """Of the gradients of keys and values some ranks' share has not come, or another rank's has."""
    if shares := shares_of(scene, layout, _seen_by):
        yield from _share_missing(scene, own, shares)
        yield from _of_other_tokens(scene, layout, own, shares)
        yield from _of_other_strides(scene, own, shares)


def _seen_by(rows: Tensor, core: Core, heads: Heads, mask: Tensor | None) -> Tensor:
    """Return what is attended to; gradients reach keys and values from these queries alone."""
    queries, keys, values = heads
    whole: Tensor = core.forward(queries, keys, values, mask)
    apart: Tensor = core.forward(queries, keys.detach(), values.detach(), mask)
    return torch.where(rows[:, None], whole, apart)


def _share_missing(
    scene: Investigation, own: Own, shares: Sequence[Tensor]
) -> Iterator[Explanation]:
    owners = lacking(own.tensor, [own.part(share) for share in shares], EXACT)
    if not owners:
        return
    ranks = ranks_text(scene, owners)
    sentence = (
        f"Rank {scene.rank} has no gradient of its keys and values from the queries of "
        f"{ranks}. Send all partial dK and dV to the rank that owns the tokens, and add them."
    )
    yield Explanation("missing dK and dV", sentence, whose=f" from {ranks}")


def _of_other_tokens(
    scene: Investigation, layout: TokenLayout, own: Own, shares: Sequence[Tensor]
) -> Iterator[Explanation]:
    whole = torch.stack(list(shares)).sum(0)
    for owner, spans in enumerate(layout.spans):
        if relative(own.tensor, own.part(whole, spans)) <= EXACT:
            its = ranks_text(scene, [owner])
            sentence = (
                f"Rank {scene.rank} has the gradients of the keys and values of {its}. Send "
                "dK and dV to the rank that owns the tokens."
            )
            yield Explanation("dK and dV", sentence, whose=f" of {its}")


def _of_other_strides(
    scene: Investigation, own: Own, shares: Sequence[Tensor]
) -> Iterator[Explanation]:
    """Elements went from memory with heads in front of tokens to memory with tokens in front, or
    the reverse, in the order in which they lay there."""
    if not isinstance(scene.spec.model, ModelShape):
        return
    sum_BTC = own.part(torch.stack(list(shares)).sum(0))
    sum_BTGD = sum_BTC.unflatten(-1, (-1, scene.spec.model.head_dim))
    if any(relative(own.tensor, x_BTC) <= EXACT for x_BTC in under_other_strides(sum_BTGD)):
        sentence = (
            f"Rank {scene.rank} has the gradients of its keys and values in the element "
            "order of other strides, as all_gather of torch.distributed.nn.functional "
            "returns them on gloo. Make the tensor that backward receives contiguous, or use "
            "functional collectives."
        )
        yield Explanation("dK and dV in the order of other strides", sentence)


def under_other_strides(x_BTGD: Tensor) -> tuple[Tensor, Tensor]:
    """Return [samples, tokens, features] of memory with heads in front that is read as if tokens
    were, and of memory with tokens in front that is read as if heads were."""
    x_BGTD = x_BTGD.transpose(1, 2)
    taken_for_heads = x_BTGD.reshape(x_BGTD.shape).transpose(1, 2)
    return x_BGTD.reshape(x_BTGD.shape).flatten(2), taken_for_heads.flatten(2)


def of_some_keys(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
    """The gradients of queries lack what they get from the keys of some ranks."""
    shares = [own.part(share) for share in shares_of(scene, layout, _by_keys)]
    if shares and (owners := lacking(own.tensor, shares, EXACT)):
        ranks = ranks_text(scene, owners)
        sentence = (
            f"Rank {scene.rank} has no gradient of its queries from the keys of {ranks}. Sum "
            "dQ over all hops."
        )
        yield Explanation("missing dQ", sentence, whose=f" from the keys of {ranks}")


def _by_keys(columns: Tensor, core: Core, heads: Heads, mask: Tensor | None) -> Tensor:
    """Return what is attended to; gradients reach queries from these keys alone. Queries and keys
    have twice the features: half of them give the scores of these keys, the others, whose queries
    are detached, those of the rest."""
    queries, keys, values = heads
    features = queries.shape[-1]
    scores = replace(core.scores, scale=core.scores.scale or features**-0.5)
    chosen = columns[:, None]
    y_BHTD: Tensor = type(core)(core.dropout, scores).forward(
        torch.cat((queries, queries.detach()), -1),
        torch.cat((keys * chosen, keys * ~chosen), -1),
        F.pad(values, (0, features)),
        mask,
    )
    return y_BHTD[..., :features]


_BY_GLOBAL = "Number tokens by their position in the full sequence (Transformer.place_tokens)."


def other_positions(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
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
        yield Explanation(text, f"The tokens have {text}. {_BY_GLOBAL}")


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


def other_heads(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
    """Ulysses put heads together in another order, or gave a rank the keys of other heads."""
    count, path = layout.step.ulysses, scene.first.name
    if count == 1 or core_of(scene) != path:
        return
    order = order_of_slices(own.tensor, own.expected, count, dims=(1,))
    if order is not None:
        text = ", ".join(map(str, order))
        sentence = (
            f"The heads of {path} are in the Ulysses rank order {text}. Concatenate them by "
            "rank, in the order in which they were sent."
        )
        yield Explanation("heads in another order", sentence)
    (queries, *others), mask = inputs_of(scene, path)
    for shift in range(1, count):
        keys, values = (_rolled(tensor, shift, count) for tensor in others)
        if own.fits(_attended(scene, (queries, keys, values), mask)):
            sentence = (
                f"{path} applies the queries of one rank's heads to the keys of another's. "
                "Split queries, keys and values by heads in the same order."
            )
            yield Explanation("keys of other heads", sentence)


def _rolled(tensor: Tensor, shift: int, count: int) -> Tensor:
    return tensor.roll(shift * (tensor.shape[1] // count), 1)


def _attended(scene: Investigation, heads: Heads, mask: Tensor | None) -> Tensor:
    with torch.no_grad():
        core = scene.reference.module.get_submodule(scene.first.name)
        result: Tensor = core.forward(*heads, mask)
    return result


def other_keys(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
    """The rank attended to other keys."""
    path = scene.first.name
    if core_of(scene) != path:
        return
    heads, window = inputs_of(scene, path)
    for seen, explanation in _other_masks(scene, layout):
        mask = torch.zeros_like(seen, dtype=heads[0].dtype).masked_fill_(~seen, -torch.inf)
        if window is not None:
            own_window = window[..., : len(seen), : len(seen)]
            is_bool = own_window.dtype is torch.bool
            mask = mask.masked_fill(~own_window, -torch.inf) if is_bool else mask + own_window
        if own.fits(_attended(scene, heads, mask)):
            yield explanation


def _other_masks(scene: Investigation, layout: TokenLayout) -> Iterator[tuple[Tensor, Explanation]]:
    """Yield which keys queries might see, bool [S, S]."""
    path, numbers = scene.first.place, torch.arange(layout.step.sequence)
    causal = numbers[:, None] >= numbers
    by_index = f"{path} masks by the local index of tokens. Mask by the index in the full sequence."
    unmasked = f"{path} sees future tokens. Mask key blocks by their place in the sequence."
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
                f"{path} on rank {scene.rank} sees no keys of {keys}. Pass keys and values "
                "on until every rank has received all of them."
            )
            explanation = Explanation("missing keys", sentence, whose=f" of {keys}")
            yield causal & ~_any_of(own, hidden), explanation


def _of_other_slices(path: str, layout: TokenLayout) -> Iterator[tuple[Tensor, Explanation]]:
    """Yield what queries see if slices are taken for contiguous, or for early and late chunks."""
    kinds = "contiguous slices", "early and late chunks"
    right, wrong = reversed(kinds) if layout.step.is_balanced else kinds
    sentence = (
        f"{path} treats {right} as {wrong}. Permute tokens identically in the loader "
        "and in attention."
    )
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
    return ranks_text(scene, ranks)


def context_cause(scene: Investigation) -> RootCause | None:
    """Explain a module's output, or the gradient of it, that differs where cp cuts the tokens: by
    what most ranks say, each of which may have several explanations. Collective."""
    step = context_of(scene.spec)
    if step is None:
        return None
    causes = _FORWARD if scene.first.moment is Moment.FORWARD else _BACKWARD
    layout = TokenLayout.of(step)

    def said(own: Own) -> list[Explanation]:
        return next(filter(None, (list(cause(scene, layout, own)) for cause in causes)), [])

    return agreed(scene, said, str(step.axis))


_FORWARD = (other_heads, other_keys, other_positions)
_BACKWARD = (not_home, of_some_keys)
