"""From a spec's model to a module, on the current default device (the meta device included)."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import nn

from ptrain.errors import refused
from ptrain.models.external import build_external
from ptrain.models.gpt import Gpt
from ptrain.models.huggingface import build_hugging_face
from ptrain.models.llama import Llama
from ptrain.spec.extras import require_leave_of
from ptrain.spec.model import ExternalModel, Family, HuggingFaceModel, ModelShape, ModelSpec


def build(
    model: ModelSpec, *, sequence: int, allow_import: bool = False, seed: int = 0
) -> nn.Module:
    """A built-in model comes without its initial weights (`models.initialize` gives them); another
    with those of its constructor, which runs with torch's generator at `seed`."""
    match model:
        case ModelShape():
            return _build_shape(model, sequence)
        case ExternalModel():
            require_leave_of(model.function, allow_import=allow_import)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return build_external(model)
        case HuggingFaceModel():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return build_hugging_face(model, sequence=sequence)
        case other:
            assert_never(other)


def _build_shape(shape: ModelShape, sequence: int) -> nn.Module:
    if shape.hidden % shape.heads:
        finding = f"heads={shape.heads} does not divide hidden={shape.hidden}"
        raise refused("model.heads", finding, "choose a divisor")
    match shape.family:
        case Family.LLAMA:
            if shape.heads % shape.kv_heads:
                finding = f"kv_heads={shape.kv_heads} does not divide heads={shape.heads}"
                raise refused("model.kv_heads", finding, "choose a divisor")
            if shape.head_dim % 2:
                finding = (
                    f"RoPE turns pairs, but a head has hidden/heads = {shape.head_dim} elements"
                )
                raise refused("model.heads", finding, "choose an even number")
            return Llama(shape, sequence=sequence)
        case Family.GPT:
            if shape.kv_heads != shape.heads:
                raise refused(
                    "model.kv_heads",
                    "gpt has as many key-value heads as heads",
                    f"write kv_heads={shape.heads} or leave it out",
                )
            return Gpt(shape, sequence=sequence)
        case family:
            assert_never(family)
