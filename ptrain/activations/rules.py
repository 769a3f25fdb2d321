"""What a spec may say of A, the activations of a rank, and of attention and loss.

M and O belong to the rank, R to nobody, S and S* to the axes that cut them (their rooms have the
rules about tuples). Recomputation repeats what a block did and needs its backward pass in one
piece; offload brings back what was saved, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ptrain.axes.data.form import data_factors
from ptrain.axes.rule import SpecRule
from ptrain.errors import Fault
from ptrain.spec.activations import Kept, Scope
from ptrain.spec.dials import UnitKind
from ptrain.spec.model import Attention, ExternalModel, ModelShape
from ptrain.spec.placement import Axis, R, Tier
from ptrain.spec.spec import Spec

_ONCE = "Theorem 3 (gradient integrity)"


def modes(spec: Spec) -> tuple[Kept, ...]:
    """Those that blocks of the spec have, each once."""
    said = spec.activations
    return tuple(dict.fromkeys(kept for kept in said.modes if not kept.is_plain))


def _place(spec: Spec) -> str:
    """Return the key that says how the rank keeps activations: a data axis's tuple may."""
    own = (factor for factor in data_factors(spec) if factor.placement.activations != R)
    axis = next((factor.axis for factor in own), None)
    return f"placement.{axis}.activations" if axis else "activations"


def recomputes(spec: Spec) -> bool:
    """Return whether some block is M."""
    return any(kept.policy is not None for kept in modes(spec))


def offloads(spec: Spec) -> bool:
    """Return whether something that blocks save, or their inputs, lies off the device."""
    return any(kept.tier is not Tier.DEVICE for kept in modes(spec))


def blocks_outside(spec: Spec, num_blocks: int) -> Iterator[Fault]:
    """Ranges of blocks that the model does not have; `lower` asks it of models that are not built
    in, whose blocks nobody knows before."""
    if not num_blocks and modes(spec):
        yield Fault(
            place="activations",
            finding="they are kept by block, and no blocks are found in the model",
            remedy="name them: model.blocks=layers.*",
        )
        return
    for first, last, _ in spec.activations.by_block:
        if max(first, last or 0) < num_blocks:
            continue
        shown = f"block {first}" if first == last else f"blocks {first}-{_or_end(last)}"
        end = num_blocks - 1
        yield Fault(
            place="activations",
            finding=f"{shown}, and the model has {num_blocks}, from 0 to {end}",
            remedy=f'write ranges within 0-{end}; "{min(first, end)}-" is to the last one',
        )


def _or_end(last: int | None) -> str:
    return "" if last is None else str(last)


def _blocks(spec: Spec) -> Iterator[Fault]:
    if isinstance(spec.model, ModelShape):
        yield from blocks_outside(spec, spec.model.layers)


def _whole_backward(spec: Spec) -> Iterator[Fault]:
    if spec.degree(Axis.PP) == 1 or not spec.pipeline.is_in_halves or not recomputes(spec):
        return
    yield Fault(
        place="pipeline.schedule",
        finding=f"{spec.pipeline.schedule} has backward passes in halves, for inputs and for "
        "weights, and each of them would compute blocks that are M again",
        remedy="write a schedule with whole backward passes: 1f1b or interleaved; or "
        f"{_place(spec)}=R",
    )


def _no_dropout_in_flex(spec: Spec) -> Iterator[Fault]:
    shape = spec.model
    if not isinstance(shape, ModelShape) or shape.attention is not Attention.FLEX:
        return
    if rate := shape.dropouts.attention:
        yield Fault(
            place="attention",
            finding=f"flex: torch's flex_attention drops nothing, and the model has dropout: "
            f"{rate:g}",
            remedy="write attention=sdpa or attention=eager, or model.attention_dropout=0",
        )


def _flex_on_a_processor(spec: Spec) -> Iterator[Fault]:
    model = spec.model
    is_flex = not isinstance(model, ExternalModel) and model.attention is Attention.FLEX
    if is_flex and spec.device == "cpu":
        yield Fault(
            place="attention",
            finding="flex: torch's flex_attention has no backward pass on a processor",
            remedy="write attention=sdpa or attention=eager, or device=cuda",
        )


def _offloaded_halves(spec: Spec) -> Iterator[Fault]:
    if spec.degree(Axis.PP) == 1 or not spec.pipeline.is_in_halves or not offloads(spec):
        return
    if recomputes(spec):  # refused for good
        return
    yield Fault(
        place="pipeline.schedule",
        finding=f"not yet: with {spec.pipeline.schedule} both halves of a backward pass take what "
        "was saved, and what is offloaded is brought back once",
        remedy="write a schedule with whole backward passes: 1f1b or interleaved; or "
        f"{_place(spec)}=R",
    )


def _core_of_others(spec: Spec) -> Iterator[Fault]:
    if isinstance(spec.model, ModelShape):
        return
    if any(kept.policy and kept.policy.scope is Scope.ATTENTION for kept in modes(spec)):
        yield Fault(
            place="recompute",
            finding="not yet: attention, of a model that is not built in: which of its modules "
            "computes scores and softmax alone nobody says",
            remedy="write recompute.keep=[matmul], or recompute=selective",
        )


def _budget_of_others(spec: Spec) -> Iterator[Fault]:
    if isinstance(spec.model, ModelShape) or not spec.activations.is_open:
        return
    yield Fault(
        place="recompute.budget",
        finding="not yet: a policy that follows from a budget, of a model that is not built in: "
        "its peak is known once it is traced with one",
        remedy="write activations=M with recompute=selective or recompute=full; `ptrain predict` "
        "derives each",
    )


def _parts_of_blocks(spec: Spec) -> Iterator[Fault]:
    if spec.unit_size.kind is UnitKind.SUB_BLOCK and data_factors(spec) and recomputes(spec):
        yield Fault(
            place="unit",
            finding="not yet: sub-block, with blocks that are computed again: their parts would "
            "be gathered once more for it",
            remedy="write unit=block",
        )


def _naive_blocks(spec: Spec) -> Iterator[Fault]:
    if spec.degree(Axis.TP) > 1 and spec.tensor.is_naive and modes(spec):
        yield Fault(
            place="tensor.plan",
            finding="not yet: naive, with blocks whose activations are recomputed or offloaded",
            remedy=f"write tensor.plan=paired, or {_place(spec)}=R",
        )


def _rule(name: str, theorem: str, faults: Callable[[Spec], Iterator[Fault]]) -> SpecRule:
    return SpecRule(name=name, theorem=theorem, faults=faults)


RULES = (
    _rule("blocks are the model's", "Definition 1", _blocks),
    _rule("a block is computed again once", _ONCE, _whole_backward),
    _rule("attention drops what the model says", "Definition 1", _no_dropout_in_flex),
    _rule("attention has a backward pass", _ONCE, _flex_on_a_processor),
)
NOT_YET = (
    _rule("what is brought back is used once", "", _offloaded_halves),
    _rule("attention has a module of its own", "", _core_of_others),
    _rule("a budget's peaks are predicted", "", _budget_of_others),
    _rule("what is recomputed is gathered", "", _parts_of_blocks),
    _rule("the naive plan keeps what it saves", "", _naive_blocks),
)
