"""Why a layer of experts gives something else than on one device: by what a token's rows are
weighed, which rows it is given, and what becomes of those that find no place. Each is tried on what
one device's router and experts give.

Legend of shape suffixes: N tokens of all samples, K experts of a token, C hidden, M = N·K rows, S
places of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice

import torch
from torch import Tensor

from ptrain.models.moe import MoE
from ptrain.report.finding import Culprit, Moment
from ptrain.verification.causes.journeys import otherwise_routed
from ptrain.verification.causes.routed import Other, RoutedLayer
from ptrain.verification.causes.scene import Investigation
from ptrain.verification.causes.token_layout import Own, agreed
from ptrain.verification.causes.values import Explanation


def experts_cause(scene: Investigation) -> Culprit | None:
    """Explain what a layer of experts gives, by what most ranks say that depart. Collective."""
    if scene.first.moment is not Moment.FORWARD:
        return None
    return agreed(scene, lambda own: islice(_explanations(scene, own), 1))


def _explanations(scene: Investigation, own: Own) -> Iterator[Explanation]:
    path = scene.first.name
    layer = scene.reference.module.get_submodule(path)
    if not isinstance(layer, MoE):
        return
    routed = RoutedLayer.of(scene, path, layer)
    is_placed = layer.places is not None
    of_one_rank = _dropped_otherwise if is_placed else _rows_elsewhere
    for explanation, weights_NK, rows_NKC in chain(
        _other_weights(routed), of_one_rank(routed), otherwise_routed(scene, path, routed)
    ):
        if own.fits(routed.combined(weights_NK, rows_NKC)):
            yield explanation._replace(sentence=f"{path} {explanation.sentence}")


def _other_weights(routed: RoutedLayer) -> Iterator[Other]:
    """The right rows, otherwise weighed."""
    weights, rows = routed.weights_NK, routed.rows_NKC
    for distance, which in ((1, "before"), (-1, "behind")):
        sentence = (
            "weighs what a token's experts give by the router's weights of the token "
            f"{which} it: bring weights and rows into one order"
        )
        yield Explanation("weights of another token", sentence), weights.roll(distance, 0), rows
    for shift in range(1, weights.shape[1]):
        sentence = (
            "weighs what one of a token's experts gives by the router's weight of another: "
            "bring choices and weights into one order"
        )
        yield Explanation("weights of another choice", sentence), weights.roll(shift, 1), rows
    sentence = "adds up what a token's experts give without the router's weights: multiply by them"
    yield Explanation("not weighed", sentence), torch.ones_like(weights), rows


def _rows_elsewhere(routed: RoutedLayer) -> Iterator[Other]:
    """The right weights of rows that were not put back, or elsewhere."""
    weights, order = routed.weights_NK, routed.order_M
    ways: tuple[tuple[str, Callable[[], Tensor]], ...] = (
        (
            "puts rows back by the order in which they were sorted: use its inverse",
            lambda: routed.in_rows(order),
        ),
        (
            "adds up rows as they are sorted, by expert: put them back in the tokens' order",
            lambda: routed.in_rows(torch.arange(len(order), device=order.device)),
        ),
        (
            "takes rows by choice and then by token, where they are by token and then by choice",
            lambda: routed.rows_NKC.reshape(*reversed(weights.shape), -1).transpose(0, 1),
        ),
    )
    for sentence, rows in ways:
        yield Explanation("rows of other tokens", sentence), weights, rows()


def _dropped_otherwise(routed: RoutedLayer) -> Iterator[Other]:
    """Choices that find no place count, or others than these are dropped."""
    weights, rows, is_dropped_NK1 = (
        routed.weights_NK,
        routed.rows_NKC,
        routed.is_dropped_NK[..., None],
    )
    x_N1C = routed.x_BTC.flatten(0, 1)[:, None]
    last_C = routed.y.flatten(0, 1)[-1]
    counted: tuple[tuple[str, Tensor], ...] = (
        ("a choice that finds no place is given what lies in the last one: give it zeros", last_C),
        (
            "a choice that finds no place gives the token itself, which the residual stream has",
            x_N1C,
        ),
    )
    for sentence, instead in counted:
        of_others = torch.where(is_dropped_NK1, instead, rows)
        yield (
            Explanation("dropped tokens counted", f"drops wrongly: {sentence}"),
            weights,
            of_others,
        )
    kept = weights.masked_fill(routed.is_dropped_NK, 0.0)
    share_N1 = kept.sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    sentence = "divides by the weights of the choices that find a place: divide by those of all"
    yield Explanation("weights of kept choices", sentence), kept / share_N1.clamp(min=1e-30), rows
    sentence = "drops nothing: what is beyond an expert's capacity has to pass it by"
    yield Explanation("dropped tokens counted", sentence), weights, _of_all(routed)


def _of_all(routed: RoutedLayer) -> Tensor:
    """Return what all choices give, as if every one had a place."""
    x_NC = routed.x_BTC.flatten(0, 1)
    experts = routed.layer.experts
    with torch.no_grad():
        y_ENC = experts(x_NC.expand(experts.num_experts, -1, -1))
    return y_ENC[routed.chosen_NK, torch.arange(len(x_NC), device=x_NC.device)[:, None]]
