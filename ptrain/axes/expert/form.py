"""The expert axis of a spec: its experts, their loads, and its part of a search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import gcd

from ptrain.axes.candidates import AxisOption, FixedChoices, divisors, single_axis_space
from ptrain.axes.context.attention import all_spans, context_of
from ptrain.cost import Collective
from ptrain.errors import Fault, SpecError, input_error
from ptrain.facts.model import ExpertLayers, ModelFacts, TensorFacts
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import TOKEN_AXES, Axis, Factor, Placement, R
from ptrain.spec.routing import FORM, Bound, Choices, Histogram
from ptrain.spec.spec import Spec, place_of, ranks_over
from ptrain.steps.experts import BoundLoads, CountedLoads, ExpertParallel, Loads, Span

# A rank of ep has some of a layer's experts, and all other tensors.


@lru_cache(maxsize=64)
def with_own_experts(facts: ModelFacts, step: ExpertParallel, ranks: int) -> ModelFacts:
    """Return the facts with only the experts of one rank; all ranks have the same number.

    The first dimension of an expert tensor is the expert.

    Args:
        facts: The facts of the full model.
        step: The sharding of experts.
        ranks: Ranks that shard them.
    """

    def own(tensor: TensorFacts) -> TensorFacts:
        experts, *rest = tensor.shape
        assert experts % ranks == 0, "a rule: ranks have as many"
        return tensor._replace(shape=(experts // ranks, *rest), cut_over=step.axes)

    units = tuple(
        replace(unit, tensors=tuple(map(own, unit.tensors)))
        if step.has_experts(unit.modules)
        else unit
        for unit in facts.units
    )
    return replace(facts, units=units)


# Check of a histogram of router choices against a spec's layers with experts.


def find_histogram_mismatch(
    spec: Spec, histogram: Histogram, layers: Sequence[str], number: int, chosen: int
) -> str:
    """Return the first mismatch between a histogram and a spec's layers with experts.

    Args:
        spec: The spec.
        histogram: Counts of choices by layer, rank, micro-batch and expert.
        layers: Names of the layers with experts.
        number: Experts of a layer.
        chosen: Experts that each token chooses.

    Returns:
        The mismatch with its position. Empty if the histogram fits. Only the first one is returned,
        because the same error usually occurs in all counts.
    """
    if missing := [layer for layer in layers if layer not in histogram.layers]:
        return f"no counts for {', '.join(missing)}"
    if others := [layer for layer in histogram.layers if layer not in layers]:
        return f"{', '.join(others)}: the model has no MoE layer with this name"
    ranks = ranks_over(spec, spec.routing_axes)
    for layer, of_layer in zip(histogram.layers, histogram.counts, strict=True):
        if len(of_layer) != ranks:
            return f"{layer}: {len(of_layer)} ranks; {ranks} ranks have different tokens"
        for rank, of_rank in enumerate(of_layer):
            place = f"{layer}, rank {rank}"
            if len(of_rank) != spec.batch.accumulate:
                return f"{place}: {len(of_rank)} micro-batches; a step has {spec.batch.accumulate}"
            for index, of_experts in enumerate(of_rank):
                if wrong := _micro_batch_misfit(spec, of_experts, number, chosen):
                    return f"{place}, micro-batch {index}: {wrong}"
    return ""


def _micro_batch_misfit(spec: Spec, of_experts: Choices, number: int, chosen: int) -> str:
    """Return the mismatch of the counts of one micro-batch, or an empty text."""
    if len(of_experts) != number:
        return f"{len(of_experts)} experts; the layer has {number}"
    tokens = spec.batch.micro * spec.routed_tokens
    if (choices := sum(of_experts)) != tokens * chosen:
        return (
            f"{choices} choices; {tokens} tokens with {chosen} experts each need {tokens * chosen}"
        )
    if (most := max(of_experts)) > tokens:
        return f"expert {of_experts.index(most)} has {most} choices; there are {tokens} tokens"
    return ""


def factor_of(spec: Spec) -> Factor | None:
    """Return the factor of ep, or None if it has fewer than two ranks.

    Its placement is that of all tensors except the experts'.
    """
    return next((f for f in spec.factors if f.axis is Axis.EP and f.degree > 1), None)


def own_places(spec: Spec, shape: ModelShape) -> int:
    """Return the places of an expert that a rank lays out for the tokens of a sample that it
    routes.

    This is the capacity for the full sample, but at most the number of tokens that the rank routes.
    """
    return min(shape.capacity(spec.batch.sequence), spec.routed_tokens)


def experts_of(
    spec: Spec, units: Sequence[Sequence[str]], layers: ExpertLayers | None
) -> ExpertParallel | None:
    """Return the step that shards experts over the ranks.

    Args:
        spec: The spec.
        units: The modules of each unit. Experts are units.
        layers: The layers with experts. None if unknown.

    Returns:
        The step. None without an ep axis of two or more ranks, or if `layers` is None.

    Raises:
        SpecError: The ranks do not divide the experts, or `routing` does not fit the layers.
    """
    factor, shape = factor_of(spec), spec.model
    if factor is None or layers is None:
        return None
    if layers.number % factor.degree:
        divide = [d for d in range(1, layers.number + 1) if layers.number % d == 0]
        raise input_error(
            "mesh.ep",
            f"{factor.degree} ranks do not divide {layers.number} experts",
            f"Use one of {', '.join(map(str, divide))} for `mesh.ep`.",
        )
    if wrong := histogram_fault(spec, layers):
        raise SpecError(wrong)
    modules = [module for unit in units for module in unit]
    places = None
    if isinstance(shape, ModelShape) and shape.capacity_factor is not None:
        places = own_places(spec, shape)
    counting = _counting_axes(spec)
    return ExpertParallel(
        axis=factor.axis,
        modules=tuple(module for module in modules if module in layers.modules),
        number=layers.number,
        chosen=layers.chosen,
        features=layers.features,
        places=places,
        overlaps=spec.overlap_shared_experts,
        folded=spec.folded_axes,
        counting=counting,
        spans=tuple(_routed_spans(spec, counting)) if counting else (),
    )


def histogram_fault(spec: Spec, layers: ExpertLayers) -> Fault | None:
    """Return the fault of a histogram that does not fit these layers, or None."""
    if not isinstance(spec.routing, Histogram) or not is_by_routing(spec):
        return None
    named = [module.rpartition(".")[0] for module in layers.modules]
    wrong = find_histogram_mismatch(spec, spec.routing, named, layers.number, layers.chosen)
    return Fault(place="routing", finding=wrong, remedy=f"Use {FORM}.") if wrong else None


def _counting_axes(spec: Spec) -> tuple[Axis, ...]:
    """Return the axes along which ranks route different tokens of the same samples, outermost
    first.

    The result is empty if no axis is folded into ep.
    """
    axes = (*TOKEN_AXES, *spec.folded_axes) if spec.folded_axes else ()
    return tuple(f.axis for f in spec.factors if f.axis in axes and f.degree > 1)


def _routed_spans(spec: Spec, counting: Sequence[Axis]) -> Iterator[tuple[Span, ...]]:
    """Yield the tokens of a sample that each rank along these axes routes.

    The ranks of folded axes share the tokens of a cp rank equally, in order.
    """
    context = context_of(spec)
    held = [*all_spans(context)] if context else [((0, spec.batch.sequence),)]
    for place in range(ranks_over(spec, counting)):
        own = place_of(spec, counting, place)
        first = sum(own[axis] for axis in spec.folded_axes) * spec.routed_tokens
        of_rank = held[own[context.axis]] if context else held[0]
        yield tuple(_sub_spans(of_rank, first, first + spec.routed_tokens))


def _sub_spans(spans: Sequence[Span], first: int, behind: int) -> Iterator[Span]:
    """Yield the ranges of tokens at positions `first` to `behind` (exclusive) of these spans."""
    for start, end in spans:
        length = end - start
        own = max(first, 0), min(behind, length)
        if own[0] < own[1]:
            yield start + own[0], start + own[1]
        first, behind = first - length, behind - length


def is_by_routing(spec: Spec) -> bool:
    """Return True if sizes depend on the routing: experts are sharded, and have no capacity."""
    shape = spec.model
    has_places = isinstance(shape, ModelShape) and shape.capacity_factor is not None
    return factor_of(spec) is not None and not has_places


def loads_of(spec: Spec, step: ExpertParallel | None) -> Loads | None:
    """Return the routing that the spec states. None if it states none, or if no size depends
    on it."""
    routing = spec.routing
    if step is None or routing is None or not is_by_routing(spec):
        return None
    if isinstance(routing, Histogram):
        return CountedLoads(spec, routing)
    return BoundLoads(spec, step, routing, spec.batch.accumulate)


def routing_assumptions(spec: Spec) -> dict[str, str]:
    """Return the figures that depend on assumptions about routing, with a sentence about each.

    The result is empty if no figure depends on routing.
    """
    if factor_of(spec) is None or not is_by_routing(spec):
        return {}
    where = {
        None: f"are spread evenly over the experts of all {' × '.join(spec.expert_axes)} ranks",
        Bound.BEST: "select experts of their local rank",
        Bound.WORST: "all select the experts of one rank",
    }
    routing = spec.routing
    how = "are routed as counted in `routing`" if isinstance(routing, Histogram) else where[routing]
    why = (
        f"predicted for tokens that {how}; the router decides this at run time "
        "(`model.capacity_factor` makes it constant)"
    )
    exchanged = f"traffic {'+'.join(spec.expert_axes)} {Collective.ALL_TO_ALL}"
    return dict.fromkeys(("activations", "peak", exchanged), why)


# Candidates of a search: degrees that divide a layer's experts. Without a capacity the router
# decides how many rows a rank receives, so the ranking holds for the routing that the spec states.
#
# All tensors except experts have the same placement on ep as on the innermost data axis, so that
# both axes form one group. Experts have only one placement.

_COPIES = Placement(parameters=R, optimizer=R, gradients=R)


def _degrees_to_search(spec: Spec, devices: int, written: FixedChoices) -> Iterable[int]:
    shape = spec.model
    experts = shape.experts if isinstance(shape, ModelShape) else None
    return written.degrees_to_try(Axis.EP, devices, divisors(gcd(experts or 1, devices)))


def _options(spec: Spec, ranks: int) -> tuple[AxisOption, ...]:
    return (((_COPIES,), ()),)


SPACE = single_axis_space(Axis.EP, _degrees_to_search, _options, (_COPIES,), follows=True)
