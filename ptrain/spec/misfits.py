"""Checks of a built-in model's shape: fields that contradict each other or have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple

from ptrain.errors import Fault
from ptrain.spec.block import Bias, BlockOptions, Positions, RopeScaling
from ptrain.spec.model import Attention, ModelShape

_DEFAULTS = {option.name: option.default for option in fields(BlockOptions)}
_OF_ROPE = ("rope_base", "rotary", "window_rope_base", "rope_scaling")
_OF_EXPERTS = (
    "experts_per_token", "expert_ffn", "shared_experts", "expert_groups", "groups_per_token",
    "dense_layers", "router", "router_norm", "router_scale", "bias_update_rate", "capacity_factor",
    "aux_loss", "z_loss",
)  # fmt: skip
_OF_LATENT = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_BY_TURNS = (RopeScaling.LLAMA3, RopeScaling.YARN)
_OF_TURNS = ("rope_low_factor", "rope_high_factor", "rope_original")


def find_misfits(shape: ModelShape) -> Iterator[Fault]:
    """Yield a fault for each field with an impossible value or without effect."""
    yield from _check_latent(shape) if shape.is_latent else _check_heads(shape)
    for void in find_ineffective_options(shape):
        yield Fault(place=f"model.{void.name}", finding=void.finding, remedy=void.remedy)
    yield from _check_documents(shape)
    if shape.experts is not None:
        yield from _check_experts(shape, shape.experts)
    if shape.rope_scaling is not RopeScaling.NONE and shape.rope_factor == 1.0:
        yield Fault(
            place="model.rope_scaling",
            finding=f"{shape.rope_scaling} has no effect with rope_factor: 1",
            remedy="Use a larger `model.rope_factor`, or `model.rope_scaling=none`.",
        )
    if shape.rope_scaling in _BY_TURNS and shape.rope_high_factor <= shape.rope_low_factor:
        yield Fault(
            place="model.rope_high_factor",
            finding=(
                f"{shape.rope_high_factor:g} must be greater than rope_low_factor: "
                f"{shape.rope_low_factor:g}"
            ),
            remedy="Use a larger value.",
        )


def _check_documents(shape: ModelShape) -> Iterator[Fault]:
    """Yield faults of the tokens that separate documents."""
    start, end, place = shape.document_start, shape.document_end, f"model.{shape.document_key}"
    if start is not None and end is not None:
        yield Fault(
            place=place,
            finding=f"document_start and document_end are both token {start}",
            remedy="Remove one of the two.",
        )
        return
    edge = end if start is None else start
    if edge is not None and edge >= shape.vocab:
        yield Fault(
            place=place,
            finding=f"token {edge} is outside the vocabulary of {shape.vocab} tokens",
            remedy=f"Use a token id below {shape.vocab}.",
        )
    if edge is not None and shape.attention is Attention.FLEX:
        yield Fault(
            place=place,
            finding="not supported yet: document masks with flex_attention",
            remedy=("Use `attention=sdpa` or `attention=eager`."),
        )


def _check_experts(shape: ModelShape, experts: int) -> Iterator[Fault]:
    """Yield faults of the experts of a mixture-of-experts model."""
    chosen, dense = shape.experts_per_token, shape.dense_layers
    if chosen > experts:
        yield Fault(
            place="model.experts_per_token",
            finding=f"{chosen} experts per token, but a layer has only {experts}",
            remedy=f"Use {experts} or fewer.",
        )
    elif chosen == experts and shape.bias_update_rate is not None:
        yield Fault(
            place="model.bias_update_rate",
            finding=f"each token goes to all {experts} experts, so the bias has no effect",
            remedy="Remove it, or use a smaller `model.experts_per_token`.",
        )
    if shape.expert_groups is not None:
        yield from _check_groups(shape, experts, shape.expert_groups)
    if dense >= shape.layers:
        yield Fault(
            place="model.dense_layers",
            finding=(
                f"{dense} dense layers leave no MoE layer: the model has {shape.layers} layers"
            ),
            remedy=f"Use a number below {shape.layers}, or remove `model.experts`.",
        )
    if shape.bias is Bias.ALL:
        yield Fault(
            place="model.bias",
            finding="not supported yet: experts with biases",
            remedy="Use `model.bias=none` or `model.bias=qkv`.",
        )


def _check_groups(shape: ModelShape, experts: int, groups: int) -> Iterator[Fault]:
    """Yield a fault if the experts cannot be split into the groups, or too few groups are
    chosen."""
    chosen, of_token = shape.experts_per_token, shape.groups_per_token
    # A group of one expert, or a single group, would not limit the routing.
    sizes = [size for size in divisors(experts) if 1 < size < experts]
    if experts % groups or experts // groups < 2:
        finding = f"{groups} groups cannot split {experts} experts into groups of "
        choices = ", ".join(str(experts // size) for size in reversed(sizes))
        yield Fault(
            place="model.expert_groups",
            finding=f"{finding}two or more",
            remedy=f"Use one of {choices}." if choices else "Remove it.",
        )
    elif of_token >= groups:
        yield Fault(
            place="model.groups_per_token",
            finding=f"{of_token} groups per token, but there are only {groups}",
            remedy=f"Use a number below {groups}, or remove `model.expert_groups`.",
        )
    elif chosen > of_token * experts // groups:
        yield Fault(
            place="model.groups_per_token",
            finding=(
                f"{chosen} experts per token, but {of_token} of {groups} groups have "
                f"only {of_token * experts // groups}"
            ),
            remedy=f"Use {-(-chosen * groups // experts)} or more.",
        )


def _check_latent(shape: ModelShape) -> Iterator[Fault]:
    """Yield the fields that latent attention does not support."""
    own = {
        "kv_heads": (shape.kv_heads != shape.heads, "every head has its own keys and values"),
        "head_dim": (
            shape.own_head_dim is not None,
            "use qk_nope_head_dim and qk_rope_head_dim instead",
        ),
        "rotary": (shape.rotary != 1.0, "qk_rope_head_dim sets the rotary dimensions"),
        "qk_norm": (shape.qk_norm, "the latent vectors are normalized instead"),
    }
    for name, (is_written, finding) in own.items():
        if is_written:
            yield Fault(
                place=f"model.{name}",
                finding=f"not available with latent attention (kv_lora_rank): {finding}",
                remedy=f"Remove `model.{name}`.",
            )
    if shape.bias is not Bias.NONE:
        yield Fault(
            place="model.bias",
            finding=f"not supported yet: bias {shape.bias} with latent attention (kv_lora_rank)",
            remedy="Use `model.bias=none`.",
        )
    if shape.positions is not Positions.ROPE:
        yield Fault(
            place="model.positions",
            finding=f"latent attention uses rotary embeddings; got {shape.positions}",
            remedy="Use `model.positions=rope`.",
        )
    if shape.qk_rope_head_dim % 2:
        yield Fault(
            place="model.qk_rope_head_dim",
            finding=f"{shape.qk_rope_head_dim} is odd; rotary embeddings need an even number",
            remedy="Use an even number.",
        )
    if shape.v_head_dim > shape.head_dim:
        yield Fault(
            place="model.v_head_dim",
            finding=(
                f"not supported yet: value heads of dimension {shape.v_head_dim} with query heads "
                f"of dimension {shape.head_dim}"
            ),
            remedy=f"Use {shape.head_dim} or less.",
        )


def _check_heads(shape: ModelShape) -> Iterator[Fault]:
    """Yield faults of attention heads that do not divide evenly, or have an odd rotary
    dimension."""
    if shape.own_head_dim is None and shape.hidden % shape.heads:
        yield Fault(
            place="model.heads",
            finding=f"heads={shape.heads} does not divide hidden={shape.hidden}",
            remedy=_other_heads(shape),
        )
    elif shape.heads % shape.kv_heads:
        yield Fault(
            place="model.kv_heads",
            finding=f"kv_heads={shape.kv_heads} does not divide heads={shape.heads}",
            remedy=f"Use one of {_nearest_text(divisors(shape.heads), shape.kv_heads)}.",
        )
    elif shape.positions is Positions.ROPE and not _is_rotary_even(shape, shape.head_dim):
        whose = "head_dim" if shape.own_head_dim else "hidden / heads"
        if shape.rotary == 1.0:
            finding = f"{whose} = {shape.head_dim} is odd; rotary embeddings need an even number"
            remedy = f"Make {'it' if shape.own_head_dim else 'hidden / heads'} even."
            place = "model.head_dim" if shape.own_head_dim else "model.heads"
        else:
            finding = (
                f"{shape.rotary:g} of a head of dimension {shape.head_dim} is {shape.rotary_dim} "
                "dimensions; rotary embeddings need an even number"
            )
            place, remedy = "model.rotary", "Use a fraction that gives an even number, 2 or more."
        yield Fault(place=place, finding=finding, remedy=remedy)


def _is_rotary_even(shape: ModelShape, head_dim: int) -> bool:
    turned = int(head_dim * shape.rotary)
    return turned > 0 and turned % 2 == 0


def _other_heads(shape: ModelShape) -> str:
    """Return a remedy: numbers of heads with which the shape has no other fault."""
    kv_heads = 1 if shape.kv_heads == shape.heads else shape.kv_heads
    counts = [
        heads
        for heads in divisors(shape.hidden)
        if heads % kv_heads == 0
        and (shape.positions is not Positions.ROPE or _is_rotary_even(shape, shape.hidden // heads))
    ]
    return (
        f"Use one of {_nearest_text(counts, shape.heads)}."
        if counts
        else ("Change `model.hidden` or `model.kv_heads`.")
    )


class IneffectiveOption(NamedTuple):
    """An option that has no effect because of the option `cause`, and differs from its
    default."""

    name: str
    cause: str
    finding: str
    remedy: str


def find_ineffective_options(shape: ModelShape) -> Iterator[IneffectiveOption]:
    """Yield the options that have no effect because of another option."""
    scaling, experts = shape.rope_scaling, shape.experts
    rows = (
        (
            shape.positions is not Positions.ROPE,
            (_OF_ROPE, "positions", "positions=rope"),
            f"positions: {shape.positions} has no rotary embeddings",
        ),
        (
            scaling is RopeScaling.NONE,
            (("rope_factor",), "rope_scaling", "rope_scaling=linear"),
            "rope_scaling: none does not scale frequencies",
        ),
        (
            scaling not in _BY_TURNS,
            (_OF_TURNS, "rope_scaling", "rope_scaling=llama3"),
            f"rope_scaling: {scaling} does not use this key",
        ),
        (
            not shape.is_latent,
            (_OF_LATENT, "kv_lora_rank", "kv_lora_rank"),
            "the model has no latent attention (kv_lora_rank is not set)",
        ),
        (
            shape.lora_rank is None,
            (("lora_alpha",), "lora_rank", "lora_rank"),
            "the model has no adapters (lora_rank is not set)",
        ),
        (
            shape.window is None,
            (("global_every", "window_rope_base"), "window", "window"),
            "no layer has a sliding window (window is not set)",
        ),
        (
            experts is None,
            (_OF_EXPERTS, "experts", "experts"),
            "the model has no experts (experts is not set)",
        ),
        (
            experts is not None and shape.expert_groups is None,
            (("groups_per_token",), "expert_groups", "expert_groups"),
            "there are no expert groups (expert_groups is not set)",
        ),
        (
            shape.tied,
            (("head_bias",), "tied", "tied=false"),
            "a tied head uses the embedding, which has no bias",
        ),
    )
    for is_void, (names, by, other), finding in rows:
        for name in names if is_void else ():
            if getattr(shape, name) != _DEFAULTS[name]:
                yield IneffectiveOption(
                    name, by, finding, f"Remove `model.{name}`, or set `model.{other}`."
                )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number up to 2**20, in ascending order."""
    return [d for d in range(1, min(number, 2**20) + 1) if number % d == 0]


def _nearest_text(numbers: list[int], near: int) -> str:
    """Return the six numbers nearest to `near`, in ascending order, as text."""
    return ", ".join(map(str, sorted(sorted(numbers, key=lambda d: abs(d - near))[:6])))
