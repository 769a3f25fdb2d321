"""Why a module's output, or the gradient of it, is not that of one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from ptrain.report.finding import Moment, Subject
from ptrain.verification.causes.context import context_cause
from ptrain.verification.causes.experts import experts_cause
from ptrain.verification.causes.order import order_of_slices
from ptrain.verification.causes.rerun import output_with
from ptrain.verification.causes.routers import balance_cause
from ptrain.verification.causes.scene import EXACT, Cause, Investigation
from ptrain.verification.causes.trials import LIKE_ROUNDINGS, directly
from ptrain.verification.factors import factor_text, is_even, multiple, products, share_of_sum
from ptrain.verification.parts import held, relative
from ptrain.verification.roundings import COARSER, rounded_to

RULED_OUT = (
    "an addend of a sum over ranks, other parameters, a multiple, another rank's part, rows of "
    "other tokens or experts, keys and positions of other slices, slices in another order, a "
    "rounding"
)


def output_cause(scene: Investigation) -> Cause | None:
    """Explain the first departure, a module's output or the gradient of it. Collective."""
    causes: tuple[Callable[[Investigation], Cause | None], ...] = (
        balance_cause,
        _partial,
        _other_weights,
        _multiple,
        _of_another_rank,
        experts_cause,
        context_cause,
        _of_slices,
        _rounded,
    )
    for cause in causes:
        if (explanation := cause(scene)) is not None:
            return explanation
    return None


def _own(scene: Investigation) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """This rank's tensor and the reference's whole one."""
    is_forward = scene.first.moment is Moment.FORWARD
    key = scene.first.name, scene.first.index
    evidence = scene.evidence
    own, its = evidence.outputs, evidence.expected_outputs
    if is_forward:
        return own.forward.get(key), its.forward.get(key)
    return own.backward.get(key), its.backward.get(key)


def _parts(scene: Investigation) -> tuple[torch.Tensor, torch.Tensor] | None:
    """This rank's part, and the reference's."""
    tensor, whole = _own(scene)
    if tensor is None or whole is None:
        return None
    part = scene.own_part(tensor, whole)
    return None if part is None else (held(tensor), part.of(whole))


def _partial(scene: Investigation) -> Cause | None:
    parts = scene.gather_parts(*_own(scene))
    votes: list[str] = []
    if (pair := _parts(scene)) is not None:
        _, expected = pair
        for axes, ranks in scene.partial_over(parts):
            values = [parts[rank].values for rank in ranks]
            wanted = expected.reshape(-1)[: len(values[0])]
            fit = share_of_sum(values, wanted)
            is_own = relative(values[ranks.index(scene.rank)], wanted) <= EXACT
            if fit.holds(EXACT) and abs(fit.factor - 1.0) <= EXACT and not is_own:
                votes.append(" and ".join(axes))
    by_rank = scene.exchange.gather(votes)
    everyone = [axis for its in by_rank for axis in its]
    if not everyone:
        return None
    axes = Counter(everyone).most_common(1)[0][0]
    what = "output" if scene.first.moment is Moment.FORWARD else "output's gradient"
    sentence = (
        f"each rank of {axes} has its own addend of the {what} of {scene.first.place}: sum it over "
        f"{axes}"
    )
    cause = Cause(axes.partition(" ")[0], f"missing all-reduce over {axes}", sentence)
    return directly(cause, f"summed over {axes} it is one device's", by_all=scene.by_all(by_rank))


def _other_weights(scene: Investigation) -> Cause | None:
    """The output is what the module makes with the weights of an earlier step, or rounded ones."""
    said: list[str] = []
    pair = _parts(scene)
    is_off = pair is not None and relative(*pair) > EXACT * 1e-3
    if scene.first.moment is Moment.FORWARD and pair is not None and is_off:
        tensor, _ = pair
        for text, weights in _candidates(scene):
            output = output_with(scene, weights)
            whole = _own(scene)[1]
            if output is None or whole is None:
                continue
            part = scene.own_part(_own(scene)[0], whole)
            if (
                part is not None
                and relative(tensor, part.of(scene.as_held(scene.first.name, output)))
                <= EXACT * 1e-3
            ):
                said.append(text)
                break
    by_rank = scene.exchange.gather(said)
    everyone = [text for its in by_rank for text in its]
    if not everyone:
        return None
    text = Counter(everyone).most_common(1)[0][0]
    ranks = scene.ranks_of(scene.first)
    axis = scene.axis_of(ranks)
    if text.startswith("stale"):
        sentence = (
            f"{scene.first.place} computes with parameters that the update has not reached: gather "
            "or copy them after it"
        )
    else:
        sentence = f"{scene.first.place} computes with parameters in another dtype: keep one dtype"
    tried = f"with these parameters one device's {scene.first.place} returns what the ranks have"
    return directly(Cause(axis, text, sentence), tried, by_all=scene.by_all(by_rank))


def _candidates(scene: Investigation) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Return parameters of the departing module that might have been used: those of earlier steps,
    and the right ones rounded."""
    evidence, path = scene.evidence, scene.first.name
    candidates = []
    for back, states in enumerate(reversed(evidence.states)):
        own = {
            name: tensor
            for (subject, name), tensor in states.items()
            if subject is Subject.PARAMETERS and (not path or name.startswith(f"{path}."))
        }
        if back:
            candidates.append((f"stale by {back} step{'s' * (back > 1)}", own))
        else:
            candidates += [
                (
                    f"{str(dtype).removeprefix('torch.')} parameters",
                    {name: tensor.to(dtype).to(tensor.dtype) for name, tensor in own.items()},
                )
                for dtype in COARSER
            ]
    return [(text, weights) for text, weights in candidates if weights]


def _multiple(scene: Investigation) -> Cause | None:
    own = None
    if (pair := _parts(scene)) is not None and bool(pair[1].any()):
        fit = multiple(pair[0], pair[1])
        if fit.holds(EXACT) and abs(fit.factor - 1.0) > EXACT:
            own = fit.factor
    by_rank = scene.exchange.gather(own)
    factors = [factor for factor in by_rank if factor is not None]
    if not factors:
        return None
    ratio = Counter(round(factor, 6) for factor in factors).most_common(1)[0][0]
    text = factor_text(ratio, scene.degrees)
    candidates = products(ratio, scene.degrees)
    axis = next((name for candidate in candidates for name in candidate.axes if name != "K"), "")
    what = "output" if scene.first.moment is Moment.FORWARD else "output's gradient"
    sentence = f"the {what} of {scene.first.place} is {text}: sum or divide it once"
    cause = Cause(axis or scene.axis_of(scene.ranks_of(scene.first)), text, sentence)
    by_all = scene.by_all(by_rank) and is_even(factors, EXACT)
    return directly(cause, f"divided by {ratio:.4g} it is one device's", by_all=by_all)


def _of_another_rank(scene: Investigation) -> Cause | None:
    """It is another rank's part of the right tensor."""
    parts = scene.gather_parts(*_own(scene))
    said = None
    if (pair := _parts(scene)) is not None:
        tensor, expected = pair
        whole = _own(scene)[1]
        assert whole is not None
        if relative(tensor, expected) > EXACT:
            for rank, its in parts.items():
                wanted = its.part.of(whole)
                same = wanted.shape == tensor.shape
                if rank != scene.rank and same and relative(tensor, wanted) <= EXACT:
                    said = rank
    everyone = scene.exchange.gather(said)
    swapped = [(rank, other) for rank, other in enumerate(everyone) if other is not None]
    if not swapped:
        return None
    rank, other = swapped[0]
    sentence = f"rank {rank} computes the part of rank {other}: its place or its groups are wrong"
    by_all = scene.by_all([its is not None for its in everyone])
    tried = "one device's output at the places of other ranks is what these ranks have"
    cause = Cause(scene.axis_of([rank]), f"part of rank {other}", sentence)
    return directly(cause, tried, by_all=by_all)


def _of_slices(scene: Investigation) -> Cause | None:
    """The right slices of an axis' ranks are in the wrong order."""
    said: list[list[str]] = []
    if (pair := _parts(scene)) is not None:
        for axis in scene.axes:
            order = order_of_slices(*pair, scene.spec.degree(axis))
            if order is not None:
                said.append([str(axis), ", ".join(map(str, order))])
    by_rank = scene.exchange.gather(said)
    rows = [row for its in by_rank for row in its]
    if not rows:
        return None
    axis, order = rows[0]
    what = "output" if scene.first.moment is Moment.FORWARD else "output's gradient"
    sentence = (
        f"the {what} of {scene.first.place} has the slices of {axis} in the order {order}: gather "
        "them by rank"
    )
    tried = "put in order, its slices are one device's"
    cause = Cause(axis, "slices in another order", sentence)
    return directly(cause, tried, by_all=scene.by_all(by_rank))


def _rounded(scene: Investigation) -> Cause | None:
    own = ""
    if (pair := _parts(scene)) is not None:
        own = rounded_to(*pair)
    everyone = [dtype for dtype in scene.exchange.gather(own) if dtype]
    if not everyone:
        return None
    dtype = Counter(everyone).most_common(1)[0][0]
    sentence = f"{scene.first.place} has the rounding of {dtype}: compute in the spec's dtype"
    cause = Cause(scene.axis_of(scene.ranks_of(scene.first)), f"rounded to {dtype}", sentence)
    return replace(cause, tried=LIKE_ROUNDINGS)
