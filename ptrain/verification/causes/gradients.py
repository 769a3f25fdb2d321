"""Why parameter gradients are not those of one device: each cause is a statement about how the
gradient came from the samples' or the ranks' contributions, tested against the reference's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ptrain.report.finding import Moment, Subject
from ptrain.verification.causes.addends import (
    of_another_operator,
    of_other_ranks,
    of_samples,
    partial,
)
from ptrain.verification.causes.common import (
    even_ratio,
    family,
    listed,
    own_part_of,
    ratio_cause,
)
from ptrain.verification.causes.own_experts import of_experts
from ptrain.verification.causes.rounding import flipped_bit, odd_element, rounded_to
from ptrain.verification.causes.routers import of_router_losses
from ptrain.verification.causes.scene import Cause, Investigation
from ptrain.verification.parts import held


def gradient_cause(scene: Investigation) -> Cause | None:
    """Return the first cause that explains them; None where none does. Collective."""
    names = list(
        dict.fromkeys(departure.name for departure in scene.at(Moment.GRADIENTS, Subject.GRADIENTS))
    )
    if not names:
        return None
    causes: tuple[Callable[[Investigation, list[str]], Cause | None], ...] = (
        _lost,
        _one_element,
        of_experts,
        _multiple,
        of_router_losses,
        of_samples,
        partial,
        of_other_ranks,
        of_another_operator,
        _rounded,
    )
    for cause in causes:
        if (explanation := cause(scene, names)) is not None:
            return explanation
    return None


def _lost(scene: Investigation, names: list[str]) -> Cause | None:
    """No rank has a gradient of some parameters, or has zeros; one device has."""
    evidence = scene.evidence
    own = [name for name, gradient in evidence.gradients.items() if bool(held(gradient).any())]
    reached = {name for its in scene.exchange.gather(own) for name in its}
    expected = evidence.expected_gradients.items()
    gone = [name for name, whole in expected if name not in reached and bool(whole.any())]
    if not gone:
        return None
    sentence = (
        f"no gradient reaches {family(gone)}: find where what it makes leaves the graph (detach, "
        "no_grad, an index in the place of a value), or what keeps it from the reduction"
    )
    return Cause("", "zero", sentence, gone[0])


def _one_element(scene: Investigation, names: list[str]) -> Cause | None:
    """One element of one tensor is off, and nothing else."""
    if len(names) > 1:
        return None
    said = None
    if (own := own_part_of(scene, names[0])) is not None:
        clipped = scene.evidence.clipped_by()
        odd = odd_element(own[0], own[1])
        if odd is not None:
            bit = flipped_bit(own[0] * clipped, own[1] * clipped)
            said = "one element" if bit is None else f"flipped bit {bit} of one element"
    factors = [factor for factor in scene.exchange.gather(said) if factor is not None]
    if not factors:
        return None
    ranks = scene.ranks_of(scene.first)
    sentence = (
        f"one element of the gradient of {names[0]} is off on ranks {listed(ranks)} and nothing "
        "else: suspect the memory there, or what writes to the buffer after the reduction"
    )
    return Cause(scene.axis_of(ranks), factors[0], sentence)


def _multiple(scene: Investigation, names: list[str]) -> Cause | None:
    """Every departing gradient is the same multiple of the right one."""
    ratio = even_ratio(scene, names)
    if ratio is None:
        return None
    if not ratio:
        sentence = f"no gradient reaches the update of {family(names)}: reduce it before the step"
        return Cause("", "zero", sentence)
    return ratio_cause(scene, ratio, names)


def _rounded(scene: Investigation, names: list[str]) -> Cause | None:
    """It differs by the rounding of a coarser dtype."""
    dtypes = [
        dtype
        for name in names[:8]
        if (own := own_part_of(scene, name)) is not None and (dtype := rounded_to(own[0], own[1]))
    ]
    everyone = [dtype for its in scene.exchange.gather(dtypes) for dtype in its]
    if not everyone:
        return None
    dtype = Counter(everyone).most_common(1)[0][0]
    ranks = scene.ranks_of(scene.first)
    sentence = f"gradients have the rounding of {dtype}: compute and reduce them in one dtype"
    return Cause(scene.axis_of(ranks), f"rounded to {dtype}", sentence)
