"""How long each layer takes, and what surrounds the layers, in operations of one token.

The model of time: a device does nothing but multiply matrices, at one rate. A matrix of n elements
costs a token 2n operations forward and 4n backward (the gradients of its input and of itself); the
scores of attention 4TH forward and 8TH backward for T tokens of width H, whole as in Chowdhery et
al. 2022 (PaLM), appendix B, though a causal kernel may do half. Looking up an embedding, norms and
whatever else moves memory is free, and so is what is sent. A tied head multiplies like one of its
own.

Of a model that is not built in, the tensors alone are known: its matrices, without the scores.
"""

from __future__ import annotations

from collections.abc import Iterable

from ptrain.facts.stages import Layers, Tensor
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

_OF_A_MATRIX, _OF_SCORES = 2 + 4, 4 + 8
_MATRIX = 2  # dimensions


def times(spec: Spec, model: Layers) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the operations of one token: of each layer; in front of the first, behind the last."""
    scores = 0
    if isinstance(spec.model, ModelShape):
        scores = _OF_SCORES * spec.batch.sequence * spec.model.hidden
    layers = tuple(_multiplying(layer.tensors) + scores for layer in model.layers)
    tied = dict(model.tied)
    copies = [tensor for tensor in model.front if tensor.name in tied]
    return layers, (0, _multiplying((*copies, *model.behind)))


def _multiplying(tensors: Iterable[Tensor]) -> int:
    return sum(_OF_A_MATRIX * tensor.numel for tensor in tensors if len(tensor.shape) == _MATRIX)
