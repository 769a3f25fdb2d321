"""Traffic of flat units in one steady step, call by call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from ptrain.axes.data.costs import reductions
from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State, Traffic
from ptrain.derivation.calls import gather_calls, group_over, reduce_scatter_calls, without
from ptrain.derivation.facts import ModelFacts
from ptrain.derivation.flat_memory import flat_buffers
from ptrain.plan.step import FlatUnits, Plan
from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlatUnits:
    """`times` units whose flat buffers have equal sizes, in bytes of parameters and gradients."""

    spec: Spec
    wrap: FlatUnits
    times: int
    parameters: int
    gradients: int

    def group(self, axes: Iterable[Axis]) -> Group:
        """The group over `axes`, in mesh order."""
        wanted = set(axes)
        return group_over(self.spec, [axis for axis in self.wrap.axes if axis in wanted])

    def gradient_shard(self, *cuts: tuple[Axis, ...]) -> int:
        """Bytes of a gradient that is a shard along all of `cuts`."""
        return self.gradients // self.group(chain(*cuts)).ranks

    def parameter_shard(self, *cuts: tuple[Axis, ...]) -> int:
        """Bytes of a parameter that is a shard along all of `cuts`."""
        return self.parameters // self.group(chain(*cuts)).ranks


def flat_sent(spec: Spec, plan: Plan, wrap: FlatUnits, facts: ModelFacts) -> Iterator[Traffic]:
    layout = plan.update.layout
    for padded, times in flat_buffers(spec, wrap, facts).items():
        units = _FlatUnits(
            spec=spec,
            wrap=wrap,
            times=times,
            parameters=padded * layout.parameters.itemsize,
            gradients=padded * layout.gradients.itemsize,
        )
        yield from _flat_passes(units, plan.accumulate.micro_batches)
        yield from _flat_reduction(units)
        yield from _flat_update(units, updates_in_place=layout.master is None)


def _flat_passes(units: _FlatUnits, num_micro: int) -> Iterator[Traffic]:
    """Forward and backward: gather Theta for use, reduce G to the shards in which it is kept."""
    wrap = units.wrap
    if wrap.parameters:
        group = units.group(wrap.parameters)
        yield from gather_calls(wrap.sync, num_micro, units.times, group, units.parameters)
    if wrap.gradients:
        times = units.times * reductions(wrap.sync, num_micro)
        calls = reduce_scatter_calls(wrap.reduce_scatter, Phase.BACKWARD, times)
        yield calls.over(units.group(wrap.gradients), units.gradients)


def _flat_reduction(units: _FlatUnits) -> Iterator[Traffic]:
    """From G's layout to Omega's: reduce what is partial, then gather what is needed whole."""
    wrap, times = units.wrap, units.times
    kept, updated = wrap.gradients, wrap.optimizer
    if narrower := without(updated, kept):
        calls = reduce_scatter_calls(wrap.reduce_scatter, Phase.UPDATE, times)
        yield calls.over(units.group(narrower), units.gradient_shard(kept))
    if partial := without(wrap.axes, (*updated, *kept)):
        calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.UPDATE, times)
        yield calls.over(units.group(partial), units.gradient_shard(kept, updated))
    if wider := without(kept, updated):
        calls = Calls(Collective.ALL_GATHER, State.GRADIENTS, Phase.UPDATE, times)
        yield calls.over(units.group(wider), units.gradient_shard(updated))


def _flat_update(units: _FlatUnits, *, updates_in_place: bool) -> Iterator[Traffic]:
    """Gather what the update reads of Theta (a master copy needs nothing), and what it wrote."""
    wrap = units.wrap
    stored, updated = wrap.parameters, wrap.optimizer
    calls = Calls(Collective.ALL_GATHER, State.PARAMETERS, Phase.UPDATE, units.times)
    if updates_in_place and (read := without(stored, updated)):
        shared = tuple(axis for axis in stored if axis in updated)
        yield calls.over(units.group(read), units.parameter_shard(shared))
    if written := without(updated, stored):
        yield calls.over(units.group(written), units.parameter_shard(stored))
