"""Rows of tokens that go wrong between ranks with experts of their own: lying otherwise than they
are taken to lie, by counts of another micro-batch, to other ranks, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ptrain.axes.expert.run import apply as exchange
from ptrain.axes.expert.run.apply import JourneyOverRanks, RoutedRowCounts
from ptrain.interpreter.program import Program
from ptrain.models.moe import Journey
from ptrain.report.finding import Subject
from tests.faults.fault import Fault
from tests.faults.of_expert_ranks import EP, EP_DP, EP_PLACES, ONE_EACH
from tests.faults.of_experts import combined, layer_of
from tests.faults.planting import exchanged


def _travels(program: Program, journey: type[JourneyOverRanks], block: int = 0) -> None:
    """Rows of one layer travel otherwise."""
    group = program.mesh.group(program.spec.expert_axes)
    layer_of(program, block).journey = lambda: journey(group)


class HomeUnsorted(JourneyOverRanks):
    """What comes back lies by expert, and is taken to lie by rank."""

    def return_rows(self, y_RC: Tensor) -> Tensor:
        assert self._routed is not None
        return self._exchange_rows(y_RC, self._routed.received, self._routed.sent)


class ThereUnsorted(JourneyOverRanks):
    """What arrives lies by rank, and is taken to lie by expert."""

    def send_rows(self, x_MC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
        x_RC, ends_e = super().send_rows(x_MC, ends_E)
        assert self._routed is not None
        return self._routed.by_rank(x_RC), ends_e

    def return_rows(self, y_RC: Tensor) -> Tensor:
        assert self._routed is not None
        return super().return_rows(self._routed.by_expert(y_RC))


class PlacesUnsorted(JourneyOverRanks):
    """Places that come back lie by expert, and are taken to lie by rank."""

    def return_places(self, y_eTC: Tensor) -> Tensor:
        experts, places, hidden = y_eTC.shape
        ranks = self.group.size()
        y_ESC = y_eTC.reshape(ranks * experts, places // ranks, hidden)
        places_NE = self._places_of(y_ESC)
        return self._by_rank(self._exchange_rows(y_ESC, places_NE, places_NE)).flatten(0, 1)


class NextExperts(JourneyOverRanks):
    """Rows go to the rank behind that of their experts."""

    def send_rows(self, x_MC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
        counts_NE = exchange._counts_of(ends_E).unflatten(0, (self.group.size(), -1))
        x_MC, ends_E = _rolled(x_MC, counts_NE, 1)
        self._sent = counts_NE.roll(1, 0)
        return super().send_rows(x_MC, ends_E)

    def return_rows(self, y_RC: Tensor) -> Tensor:
        return _rolled(super().return_rows(y_RC), self._sent, -1)[0]


def _rolled(x_MC: Tensor, counts_NE: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return what goes to each rank as what goes to the one behind it, and where rows end then."""
    pieces = list(x_MC.split(counts_NE.sum(1).tolist()))
    rolled = [pieces[(place - shift) % len(pieces)] for place in range(len(pieces))]
    ends_E = counts_NE.roll(shift, 0).flatten().cumsum(0, dtype=torch.int32)
    return torch.cat(rolled), ends_E


def stale_counts(program: Program) -> None:
    """What is sent where was counted in the micro-batch before, so that nobody waits for it."""
    before: list[Tensor] = []

    class OfTheLastPass(JourneyOverRanks):
        def send_rows(self, x_MC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
            before.append(ends_E)
            return super().send_rows(x_MC, before[-2] if len(before) > 1 else ends_E)

    _travels(program, OfTheLastPass)


def rows_by_expert_sent_home(program: Program) -> None:
    _travels(program, HomeUnsorted)


def rows_by_rank_taken_for_sorted(program: Program) -> None:
    _travels(program, ThereUnsorted)


def places_by_expert_sent_home(program: Program) -> None:
    _travels(program, PlacesUnsorted)


def experts_of_the_next_rank(program: Program) -> None:
    _travels(program, NextExperts)


def nothing_travels(program: Program) -> None:
    """Rows stay: each rank gives them to that of its experts which has the same place."""
    layer = layer_of(program, 0)
    own = layer.experts.num_experts // program.mesh.group_size(program.spec.expert_axes)

    class Home(Journey):
        def send_rows(self, x_MC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
            counts_NE = exchange._counts_of(ends_E).unflatten(0, (-1, own))
            self.routed = RoutedRowCounts(counts_NE.tolist(), counts_NE.tolist())
            ends_e = counts_NE.sum(0).cumsum(0, dtype=torch.int32)
            return self.routed.by_expert(x_MC), ends_e

        def return_rows(self, y_MC: Tensor) -> Tensor:
            return self.routed.by_rank(y_MC)

    layer.journey = Home


def weights_of_another_rank(program: Program) -> None:
    """What a token's experts give is weighed by what the next rank's router gave its token."""
    group = program.mesh.group(program.spec.expert_axes)
    combined(program, lambda weights, _, rows, __: (exchanged(weights.detach(), group), rows))


def _all_faults() -> Iterator[Fault]:
    for plant, setting, name, factor in (
        (rows_by_expert_sent_home, EP, "rows sent home by expert", "rows of other tokens"),
        (
            rows_by_rank_taken_for_sorted,
            EP_DP,
            "rows taken for sorted as they arrive",
            "rows of other experts",
        ),
        (
            places_by_expert_sent_home,
            EP_PLACES,
            "places sent home by expert",
            "rows of other tokens",
        ),
        (experts_of_the_next_rank, ONE_EACH, "rows sent to the next rank", "another rank"),
        (nothing_travels, EP, "no all-to-all", "all-to-all left out"),
        (stale_counts, EP, "counts of the micro-batch before", "stale by 1 micro-batch"),
        (weights_of_another_rank, EP, "weights of another rank's tokens", "weights of ep rank"),
    ):
        yield Fault(
            name=f"{name} (ep)",
            setting=setting,
            plant=plant,
            subjects=(Subject.ACTIVATIONS,),
            axis="ep",
            factor=factor,
            place=r"blocks\.0\.mlp$",
        )


FAULTS = tuple(_all_faults())
