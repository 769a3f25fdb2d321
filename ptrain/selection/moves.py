"""Seconds in which the units of a model are moved over the data axes, for many choices at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Protocol

from ptrain.cost import Collective, State
from ptrain.selection.arrays import Array, by_value, numpy
from ptrain.selection.profile import Wires
from ptrain.spec.rates import Hook

_BUCKET = 25 * 2**20  # bytes that DistributedDataParallel reduces at once
_THETA, _OMEGA, _GRADS = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS


class MovingWays(Protocol):
    """Choices over the same axes, as far as they say what is moved."""

    wires: Wires
    cut: dict[State, Array]
    materialized: Array
    flat: Array
    local: Array
    replicas: Array


class UnitMoves:
    """Seconds in which units of so many bytes are moved over the data axes: innermost the shards,
    which are `within` ranks apart, around them the copies."""

    def __init__(self, ways: MovingWays, degrees: Sequence[int], within: int) -> None:
        self.ways, self.degrees = ways, degrees
        self.strides = [within * prod(degrees[at + 1 :]) for at in range(len(degrees))]

    def _over(self, collective: Collective, mask: Array, sizes: Array) -> Array:
        """Seconds of one call over the axes that a choice's row of the mask has, of each size: its
        group has all their ranks."""
        np, wires = numpy(), self.ways.wires
        seconds = np.zeros(len(sizes))
        if not mask.any():
            return seconds
        for chosen_axes in product((False, True), repeat=len(self.degrees)):
            at = [place for place, is_in in enumerate(chosen_axes) if is_in]
            rows = np.flatnonzero((mask == np.array(chosen_axes)).all(axis=1)) if at else ()
            if not len(rows):
                continue
            ranks = prod(self.degrees[place] for place in at)
            over = partial(wires.seconds, collective, ranks, self.strides[at[-1]])
            seconds[rows] = by_value(sizes[rows], over)
        return seconds

    def _by_axis(self, mask: Array, sizes: Array) -> Iterator[tuple[Array, Array]]:
        """Yield the axes one by one, innermost first, as a mask of them alone, with what a unit
        takes there: a shard, behind those over which it is cut."""
        np = numpy()
        for at in reversed(range(len(self.degrees))):
            alone = np.zeros_like(mask)
            alone[:, at] = True
            yield alone, sizes
            sizes = np.where(mask[:, at], sizes / self.degrees[at], sizes)

    def _hook(self, flat: Hook, other: Hook) -> Array:
        """Seconds of the host's, if it computes by itself and there is anybody to send to; those of
        one that runs ahead are `issuing`."""
        is_free = self.ways.wires.pace.overlaps or not self.degrees
        return 0.0 if is_free else self._of_form(flat, other)

    def _of_form(self, flat: Hook, other: Hook) -> Array:
        pace = self.ways.wires.pace
        return numpy().where(self.ways.flat, pace.hook_seconds(flat), pace.hook_seconds(other))

    def issuing(self, sizes: Array) -> dict[str, Array]:
        """Return the seconds in which a host that runs ahead issues what is sent of a unit: its
        gather, its reduction and what is `settled` with the update. Of buckets it is a share."""
        np, ways, pace = numpy(), self.ways, self.ways.wires.pace
        cut = ways.cut[_GRADS] | ways.cut[_OMEGA]
        narrower = ways.cut[_OMEGA] & ~ways.cut[_GRADS]
        spread = ways.cut[_OMEGA] & ~ways.cut[_THETA] & ~ways.materialized[:, None]
        summed = narrower.any(axis=1) * 1.0 + (~cut).any(axis=1)
        buckets = sizes / _BUCKET * pace.hook_seconds(Hook.DDP_BUCKET)
        is_cut = ways.cut[_GRADS].any(axis=1)
        reduce = self._of_form(Hook.FLAT_REDUCE, Hook.FSDP2_REDUCE) * (is_cut | ~ways.flat)
        settled = summed * pace.hook_seconds(Hook.FLAT_REDUCE)
        settled = settled + spread.any(axis=1) * pace.hook_seconds(Hook.FLAT_GATHER)
        return {
            "issue_gather": self._of_form(Hook.FLAT_GATHER, Hook.FSDP2_GATHER),
            "issue_reduce": np.where(ways.local, 0.0, np.where(ways.replicas, buckets, reduce)),
            "issue_settled": np.where(ways.flat, settled, 0.0),
        }

    def gather(self, sizes: Array) -> Array:
        """Of Theta, over all the axes that cut it, or the master copy that it is made of."""
        np, ways = numpy(), self.ways
        over = np.where(ways.materialized[:, None], ways.cut[_OMEGA], ways.cut[_THETA])
        hook = self._hook(Hook.FLAT_GATHER, Hook.FSDP2_GATHER)
        return hook + self._over(Collective.ALL_GATHER, over, sizes)

    def reduce(self, sizes: Array) -> Array:
        """Shards first: what copies sum then is a shard. DDP reduces by bucket. A flat unit is
        reduced over all the axes that cut gradients at once."""
        np, ways = numpy(), self.ways
        if not self.degrees:
            return np.zeros(len(sizes))
        pace = ways.wires.pace
        hook = 0.0 if pace.overlaps else pace.hook_seconds(Hook.DDP_BUCKET)
        pieces = np.maximum(1.0, sizes / _BUCKET)
        is_first = np.arange(len(self.degrees)) == 0
        first = ways.replicas[:, None] & is_first
        buckets = pieces * (hook + self._over(Collective.ALL_REDUCE, first, sizes / pieces))
        cut = ways.cut[_GRADS] | ways.cut[_OMEGA]
        total, is_by_axis = np.zeros(len(sizes)), ~(ways.flat | ways.replicas)[:, None]
        for alone, size in self._by_axis(cut, sizes):
            alone &= is_by_axis
            total = total + self._over(Collective.REDUCE_SCATTER, alone & cut, size)
            total = total + self._over(Collective.ALL_REDUCE, alone & ~cut, size)
        flat = ways.cut[_GRADS] & ways.flat[:, None]
        total = np.where(ways.flat, self._over(Collective.REDUCE_SCATTER, flat, sizes), total)
        total = total + self._hook(Hook.FLAT_REDUCE, Hook.FSDP2_REDUCE)
        return np.where(ways.local, 0.0, np.where(ways.replicas, buckets, total))

    def settle(self, sizes: Array) -> Array:
        """What of a flat unit is reduced for its update: first into the slices of Omega, then a sum
        over the other axes. Where nothing cuts gradients that begins with the last backward."""
        np, ways = numpy(), self.ways
        if not self.degrees:
            return np.zeros(len(sizes))
        degrees = np.array(self.degrees, dtype=float)
        narrower = ways.cut[_OMEGA] & ~ways.cut[_GRADS]
        cut = ways.cut[_OMEGA] | ways.cut[_GRADS]
        shard = sizes / np.where(ways.cut[_GRADS], degrees, 1.0).prod(axis=1)
        slices = sizes / np.where(cut, degrees, 1.0).prod(axis=1)
        is_flat = ways.flat[:, None]
        return self._over(Collective.REDUCE_SCATTER, narrower & is_flat, shard) + self._over(
            Collective.ALL_REDUCE, ~cut & is_flat, slices
        )

    def spread(self, sizes: Array) -> Array:
        """What is gathered after the update: Theta that is whole where Omega is a slice."""
        ways = self.ways
        spread = ways.cut[_OMEGA] & ~ways.cut[_THETA] & ~ways.materialized[:, None]
        degrees = numpy().array(self.degrees, dtype=float)
        kept = sizes / numpy().where(ways.cut[_THETA], degrees, 1.0).prod(axis=1)
        return self._over(Collective.ALL_GATHER, spread, kept)


class PartedMoves:
    """Seconds in which units are moved of which a `share` is experts, over ranks of their own."""

    def __init__(self, rest: UnitMoves, experts: UnitMoves, share: float) -> None:
        self.rest, self.experts, self.share = rest, experts, share

    def gather(self, sizes: Array) -> Array:
        """Of Theta."""
        return self._both(UnitMoves.gather, sizes)

    def reduce(self, sizes: Array) -> Array:
        """Of gradients, after a backward pass."""
        return self._both(UnitMoves.reduce, sizes)

    def settle(self, sizes: Array) -> Array:
        """Of gradients, for the update."""
        return self._both(UnitMoves.settle, sizes)

    def spread(self, sizes: Array) -> Array:
        """Of Theta, after the update."""
        return self._both(UnitMoves.spread, sizes)

    def _both(self, seconds: Callable[[UnitMoves, Array], Array], sizes: Array) -> Array:
        if not self.share:
            return seconds(self.rest, sizes)
        return seconds(self.rest, sizes * (1 - self.share)) + seconds(
            self.experts, sizes * self.share
        )


def inside(degrees: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the degrees of the axes where the innermost is without so many ranks."""
    *outer, last = degrees or (1,)
    return (*outer, last // ranks) if degrees else ()
