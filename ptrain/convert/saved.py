"""The model in a run's checkpoint, whatever ranks saved it, read in one process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ptrain.errors import refused
from ptrain.models.initialize import build, holds_buffers, kept_buffers
from ptrain.rooms.world import World
from ptrain.spec.load import load
from ptrain.spec.model import ExternalModel, ModelShape
from ptrain.spec.spec import Spec
from ptrain.spec.text import read
from ptrain.train import checkpoint, manifest
from ptrain.train.exchange import Exchange
from ptrain.train.folder import RunFolder, shown
from ptrain.train.index import IndexReader
from ptrain.train.manifest import Manifest

_MODEL = "model."


class SavedModel:
    """The parameters of a run's newest checkpoint, or of that of `step`; its `spec`; `gone`, the
    folder that the model began with, where that is there no more. Raises PtrainError for a run
    without one that is sound."""

    def __init__(self, run: Path, step: int | None = None) -> None:
        self._resolved = RunFolder(run).resolved
        self.spec, self.gone = _spec_of(run)
        self.folder, self._sound = _checkpoint(run, step)
        metadata = self._reader().read_metadata()
        self.parameters: dict[str, TensorStorageMetadata] = {
            name.removeprefix(_MODEL): entry
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
        }

    def built(self, *, allow_import: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """Return the model as it is constructed, but for the buffers that the folder has which it
        began with; and these by name. Raises SpecError where that is gone and may have had some."""
        spec = self.spec
        model = replace(spec.model, pretrained=None)  # all parameters are in the checkpoint
        module = build(
            model, sequence=spec.batch.sequence, allow_import=allow_import, seed=spec.train.seed
        )
        if isinstance(spec.model, ModelShape):
            return module, {}
        self.require_folder(needed=holds_buffers(module))
        folder = spec.model.pretrained
        return module, {} if folder is None else kept_buffers(module, folder)

    def require_folder(self, *, needed: bool) -> None:
        """Raises SpecError where a model needs the folder that it began with, which is gone."""
        if not needed or self.gone is None:
            return
        finding = f"{self.gone} is gone, and the model has tensors of it that are not trained"
        remedy = "put it back: no checkpoint has them"
        if isinstance(self.spec.model, ExternalModel):  # whose folder may lack them
            finding = f"{self.gone} is gone, and the model has buffers, which may be of it"
            remedy += f"; if it had none, take model.pretrained out of {shown(self._resolved)}"
        raise refused("model.pretrained", finding, remedy)

    @property
    def step(self) -> int:
        """How many steps were done."""
        return self._sound.step

    def load(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return these parameters, whole, on the CPU, in the dtype they were trained in."""
        entries = {name: self.parameters[name] for name in names}
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
        }
        with checkpoint.without_advice():
            dcp.load({"model": tensors}, storage_reader=self._reader(), no_dist=True)
        return tensors

    def _reader(self) -> IndexReader:
        return IndexReader(self.folder, listed=frozenset(self._sound.files))


def _spec_of(run: Path) -> tuple[Spec, Path | None]:
    """Return a run's spec, and the folder that its model began with, if that is gone: the
    checkpoint has all weights."""
    resolved = RunFolder(run).resolved
    if not os.path.isfile(resolved):  # nor of a name that no file can have
        finding = f"{shown(run)} is no run folder: it has no {resolved.name}"
        raise refused("RUN", finding, "name a folder of runs/, like runs/latest")
    begun = read(resolved).at(("model", "pretrained"))
    gone = None if begun is None or Path(str(begun)).exists() else Path(str(begun))
    return load(str(resolved), ["model.pretrained=null"] if gone else []).spec, gone


def _checkpoint(run: Path, step: int | None) -> tuple[Path, Manifest]:
    complete = manifest.complete(RunFolder(run).checkpoints)
    wanted = [path for path in complete if step in (None, manifest.step_of(path))]
    if not wanted:
        has = ", ".join(str(manifest.step_of(path)) for path in complete) or "none"
        what = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        finding = f"{shown(run)} has not {what}; it has {has}"
        raise refused("RUN", finding, "train with checkpoint.at_end=true, or name a step it has")
    path, sound, complaints = checkpoint.newest(wanted, Exchange(World()))
    if path is None or sound is None:
        remedy = "take it from where it is whole, name another --step, or train anew"
        raise refused("RUN", complaints[0], remedy)
    return path, sound
