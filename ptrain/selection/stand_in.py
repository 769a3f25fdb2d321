"""A shape that the tables tell of, in the place of one that they do not: what a search scores."""

from __future__ import annotations

from dataclasses import fields, replace
from math import gcd, log

from ptrain.axes.candidates import divisors
from ptrain.facts.model import InnerCollective, LayerWork, ModelWork, Operator
from ptrain.facts.parameters import facts
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.rates import OperatorKind

_OF_HEADS = (OperatorKind.ATTENTION, OperatorKind.ATTENTION_BACKWARD)
_STEP = 64  # of the feed-forward part's width, so that it divides as the model's own does
_LARGEST_HEAD, _EVEN = 256, 8  # of which attention has kernels


def stand_in(shape: ModelShape) -> ModelShape:
    """Return a llama's shape where the activation is gated, else a gpt's: as many layers, as wide a
    stream and vocabulary, heads about as wide that fill the stream, and a feed-forward part with
    which a block has about as many parameters (of one with experts, as `dense` has), so that what
    its projections have more or less is computed and kept there. What its heads compute with each
    other has no parameters: `with_heads`."""
    shape = dense(shape)
    is_gated = shape.activation.is_gated
    heads = _heads(shape)
    step = gcd(shape.ffn, _STEP)
    like = ModelShape(
        family=Family.LLAMA if is_gated else Family.GPT,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=heads,
        kv_heads=gcd(heads, shape.kv_heads) if is_gated else heads,
        ffn=step,
        vocab=shape.vocab,
        attention=shape.attention,
        tied=shape.tied,
        dropout=0.0 if is_gated else max(shape.dropouts),
    )
    least, next_least = block_size(like), block_size(replace(like, ffn=2 * step))
    more = round((block_size(shape) - least) / (next_least - least))
    return replace(like, ffn=step * (1 + max(0, more)))


def dense(shape: ModelShape) -> ModelShape:
    """Return the shape with a feed-forward part in place of experts, as wide as those that a
    token's rows go through, places that stay empty included: it computes and keeps as much."""
    if shape.experts is None:
        return shape
    rows = shape.experts_per_token * (shape.capacity_factor or 1.0)
    width = shape.width_of_expert
    return replace(
        shape,
        ffn=round(min(rows, shape.experts) * width) + shape.shared_experts * width,
        experts=None,
        shared_experts=0,
        dense_layers=0,
        capacity_factor=None,
    )


def block_size(shape: ModelShape) -> int:
    """Return the parameters of a block."""
    return facts(replace(shape, layers=1), 1).units[0].numel


def _heads(shape: ModelShape) -> int:
    """The number whose width is nearest the model's own, of those that attention has kernels for
    and that its heads of keys divide, where there are any: then tp cuts both alike."""
    pool = [heads for heads in divisors(shape.hidden) if shape.hidden // heads % 2 == 0] or [1]
    alike = [heads for heads in pool if heads % shape.kv_heads == 0]

    def distance(heads: int) -> tuple[bool, float]:
        width = shape.hidden // heads
        is_odd = width % _EVEN != 0 or width > _LARGEST_HEAD
        return is_odd, abs(log(width / shape.head_dim))

    return min(alike or pool, key=distance)


def with_heads(work: ModelWork, shape: ModelShape, like: ModelShape) -> ModelWork:
    """Return the work of a shape's stand-in with attention over as many heads as the shape has, and
    as wide ones: their scores grow with the square of the sequence, and no part of the feed-forward
    width makes up for them."""
    return ModelWork(
        front=work.front,
        layers=tuple(_layer_with_heads(layer, shape, like) for layer in work.layers),
        behind=work.behind,
    )


def _layer_with_heads(layer: LayerWork, shape: ModelShape, like: ModelShape) -> LayerWork:
    passes = {
        spot.name: tuple(_with_heads(item, shape, like) for item in getattr(layer, spot.name))
        for spot in fields(layer)
    }
    return LayerWork(**passes)


def _with_heads(
    item: Operator | InnerCollective, shape: ModelShape, like: ModelShape
) -> Operator | InnerCollective:
    if isinstance(item, InnerCollective) or item.kind not in _OF_HEADS:
        return item
    samples, heads, queries, keys, _ = item.dimensions
    of_rank = max(1, heads * shape.heads // like.heads)
    return replace(item, dimensions=(samples, of_rank, queries, keys, shape.head_dim))
