"""In which form a model stands in files: its config, and how they have its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import torch
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
from ptrain.models.pretrained import PretrainedFolder
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


def form_of(saved: SavedModel, *, allow_import: bool) -> FileForm:
    """Return the form of a trained model. Raises SpecError for one that no class of transformers is
    known to be, and for one of the user's own that must be built, without leave."""
    match saved.spec.model:
        case ModelShape() as shape:
            published = published_config(shape, sequence=saved.spec.batch.sequence)
            return FileForm(
                architecture=published.config[ARCHITECTURES][0],
                config=published.config,
                stored=partial(stored, published.kind, shape=shape),
                unsaid=published.unsaid,
            )
        case ExternalModel() as model:
            return FileForm(
                architecture=model_name(saved.spec),
                config={},
                stored=lambda name: StoredTensor(names=(name,)),
                buffers=_own_buffers(model, saved, allow_import=allow_import),
            )
        case HuggingFaceModel() as model:
            return _of_class(model, saved)
        case other:
            assert_never(other)


def _own_buffers(
    model: ExternalModel, saved: SavedModel, *, allow_import: bool
) -> dict[str, Tensor]:
    """Return the buffers that a model of the user's own has of its folder. It is built, which runs
    its code, only where the folder has, or may have had, more than what is trained."""
    if saved.gone is None:
        folder = model.pretrained
        if folder is None or not (
            PretrainedFolder(Path(folder)).file_of.keys() - saved.parameters.keys()
        ):
            return {}
    _, buffers = saved.built(allow_import=allow_import)
    # One may be a view, or of another's memory, which a file cannot have.
    return {
        name: buffer.clone(memory_format=torch.contiguous_format)
        for name, buffer in buffers.items()
    }


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
