"""Memory and traffic of FSDP2. Tensors are sharded by rows, padded to equal shards, or along a
later dimension. One unit of each kind is simulated by `fsdp2`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from enum import Enum, auto
from functools import cached_property

from ptrain.axes.data.cost import GatherCounts, count_reductions, local_rows
from ptrain.cost import Footprint, Phase, Traffic
from ptrain.derivation.ghosts.fsdp2 import FullySharded, UnitShards, index_over, shards_of
from ptrain.derivation.ghosts.in_place import InPlace
from ptrain.derivation.ghosts.wrapping import (
    Times,
    WrapContext,
    accumulation_notes,
    kept_root,
    micro_batches,
    state_rows,
)
from ptrain.derivation.tape import Account, Scene
from ptrain.facts.model import UnitFacts
from ptrain.runtime.interface import Shape
from ptrain.spec.spec import ranks_over
from ptrain.steps.wraps import FullyShard
from ptrain.timeline import Complete


class UnitTurn(Enum):
    """How the passes use a unit: in forward and backward, or in forward only. In the second case,
    backward may still prefetch the unit, because it is next in order."""

    BACK_AND_FORTH = auto()
    FORTH = auto()
    GATHERED_FOR_NOBODY = auto()


class Sharded(InPlace):
    """A model that FSDP2 shards by rows, with or without replicas."""

    def __init__(self, wrapped: WrapContext, step: FullyShard) -> None:
        super().__init__(wrapped)
        self.step, self.owns_master = step, step.materialized
        self.ranks = ranks_over(wrapped.spec, step.shard_axes)
        # prefetched units, and the previous one, whose gather buffer or reduction input is freed
        self.reach = 1 + (1 if step.prefetch is None else step.prefetch)

    def make_wrap(self, scene: Scene) -> FullySharded:
        return FullySharded(scene, self.step, self)

    @cached_property
    def _passed_by(self) -> tuple[UnitFacts, ...]:
        """The units that backward skips: frozen units before all trained ones."""
        facts = self.wrapped.facts
        return tuple(unit for unit in facts.units if facts.is_passed_by(unit))

    def turn_of(self, unit: UnitFacts) -> UnitTurn:
        if unit not in self._passed_by:
            return UnitTurn.BACK_AND_FORTH
        ahead = (1 if self.step.prefetch is None else self.step.prefetch) * self.step.overlaps
        number = len(self._passed_by) - self._passed_by.index(unit)
        return UnitTurn.GATHERED_FOR_NOBODY if number <= ahead else UnitTurn.FORTH

    def _shards(self, unit: UnitFacts) -> UnitShards:
        return shards_of(self.wrapped.spec, self.wrapped.plan, unit)

    def _shard_index(self, shards: UnitShards, shard: int) -> int:
        return index_over(self.wrapped.spec, self.wrapped.plan, shards, shard)

    @cached_property
    def _heights(self) -> list[tuple[Shape, UnitShards]]:
        """The numbers of rows that shards do not divide evenly, each as a shape, with the shards of
        its unit."""
        shards = [(unit, self._shards(unit)) for unit, _ in self.kinds]
        heights = {
            (shape[:1], own)
            for unit, own in shards
            for shape in unit.shapes
            if not own.shard_dim(shape)
        }
        uneven = ((height, own) for height, own in heights if math.prod(height) % own.ranks)
        return sorted(uneven, key=lambda pair: (pair[0], pair[1].ranks))

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return the rows that the shard has of tensors of each uneven height."""
        return self._shard_kinds[shard]

    @cached_property
    def _shard_kinds(self) -> list[tuple[int, ...]]:
        """By shard, the rows that it has of tensors of each uneven height."""
        rows = (
            [
                local_rows(
                    height, own.ranks, n if own.ranks == self.ranks else self._shard_index(own, n)
                )
                for n in range(self.ranks)
            ]
            for height, own in self._heights
        )
        return list(zip(*rows, strict=True)) or [()] * self.ranks

    @cached_property
    def stored_elements(self) -> int:
        """The elements of one rank's part of all tensors, including padding."""
        return sum(times * self._padded_elements(unit) for unit, times in self.kinds)

    def _padded_elements(self, unit: UnitFacts) -> int:
        """Return the elements of one rank's part of a unit, including padding."""
        return sum(map(self._shards(unit).padded_elements, unit.shapes))

    @cached_property
    def stored_gradients(self) -> int:
        """The elements of one rank's gradients, which are views of the padded reduction."""
        return sum(
            times * sum(map(self._shards(unit).padded_elements, unit.trained_shapes))
            for unit, times in self.kinds
        )

    def updated_shapes(self, unit: UnitFacts, shard: int) -> tuple[Shape, ...]:
        shards = self._shards(unit)
        index = self._shard_index(shards, shard)
        return tuple(shards.local_shape(shape, index) for shape in unit.trained_shapes)

    def footprints(self, shard: int) -> Iterator[Footprint]:
        layout, stored = self.wrapped.plan.update.layout, self.stored_elements
        optimizer = self.optimizer_bytes(shard)
        parameters = stored * layout.parameters.itemsize
        # FSDP2 stores only the shards, in the dtype of the masters. The parameters in the dtype of
        # compute exist only while a unit is gathered.
        if self.owns_master:  # the shards are the master copies
            assert layout.master is not None
            parameters, optimizer = 0, optimizer + stored * layout.master.itemsize
        return state_rows(parameters, optimizer, self.stored_gradients * layout.gradients.itemsize)

    def kept_gradients(self, unit: UnitFacts) -> Iterator[int]:
        yield from (
            sum(map(math.prod, self.updated_shapes(unit, shard))) for shard in range(self.ranks)
        )

    def traffic(self, times: Times | None) -> Iterator[Traffic]:
        """Yield the traffic, by simulating one unit of each kind."""
        for unit, number in self.kinds:
            if not unit.tensors:
                continue
            account = Account(self.wrapped.spec, number)
            scene = self.wrapped.make_scene((unit,), account)
            player = _Alone(self.make_wrap(scene), unit, account, self.turn_of(unit))
            if times is None:
                player.in_turn(self.wrapped.plan.accumulate.micro_batches)
            else:
                count = count_reductions(self.step.sync, self.wrapped.plan.accumulate.micro_batches)
                player.by_count(times(self.step.sync, is_root=unit.is_root), count)
            yield from account.rows

    def notes(self) -> Iterator[str]:
        yield from accumulation_notes(self.wrapped)
        shards = self.step.sync.after_forward(is_root=False)
        if not isinstance(shards, bool):
            yield (
                f"between forward and backward, a unit is sharded over {shards} ranks "
                f"instead of {self.ranks}: backward all-gathers it over {shards} ranks and "
                f"sends {shards - 1}/{shards} of it"
            )
        yield from kept_root(self.wrapped)
        numel = self.wrapped.facts.numel
        padded = sum(
            n * self._shards(unit).ranks * self._padded_elements(unit) for unit, n in self.kinds
        )
        if padded > numel:
            yield (
                f"each tensor is sharded by rows, ceil(d0 / {self.ranks}) on every rank: "
                f"{padded / numel - 1:.2%} more than in the model"
            )


class _Alone:
    """A step of one unit, counted as often as the account specifies."""

    def __init__(
        self, player: FullySharded, unit: UnitFacts, account: Account, turn: UnitTurn
    ) -> None:
        self.player, self.unit, self.account, self.turn = player, unit, account, turn
        self.tape, self.units = player.tape, account.times

    def in_turn(self, count: int) -> None:
        """Run micro-batches that go forward and backward one at a time."""
        for is_first, is_last, repeated in micro_batches(count):
            self.account.times = self.units * repeated
            self.player.begin(is_first=is_first, is_last=is_last)
            self._forward()
            self._gather_again()
            self._reduce()

    def by_count(self, gathers: GatherCounts, reductions: int) -> None:
        """Run micro-batches in flight together. Each call runs as often as in their schedule."""
        self.account.times = self.units * gathers.forward
        self._forward()
        self.account.times = self.units * gathers.backward
        # In a pipeline, forward and backward of a micro-batch do not alternate, so the counts are
        # independent of whether this forward left the unit gathered.
        self.player.gathers.reshard(0)  # another micro-batch freed it
        self._gather_again()
        self.account.times = self.units * reductions
        self.player.begin(is_first=True, is_last=True)
        self._reduce()

    def _forward(self) -> None:
        self.tape.enter(Phase.FORWARD)
        self.player.enter(0)
        self.player.leave(0)

    def _gather_again(self) -> None:
        self.tape.enter(Phase.BACKWARD)
        # `_backward_prefetch` takes the previous entry of `post_forward_order`, whether or not
        # backward reaches that unit. A frozen unit next to a trained one is therefore gathered
        # without use.
        if self.turn is UnitTurn.BACK_AND_FORTH:
            self.player.before_backward(0)
        elif self.turn is UnitTurn.GATHERED_FOR_NOBODY:
            self.player.gathers.gather_ahead(0)

    def _reduce(self) -> None:
        for tensor in self.unit.trained:
            self.player.complete(Complete(tensor.name, tensor.numel * self.player.e_parameters))
        self.player.after_backward(0)
