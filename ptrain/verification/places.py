"""Where a rank is in a spec's mesh, row-major, outermost axis first; found from the spec alone, so
that a program that has it wrong is told.

What a rank has of one device's tensors where cp gives it a slice of the tokens; by the spec
alone, so that a program that takes others is told.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ptrain.axes.context.attention import Span, context_of, spans_at
from ptrain.facts.parameters import OF_TOKENS
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import SAMPLE_AXES, TOKEN_AXES
from ptrain.spec.spec import Spec, coordinates


def data_place(spec: Spec, rank: int) -> int:
    """Return which share of every global batch is this rank's."""
    where, place = coordinates(spec, rank), 0
    for axis in SAMPLE_AXES:
        if axis in where:
            place = place * spec.degree(axis) + where[axis]
    return place


def token_place(spec: Spec, rank: int) -> int:
    """Return which slice of the tokens of its samples is this rank's; 0 where it has all."""
    where = coordinates(spec, rank)
    return next((where[axis] for axis in TOKEN_AXES if axis in where), 0)


_OF_HEADS = 4  # dimensions of a tensor that has heads in front of the tokens


def own_spans(spec: Spec, rank: int) -> tuple[Span, ...]:
    """Return the tokens of a rank, in its order; none where it has all of a sample's."""
    step = context_of(spec)
    return spans_at(step, coordinates(spec, rank)[step.axis]) if step else ()


def tokens_in(spans: Sequence[Span]) -> torch.Tensor:
    """Return their numbers in the whole sequence, int64."""
    return torch.cat([torch.arange(*span) for span in spans])


class TokensOfRank:
    """Takes a rank's tokens of whole tensors, or those in other `spans`."""

    def __init__(self, spec: Spec, rank: int, spans: Sequence[Span] | None = None) -> None:
        self._spans = own_spans(spec, rank) if spans is None else spans
        self._sequence = spec.batch.sequence
        self._is_built_in = isinstance(spec.model, ModelShape)

    def of_output(self, whole: torch.Tensor) -> torch.Tensor:
        """Of what a module gives, [samples, tokens, ...], or heads in front of the tokens; of
        tokens, [samples, tokens]. All else is as it was."""
        dims = (2, 1) if whole.dim() == _OF_HEADS else (1,)
        sizes = dict(zip(range(whole.dim()), whole.shape, strict=True))
        dim = next((dim for dim in dims if sizes.get(dim) == self._sequence), None)
        return whole if dim is None else self._taken(whole, dim)

    def of_buffer(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Of a built-in model's table with a row for each token."""
        is_cut = self._is_built_in and name.endswith(OF_TOKENS)
        return self._taken(whole, 0) if is_cut else whole

    def _taken(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        if not self._spans:
            return whole
        parts = [whole.narrow(dim, first, behind - first) for first, behind in self._spans]
        return torch.cat(parts, dim)
