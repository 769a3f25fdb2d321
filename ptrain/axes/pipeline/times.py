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

from ptrain.facts.parameters import elements_met
from ptrain.facts.stages import Layers, Tensor
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

_OF_A_MATRIX, _OF_SCORES = 2 + 4, 4 + 8
_MATRICES = (2, 3)  # dimensions of one, and of those of all experts


def times(spec: Spec, model: Layers) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the operations of one token: of each layer; in front of the first, behind the last."""
    scores = 0
    if isinstance(spec.model, ModelShape):
        scores = _OF_SCORES * spec.batch.sequence * spec.model.hidden
    layers = tuple(_multiplying(spec, layer.tensors) + scores for layer in model.layers)
    tied = dict(model.tied)
    copies = [tensor for tensor in model.front if tensor.name in tied]
    return layers, (0, _multiplying(spec, (*copies, *model.behind)))


def _multiplying(spec: Spec, tensors: Iterable[Tensor]) -> int:
    shape = spec.model
    matrices = [tensor for tensor in tensors if len(tensor.shape) in _MATRICES]
    if not isinstance(shape, ModelShape):
        return sum(_OF_A_MATRIX * matrix.numel for matrix in matrices)
    return sum(_OF_A_MATRIX * elements_met(shape, matrix.name, matrix.numel) for matrix in matrices)
