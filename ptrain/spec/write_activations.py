"""What blocks keep, the attention and the loss of a spec -> the keys that say so, where they say
anything but the default."""

from __future__ import annotations

from ptrain.spec.activations import ATTENTION_ONLY, FULL, SELECTIVE, Kept, Policy, belongs_to_rank
from ptrain.spec.axis import DATA_AXES
from ptrain.spec.function import UserFunction
from ptrain.spec.model import Attention, ExternalModel, HuggingFaceModel, ModelSpec
from ptrain.spec.placement import Distribution, Mode, Tier
from ptrain.spec.spec import ActivationSpec, LossSpec, Spec

_NAMED = {FULL: "full", SELECTIVE: "selective", ATTENTION_ONLY: "attention"}
UNWRITTEN: dict[str, object] = {
    "activations": "R",
    "recompute": "none",
    "attention": Attention.SDPA.value,
    "loss": "cross-entropy",
}


def kept(spec: Spec) -> dict[str, object]:
    """`activations`, unless a tuple of the mesh says it; `recompute`, `attention` and `loss`."""
    said = {
        "activations": None if _is_in_a_tuple(spec) else _activations(spec.activations),
        "recompute": _recompute(spec.activations),
        "attention": _attention(spec.model),
        "loss": _loss(spec.loss),
        "step": _function(spec.loss.step),
    }
    return {
        key: value
        for key, value in said.items()
        if value is not None and (value != UNWRITTEN.get(key) or _has_its_own(key, spec.model))
    }


def _attention(model: ModelSpec) -> str | None:
    kind = None if isinstance(model, ExternalModel) else model.attention
    return kind.value if kind else None


def _has_its_own(key: str, model: ModelSpec) -> bool:
    """Whether leaving the key out means what a class of transformers has by default."""
    return key == "attention" and isinstance(model, HuggingFaceModel)


def _is_in_a_tuple(spec: Spec) -> bool:
    return any(
        factor.axis in DATA_AXES and belongs_to_rank(factor.placement.activations)
        for factor in spec.factors
    )


def _activations(activations: ActivationSpec) -> object:
    """A mode, or modes by block."""
    if not activations.by_block:
        return _mode(activations.default)
    return {_range(first, last): _mode(kept) for first, last, kept in activations.by_block}


def _range(first: int, last: int | None) -> str:
    return str(first) if first == last else f"{first}-{'' if last is None else last}"


def _mode(kept: Kept) -> str:
    if kept.policy is not None:
        return str(Mode(Distribution.MATERIALIZED, kept.tier))
    return "R" if kept.tier is Tier.DEVICE else str(Mode(Distribution.SHARDED, kept.tier))


def _recompute(activations: ActivationSpec) -> object:
    """A word, or a mapping where there is more to say."""
    policy = next((kept.policy for kept in activations.modes if kept.policy), None)
    if activations.budget is None:
        return None if policy is None else _policy(policy, activations.every)
    said = {} if activations.is_open else _written(policy)
    every = {"every": activations.every} if activations.every != 1 else {}
    return {"budget": activations.budget, **said, **every}


def _policy(policy: Policy, every: int) -> object:
    if every == 1 and policy in _NAMED:
        return _NAMED[policy]
    return _written(policy) | ({"every": every} if every != 1 else {})


def _written(policy: Policy | None) -> dict[str, object]:
    if policy is None:
        return {"policy": "none"}
    if policy in _NAMED:
        return {"policy": _NAMED[policy]}
    return {"keep": [operators.value for operators in policy.keep]}


def _loss(loss: LossSpec) -> object:
    if loss.function is not None:
        return _function(loss.function)
    return None if loss.chunk is None else {"chunk": loss.chunk, "fused": loss.fused}


def _function(function: UserFunction | None) -> dict[str, object] | None:
    if function is None:
        return None
    folder = {"folder": function.folder} if function.folder else {}
    return {"target": function.target, **folder, "arguments": function.arguments}
