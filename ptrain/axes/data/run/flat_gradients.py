"""G of one unit: a whole buffer while a backward pass fills it, then what is kept of it until the
update, as a whole or a shard, on any tier."""

from __future__ import annotations

import torch

from ptrain.axes.data.run.flat_parameters import Parameters, pieces
from ptrain.axes.data.run.local_part import Parameter
from ptrain.costs import State
from ptrain.plan.step import FlatUnits
from ptrain.rooms.comm import Move, all_reduce
from ptrain.rooms.tiers import cast
from ptrain.spec.axis import Axis
from ptrain.spec.placement import Tier

Axes = tuple[Axis, ...]


class Gradients:
    """`whole` collects a micro-batch's gradients in the dtype in which they travel; `kept` is what
    there is of their sum, in the dtype in which it is kept, cut along `now`; `raw` a layout's
    second copy: the last micro-batch's own shard."""

    def __init__(self, parameters: Parameters, step: FlatUnits) -> None:
        self.named = parameters.named
        self.label = parameters.label
        self.layout = parameters.layout
        self.tiers = parameters.tiers
        self.dtypes = parameters.dtypes
        self.cut = step.gradients
        self.tier = step.gradients_tier
        self.step = step
        self.whole: torch.Tensor | None = None
        self.raw: torch.Tensor | None = None
        self.kept: torch.Tensor | None = None
        self.now: Axes = self.cut
        self.partial = self._not_over((*step.updated, *self.cut))
        self._pieces: dict[Parameter, torch.Tensor] = {}
        self._mapped: torch.Tensor | None = None
        self._move: Move | None = None
        self._is_in_place = self.dtypes.parameters == self.dtypes.reduced

    @property
    def adds_up(self) -> bool:
        """Whether whole gradients are added to a sum of their own after every micro-batch."""
        return not self.cut and (self.dtypes.keeps_both or self.tier is not Tier.DEVICE)

    def open(self) -> None:
        """Before the unit's backward: somewhere for gradients to be added to."""
        if self.whole is not None:
            return
        device = self.named[0][1].device
        self.whole = torch.zeros(self.layout.padded, dtype=self.dtypes.reduced, device=device)
        self.layout.registry.tag(self.whole, State.GRADIENTS, name=self.label)
        for (_, parameter), piece in zip(self.named, pieces(self.whole, self.named), strict=True):
            if self._is_in_place:
                parameter.grad = piece
            else:
                self._pieces[parameter] = piece

    def accumulated(self, parameter: Parameter) -> None:
        """Autograd has a gradient: it added it in place, unless it is of another dtype."""
        if self._pieces and parameter.grad is not None:
            self._pieces[parameter].add_(parameter.grad)
            parameter.grad = None

    def finish(self, *, is_last: bool, is_due: bool) -> None:
        """After the unit's backward: sums over the ranks along `cut` where that is due, and keeps
        this rank's part. With overlap the first collective is only begun; `complete` does the
        rest."""
        if self.whole is None:
            return
        overlaps = self.step.overlaps and not self.step.consumed
        if self.cut and is_due and overlaps:
            self._move = self.layout.start_reduce_scatter(self.whole, (), self.cut)
        elif self.cut and is_due:
            self._reduced(self.layout.reduce_scatter(self.whole, (), self.cut))
        elif self.adds_up:
            self._keep(self.whole)
            if self.dtypes.keeps_both:
                self.whole.zero_()
            else:
                self._close()
        if overlaps and is_last and not self.cut and self.tier is Tier.DEVICE:
            self._start_update()

    def _reduced(self, shard: torch.Tensor) -> None:
        self._close()
        self._keep(shard)
        if self.dtypes.keeps_both:
            self.raw = shard

    def _start_update(self) -> None:
        """Nothing is reduced for keeping, so the update's first collective is begun instead."""
        held = self.whole if self.kept is None else self.kept
        assert held is not None
        if self.step.updated:
            self._move = self.layout.start_reduce_scatter(held, (), self.step.updated)
        elif self.partial:
            self._move = all_reduce(held, self._group(), is_awaited=False)

    def complete(self) -> None:
        """Wait for what `finish` began, and do what comes after it."""
        if self._move is None:
            return
        made, self._move = self._move.wait(), None
        if self.cut:
            self._reduced(made)
        elif self.step.updated:
            self.kept, self.now = made, self.step.updated
            if not self.dtypes.keeps_both:
                self._close()
        else:
            self.partial = ()

    def _keep(self, part: torch.Tensor) -> None:
        """Add one micro-batch's part to what is kept."""
        if self.tier is Tier.DEVICE:
            if self.kept is None:
                self.kept = self._cast(part, copy=self.dtypes.keeps_both)
            else:
                self.kept.add_(part)
            return
        arrived = self.tiers.move(self._cast(part), Tier.HOST, State.GRADIENTS)
        if self.tier is Tier.HOST:
            self.kept = arrived if self.kept is None else self.kept.add_(arrived)
            return
        if self.kept is not None:
            arrived = self.tiers.move(self.kept, Tier.HOST, State.GRADIENTS).add_(arrived)
        self.kept = self._file(arrived.numel()).copy_(arrived)

    def _cast(self, part: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        made = cast(part, self.dtypes.gradients, copy=copy)
        return self.layout.registry.tag(made, State.GRADIENTS, name=self.label)

    def _file(self, numel: int) -> torch.Tensor:
        """Made once: it takes no memory, and making it costs more than writing to it."""
        if self._mapped is None:
            self._mapped = self.tiers.empty(
                numel, self.dtypes.gradients, Tier.FILE, State.GRADIENTS
            )
        return self._mapped

    def for_update(self) -> None:
        """From the layout of G to that of the update: reduce what is still partial (smallest
        pieces first), then gather what the update needs whole, but for what it gathers itself."""
        held = self.whole if self.kept is None else self.kept
        if held is None:
            return
        if self.kept is not None:
            self._close()
        self.raw = None
        wanted = (*self.step.updated, *self.step.gathered_gradients)
        narrower = tuple(axis for axis in self.step.updated if axis not in self.now)
        wider = tuple(axis for axis in self.now if axis not in wanted)
        travels = bool(narrower or self.partial or wider) and self.tier is not Tier.DEVICE
        if self.tier is Tier.FILE:
            held = self.tiers.move(held, Tier.HOST, State.GRADIENTS)
        if travels:
            held = self.tiers.move(held, Tier.DEVICE, State.GRADIENTS)
        now = self.now
        if narrower:
            held, now = self.layout.reduce_scatter(held, now, narrower), (*now, *narrower)
        self._close()
        if self.partial:
            all_reduce(held, self._group()).wait()
        if wider:
            held = self.layout.gather(held, now, wider, State.GRADIENTS)
        held = self._cast(held)
        if travels:
            held = self.tiers.move(held, Tier.HOST, State.GRADIENTS)
        self.kept, self.now, self.partial = held, wanted, ()

    def working(self) -> torch.Tensor | None:
        """What the update works with, where it works: whole along the axes of S*."""
        held = self.kept
        if held is None:
            return None
        gathered, step = self.step.gathered_gradients, self.step
        on_device = self.tier is Tier.DEVICE
        if not on_device and (gathered or step.update_tier is Tier.DEVICE):
            held, on_device = self.tiers.move(held, Tier.DEVICE, State.GRADIENTS), True
        if gathered:
            held = self.layout.gather(held, self.now, gathered, State.GRADIENTS)
        if on_device and step.update_tier is not Tier.DEVICE:
            held = self.tiers.move(held, Tier.HOST, State.GRADIENTS)
        return held

    def clear(self) -> None:
        """After the update."""
        self._close()
        self.kept = self.raw = None
        self.now = self.cut
        self.partial = self._not_over((*self.step.updated, *self.cut))

    def read_ahead(self) -> None:
        """It is needed next."""
        if self.kept is not None:
            self.tiers.ahead(self.kept)

    def held(self) -> list[torch.Tensor]:
        """All that is there now."""
        return [held for held in (self.whole, self.raw, self.kept) if held is not None]

    def _close(self) -> None:
        self.whole = None
        self._pieces.clear()
        for _, parameter in self.named:
            parameter.grad = None

    def _group(self) -> torch.distributed.ProcessGroup:
        return self.layout.mesh.group(self.partial)

    def _not_over(self, axes: Axes) -> Axes:
        return tuple(axis for axis in self.step.axes if axis not in axes)
