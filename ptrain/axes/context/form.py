"""What a spec says of the context axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptrain.facts.parameters import OF_TOKENS
from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec


def held_tokens(spec: Spec) -> int:
    """Return how many tokens of a sample a rank holds: inputs and targets, which overlap but for
    one where they are a whole sample's and all count."""
    degree, sequence = spec.degree(Axis.CP), spec.batch.sequence
    if degree > 1:
        return 2 * (sequence // degree)
    return (sequence + 1) * (2 if spec.ignores_targets else 1)


def held_buffers(spec: Spec, buffers: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of what a rank holds of a built-in model's buffers: of tables of angles
    the rows of its tokens."""
    for name, size in buffers:
        yield name, size // spec.degree(Axis.CP) if name.endswith(OF_TOKENS) else size
