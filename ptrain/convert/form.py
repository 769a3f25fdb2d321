"""In which form a model stands in files: its config, and how they have its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

from torch import Tensor

from ptrain.convert.config import published_config
from ptrain.convert.saved import SavedModel
from ptrain.models.huggingface import config_of_class, unreal
from ptrain.models.module_weights import (
    StoredParts,
    holds_buffers,
    kept_buffers,
    stored_rows,
)
from ptrain.models.published_names import StoredTensor, stored
from ptrain.report.heading import model_name
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelShape
from ptrain.spec.resolve_sections import ARCHITECTURES

Stored = StoredTensor | StoredParts


@dataclass(frozen=True, slots=True, kw_only=True)
class FileForm:
    """`architecture`: the class, or the function of a model that no class is, whose `config` is
    empty. `stored`: how files have a parameter, by its name. `buffers` belong to the files, and no
    checkpoint has them. `unsaid`: keys of the spec that the config cannot say."""

    architecture: str
    config: dict[str, Any]
    stored: Callable[[str], Stored]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    unsaid: tuple[str, ...] = ()


def form_of(saved: SavedModel) -> FileForm:
    """Return the form of a trained model. Raises SpecError for one that no class of transformers is
    known to be."""
    match saved.spec.model:
        case ModelShape() as shape:
            published = published_config(shape, sequence=saved.spec.batch.sequence)
            return FileForm(
                architecture=published.config[ARCHITECTURES][0],
                config=published.config,
                stored=partial(stored, published.kind, shape=shape),
                unsaid=published.unsaid,
            )
        case ExternalModel():
            return FileForm(
                architecture=model_name(saved.spec),
                config={},
                stored=lambda name: StoredTensor(names=(name,)),
            )
        case HuggingFaceModel() as model:
            return _of_class(model, saved)
        case other:
            assert_never(other)


def _of_class(model: HuggingFaceModel, saved: SavedModel) -> FileForm:
    module, config = unreal(model), config_of_class(model)
    rows = stored_rows(module)
    saved.require_folder(needed=holds_buffers(module))
    return FileForm(
        architecture=config[ARCHITECTURES][0],
        config=config,
        stored=lambda name: StoredParts(tuple(rows[name])),
        buffers=kept_buffers(module, model.pretrained) if model.pretrained else {},
    )
