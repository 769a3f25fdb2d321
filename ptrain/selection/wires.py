"""What ranks send each other on a cluster, in seconds that a search asks for once each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ptrain.costs import Collective
from ptrain.derivation.activation_moves import COPIES
from ptrain.facts.operators import Operator
from ptrain.rates.pace import Pace, UnknownRate
from ptrain.selection.profile import nodes_of
from ptrain.spec.placement import Tier
from ptrain.spec.rates import Hook, OperatorKind
from ptrain.spec.spec import Spec

_COPIED = 2**24  # bytes by which the pace of copies between tiers is asked


@dataclass(frozen=True)
class Wires:
    """Seconds of what ranks send each other on a cluster, asked once each; `is_nominal`: they are
    none that anybody measured."""

    base: Spec
    pace: Pace
    is_nominal: bool = False

    @cached_property
    def is_issued(self) -> bool:
        """Whether hosts that run ahead of their devices are known to take any time."""
        return self.pace.overlaps and any(self.pace.hook_seconds(hook) for hook in Hook)

    @cached_property
    def _known(self) -> dict[tuple[Collective, int, int, int], float]:
        return {}

    @cached_property
    def _operators(self) -> dict[tuple[OperatorKind, int], float]:
        return {}

    @cached_property
    def _updates(self) -> dict[tuple[int, int], float]:
        return {}

    def seconds(self, collective: Collective, ranks: int, stride: int, payload: float) -> float:
        """Return the seconds of a collective over ranks that are `stride` apart."""
        if ranks == 1 or not payload:
            return 0.0
        nodes = nodes_of(self.base, ranks, stride)
        key = (collective, ranks, nodes, int(payload))
        if key not in self._known:
            self._known[key] = self.pace.collective_seconds(
                collective, ranks=ranks, nodes=nodes, payload=int(payload)
            )
        return self._known[key]

    def operator_seconds(self, kind: OperatorKind, size: float) -> float:
        """Return the seconds of an operator on so many bytes of values as they are computed."""
        key = kind, int(size)
        if key not in self._operators:
            dtype = self.base.precision.effective.parameters
            self._operators[key] = self.pace.operator_seconds(Operator(kind, dtype, key[1:]))
        return self._operators[key]

    def update_seconds(self, elements: int, tensors: int) -> float:
        """Return the seconds of an update of so many elements in so many tensors."""
        key = elements, tensors
        if key not in self._updates:
            base = self.base
            name, layout = base.optimizer.name, base.precision.effective
            self._updates[key] = self.pace.update_seconds(
                name, layout, elements=elements, tensors=tensors
            )
        return self._updates[key]

    def there_and_back(self, tier: Tier) -> float:
        """Return the seconds of a byte that leaves for a tier and comes back: endless where that is
        not known."""
        try:
            return sum(self.pace.copy_seconds(copy, _COPIED) for copy in COPIES[tier]) / _COPIED
        except UnknownRate:
            return float("inf")
