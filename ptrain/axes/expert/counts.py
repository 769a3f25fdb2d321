"""Whether counts of what tokens choose are those of a spec's layers with experts."""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.spec.layout import ranks_over
from ptrain.spec.routing import Choices, Histogram
from ptrain.spec.spec import Spec


def misfit(
    spec: Spec, histogram: Histogram, layers: Sequence[str], number: int, chosen: int
) -> str:
    """Return what does not fit layers of so many experts, of which a token chooses so many
    (`chosen`), with its place; empty where all does. It is one: what is wrong with counts in one
    place mostly is in all of them."""
    if missing := [layer for layer in layers if layer not in histogram.layers]:
        return f"no counts of {', '.join(missing)}"
    if others := [layer for layer in histogram.layers if layer not in layers]:
        return f"{', '.join(others)}: the model has no such layer with experts"
    ranks = ranks_over(spec, spec.routing_axes)
    for layer, of_layer in zip(histogram.layers, histogram.counts, strict=True):
        if len(of_layer) != ranks:
            return f"{layer}: {len(of_layer)} ranks; {ranks} have tokens of their own"
        for rank, of_rank in enumerate(of_layer):
            place = f"{layer}, rank {rank}"
            if len(of_rank) != spec.batch.accumulate:
                return f"{place}: {len(of_rank)} micro-batches; a step has {spec.batch.accumulate}"
            for index, of_experts in enumerate(of_rank):
                if wrong := _misfit_of(spec, of_experts, number, chosen):
                    return f"{place}, micro-batch {index}: {wrong}"
    return ""


def _misfit_of(spec: Spec, of_experts: Choices, number: int, chosen: int) -> str:
    """Return what does not fit in the counts of one micro-batch."""
    if len(of_experts) != number:
        return f"{len(of_experts)} experts; the layer has {number}"
    tokens = spec.batch.micro * spec.routed_tokens
    if (choices := sum(of_experts)) != tokens * chosen:
        return f"{choices} choices; {tokens} tokens make {chosen} each, which are {tokens * chosen}"
    if (most := max(of_experts)) > tokens:
        return f"{most} choices of expert {of_experts.index(most)}; there are {tokens} tokens"
    return ""
