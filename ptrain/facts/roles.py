"""The roles of a built-in model's modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ptrain.facts.parameters import EXPERTS
from ptrain.spec.block import Positions
from ptrain.spec.model import ModelShape
from ptrain.spec.role import Role, Roles


def roles_of(shape: ModelShape, *, has_whole_experts: bool = False) -> Roles:
    """Return the roles of a built-in model's modules, in the order of a forward pass. Norms of
    heads are used on a rank's own heads, all other norms between the sub-blocks.
    `has_whole_experts`: of experts each rank has some, and features of those that are shared."""
    is_learned = shape.positions is Positions.LEARNED
    blocks = (
        *((f"blocks.*.{name}", Role.NORM) for name in _norms(shape, "attention")),
        ("blocks.*.attention", Role.LATENT_INPUT if shape.is_latent else Role.WHOLE_INPUT),
        *((f"blocks.*.attention.{name}", role) for name, role in _attention(shape)),
        ("blocks.*.attention.output", Role.ROW),
        *((f"blocks.*.{name}", Role.NORM) for name in _norms(shape, "mlp")),
        *_feed_forward(shape, has_whole_experts),
    )
    positions = (("positions", Role.POSITIONS),) if is_learned else ()
    head = () if shape.tied else (("head", Role.HEAD),)
    return (("embed", Role.VOCABULARY), *positions, *blocks, ("norm", Role.LAST_NORM), *head)


def _attention(shape: ModelShape) -> Iterator[tuple[str, Role]]:
    """Yield what makes queries, keys and values. Latent features are those of all heads, and each
    rank's heads give their gradient an addend."""
    if shape.is_latent:
        down = ["query_down", "query_norm"] if shape.q_lora_rank else []
        yield from ((name, Role.LATENT) for name in (*down, "kv_down", "kv_norm"))
        yield from ((name, Role.INNER_COLUMN) for name in ("query_up", "kv_up"))
        return
    yield from ((name, Role.COLUMN) for name in ("query", "key", "value"))
    yield from ((name, Role.SHARED) for name in ("query_norm", "key_norm") if shape.qk_norm)


def _feed_forward(shape: ModelShape, has_whole_experts: bool) -> Iterator[tuple[str, Role]]:
    """Yield the roles of layers without experts and of those with them. There what each rank's
    slices of their features give is a part of a sum, of the shared ones too: it is summed once.
    Where a rank has whole ones nothing is a sum but what the shared ones give, as without any."""
    inner = ("gate", "up") if shape.activation.is_gated else ("up",)
    for place in _places(shape, with_experts=False):
        yield from _pair(f"blocks.{place}.mlp", inner)
    for place in _places(shape, with_experts=True):
        own = Role.WHOLE_EXPERTS if has_whole_experts else Role.EXPERTS
        yield f"blocks.{place}.mlp", own
        yield f"blocks.{place}.mlp.router", Role.SHARED
        if has_whole_experts:
            if shape.shared_experts:
                yield from _pair(f"blocks.{place}.mlp.shared", inner)
            continue
        for part in (EXPERTS, *(["shared"] if shape.shared_experts else [])):
            names = (f"blocks.{place}.mlp.{part}.{name}" for name in inner)
            yield from ((name, Role.INNER_COLUMN) for name in names)
            yield f"blocks.{place}.mlp.{part}.down", Role.INNER_ROW


def _pair(module: str, inner: Iterable[str]) -> Iterator[tuple[str, Role]]:
    """Yield the roles of column operators in a pair with a row operator."""
    yield module, Role.WHOLE_INPUT
    yield from ((f"{module}.{name}", Role.COLUMN) for name in inner)
    yield f"{module}.down", Role.ROW


def _places(shape: ModelShape, *, with_experts: bool) -> Iterable[object]:
    """Return the numbers of such layers, or * where all are alike."""
    if shape.experts is None or not shape.dense_layers:
        return "*" if with_experts is (shape.experts is not None) else ()
    dense = range(shape.dense_layers)
    return range(shape.dense_layers, shape.layers) if with_experts else dense


def _norms(shape: ModelShape, part: str) -> tuple[str, ...]:
    """Names of the norms in front of a sub-block and behind it."""
    has_own = part == "attention" or not shape.parallel
    return (*([f"{part}_norm"] * has_own), *([f"{part}_post_norm"] * shape.post_norm))
