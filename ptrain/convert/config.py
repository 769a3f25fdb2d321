"""The config.json that says what a built-in model is. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ptrain.errors import PtrainError, refused
from ptrain.spec.block import BlockOptions
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.published import config_of, kinds, read_config
from ptrain.spec.resolve_sections import CONFIG, shape_of
from ptrain.spec.write import keys_of_shape

# What a training does beside what the model computes afterwards, in the words of a shape.
_OF_TRAINING = ("aux_loss", "z_loss", "capacity_factor", "document_start", "document_end")
_DROPOUTS = ("dropout", "embedding_dropout", "attention_dropout", "hidden_dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedConfig:
    """What is written. `kind`: one of spec.published. `unsaid`: keys of the spec that no config of
    this kind can say, and that change what the model computes."""

    kind: str
    config: dict[str, Any]
    unsaid: tuple[str, ...]


def published_config(model: ModelShape, *, sequence: int) -> PublishedConfig:
    """Return the config of a model that was trained on samples of so many tokens. What it begins
    with has a config of its own, whose other fields stay. Raises SpecError for a model that no
    class of transformers is known to be."""
    before = _before(model)
    first = str(before.get("model_type", ""))
    shape, keys = _of_weights(model), keys_of_shape(model)
    for kind in sorted(kinds(), key=lambda name: name != first):
        config = {**before, **config_of(kind, keys)}
        if _is_same(config, shape):
            size = "n_positions" if kind == "gpt2" else "max_position_embeddings"
            longest = 0 if kind == "gpt2" else int(before.get(size, 0))  # of what it began with
            config[size] = max(sequence, longest)
            unsaid = tuple(name for name in _OF_TRAINING[2:] if getattr(model, name) is not None)
            return PublishedConfig(kind=kind, config=config, unsaid=unsaid)
    finding = "no class of transformers that is known here computes what this model does"
    raise refused("model", finding, f"what is known: models as {', '.join(kinds())} have them")


def _is_same(config: dict[str, Any], shape: ModelShape) -> bool:
    """Return whether a config says all that a shape does."""
    published = read_config(config)
    read = None if published.faults else shape_of(published.keys)
    return read is not None and _of_weights(read) == shape


def _of_weights(shape: ModelShape) -> ModelShape:
    """Return a shape without what training alone needs, and with each thing said in one way."""
    usual = {spot.name: spot.default for spot in fields(BlockOptions)}
    changes: dict[str, Any] = {name: usual[name] for name in (*_OF_TRAINING, *_DROPOUTS)}
    scale = shape.attention_scale
    return replace(
        shape,
        **changes,
        own_head_dim=shape.head_dim,
        attention=Attention.SDPA,
        pretrained=None,
        attention_scale=shape.head_dim**-0.5 if scale is None else round(scale, 12),
        expert_ffn=shape.width_of_expert if shape.experts else None,
    )


def _before(shape: ModelShape) -> dict[str, Any]:
    """Return the config of the folder that a model begins with, without rotations, of which newer
    files have one field and older ones two. Raises PtrainError where it cannot be read any more."""
    if shape.pretrained is None:
        return {}
    try:
        config = json.loads((Path(shape.pretrained) / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PtrainError(f"error: {shape.pretrained} cannot be read any more: {error}") from error
    return {name: value for name, value in config.items() if name != "rope_parameters"}
