"""From a spec's model to a module, on the current default device (the meta device included)."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import nn

from ptrain.errors import SpecError
from ptrain.models.external import build_external
from ptrain.models.huggingface import build_hugging_face
from ptrain.models.meta import materialize_built_on_meta
from ptrain.models.module_weights import require_module_weights
from ptrain.models.pretrained import require_weights
from ptrain.models.transformer import Transformer
from ptrain.spec.extras import require_leave_of
from ptrain.spec.misfits import misfits
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelShape, ModelSpec


def build(
    model: ModelSpec, *, sequence: int, allow_import: bool = False, seed: int = 0
) -> nn.Module:
    """A built-in model comes without its initial weights, which `models.initialize` gives (a folder
    of them is known to fit); another with those of its constructor, which runs with torch's
    generator at `seed`, or of a folder that fits, which `models.module_weights` reads."""
    match model:
        case ModelShape():
            return _build_shape(model, sequence)
        case ExternalModel():
            require_leave_of(model.function, allow_import=allow_import)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = build_external(model)
                materialize_built_on_meta(module, model.function)
        case HuggingFaceModel():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = build_hugging_face(model, sequence=sequence)
        case other:
            assert_never(other)
    require_module_weights(module, model.pretrained)
    return module


def _build_shape(shape: ModelShape, sequence: int) -> nn.Module:
    if faults := tuple(misfits(shape)):
        raise SpecError(*faults)
    module = Transformer(shape, sequence=sequence)
    if shape.pretrained is not None:
        require_weights(module, shape)
    return module
