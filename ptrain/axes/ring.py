"""The ring model of Theorem 2: the bytes that one rank sends for a collective, rounded up
per call."""

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
    """The flattened group of ranks that differ only along these axes, and its size."""

    axes: tuple[Axis, ...]
    ranks: int


def group_over(spec: Spec, axes: Sequence[Axis]) -> Group:
    """Return the group along `axes`, as every wrap uses it for its collectives."""
    return Group(tuple(axes), ranks_over(spec, axes))


def sent_bytes(collective: Collective, payload: int, ranks: int) -> int:
    """Return the bytes that one rank sends for one call.

    Args:
        collective: The collective.
        payload: The bytes of the full tensor.
        ranks: The size N of the group.

    Returns:
        (N-1)/N of the tensor, rounded up; twice that for an all-reduce, the full tensor for a send,
        and 0 for a receive.
    """
    match collective:
        case Collective.ALL_REDUCE:
            # A ring all-reduce is a reduce-scatter followed by an all-gather, with (N-1)/N of the
            # tensor each.
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
            # The bytes of a message count once, at its sender.
            return 0
        case _:
            raise AssertionError(f"the ring model does not cover {collective}")


class Calls(NamedTuple):
    """A number of equal calls in one step: the collective, the state and phase they serve, and how
    often."""

    collective: Collective
    state: State
    phase: Phase
    times: int = 1
    via: str | None = None

    def traffic(self, group: Group, payload: int) -> Traffic:
        """Return the traffic of the calls on one rank.

        Args:
            group: The axes and the number of ranks of the collectives.
            payload: The bytes of the full tensor of one call.

        Returns:
            The number of calls, and the payload and sent bytes of all calls.
        """
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
