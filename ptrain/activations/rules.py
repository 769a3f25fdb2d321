"""Rules of activation modes, attention and loss.

Here are the rules of M and O, which a rank applies alone; the axes have the rules of S and S*.
Recomputation needs the backward pass of a block in one piece. Offload loads a saved tensor once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ptrain.axes.context.attention import factor_of, has_ring
from ptrain.axes.data.form import data_factors
from ptrain.axes.rule import SpecRule
from ptrain.errors import Fault
from ptrain.installed import torch_minor
from ptrain.spec.activations import ActivationMode, Scope
from ptrain.spec.dials import Compiled, UnitKind
from ptrain.spec.model import Attention, ExternalModel, HuggingFaceModel, ModelShape
from ptrain.spec.placement import DATA_AXES, Axis, Distribution, R, Tier
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec

_ONCE = "Theorem 3, gradient integrity"


def block_modes(spec: Spec) -> tuple[ActivationMode, ...]:
    """Return the distinct modes of the spec's blocks, without blocks that save everything."""
    said = spec.activations
    return tuple(dict.fromkeys(kept for kept in said.modes if not kept.is_plain))


def _activations_key(spec: Spec) -> str:
    """Return the key that sets the activation mode: a data axis's tuple, or `activations`."""
    data = (factor for factor in data_factors(spec) if factor.axis in DATA_AXES)
    own = (factor for factor in data if factor.placement.activations != R)
    axis = next((factor.axis for factor in own), None)
    return f"placement.{axis}.activations" if axis else "activations"


def has_recomputation(spec: Spec) -> bool:
    """Return True if a block is recomputed (M)."""
    return any(kept.policy is not None for kept in block_modes(spec))


def has_offload(spec: Spec) -> bool:
    """Return True if blocks offload saved tensors or their inputs."""
    return any(kept.tier is not Tier.DEVICE for kept in block_modes(spec))


def missing_block_faults(spec: Spec, num_blocks: int) -> Iterator[Fault]:
    """Yield a fault for each range of blocks that the model does not have.

    `lower` calls it for custom models, whose number of blocks is unknown before.
    """
    if not num_blocks and block_modes(spec):
        yield Fault(
            place="activations",
            finding="modes by block need blocks, and none were found in the model",
            remedy="Set `model.blocks`, for example `model.blocks=layers.*`.",
        )
        return
    for first, last, _ in spec.activations.by_block:
        if max(first, last or 0) < num_blocks:
            continue
        shown = (
            f"block {first}" if first == last else f"blocks {first}-{'' if last is None else last}"
        )
        end = num_blocks - 1
        yield Fault(
            place="activations",
            finding=f"{shown}, but the model has {num_blocks}, from 0 to {end}",
            remedy=f'Use ranges within 0-{end}; "{min(first, end)}-" ends at the last block.',
        )


def _block_range_faults(spec: Spec) -> Iterator[Fault]:
    if isinstance(spec.model, ModelShape):
        yield from missing_block_faults(spec, spec.model.layers)


def split_backward_faults(spec: Spec) -> Iterator[Fault]:
    """Yield the fault of a schedule that would recompute blocks in both halves of backward."""
    if spec.degree(Axis.PP) != 1 and spec.pipeline.is_in_halves and has_recomputation(spec):
        yield Fault(
            place="pipeline.schedule",
            finding=(
                f"{spec.pipeline.schedule} splits backward passes into inputs and weights, "
                "and both would recompute blocks with activations M"
            ),
            remedy=(
                "Use a schedule with full backward passes, `pipeline.schedule=1f1b` or "
                f"`pipeline.schedule=interleaved`, or `{_activations_key(spec)}=R`."
            ),
        )


def _flex_dropout_faults(spec: Spec) -> Iterator[Fault]:
    shape = spec.model
    if (
        isinstance(shape, ModelShape)
        and shape.attention is Attention.FLEX
        and (rate := shape.dropouts.attention)
    ):
        yield Fault(
            place="attention",
            finding=f"torch's flex_attention does not support dropout; the model has {rate:g}",
            remedy="Use `attention=sdpa` or `attention=eager`, or `model.attention_dropout=0`.",
        )


def _grouped_faults(spec: Spec) -> Iterator[Fault]:
    """Yield a fault for each property for which torch has no kernel that reads a head of keys for
    several heads of queries."""
    shape = spec.model
    if isinstance(shape, ExternalModel) or shape.attention is not Attention.SDPA_GQA:
        return
    if isinstance(shape, HuggingFaceModel):
        finding = f"sdpa-gqa is of built-in models; {shape.hf} decides by itself if it copies keys"
        yield Fault(place="attention", finding=finding, remedy="Use `attention=sdpa`.")
        return
    # On GPUs masks and fp32 are supported by the memory-efficient kernel alone, which requires
    # equal numbers of heads (torch 2.11 to 2.15, sdp_utils.cpp); torch would then compute
    # attention operator by operator, with the scores in memory.
    is_wide = spec.precision.effective_layout.parameters is DType.FP32
    reasons = {
        "masks of windows or documents": shape.window is not None or shape.has_documents,
        "capped scores": shape.attention_soft_cap is not None,
        "fp32 on GPUs": spec.is_for_cuda and is_wide,
    }
    for reason in (words for words, is_so in reasons.items() if is_so):
        yield Fault(
            place="attention",
            finding=f"sdpa-gqa: torch has no kernel for fewer heads of keys with {reason}",
            remedy="Use `attention=sdpa`.",
        )


def _flex_cpu_faults(spec: Spec) -> Iterator[Fault]:
    model = spec.model
    is_flex = not isinstance(model, ExternalModel) and model.attention is Attention.FLEX
    if is_flex and spec.device == "cpu":
        yield Fault(
            place="attention",
            finding="torch's flex_attention has no backward pass on CPUs",
            remedy="Use `attention=sdpa` or `attention=eager`, or `device=cuda`.",
        )


def _offloaded_split_backward_faults(spec: Spec) -> Iterator[Fault]:
    if spec.degree(Axis.PP) == 1 or not spec.pipeline.is_in_halves or not has_offload(spec):
        return
    if has_recomputation(spec):  # rejected by `split_backward_faults`
        return
    yield Fault(
        place="pipeline.schedule",
        finding=(
            f"not supported yet: offloaded activations with {spec.pipeline.schedule}, "
            "whose two backward halves would both load them"
        ),
        remedy=(
            "Use a schedule with full backward passes, `pipeline.schedule=1f1b` or "
            f"`pipeline.schedule=interleaved`, or `{_activations_key(spec)}=R`."
        ),
    )


def _custom_attention_faults(spec: Spec) -> Iterator[Fault]:
    if not isinstance(spec.model, ModelShape) and any(
        kept.policy and kept.policy.scope is Scope.ATTENTION for kept in block_modes(spec)
    ):
        yield Fault(
            place="recompute",
            finding=(
                "not supported yet: policy attention for custom models, whose attention "
                "module is unknown"
            ),
            remedy="Use `recompute.keep=[matmul]`, or `recompute=selective`.",
        )


def _custom_budget_faults(spec: Spec) -> Iterator[Fault]:
    if not isinstance(spec.model, ModelShape) and spec.activations.is_open:
        yield Fault(
            place="recompute.budget",
            finding=(
                "not supported yet: recompute.budget for custom models, whose peak is known "
                "only after a trace"
            ),
            remedy=(
                "Use `activations=M` with `recompute=selective` or `recompute=full`; `ptrain "
                "predict` derives each."
            ),
        )


def _sub_block_unit_faults(spec: Spec) -> Iterator[Fault]:
    if spec.unit_size.kind is UnitKind.SUB_BLOCK and data_factors(spec) and has_recomputation(spec):
        yield Fault(
            place="unit",
            finding=(
                "not supported yet: unit=sub-block with recomputed blocks, whose parts "
                "would be gathered again"
            ),
            remedy="Use `unit=block`.",
        )


def _naive_plan_faults(spec: Spec) -> Iterator[Fault]:
    if spec.degree(Axis.TP) > 1 and spec.tensor.is_naive and block_modes(spec):
        yield Fault(
            place="tensor.plan",
            finding="not supported yet: naive with recomputed or offloaded activations",
            remedy=f"Use `tensor.plan=paired`, or `{_activations_key(spec)}=R`.",
        )


Obstacle = tuple[str, str, str]  # place, finding and remedy


def _compile_faults(spec: Spec) -> Iterator[Fault]:
    of_blocks = [*_block_obstacles(spec)] if spec.compile.has_blocks else []
    of_loss = [*_loss_obstacles(spec)] if spec.compile.has_loss else []
    of_both = [*_compile_obstacles(spec)]
    rest = Compiled.NONE
    if spec.compile is Compiled.ALL and not of_both and not (of_blocks and of_loss):
        rest = Compiled.LOSS if of_blocks else Compiled.BLOCK
    for place, finding, remedy in (*of_both, *of_blocks, *of_loss):
        yield Fault(
            place=place,
            finding=f"not supported yet with compile={spec.compile}: {finding}",
            remedy=f"{remedy}, or use `compile={rest}`.",
        )


def _compile_obstacles(spec: Spec) -> Iterator[Obstacle]:
    """Yield each setting with which neither blocks nor the loss are compiled."""
    if spec.compile is Compiled.NONE:
        return
    if not isinstance(spec.model, ModelShape):
        yield "model", "a model that is not built in", "Use a built-in model"
    if spec.degree(Axis.PP) > 1 and spec.pipeline.is_in_halves:
        finding = f"{spec.pipeline.schedule}, which splits the backward pass of a block"
        yield "pipeline.schedule", finding, "Use `pipeline.schedule=1f1b`"


def _loss_obstacles(spec: Spec) -> Iterator[Obstacle]:
    """Yield each setting with which logits and loss are not one program."""
    if (function := spec.loss.user_function) is not None:
        finding = f"the loss of {function.target}, which is your code"
        yield function.target_key, finding, f"Remove `{function.section}`"
    if spec.loss.chunk is not None:
        finding = "a loss in chunks of tokens, which already frees their logits"
        yield "loss", finding, "Use `loss=cross-entropy`"
    if spec.degree(Axis.TP) > 1:
        finding = "logits over tp, which ranks gather or sum between the operators"
        yield "mesh.tp", finding, "Use `mesh.tp=1`"


def _block_obstacles(spec: Spec) -> Iterator[Obstacle]:
    """Yield each setting with which a block is not one program.

    torch does not compile it as one, or the program communicates or saves other tensors than the
    plan.
    """
    shape = spec.model
    if not isinstance(shape, ModelShape):
        return
    # Routers count tokens, and rings communicate, outside of programs: the other half of the block
    # is compiled (`Compile`).
    if shape.experts is not None and has_ring(spec):
        finding = "mixtures of experts with attention along a ring, which leave no half to compile"
        yield "context.attention", finding, "Use `context.attention=ulysses`"
    is_half = shape.experts is not None or has_ring(spec)
    if is_half and has_recomputation(spec):
        finding = "recomputed blocks of which a half is compiled"
        yield _activations_key(spec), finding, f"Use `{_activations_key(spec)}=R`"
    if shape.has_dropout and factor_of(spec) is not None and not has_ring(spec):
        finding = "dropout with Ulysses attention, whose masks are sliced by hooks within a block"
        yield "model.dropout", finding, "Use `model.dropout=0`"
    if shape.attention is Attention.FLEX:
        yield "attention", "flex, which is a program of its own", "Use `attention=sdpa`"
    # torch's meta kernel declares the log-sum-exp of fp64 attention on CPUs as fp32, and the
    # backward pass of the program fails (torch/_meta_registrations.py, up to 2.12).
    is_double = spec.precision.effective_layout.parameters is DType.FP64
    is_declared_fp32 = is_double and torch_minor() in ("2.11", "2.12")
    if is_declared_fp32 and shape.attention is not Attention.EAGER and not spec.is_for_cuda:
        finding = "fp64 attention, whose compiled backward pass fails up to torch 2.12"
        yield "precision.compute", finding, "Use `attention=eager`"
    if spec.unit_size.kind is UnitKind.SUB_BLOCK and data_factors(spec):
        finding = "units within a block, whose hooks would be in the program"
        yield "unit", finding, "Use `unit=block`"
    if has_offload(spec):
        finding = "offloaded activations: what a program saves is moved after its end"
        key = _activations_key(spec)
        recomputed = "" if is_half or spec.degree(Axis.TP) > 1 else f" or `{key}=M`"
        yield key, finding, f"Use `{key}=R`{recomputed}"
    is_of_attention = (m.policy and m.policy.scope is Scope.ATTENTION for m in block_modes(spec))
    if not is_half and any(is_of_attention):
        finding = "policy attention, with which torch makes a program for every layer"
        yield "recompute", finding, "Use `recompute=full` or `recompute=selective`"
    yield from _tensor_compile_obstacles(spec, shape)


def _tensor_compile_obstacles(spec: Spec, shape: ModelShape) -> Iterator[Obstacle]:
    factor = next((f for f in spec.factors if f.axis is Axis.TP and f.degree > 1), None)
    if factor is None:
        return
    if factor.placement.activations.distribution is Distribution.GATHERED:
        finding = "inputs that are saved as shards (S*), by hooks within a block"
        yield "placement.tp.activations", finding, "Use `placement.tp.activations=S`"
    if shape.has_dropout:
        finding = "dropout over tp, whose generators are switched within a block"
        yield "model.dropout", finding, "Use `model.dropout=0`"
    if has_recomputation(spec):
        finding = "recomputed blocks over tp, whose saved tensors torch does not take apart"
        yield _activations_key(spec), finding, f"Use `{_activations_key(spec)}=R`"


def _make_rule(name: str, theorem: str, faults: Callable[[Spec], Iterator[Fault]]) -> SpecRule:
    return SpecRule(name=name, theorem=theorem, faults=faults)


RULES = (
    _make_rule("blocks exist in the model", "Definition 1", _block_range_faults),
    _make_rule("a block is recomputed once", _ONCE, split_backward_faults),
    _make_rule("attention supports the model's dropout", "Definition 1", _flex_dropout_faults),
    _make_rule("attention has a backward pass", _ONCE, _flex_cpu_faults),
    _make_rule("attention has a kernel for grouped heads", "Definition 1", _grouped_faults),
)
NOT_YET = (
    _make_rule("offloaded activations are used once", "", _offloaded_split_backward_faults),
    _make_rule("attention is a separate module", "", _custom_attention_faults),
    _make_rule("a budget's peaks are predicted", "", _custom_budget_faults),
    _make_rule("recomputed units are gathered", "", _sub_block_unit_faults),
    _make_rule("the naive plan keeps saved activations", "", _naive_plan_faults),
    _make_rule("a block, or the loss, is one program", "", _compile_faults),
)
