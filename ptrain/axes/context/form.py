"""What a spec says of the context axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptrain.facts.parameters import OF_TOKENS
from ptrain.spec.axis import Axis
from ptrain.spec.context import ContextAttention, Hybrid
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec


def written_attention(spec: Spec) -> ContextAttention | Hybrid | None:
    """Return the attention that a spec writes; None where it writes none, or no two ranks obey
    it."""
    return spec.context.attention if spec.context and spec.degree(Axis.CP) > 1 else None


def left_to_others(spec: Spec) -> str:
    """Return why the paper has no figure for what is sent over cp, behind a sentence that says that
    it has none; nothing without cp."""
    if spec.degree(Axis.CP) == 1:
        return ""
    return (
        "; it has no context axis: context parallelism, it says, takes a model of what is sent "
        "within the attention operator, which it leaves to future work"
    )


def held_tokens(spec: Spec) -> int:
    """Return how many tokens of a sample a rank holds: inputs and targets, which overlap but for
    one where they are a whole sample's and all count."""
    degree, sequence = spec.degree(Axis.CP), spec.batch.sequence
    if degree > 1:
        return 2 * (sequence // degree)
    return (sequence + 1) * (2 if spec.ignores_targets else 1)


def held_buffers(spec: Spec, buffers: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of what a rank holds of a model's buffers: of a built-in one's tables of
    angles the rows of its tokens."""
    is_built_in = isinstance(spec.model, ModelShape)
    for name, size in buffers:
        is_cut = is_built_in and name.endswith(OF_TOKENS)
        yield name, size // spec.degree(Axis.CP) if is_cut else size
