"""One device, DistributedDataParallel and ZeroRedundancyOptimizer in closed form.

DDP's buckets are G itself (`gradient_as_bucket_view`): they live always, from the first step on;
autograd's gradient stands beside its view only while it is copied there or added to it. Each bucket
is all-reduced once in a step. ZeroRedundancyOptimizer gives whole tensors to ranks, the largest
first to the one that has least; each owner broadcasts one bucket of what it updated, or one element
of fp32 where it owns nothing (torch.distributed.optim.zero_redundancy_optimizer).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ptrain.axes.data.cost import assign_owners, bucket_caps, bucket_sizes
from ptrain.axes.ring import Calls, Group
from ptrain.cost import Collective, Phase, State, Traffic
from ptrain.spec.placement import Tier
from ptrain.spec.precision import DType, Layout
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import LocalGradients, Replicate
from tests.oracles.data.chain import Resident, UnitChain
from tests.oracles.data.optimizer import (
    COUNTER_BYTES,
    has_counter,
    norm,
    num_moments,
    update_casts,
)

_INDEX_BYTES = 4  # int32: of a bucket's tensors, broadcast when buckets are rebuilt


@dataclass(frozen=True)
class ReplicatedForm:
    """The closed forms of a plan with replicated parameters and gradients."""

    spec: Spec
    plan: Plan
    step: Replicate | LocalGradients
    chain: UnitChain

    @property
    def layout(self) -> Layout:
        return self.plan.update.layout

    @property
    def buckets(self) -> Replicate | None:
        """Return DDP's buckets, if there is more than one device."""
        return self.step if isinstance(self.step, Replicate) else None

    @property
    def ranks(self) -> int:
        return math.prod(self.spec.degree(a) for a in self.buckets.axes) if self.buckets else 1

    def _owned(self, index: int) -> list[tuple[int, bool]]:
        """Return (elements, whether Muon updates it) for each tensor that a rank updates."""
        known = [
            (numel, unit.is_hidden(shape))
            for unit in self.chain.units
            for shape, numel in zip(unit.shapes, unit.numels, strict=True)
        ]
        if self.buckets is None or not self.buckets.zero_redundancy:
            return known
        owners = assign_owners([numel for numel, _ in known], self.ranks)
        return [tensor for tensor, owner in zip(known, owners, strict=True) if owner == index]

    def _gradient_buckets(self, step: Replicate) -> list[int]:
        """Return the bytes of DDP's buckets."""
        itemsize = self.layout.gradients.itemsize
        arriving = (numel * itemsize for numel in self.chain.arrival)
        return bucket_sizes(arriving, bucket_caps(step.bucket_bytes))

    def _sent_buckets(self) -> list[int]:
        """Return the bytes of each owner's broadcasts."""
        itemsize = self.layout.parameters.itemsize
        owned = (sum(numel for numel, _ in self._owned(rank)) for rank in range(self.ranks))
        return [numel * itemsize or DType.FP32.itemsize for numel in owned]

    def resident(self, index: int) -> Resident:
        """Return the bytes on the rank that owns the tensors of `index`."""
        layout, optimizer = self.layout, self.spec.optimizer
        theta = self.chain.numel * layout.parameters.itemsize
        if self.buckets is not None and self.buckets.zero_redundancy:
            theta = sum(self._sent_buckets())
        omega = 0
        for numel, hidden in self._owned(index):
            omega += numel * num_moments(optimizer, is_hidden=hidden) * layout.moments.itemsize
            omega += numel * (layout.master.itemsize if layout.master else 0)
            omega += COUNTER_BYTES * has_counter(optimizer, is_hidden=hidden)
        gradients = self.chain.numel * layout.gradients.itemsize
        return {
            State.PARAMETERS: Counter({Tier.DEVICE: theta}),
            State.OPTIMIZER: Counter({Tier.DEVICE: omega}),
            State.GRADIENTS: Counter({Tier.DEVICE: gradients}),
        }

    def transient(self) -> int:
        """Return 0: no unit is gathered."""
        return 0

    def sent(self) -> Iterator[Traffic]:
        """Return the traffic: each bucket once per step for any accumulation, and updated
        parameters from their owners."""
        if self.buckets is None:
            return
        group = Group(self.buckets.axes, self.ranks)
        buckets = self._gradient_buckets(self.buckets)
        for size in buckets:
            yield Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.BACKWARD).traffic(group, size)
        rebuilt = Calls(Collective.BROADCAST, State.OTHER, Phase.SETUP)
        yield rebuilt.traffic(group, _INDEX_BYTES * (len(self.chain.tensors) + 1))
        yield rebuilt.traffic(group, _INDEX_BYTES * len(buckets))
        if self.buckets.zero_redundancy:
            for size in self._sent_buckets():
                updated = Calls(Collective.BROADCAST, State.PARAMETERS, Phase.UPDATE)
                yield updated.traffic(group, size)

    def peaks(self, index: int) -> dict[Phase, int]:
        """Return bytes above resident memory by phase: the gradients, one of autograd's gradients,
        and the casts of the update."""
        layout, several = self.layout, self.plan.accumulate.micro_batches > 1
        whole = self.chain.numel * layout.gradients.itemsize
        largest = max(self.chain.arrival) * layout.parameters.itemsize
        is_copied = self.buckets is not None and not several
        added = self.chain.is_fresh and (several or self.buckets is not None)
        # a norm of each bucket, where there are some
        normed = self._gradient_buckets(self.buckets) if self.buckets else self.chain.tensors
        at_once, stays = norm(self.spec, self.plan, self.chain, len(normed))
        casts = max(update_casts(self.spec, layout, unit, unit.numels) for unit in self.chain.units)
        return {
            Phase.FORWARD: whole if self.buckets is not None or several else 0,
            Phase.BACKWARD: whole + largest * (is_copied or added),
            Phase.UPDATE: whole + max(at_once, stays + casts),
        }
