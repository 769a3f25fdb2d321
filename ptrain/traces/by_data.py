"""What a model allocates where that depends on data: of one whose operators select by data the
traces at both extents of what is selected; of one that reads values and then does something else,
nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from ptrain.facts.model import ModelFacts
from ptrain.models.boundary import CodeRaised
from ptrain.models.objective import SampleBatch
from ptrain.models.selection import BOUNDS, Extent, Selected
from ptrain.timeline import gradient_order
from ptrain.traces.rank_part import TracedLayers

_READS = "its code reads values"


class Traced(Protocol):
    """Traces a micro-batch of these samples."""

    def __call__(self, samples: SampleBatch, extent: Extent = Extent.GIVEN) -> TracedLayers: ...


def facts_by_data(
    known: ModelFacts,
    layers: TracedLayers,
    traced: Traced,
    samples: SampleBatch,
    further: Callable[[], Sequence[SampleBatch]],
) -> ModelFacts:
    """Return the facts of a whole model with what it allocates. `layers` is what it did with
    these samples; `further` gives others, none where nobody knows which it takes."""
    selected = layers.recording.selected
    if selected.unbounded:
        return _unknown(known, layers, f"{_who(selected)}, of which no bound is known")
    if selected.operators:
        facts, *others = (_with(known, traced(samples, extent)) for extent in BOUNDS)
        unvisited = _unvisited(facts, _with(known, layers), traced, samples)
        return replace(facts, by_data=_who(selected), others=tuple(others), unvisited=unvisited)
    if selected.reads and (why := _doubt(layers, traced, further)):
        return _unknown(known, layers, why)
    return _with(known, layers)


def without_bounds(facts: ModelFacts) -> ModelFacts:
    """Return the facts of a model whose ranks have experts of their own. What these select is of
    other ranks' tokens too, as many as these send: of how much nobody knows a bound."""
    if not facts.by_data:
        return facts
    why = f"{facts.by_data}, and of other ranks' rows no bound is known"
    return replace(facts, timeline=None, work=None, others=(), by_data="", untraced=why)


def extents_of(facts: ModelFacts) -> Sequence[tuple[ModelFacts, Extent]]:
    """Return the facts at each extent at which the model is to be traced."""
    if not facts.others:
        return [(facts, Extent.GIVEN)]
    return list(zip((facts, *facts.others), BOUNDS, strict=True))


def _with(known: ModelFacts, layers: TracedLayers) -> ModelFacts:
    timeline = layers.timeline(known.blocks, known.unit_modules)
    work = layers.work(known.blocks)
    return replace(known, timeline=timeline, gradient_order=gradient_order(timeline), work=work)


def _unknown(known: ModelFacts, layers: TracedLayers, why: str) -> ModelFacts:
    return replace(_with(known, layers), timeline=None, work=None, untraced=why)


def _unvisited(
    facts: ModelFacts, given: ModelFacts, traced: Traced, samples: SampleBatch
) -> tuple[str, ...]:
    """Return the parameters that have a gradient in some traces and in others none: in that of
    samples that are alike, or where nothing but each module's first selection has an element."""
    seen = [set(given.gradient_order)]
    with suppress(CodeRaised, RuntimeError):  # code that does not run on nothing never has to
        seen.append(set(_with(facts, traced(samples, Extent.FIRST)).gradient_order))
    return tuple(name for name in facts.gradient_order if not all(name in names for names in seen))


def _doubt(
    layers: TracedLayers, traced: Traced, further: Callable[[], Sequence[SampleBatch]]
) -> str:
    """Return why what the layers did does not say what the model allocates of other samples; empty
    where it allocates the same of all that there are to try."""
    samples = further()
    if not samples:
        return f"{_READS}, and it has no nn.Embedding that says which other tokens to try"
    expected = layers.own_timeline
    try:
        is_same = all(traced(other).own_timeline == expected for other in samples)
    except CodeRaised as error:
        return f"{_READS}, and on other samples it ends: {error.faults[0].finding}"
    except RuntimeError as error:  # in backward
        return f"{_READS}, and on other samples it ends: {' '.join(str(error).split())[:120]}"
    return "" if is_same else f"{_READS}, and does another thing with each"


def _who(selected: Selected) -> str:
    """Return `h.0.mlp and 3 modules more select by data (nonzero)`."""
    first, *more = selected.modules
    number = len(more)
    others = f" and {number} module{'s' * (number > 1)} more" if more else ""
    names = ", ".join(name.removeprefix("aten::") for name in selected.operators)
    return f"{first or 'the model'}{others} select{'' if more else 's'} by data ({names})"
