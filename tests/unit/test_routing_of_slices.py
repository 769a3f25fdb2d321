"""Routing of token slices has the places, and router losses the shares, of one device."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from ptrain.axes.context.attention import all_spans
from ptrain.axes.context.run import slices
from ptrain.axes.context.run.slices import SampleSlices, take_spans
from ptrain.models.moe import Balance, ExpertPlaces
from ptrain.runtime.comm import TagRegistry
from ptrain.spec.block import Router
from ptrain.spec.placement import Axis
from ptrain.steps.step import ContextParallel
from tests.pure.build import ODD_SHAPE

SAMPLES, TOKENS = 3, 24
SHAPE = replace(ODD_SHAPE, experts=5, experts_per_token=2)
WAYS = {
    "ring": (1, 3, False),
    "zigzag": (1, 3, True),
    "ulysses": (3, 1, False),
    "hybrid": (2, 2, True),
    "hybrid of three": (3, 2, True),  # the middle one of three has an early and a late stretch
}


class _Group:
    """The place of one rank of a group that answers as the test says."""

    def __init__(self, rank: int) -> None:
        self.rank = lambda: rank


def step_of(way: str) -> ContextParallel:
    ulysses, ring, is_balanced = WAYS[way]
    return ContextParallel(
        axis=Axis.CP, ulysses=ulysses, ring=ring, sequence=TOKENS, is_balanced=is_balanced
    )


def slices_of(step: ContextParallel) -> list[SampleSlices]:
    spans = [*all_spans(step)]
    return [SampleSlices(_Group(rank), TagRegistry(), spans) for rank in range(len(spans))]


def random_choices(generator: torch.Generator, shape=SHAPE) -> Tensor:
    """Two experts of each token, some of which most tokens want."""
    wanted = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0]).expand(SAMPLES * TOKENS, -1)
    picked = torch.multinomial(wanted, shape.experts_per_token, generator=generator)
    return picked.unflatten(0, (SAMPLES, TOKENS))


@pytest.fixture
def answered(monkeypatch):
    """Let ranks that compute one after the other, twice, hear in the second round what all said in
    the first."""
    said: list[Tensor] = []

    def rounds(computations):
        for hear in (False, True):
            results = []
            heard = list(said)
            said.clear()

            def gathered(own, _, hear=hear, heard=heard):
                said.append(own)
                return torch.cat(heard) if hear else torch.cat([own] * len(computations))

            def summed(own, _, hear=hear, heard=heard):
                said.append(own)
                return sum(heard) if hear else own

            monkeypatch.setattr(slices, "all_gather_tensor", gathered)
            monkeypatch.setattr(slices, "all_reduce_sum", summed)
            results = [compute() for compute in computations]
        return results

    return rounds


@pytest.mark.parametrize(("way", "factor"), product(WAYS, (0.3, 1.0, 3.0)))
def test_the_choices_that_find_a_place_are_those_of_whole_samples(answered, way, factor):
    shape, step = replace(SHAPE, capacity_factor=factor), step_of(way)
    chosen_BTK = random_choices(torch.Generator().manual_seed(5))
    whole = ExpertPlaces(shape)
    is_late_BTK = (whole(chosen_BTK) == whole.count_places(SAMPLES, TOKENS)).view_as(chosen_BTK)
    assert is_late_BTK.any() or factor == 3.0
    spans, ranks = [*all_spans(step)], []
    for tokens in slices_of(step):
        places = ExpertPlaces(shape)
        places.tokens = tokens
        ranks.append(places)
    own = [take_spans(chosen_BTK, its) for its in spans]
    results = answered([lambda p=p, x=x: p(x) for p, x in zip(ranks, own, strict=True)])
    for places, places_NK, its, own_BTK in zip(ranks, results, spans, own, strict=True):
        number = places.count_places(SAMPLES, own_BTK.shape[1])
        is_late_NK = places_NK == number
        assert is_late_NK.view_as(own_BTK).equal(take_spans(is_late_BTK, its))
        kept = places_NK[~is_late_NK]
        assert len(kept.unique()) == len(kept) and (kept < number).all()
        experts = kept // (number // SHAPE.experts)
        assert experts.equal(own_BTK.flatten(0, 1)[~is_late_NK])


@pytest.mark.parametrize(("way", "router"), product(WAYS, Router))
def test_the_shares_of_a_loss_add_up_to_that_of_whole_samples(answered, way, router):
    shape = replace(SHAPE, aux_loss=0.5, z_loss=0.1, router=router)
    step, generator = step_of(way), torch.Generator().manual_seed(6)
    chosen_BTK = random_choices(generator)
    sizes = (SAMPLES, TOKENS, SHAPE.experts)
    logits_BTE = torch.randn(*sizes, dtype=torch.float64, generator=generator).requires_grad_()

    def loss(balance: Balance, cut) -> Tensor:
        scores_BTE = logits_BTE.softmax(-1) if router is Router.SOFTMAX else logits_BTE.sigmoid()
        return balance(*map(cut, (logits_BTE, scores_BTE, chosen_BTK)))

    expected = loss(Balance(shape), lambda whole: whole)
    computations = []
    for tokens, its in zip(slices_of(step), all_spans(step), strict=True):
        balance = Balance(shape)
        balance.tokens = tokens
        computations.append(
            lambda b=balance, its=its: loss(b, lambda whole: take_spans(whole, its))
        )
    shares = answered(computations)
    total = sum(shares) / len(shares)  # `route_slices` weighs each so
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    gradients = [
        torch.autograd.grad(y, logits_BTE, retain_graph=True)[0] for y in (total, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-16)


def test_balancing_a_slice_alone_gives_another_loss(answered):
    step = step_of("ring")
    chosen_BTK = random_choices(torch.Generator().manual_seed(7))
    shape = replace(SHAPE, capacity_factor=1.0)
    whole = ExpertPlaces(shape)
    is_late = (whole(chosen_BTK) == whole.count_places(SAMPLES, TOKENS)).view_as(chosen_BTK)
    apart = []
    for its in all_spans(step):
        own = take_spans(chosen_BTK, its)
        apart.append((whole(own) == whole.count_places(SAMPLES, own.shape[1])).view_as(own))
    assert not torch.cat(apart, 1).equal(is_late)
