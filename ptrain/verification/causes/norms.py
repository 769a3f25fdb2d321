"""Why the norm by which gradients are clipped is not that of one device's gradient: squares that
count for one rank alone, or more often than once."""

from __future__ import annotations

import math

from torch import Tensor

from ptrain.cost import State
from ptrain.report.finding import Culprit
from ptrain.spec.placement import CUT, Axis
from ptrain.spec.spec import Spec, position, ranks_over
from ptrain.verification.causes.experts import expert_axis, is_of_experts, several
from ptrain.verification.causes.rerun import EXACT, Investigation
from ptrain.verification.parts import factor_text, products


def norm_cause(scene: Investigation) -> Culprit:
    """Say whether the norm is that of this rank's shards alone, or of gradients with the loss's
    scale, or counts something several times. Collective."""
    evidence = scene.evidence
    norms = scene.ranks.gather(evidence.seen.norm)
    expected = evidence.expected.norm
    if axes := _of_own_shards(scene):
        text = " and ".join(axes)
        sentence = f"clipping uses the norm of each rank's own shards: sum its square over {text}"
        cause = scene.culprit(axes[0], f"missing all-reduce over {text}", sentence)
        tried = f"the squares of the ranks' own shards, summed over {text}, make one device's norm"
        return cause.proven(tried)
    norm = norms[scene.first.rank]
    ratio = norm / expected if expected else math.inf
    if evidence.scale != 1.0 and math.isclose(ratio, evidence.scale, rel_tol=EXACT):
        sentence = "gradients are clipped with the loss's scale: divide by it before"
        cause = scene.culprit("", f"× {evidence.scale:g}: the loss scale is not undone", sentence)
        return cause.proven("divided by the loss's scale it is one device's")
    if (of_some := _of_some(scene, norm)) is not None:
        return of_some
    candidates = products(ratio, scene.degrees, EXACT)
    along = next((name for candidate in candidates for name in candidate.axes if name != "K"), "")
    text = factor_text(ratio, scene.degrees)
    sentence = f"the gradient norm is {text}: {scene.first.told}; count every element once"
    cause = scene.culprit(along or None, text, sentence)
    if candidates:
        return cause.proven(f"divided by {ratio:.4g} it is one device's")
    return cause.unexplained(
        "the norm of a rank's own shards, the loss's scale, a product of degrees"
    )


def _of_own_shards(scene: Investigation) -> tuple[str, ...]:
    """Return the axes along which the ranks' squares are not summed: the norm is that of the right
    gradient's parts that this rank has, or the squares of the ranks of some axes make up the right
    one."""
    evidence = scene.evidence
    square = 0.0
    for name, whole in evidence.expected.gradients.items():
        tensor = evidence.seen.gradients.get(name)
        part = scene.own_part(tensor, whole) if tensor is not None else None
        if part is not None:
            own = part.of(whole).double()
            square += float(_own_rows(scene, name, own).square().sum())
    norm = evidence.seen.norm if evidence.seen.norm is not None else math.nan
    is_own = math.isclose(math.sqrt(square), norm, rel_tol=EXACT)
    right = evidence.expected.norm or math.nan
    norms, are_own = zip(*scene.ranks.gather([norm, is_own]), strict=True)
    cut = tuple(str(axis) for axis in scene.axes if _cuts(scene.spec, axis))
    for axis, groups in scene.ranks.summed.items():
        axes = axis.split("+")
        sums = (math.hypot(*(norms[rank] for rank in group)) for group in groups)
        is_right = any(math.isclose(its, right, rel_tol=EXACT) for its in sums)
        if is_right and set(axes) <= set(cut):
            return tuple(name for name in cut if name in axes)
    return cut if all(are_own) else ()


def _own_rows(scene: Investigation, name: str, values: Tensor) -> Tensor:
    """Return of experts those of this rank, where values of all ranks' were gathered."""
    axes = scene.spec.expert_axes
    if not axes or not is_of_experts(scene.spec, name):
        return values
    experts, ranks = scene.evidence.expected.gradients[name].shape[0], ranks_over(scene.spec, axes)
    own = position(scene.spec, scene.rank, axes)
    return values.chunk(ranks)[own] if len(values) == experts else values


def _cuts(spec: Spec, axis: Axis) -> bool:
    """Whether ranks along it have other parts of a gradient."""
    placed = next(factor.placement for factor in spec.factors if factor.axis is axis)
    return axis in spec.expert_axes or any(
        placed[state].distribution in CUT for state in (State.GRADIENTS, State.OPTIMIZER)
    )


def _of_some(scene: Investigation, norm: float) -> Culprit | None:
    """The squares of experts alone, or of all but experts, count several times or not at all."""
    axis = expert_axis(scene.spec)
    if axis is None:
        return None
    squares = {True: 0.0, False: 0.0}
    for name, whole in scene.evidence.expected.gradients.items():
        squares[is_of_experts(scene.spec, name)] += float(whole.double().square().sum())
    for is_of_these, what, cure in (
        (True, "experts", f"an expert is on one rank of {axis}: count it there, and sum once"),
        (False, "all but experts", f"every rank of {axis} has them: count one rank's"),
    ):
        own, others = squares[is_of_these], squares[not is_of_these]
        if own < _LEAST * others:
            continue
        times = (norm**2 - others) / own
        if abs(times) <= EXACT:
            sentence = f"the gradient norm leaves out the squares of {what}: {cure}"
            tried = f"with the squares of {what} it is one device's"
            return scene.culprit(axis, f"{what} left out", sentence).proven(tried)
        if fits := products(times, scene.degrees, EXACT):
            text, axes = several(fits, axis)
            sentence = f"the gradient norm counts the squares of {what} {text} ({axes}): {cure}"
            tried = f"with the squares of {what} counted once it is one device's"
            return scene.culprit(axes, f"{what} {text}", sentence).proven(tried)
    return None


_LEAST = 1e-6  # of all squares: of less, fp64 does not tell how often they count
