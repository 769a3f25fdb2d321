"""Theta of one unit: kept as a whole or a shard, on any tier, or made of Omega's master copy; whole
on the device while it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ptrain.axes.data.costs import Run, runs
from ptrain.axes.data.run.flat_shard import Route
from ptrain.axes.data.run.layout import FlatLayout, same_memory
from ptrain.axes.data.run.local_part import Parameter, is_cut
from ptrain.costs import State
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.plan.step import FlatUnits
from ptrain.rooms.comm import Move
from ptrain.rooms.tiers import Tiers, cast
from ptrain.spec.axis import Axis
from ptrain.spec.batch import GatherAfterUpdate
from ptrain.spec.placement import Tier
from ptrain.spec.precision import Layout

Named = list[tuple[str, Parameter]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """Of one training step, as torch's; `stored` is Theta's where it is kept."""

    parameters: torch.dtype
    reduced: torch.dtype
    gradients: torch.dtype
    stored: torch.dtype
    keeps_both: bool

    @classmethod
    def of(cls, layout: Layout, step: FlatUnits) -> Dtypes:
        stored = layout.updated if step.materialized else layout.parameters
        return cls(
            parameters=TORCH_DTYPES[layout.parameters],
            reduced=TORCH_DTYPES[layout.reduced],
            gradients=TORCH_DTYPES[layout.gradients],
            stored=TORCH_DTYPES[stored],
            keeps_both=layout.keeps_both,
        )


class Parameters:
    """`stored` is this rank's shard over `cut` (all of it where `cut` is empty) on its tier;
    `whole` the buffer that the module's parameters are views of: `stored` itself, or empty between
    uses."""

    def __init__(
        self, named: Named, layout: FlatLayout, step: FlatUnits, dtypes: Dtypes, tiers: Tiers
    ) -> None:
        self.named = named
        self.layout = layout
        self.tiers = tiers
        self.cut = step.parameters
        self.tier = step.parameters_tier
        self.dtypes = dtypes
        self.is_materialized = step.materialized
        self.route = Route(
            layout=layout,
            tiers=tiers,
            kept=self.cut,
            updated=step.updated,
            tier=self.tier,
            update_tier=step.update_tier,
        )
        first = named[0][1]
        whole = first.detach().new_zeros(layout.padded)
        for (_, parameter), piece in zip(named, pieces(whole, named), strict=True):
            piece.copy_(parameter.detach())
            parameter.data = piece
        self.whole = whole
        layout.registry.tag(whole, State.PARAMETERS, name=self.label)
        self.is_transient = bool(self.cut) or self.tier is not Tier.DEVICE or self.is_materialized
        self.stored = self._first_stored() if self.is_transient else whole
        self._nbytes = whole.untyped_storage().nbytes()
        self._gathering: Move | None = None
        self._storing: Move | None = None
        self._behind: tuple[Axis, ...] = ()
        self._cut_runs: dict[tuple[Axis, ...], list[Run]] = {}
        self.is_gathered = True
        self.release()

    @property
    def state(self) -> State:
        """What the stored bytes count as: a master copy is Omega's."""
        return State.OPTIMIZER if self.is_materialized else State.PARAMETERS

    def cut_runs(self, axes: Sequence[Axis]) -> list[Run]:
        """(start, end, whether their operators are cut) of the runs of elements of a shard over
        `axes`; padding belongs to the run before it."""
        key = tuple(axes)
        if key not in self._cut_runs:
            tensors = [(parameter.numel(), is_cut(parameter)) for _, parameter in self.named]
            within = self.layout.stretches(key)
            self._cut_runs[key] = list(runs(tensors, self.layout.padded, within))
        return self._cut_runs[key]

    @property
    def label(self) -> str:
        """The unit's first tensor and its last, for whoever reads what is sent."""
        return " … ".join(dict.fromkeys((self.named[0][0], self.named[-1][0])))

    @property
    def behind(self) -> tuple[Axis, ...]:
        """Along these axes `stored` is up to date in this rank's own part alone, until `settle`."""
        return self._behind

    def _first_stored(self) -> torch.Tensor:
        part = self.layout.take(self.whole, (), self.cut).to(self.dtypes.stored)
        stored = self.tiers.empty(part.numel(), part.dtype, self.tier, self.state)
        return stored.copy_(part)

    def gather(self) -> None:
        """Make `whole` whole, if it is not."""
        self.settle()
        self._issue(is_awaited=True)
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def prefetch(self) -> None:
        """Begin to; `gather` then waits for the rest."""
        self.settle()
        self._issue(is_awaited=False)

    def _issue(self, *, is_awaited: bool) -> None:
        if self.is_gathered:
            return
        self.is_gathered = True
        self.whole.untyped_storage().resize_(self._nbytes)
        with torch.no_grad():
            part = self._for_use()
            if not self.cut:
                self.whole.copy_(part)
            elif is_awaited:
                self.layout.gather(part, self.cut, self.cut, State.PARAMETERS, into=self.whole)
            else:
                self._gathering = self.layout.start_gather(
                    part, self.cut, self.cut, State.PARAMETERS, into=self.whole
                )

    def _for_use(self) -> torch.Tensor:
        """What is stored, in the dtype of use, as near to `whole` as its collective needs it."""
        part, state = self.stored, self.state
        if self.tier is Tier.FILE:
            part = self.tiers.move(part, Tier.HOST, state)
        if part.dtype != self.whole.dtype and (self.cut or self.tier is not Tier.DEVICE):
            part = cast(part, self.whole.dtype)
            self.layout.registry.tag(part, State.PARAMETERS, name=self.label)
        if self.cut and self.tier is not Tier.DEVICE:
            part = self.tiers.move(part, Tier.DEVICE, State.PARAMETERS)
        return part

    def release(self) -> None:
        """Give `whole` back, if it can be rebuilt."""
        if not self.is_transient or not self.is_gathered:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.whole.untyped_storage().resize_(0)
        self.is_gathered = False

    def spread(
        self,
        part: torch.Tensor,
        cut: Sequence[Axis],
        missing: tuple[Axis, ...],
        when: GatherAfterUpdate,
    ) -> None:
        """Make `stored` of the ranks' updated parts: shards over `cut`, on the device, gathered
        along `missing`."""
        into = self.stored if self.tier is Tier.DEVICE else None
        match when:
            case GatherAfterUpdate.BLOCKING:
                held = self.layout.gather(part, cut, missing, State.PARAMETERS, into=into)
                self._keep(held)
            case GatherAfterUpdate.DURING_UPDATE:
                self._storing = self.layout.start_gather(
                    part, cut, missing, State.PARAMETERS, into=into
                )
            case GatherAfterUpdate.NEXT_FORWARD:
                assert into is not None, "what is gathered by the next forward is on the device"
                self.layout.put(into, part, self.cut, cut)
                self._behind = missing

    def settle(self) -> None:
        """Complete what the last update left to the next use."""
        if self._behind:
            missing, self._behind = self._behind, ()
            cut = (*self.cut, *missing)
            with torch.no_grad():
                part = self.layout.take(self.stored, self.cut, cut)
                self.layout.gather(part, cut, missing, State.PARAMETERS, into=self.stored)

    def finish_update(self) -> None:
        """Complete what was issued while other units were updated."""
        if self._storing is not None:
            held = self._storing.wait()
            self._storing = None
            self._keep(held)

    def _keep(self, held: torch.Tensor) -> None:
        """Write an updated tensor of the size of `stored` to it, from the device."""
        if same_memory(held, self.stored):
            return
        if self.tier is Tier.FILE:
            held = self.tiers.move(held, Tier.HOST, State.PARAMETERS)
        self.stored.copy_(held)


def pieces(whole: torch.Tensor, named: Named) -> Iterator[torch.Tensor]:
    """The named tensors as views of a unit's whole buffer."""
    start = 0
    for _, parameter in named:
        yield whole[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
