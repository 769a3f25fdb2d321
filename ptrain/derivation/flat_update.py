"""The update of one flat unit: its gradient, its optimizer state and its value brought to where
the update is, and back to where they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ptrain.costs import State
from ptrain.derivation.flat_bench import Bench, Buffer, Piece, kept, without
from ptrain.derivation.flat_gradients import Gradients
from ptrain.derivation.flat_theta import Theta
from ptrain.derivation.muon import muon_temporaries
from ptrain.derivation.optimizer_state import Kept, is_hidden, kept_tensors, needs_whole_tensors
from ptrain.facts.model import UnitFacts
from ptrain.spec.placement import Tier


class Route:
    """Between what is kept over Omega's axes on its tier and what the update works on."""

    def __init__(self, bench: Bench, buffer: Buffer) -> None:
        step = bench.step
        self.bench, self.buffer = bench, buffer
        self.kept, self.updated = step.optimizer, step.updated
        self.tier, self.update_tier = step.optimizer_tier, step.update_tier
        self.missing = without(self.kept, self.updated)

    def store(self, held: Kept) -> Piece:
        """What this rank keeps of one tensor of state."""
        numel = 1 if held.is_scalar else self.buffer.numel(self.kept)
        return kept(numel, held.dtype, self.tier)

    def fetch(self, stored: Piece, *, is_scalar: bool = False) -> Piece:
        """What the update works on: `stored` itself where it is that."""
        bench, held = self.bench, stored
        if self.tier is Tier.FILE:
            held = bench.move(held, Tier.HOST, State.OPTIMIZER)
        if held.tier is Tier.HOST and self.update_tier is Tier.DEVICE:
            held = bench.instead(held, bench.move(held, Tier.DEVICE, State.OPTIMIZER))
        if self.missing and not is_scalar:
            gathered = self.buffer.gather(held, self.kept, self.missing, State.OPTIMIZER)
            held = bench.instead(held, gathered)
        return held

    def put(self, stored: Piece, working: Piece, *, is_scalar: bool = False) -> None:
        """The inverse. `working` stays."""
        if working.storage is stored.storage:
            return
        bench, padded = self.bench, working
        if working.numel < self.buffer.numel(self.updated) and not is_scalar:
            padded = bench.new(self.buffer.padded, working.dtype, working.tier)
        part = padded
        if self.missing and not is_scalar:
            part = self.buffer.take(padded, self.updated, self.kept)
        if self.tier is Tier.FILE and self.update_tier is Tier.DEVICE:
            staged = bench.move(part, Tier.HOST, State.OPTIMIZER)
            bench.copied(staged, stored, State.OPTIMIZER)
        else:
            bench.copied(part, stored, State.OPTIMIZER)
        for temporary in (part, padded):
            if temporary.storage is not working.storage:
                bench.drop(temporary)


@dataclass(slots=True)
class Member:
    """One tensor that the optimizer updates: its state, and what is there while it is updated."""

    numel: int
    route: Route
    slots: list[tuple[Kept, Piece]]
    master: Piece | None
    matrix: tuple[int, ...] | None
    fetched: list[tuple[Piece, Piece]] = field(default_factory=list)
    gradient: Piece | None = None
    leaf: Piece | None = None


class UnitUpdate:
    """One unit's targets: its shard over the update's axes, or each of its tensors."""

    def __init__(
        self, bench: Bench, buffer: Buffer, unit: UnitFacts, theta: Theta, gradients: Gradients
    ) -> None:
        self.bench, self.buffer = bench, buffer
        self.theta, self.gradients = theta, gradients
        self.step = bench.step
        self.has_master = bench.layout.master is not None and not self.step.materialized
        self.by_tensor = needs_whole_tensors(bench.optimizer)
        self.route = Route(bench, buffer)
        self.members = list(self._members(unit))
        self._value: Piece | None = None

    def _members(self, unit: UnitFacts) -> Iterator[Member]:
        optimizer, layout = self.bench.optimizer, self.bench.layout
        if not self.by_tensor:
            held = kept_tensors(optimizer, layout)
            yield self._member(self.buffer.numel(self.step.updated), self.route, held, None)
            return
        for tensor in unit.tensors:
            hidden = is_hidden(unit, tensor)
            held = kept_tensors(optimizer, layout, is_hidden=hidden)
            route = Route(self.bench, Buffer(self.bench, tensor.numel, self.step.optimizer))
            yield self._member(tensor.numel, route, held, tensor.shape if hidden else None)

    def _member(
        self, numel: int, route: Route, held: tuple[Kept, ...], matrix: tuple[int, ...] | None
    ) -> Member:
        master = None
        if self.has_master:
            assert self.bench.layout.master is not None
            master = route.store(Kept(dtype=self.bench.layout.master))
        return Member(numel, route, [(each, route.store(each)) for each in held], master, matrix)

    def run(self) -> None:
        """All of the unit, once its gradient is as the update wants it."""
        working = self.gradients.working()
        if working is None:
            return
        bench, updated = self.bench, self.bench.layout.updated
        last = self.members[-1]
        for member in self.members:
            member.gradient = Piece(member.numel, working.dtype, working.storage)
            member.gradient = bench.cast(member.gradient, updated)
            if member is last and member.gradient.storage is not working.storage:
                self.gradients.forget_working(working)
            self._fetch(member)
        for member in self.members:
            if member.matrix is not None and self.step.update_tier is Tier.DEVICE:
                scaled = bench.layout.scales_loss
                bench.tape.spike(muon_temporaries(member.matrix, updated, scaled=scaled))
        for member in self.members:
            assert member.gradient is not None
            if member.gradient.storage is not working.storage:
                bench.drop(member.gradient)
            elif member is last:
                self.gradients.forget_working(working)
            self._put(member)

    def _fetch(self, member: Member) -> None:
        """The leaf, then its state."""
        bench, updated = self.bench, self.bench.layout.updated
        if member.master is not None:
            leaf = member.route.fetch(member.master)
            member.leaf = Piece(member.numel, leaf.dtype, leaf.storage)
        elif self._value is None:
            self._value = self._fetch_value()
        for held, stored in member.slots:
            fetched = member.route.fetch(stored, is_scalar=held.is_scalar)
            works = fetched
            if not held.is_scalar:
                fetched = Piece(member.numel, fetched.dtype, fetched.storage)
                works = bench.cast(fetched, updated)
            member.fetched.append((fetched, works))

    def _put(self, member: Member) -> None:
        bench = self.bench
        for (held, stored), (fetched, works) in zip(member.slots, member.fetched, strict=True):
            if works is not fetched:
                bench.drop(works)
            member.route.put(stored, fetched, is_scalar=held.is_scalar)
            bench.drop(fetched)
        member.fetched.clear()
        leaf, member.leaf = member.leaf, None
        if member.master is not None:
            assert leaf is not None
            member.route.put(member.master, leaf)
        if leaf is not None and self.by_tensor and self._value is None:
            self._value = self._room()
        if member is self.members[-1]:
            value, self._value = self._value or leaf, None
            assert value is not None
            self._store(value)
            bench.drop(value)
        bench.drop(leaf)

    def _fetch_value(self) -> Piece:
        """Theta's part over the update's axes on the update's tier: in place where it is that."""
        bench, theta, cut = self.bench, self.theta, self.step.updated
        held, now = theta.stored, theta.cut
        if self.step.materialized:
            return self.route.fetch(held)
        if held.tier is Tier.FILE:
            held = bench.move(held, Tier.HOST, State.PARAMETERS)
        if missing := without(now, cut):
            if held.tier is Tier.HOST:
                held = bench.instead(held, bench.move(held, Tier.DEVICE, State.PARAMETERS))
            gathered = self.buffer.gather(held, now, missing, State.PARAMETERS)
            held, now = bench.instead(held, gathered), without(now, missing)
        held = bench.instead(held, self.buffer.take(held, now, cut))
        if held.tier is not self.step.update_tier:
            held = bench.instead(held, bench.move(held, self.step.update_tier, State.PARAMETERS))
        return held

    def _room(self) -> Piece:
        """Somewhere for the unit's updated tensors: Theta itself where it is whole there."""
        theta, tier = self.theta, self.step.update_tier
        if not theta.cut and theta.tier is tier:
            return theta.stored
        return self.bench.new(self.buffer.padded, self.bench.stored, tier)

    def _store(self, value: Piece) -> None:
        """To where Theta lives, gathered where Theta is wider. `value` stays."""
        bench, theta, cut = self.bench, self.theta, self.step.updated
        cast = bench.cast(value, bench.stored)
        part = cast
        if self.step.materialized:
            self.route.put(theta.stored, cast)
        else:
            missing, extra = without(cut, theta.cut), without(theta.cut, cut)
            if extra:
                part = self.buffer.take(cast, cut, theta.cut)
            if missing:
                if part.tier is not Tier.DEVICE:
                    part = bench.move(part, Tier.DEVICE, State.PARAMETERS)
                theta.spread(part, (*cut, *extra), missing)
            else:
                theta.keep(part)
        for temporary in (part, cast):
            if temporary.storage is not value.storage:
                bench.drop(temporary)
