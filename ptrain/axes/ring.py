"""Theorem 2's ring model: what one rank sends of a call's full tensor, rounded up per call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ptrain.cost import Collective, Phase, State, Traffic, TrafficKey
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, ranks_over
from ptrain.units import ceil_div


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that differ only along these axes (one flattened group), and how many they are."""

    axes: tuple[Axis, ...]
    ranks: int


def group_over(spec: Spec, axes: Sequence[Axis]) -> Group:
    """The group along `axes`, as every wrap issues its calls over it."""
    return Group(tuple(axes), ranks_over(spec, axes))


def sent_bytes(collective: Collective, payload: int, ranks: int) -> int:
    """r = (N-1)/N of the full tensor; twice that for an all-reduce; all of it for a send."""
    match collective:
        case Collective.ALL_REDUCE:
            return ceil_div(2 * (ranks - 1) * payload, ranks)
        case (
            Collective.ALL_GATHER
            | Collective.REDUCE_SCATTER
            | Collective.ALL_TO_ALL
            | Collective.BROADCAST
        ):
            return ceil_div((ranks - 1) * payload, ranks)
        case Collective.SEND:
            return payload
        case Collective.RECV:
            return 0
        case _:
            raise AssertionError(f"the ring model does not cover {collective}")


class Calls(NamedTuple):
    """Equal calls in one step: of which collective, for which state, when, how many times."""

    collective: Collective
    state: State
    phase: Phase
    times: int = 1
    via: str | None = None

    def over(self, group: Group, payload: int) -> Traffic:
        """Their traffic on one rank of `group`, each call with a full tensor of `payload` bytes."""
        return Traffic(
            key=TrafficKey(
                axes=tuple(axis.value for axis in group.axes),
                collective=self.collective,
                state=self.state,
                phase=self.phase,
                via=self.via,
            ),
            calls=self.times,
            payload_bytes=self.times * payload,
            sent_bytes=self.times * sent_bytes(self.collective, payload, group.ranks),
        )
