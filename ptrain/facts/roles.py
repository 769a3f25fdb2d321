"""The roles of a built-in model's modules on the tensor axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ptrain.facts.parameters import EXPERTS
from ptrain.spec.block import Positions
from ptrain.spec.model import ModelShape
from ptrain.spec.role import Role, Roles


def roles_of(shape: ModelShape, *, has_whole_experts: bool = False) -> Roles:
    """Return the roles of a built-in model's modules, in the order of a forward pass.

    Norms of heads apply to a rank's heads; all other norms are between sub-blocks.

    Args:
        shape: The model.
        has_whole_experts: Each rank has some full experts, and a shard of the features of shared
            ones.
    """
    is_learned = shape.positions is Positions.LEARNED
    blocks = (
        *((f"blocks.*.{name}", Role.NORM) for name in _norm_names(shape, "attention")),
        ("blocks.*.attention", Role.LATENT_INPUT if shape.is_latent else Role.WHOLE_INPUT),
        *((f"blocks.*.attention.{name}", role) for name, role in _attention_roles(shape)),
        ("blocks.*.attention.output", Role.ROW),
        *((f"blocks.*.{name}", Role.NORM) for name in _norm_names(shape, "mlp")),
        *_feed_forward_roles(shape, has_whole_experts),
    )
    positions = (("positions", Role.POSITIONS),) if is_learned else ()
    head = () if shape.tied else (("head", Role.HEAD),)
    return (("embed", Role.VOCABULARY), *positions, *blocks, ("norm", Role.LAST_NORM), *head)


def _attention_roles(shape: ModelShape) -> Iterator[tuple[str, Role]]:
    """Yield the roles of the projections to queries, keys and values.

    Latent features are replicated: they serve all heads, so each rank's heads contribute a part of
    their gradient.
    """
    if shape.is_latent:
        down = ["query_down", "query_norm"] if shape.q_lora_rank else []
        yield from ((name, Role.LATENT) for name in (*down, "kv_down", "kv_norm"))
        yield from ((name, Role.INNER_COLUMN) for name in ("query_up", "kv_up"))
        return
    yield from ((name, Role.COLUMN) for name in ("query", "key", "value"))
    yield from ((name, Role.SHARED) for name in ("query_norm", "key_norm") if shape.qk_norm)


def _feed_forward_roles(shape: ModelShape, has_whole_experts: bool) -> Iterator[tuple[str, Role]]:
    """Yield the roles of feed-forward layers, without experts and with them.

    If experts are sharded by features, each rank computes a part of a sum, for shared experts too;
    the parts are summed once. If ranks have full experts, only the output of shared experts is a
    sum.
    """
    inner = ("gate", "up") if shape.activation.is_gated else ("up",)
    for place in _layer_numbers(shape, with_experts=False):
        yield from _column_row_pair(f"blocks.{place}.mlp", inner)
    for place in _layer_numbers(shape, with_experts=True):
        expert_role = Role.WHOLE_EXPERTS if has_whole_experts else Role.EXPERTS
        yield f"blocks.{place}.mlp", expert_role
        yield f"blocks.{place}.mlp.router", Role.SHARED
        if has_whole_experts:
            if shape.shared_experts:
                yield from _column_row_pair(f"blocks.{place}.mlp.shared", inner)
            continue
        for part in (EXPERTS, *(["shared"] if shape.shared_experts else [])):
            names = (f"blocks.{place}.mlp.{part}.{name}" for name in inner)
            yield from ((name, Role.INNER_COLUMN) for name in names)
            yield f"blocks.{place}.mlp.{part}.down", Role.INNER_ROW


def _column_row_pair(module: str, inner: Iterable[str]) -> Iterator[tuple[str, Role]]:
    """Yield the roles of a feed-forward module: column operators, then a row operator."""
    yield module, Role.WHOLE_INPUT
    yield from ((f"{module}.{name}", Role.COLUMN) for name in inner)
    yield f"{module}.down", Role.ROW


def _layer_numbers(shape: ModelShape, *, with_experts: bool) -> Iterable[object]:
    """Return the numbers of layers with or without experts, or * if all layers are equal."""
    if shape.experts is None or not shape.dense_layers:
        return "*" if with_experts is (shape.experts is not None) else ()
    dense = range(shape.dense_layers)
    return range(shape.dense_layers, shape.layers) if with_experts else dense


def _norm_names(shape: ModelShape, part: str) -> tuple[str, ...]:
    """Return the names of the norms before and after a sub-block."""
    has_own = part == "attention" or not shape.parallel
    return (*([f"{part}_norm"] * has_own), *([f"{part}_post_norm"] * shape.post_norm))
