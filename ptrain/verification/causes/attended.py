"""Why a rank's slice of the tokens has other outputs than on one device: its positions, the mask,
which keys it attended to, which heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ptrain.axes.context.draw import spans_text
from ptrain.axes.context.tokens import Span
from ptrain.facts.parameters import OF_TOKENS
from ptrain.models.attention import Core
from ptrain.models.transformer import LearnedPositions
from ptrain.verification.causes.positions import positions_text, runs
from ptrain.verification.causes.rerun import (
    Heads,
    core_of,
    inputs_of,
    output_with,
)
from ptrain.verification.causes.scene import Investigation
from ptrain.verification.causes.token_layout import Own, TokenLayout, ranks_text
from ptrain.verification.causes.values import Explanation, order_of_slices
from ptrain.verification.own_tokens import own_spans, tokens_in

_BY_GLOBAL = "number tokens as in the whole sequence (Transformer.place_tokens)"


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


def other_heads(scene: Investigation, layout: TokenLayout, own: Own) -> Iterator[Explanation]:
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
    (queries, *others), mask = inputs_of(scene, path)
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
            explanation = Explanation("missing keys", sentence, whose=f" of {keys}")
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
    return ranks_text(scene, ranks)
