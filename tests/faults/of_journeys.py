"""Faults of the exchange of rows between expert-parallel ranks: wrong layout, stale counts, wrong
ranks, or no exchange."""

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
from tests.faults.of_experts import layer_of, replace_combination
from tests.faults.planting import next_ranks_value


def _travels(program: Program, journey: type[JourneyOverRanks], block: int = 0) -> None:
    """Replace the exchange of one layer."""
    group = program.mesh.group(program.spec.expert_axes)
    layer_of(program, block).journey = lambda: journey(group)


class HomeUnsorted(JourneyOverRanks):
    """An exchange whose returned rows are in expert order but read in rank order."""

    def return_rows(self, y_RC: Tensor) -> Tensor:
        assert self._routed is not None
        return self._exchange_rows(y_RC, self._routed.received, self._routed.sent)


class ThereUnsorted(JourneyOverRanks):
    """An exchange whose received rows are in rank order but read in expert order."""

    def send_rows(self, x_MC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
        x_RC, ends_e = super().send_rows(x_MC, ends_E)
        assert self._routed is not None
        return self._routed.by_rank(x_RC), ends_e

    def return_rows(self, y_RC: Tensor) -> Tensor:
        assert self._routed is not None
        return super().return_rows(self._routed.by_expert(y_RC))


class PlacesUnsorted(JourneyOverRanks):
    """An exchange whose returned places are in expert order but read in rank order."""

    def return_places(self, y_eTC: Tensor) -> Tensor:
        experts, places, hidden = y_eTC.shape
        ranks = self.group.size()
        y_ESC = y_eTC.reshape(ranks * experts, places // ranks, hidden)
        places_NE = self._places_of(y_ESC)
        return self._by_rank(self._exchange_rows(y_ESC, places_NE, places_NE)).flatten(0, 1)


class NextExperts(JourneyOverRanks):
    """An exchange that sends rows to the rank after the one of their experts."""

    def send_rows(self, x_MC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
        counts_NE = exchange._counts_of(ends_E).unflatten(0, (self.group.size(), -1))
        x_MC, ends_E = _shift_by_rank(x_MC, counts_NE, 1)
        self._sent = counts_NE.roll(1, 0)
        return super().send_rows(x_MC, ends_E)

    def return_rows(self, y_RC: Tensor) -> Tensor:
        return _shift_by_rank(super().return_rows(y_RC), self._sent, -1)[0]


def _shift_by_rank(x_MC: Tensor, counts_NE: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return the rows of each rank as the rows of the next one, with their offsets."""
    pieces = list(x_MC.split(counts_NE.sum(1).tolist()))
    rolled = [pieces[(place - shift) % len(pieces)] for place in range(len(pieces))]
    ends_E = counts_NE.roll(shift, 0).flatten().cumsum(0, dtype=torch.int32)
    return torch.cat(rolled), ends_E


def stale_counts(program: Program) -> None:
    """Use the counts of the previous micro-batch, to avoid a synchronization."""
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
    """Give rows to the local expert with the same index, without an exchange."""
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
    """Weight a token's expert outputs by the scores of the next rank's router."""
    group = program.mesh.group(program.spec.expert_axes)
    replace_combination(
        program, lambda weights, _, rows, __: (next_ranks_value(weights.detach(), group), rows)
    )


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
