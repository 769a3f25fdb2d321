"""What causes of wrong gradients look at: a rank's part, a tensor that tells, a ratio in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ptrain.report.finding import Subject
from ptrain.verification.causes.scene import EXACT, Cause, Investigation
from ptrain.verification.factors import factor_text, is_even, multiple, products
from ptrain.verification.parts import TensorBox, held

SUM_ONCE = "sum each sample's gradient once, over the global number of tokens"


def own_part_of(
    scene: Investigation, name: str
) -> tuple[torch.Tensor, torch.Tensor, TensorBox] | None:
    """This rank's part of a gradient, that of the reference, and where it is."""
    evidence = scene.evidence
    tensor = evidence.gradients.get(name)
    whole = evidence.expected_gradients.get(name)
    if tensor is None or whole is None:
        return None
    part = scene.own_part(tensor, whole)
    if part is None or not held(tensor).numel():
        return None
    return held(tensor), part.of(whole), part


def raw(scene: Investigation, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    evidence = scene.evidence
    return evidence.gradients.get(name), evidence.expected_gradients.get(name)


def chosen(scene: Investigation, names: Iterable[str], least: int) -> str:
    """The smallest parameter of which every rank has at least so many elements, else the largest;
    chosen by the first departure's kind of tensor, so that it is one that departs."""
    known = [name for name in names if name in scene.evidence.expected_gradients]
    sizes = {name: scene.evidence.expected_gradients[name].numel() for name in known}
    enough = [name for name in known if sizes[name] >= least * scene.spec.world_size]
    if enough:
        return min(enough, key=lambda name: sizes[name])
    return max(known, key=lambda name: sizes[name])


def even_ratio(scene: Investigation, names: Sequence[str]) -> float | None:
    """Return which multiple of the right gradients all of these are that depart, 0 where nothing is
    left of them; None where they are none, or different ones. Collective."""
    own: dict[str, float] = {}
    for name in names:
        pair = own_part_of(scene, name)
        if pair is None or not bool(pair[1].any()):
            continue
        if not bool(pair[0].any()):
            own[name] = 0.0
            continue
        fit = multiple(pair[0], pair[1])
        if not fit.holds(EXACT):
            own = {name: float("nan")}
            break
        own[name] = fit.factor
    factors = [factor for its in scene.exchange.gather(own) for factor in its.values()]
    wrong = [factor for factor in factors if abs(factor - 1.0) > EXACT]
    if not wrong or any(factor != factor for factor in factors) or not is_even(wrong):
        return None
    return 0.0 if abs(wrong[0]) <= EXACT else wrong[0]


def ratio_cause(scene: Investigation, ratio: float, names: Sequence[str]) -> Cause:
    total = len(scene.evidence.expected_gradients)
    if (cause := _of_clipping_or_scale(scene, ratio)) is not None:
        return cause
    some = f" of {family(names)}" if len(names) < total else ""
    candidates = products(ratio, scene.degrees)
    if not candidates:
        text = factor_text(ratio, scene.degrees)
        return Cause("", text, f"gradients{some} are {text}: {SUM_ONCE}")
    axes = " or ".join(dict.fromkeys("·".join(candidate.axes) for candidate in candidates[:3]))
    axis = next(
        (candidate.axes[0] for candidate in candidates if len(candidate.axes) == 1),
        candidates[0].axes[0],
    )
    where = "accumulated micro-batches" if axis == "K" else f"the ranks of {axis}"
    done = "summed once too often or not averaged" if ratio > 1 else "divided once too often"
    what = f"gradients{some}"
    if _is_of_loss(scene, ratio):
        what, done = "loss and gradients", _DIVIDED[ratio > 1]
    sentence = f"{what} are {candidates[0]} ({axes}): {done} over {where}; {SUM_ONCE}"
    return Cause("" if axis == "K" else axis, str(candidates[0]), sentence)


_DIVIDED = (
    "the loss is divided once too often",
    "each loss is divided by a share of the tokens, and all are summed",
)


def _is_of_loss(scene: Investigation, ratio: float) -> bool:
    """Return whether the loss is the same multiple."""
    evidence = scene.evidence
    if scene.first.subject is not Subject.LOSS or not evidence.expected_loss:
        return False
    return abs(evidence.loss / evidence.expected_loss / ratio - 1.0) <= EXACT


def _of_clipping_or_scale(scene: Investigation, ratio: float) -> Cause | None:
    """The ratio is what clipping multiplies by, or the loss's scale."""
    evidence = scene.evidence
    clipped, scale = evidence.clipped_by(), evidence.scale
    known = {
        clipped: ("clipped twice", "the factor of clipping is applied twice: apply it once"),
        1 / clipped: (
            "not clipped",
            "the norm is computed and nothing is scaled by it: scale all gradients",
        ),
        scale: (
            f"× {scale:g}: the loss scale is not undone",
            "the optimizer is given gradients of the scaled loss: divide them before the update",
        ),
        1 / scale: (
            f"÷ {scale:g}: the loss scale is undone twice",
            "the optimizer divides gradients that are without the loss's scale: do it once",
        ),
    }
    for factor, (text, sentence) in known.items():
        if factor != 1.0 and abs(ratio / factor - 1.0) <= EXACT:
            return Cause("", text, sentence)
    return None


def family(names: Sequence[str]) -> str:
    """`blocks.*.norm.weight` for many of one kind; of several kinds the first, and how many."""
    patterns = list(dict.fromkeys(".".join(_starred(name)) for name in names))
    more = f" and {len(patterns) - 1} more kinds" if len(patterns) > 1 else ""
    return patterns[0] + more


def _starred(name: str) -> list[str]:
    return ["*" if word.isdigit() else word for word in name.split(".")]


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
