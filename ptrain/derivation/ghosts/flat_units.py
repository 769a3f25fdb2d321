"""Flat units among the wraps: their life is ours, and played by `derivation.flat`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cached_property

from ptrain.costs import Footprint, Traffic
from ptrain.derivation.flat import Flat, flat_step_of, places_of
from ptrain.derivation.flat_rows import FlatRows, flat_buffers, flat_rows, scalars
from ptrain.derivation.ghosts.unit_notes import accumulation, kept_root
from ptrain.derivation.ghosts.wrapping import Times, Wrapped
from ptrain.derivation.tape import Scene
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.spec.layout import ranks_over
from ptrain.steps.wraps import FlatUnits


class Units:
    """A model of flat units."""

    reach: int | None

    def __init__(self, wrapped: Wrapped, step: FlatUnits) -> None:
        self.wrapped, self.step = wrapped, step
        units = wrapped.facts.units
        is_joined = len(places_of(wrapped.plan, units)) < len(units)
        # the reduction of the unit before, and who is gathered ahead or, of files, read
        self.reach = None if is_joined else 1 + step.prefetch + step.reads_files

    @cached_property
    def _rows(self) -> FlatRows:
        wrapped = self.wrapped
        return flat_rows(wrapped.spec, wrapped.plan, self.step, wrapped.facts)

    def player(self, scene: Scene) -> Flat:
        return Flat(scene, self.step)

    def kind_of_shard(self, shard: int) -> Hashable:
        """Flat buffers are cut alike for all ranks."""
        return 0

    def footprints(self, shard: int) -> Iterator[Footprint]:
        yield from self._rows.footprints

    def sent(self, times: Times | None) -> Iterator[Traffic]:
        """`times` adds nothing: in a pipeline units are given back after every pass or after none
        (`axes.pipeline.rules`), so that the order of passes does not count."""
        yield from self._rows.sent

    def scalars(self) -> Iterator[Traffic]:
        return scalars(self.wrapped.plan, self.step)

    def kept_gradients(self, unit: UnitFacts) -> Iterator[int]:
        trained = UnitFacts(modules=unit.modules, tensors=unit.trained)
        spec, plan, alone = self.wrapped.spec, self.wrapped.plan, ModelFacts(units=(trained,))
        step = flat_step_of(plan, unit)
        kept = (*step.updated, *step.gathered_gradients)
        yield sum(flat_buffers(spec, plan, alone).elements()) // ranks_over(spec, kept)

    def notes(self) -> Iterator[str]:
        yield from accumulation(self.wrapped)
        yield from kept_root(self.wrapped)
        yield from self._update()
        facts = self.wrapped.facts
        buffers = flat_buffers(self.wrapped.spec, self.wrapped.plan, facts)
        if more := sum(size * times for size, times in buffers.items()) - facts.numel:
            elements_more = f"{more} element{'' if more == 1 else 's'} more"
            yield f"flat units are padded: {elements_more} than the model has"

    def _update(self) -> Iterator[str]:
        wrap = self.step
        axes = [axis for axis in wrap.updated if axis not in wrap.parameters]
        if axes:
            yield (
                f"parameters are whole and the optimizer is a shard on {', '.join(axes)}: each "
                "rank updates its part, so the updated parameters must be gathered, r|Θ| that "
                "Theorem 2 as printed leaves out"
            )
        if wrap.consumed:
            yield (
                "gradients are M: a unit is reduced and updated as soon as its gradients are "
                "complete, so that no more than one unit's live at once"
            )
        late = [axis for axis in wrap.updated if axis not in wrap.gradients]
        if late and not wrap.consumed:
            yield (
                f"gradients are R and the optimizer is a shard on {', '.join(late)}: a reduce-"
                "scatter before the update replaces the all-reduce, r|G| instead of 2r|G|; "
                "gradients keep their full size, and only the rank's own part of them holds the sum"
            )
        whole = [axis for axis in wrap.optimizer if axis not in wrap.updated]
        if whole:
            yield (
                f"optimizer state is gathered over {', '.join(whole)} for the update, r|Ω| unit by "
                "unit, and every rank there computes the same whole update"
            )
        wider = [axis for axis in wrap.gradients if axis not in wrap.updated]
        if wider:
            yield (
                f"gradients are shards on {', '.join(wider)} and the update takes them whole "
                "there: they are gathered for it, r|G|"
            )
