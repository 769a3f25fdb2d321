"""A closer look at copies that differ: in how many elements, and if it is one, in which bit. By
digests of halves, so that of a tensor of any size some tens of words travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from ptrain.interpreter.program import Program
from ptrain.meters import holdings
from ptrain.meters.digest import digests
from ptrain.models.ledger import local
from ptrain.report.finding import Culprit, Departure, Way
from ptrain.train.exchange import Exchange
from ptrain.verification.roundings import INTEGERS


def closer(
    program: Program, exchange: Exchange, departures: Sequence[Departure], culprit: Culprit
) -> Culprit:
    """Return `culprit` of these departures, with the bit where it is one bit of one element.
    Collective; what departs has to be there still."""
    first = min(departures, key=lambda departure: departure.when)
    if first.way is not Way.VALUE or len(first.between) < 2:
        return culprit
    own = _held(program, first) if program.world.rank in first.between else None
    sizes = exchange.gather(None if own is None else own.numel())
    ranks = [rank for rank in first.between if sizes[rank] is not None]
    if len(ranks) < 2 or len({sizes[rank] for rank in ranks}) > 1:
        return culprit
    element = _one_element(own, sizes[ranks[0]], ranks, exchange)
    if element is None:
        return culprit
    place, bits = element
    factor = f"flipped bit {bits[0]}" if len(bits) == 1 else "one element"
    sentence = f"element {place} of {first.name} is another ({factor}), and no other. "
    return replace(culprit, factor=factor, sentence=sentence + culprit.sentence)


def _held(program: Program, first: Departure) -> torch.Tensor | None:
    """Return what this rank has under the name, as a row of integers."""
    known = (holdings.parameters, holdings.optimizer, holdings.buffers)
    for held in chain.from_iterable(holding(program) for holding in known):
        name = f"{held.name}.{held.key}" if held.key else held.name
        if (held.subject, name, held.part) == (first.subject, first.name, first.told):
            tensor = local(held.tensor.detach()).contiguous()
            return tensor.view(INTEGERS[tensor.element_size()]).reshape(-1)
    return None


def _one_element(
    own: torch.Tensor | None, size: int, ranks: Sequence[int], exchange: Exchange
) -> tuple[int, list[int]] | None:
    """Return its place, and the bits in which the ranks' differ; None where other elements do
    too."""

    def differs(start: int, end: int) -> bool:
        checksums = exchange.gather(None if own is None else digests([own[start:end]])[0])
        return len({checksums[rank] for rank in ranks}) > 1

    start, end = 0, size
    while end - start > 1:
        middle = (start + end) // 2
        start, end = (start, middle) if differs(start, middle) else (middle, end)
    if not differs(start, end) or (end < size and differs(end, size)):
        return None
    values: list[Any] = exchange.gather(None if own is None else int(own[start]))
    width = 8 * (own.element_size() if own is not None else 8)
    widths = exchange.gather(width)
    mask = 2 ** widths[ranks[0]] - 1
    both = 0
    for rank in ranks[1:]:
        both |= (values[rank] ^ values[ranks[0]]) & mask
    return start, [bit for bit in range(both.bit_length()) if both >> bit & 1]
