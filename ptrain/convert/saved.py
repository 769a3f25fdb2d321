"""Load the model of a run's checkpoint into one process, whatever ranks saved it; let it continue
texts and score them, on the CPU, in fp32, in the vocabulary that it was trained on.

Each token is computed from the window before it; nothing is kept between tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ptrain.data.chat_rows import ChatTemplate
from ptrain.data.tokenized import TokenOrigin, read_origin
from ptrain.data.vocabulary import FILE, ByteVocabulary, FileVocabulary, Vocabulary, file_of
from ptrain.errors import refused
from ptrain.models.initialize import build, cast, holds_buffers, kept_buffers
from ptrain.rooms.world import World
from ptrain.spec.job import DataSpec
from ptrain.spec.load import load
from ptrain.spec.model import ExternalModel, ModelShape
from ptrain.spec.spec import Spec
from ptrain.spec.text import read
from ptrain.train import checkpoint, manifest
from ptrain.train.checkpoint import IndexReader
from ptrain.train.exchange import Exchange
from ptrain.train.folder import RunFolder, shown
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
        finding = f"{self.gone} does not exist any more, but the model needs its untrained tensors"
        remedy = "Restore the folder: checkpoints do not contain these tensors."
        if isinstance(self.spec.model, ExternalModel):  # whose folder may lack them
            finding = (
                f"{self.gone} does not exist any more, but the model has buffers that "
                "may come from it"
            )
            remedy += (
                f" If it contained none, remove `model.pretrained` from {shown(self._resolved)}."
            )
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
        raise refused(
            "RUN",
            f"{shown(run)} is not a run folder: it has no {resolved.name}",
            "Use a run folder, such as `runs/latest`.",
        )
    begun = read(resolved).at(("model", "pretrained"))
    gone = None if begun is None or Path(str(begun)).exists() else Path(str(begun))
    return load(str(resolved), ["model.pretrained=null"] if gone else []).spec, gone


def _checkpoint(run: Path, step: int | None) -> tuple[Path, Manifest]:
    complete = manifest.complete(RunFolder(run).checkpoints)
    wanted = [path for path in complete if step in (None, manifest.step_of(path))]
    if not wanted:
        has = ", ".join(str(manifest.step_of(path)) for path in complete) or "none"
        what = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise refused(
            "RUN",
            f"{shown(run)} does not have {what}; steps with a checkpoint: {has}",
            "Train with `checkpoint.at_end=true`, or use a step that has a checkpoint.",
        )
    path, sound, complaints = checkpoint.newest(wanted, Exchange(World()))
    if path is None or sound is None:
        raise refused(
            "RUN", complaints[0], "Restore it from a backup, use another `--step`, or train again."
        )
    return path, sound


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScore:
    """How well a text is foreseen. `loss`: nats for each of so many `tokens`; `bits`: for each of
    its bytes."""

    tokens: int
    loss: float
    bits: float

    @property
    def perplexity(self) -> float:
        """Among how many tokens the model hesitates, in the mean."""
        return math.exp(self.loss)


class Writer:
    """The model of a run's newest checkpoint, or of that of `step`. `tokenizer` is a
    tokenizer.json or its folder; None: what it was trained on; if it `is_chat`, texts are what a
    user says. Raises PtrainError as SavedModel, and for a model
    whose tokens nobody knows."""

    def __init__(
        self,
        run: Path,
        step: int | None = None,
        *,
        tokenizer: Path | None = None,
        is_chat: bool = False,
        allow_import: bool = False,
    ) -> None:
        saved = SavedModel(run, step)
        self.step, self.spec = saved.step, saved.spec
        self.vocabulary: Vocabulary = vocabulary_of(saved.spec, tokenizer, is_chat=is_chat)
        self._model = _model(saved, allow_import=allow_import)
        _fill(self._model, saved)
        self._model.eval()

    def written(
        self, prompt: str, *, tokens: int, temperature: float, generator: torch.Generator
    ) -> str:
        """Return what follows a text: at most so many tokens, drawn by their probabilities at a
        `temperature`, the most probable at 0."""
        if not (begun := self.vocabulary.tokens(prompt)):
            raise refused("PROMPT", "the prompt has no tokens", "Use a longer prompt.")
        self._require_known(begun)
        new: list[int] = []
        while len(new) < tokens:
            logits_V = self._logits([*begun, *new])[-1]
            token = _drawn(logits_V, temperature, generator)
            if token == self.vocabulary.end:
                break
            new.append(token)
        return self.vocabulary.text(new)

    def score(self, text: str) -> TextScore:
        """Return how well a text is foreseen, window by window. Raises SpecError for one of fewer
        than two tokens."""
        tokens = self.vocabulary.tokens(text)
        if len(tokens) < 2:
            raise refused("--score", "the text has fewer than two tokens", "Use a longer text.")
        self._require_known(tokens)
        sums = sum(self._losses(tokens))
        number, size = len(tokens) - 1, len(text.encode())
        return TextScore(tokens=number, loss=sums / number, bits=sums / math.log(2) / size)

    def _losses(self, tokens: Sequence[int]) -> Iterator[float]:
        """Yield the sum of each window's losses."""
        for window in windows(tokens, self.spec.batch.sequence):
            logits_TV = self._logits(window[:-1])
            yield F.cross_entropy(logits_TV, torch.tensor(window[1:]), reduction="sum").item()

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits [T, V] of the last tokens, no more of them than a sample had."""
        window = torch.tensor([*tokens][-self.spec.batch.sequence :])
        with torch.no_grad():
            logits_BTV: Tensor = self._model(window[None])
        return logits_BTV[0].float()

    def _require_known(self, tokens: Sequence[int]) -> None:
        size, key = self.spec.model.vocabulary
        if size is not None and (largest := max(tokens)) >= size:
            raise refused(
                "--tokenizer",
                f"it produces token {largest}, but {key} is {size}",
                "Use the tokenizer that the model was trained with.",
            )


def _model(saved: SavedModel, *, allow_import: bool) -> nn.Module:
    module, _ = saved.built(allow_import=allow_import)
    cast(module, torch.float32)
    return module


def _fill(module: nn.Module, saved: SavedModel) -> None:
    """Give a model what was saved, one tensor after the other."""
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in saved.parameters:
                tensor.copy_(saved.load([name])[name])


def _drawn(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities_V = (logits_V / temperature).softmax(-1)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


class ChatVocabulary(FileVocabulary):
    """The vocabulary of a folder, of which a text is what a user says to the model."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._template = ChatTemplate(folder)
        end = self._template.answer_end()
        self.end = self.end if end is None else end

    def tokens(self, text: str) -> list[int]:
        return self._template.question(text)


def vocabulary_of(spec: Spec, named: Path | None, *, is_chat: bool = False) -> Vocabulary:
    """Return the vocabulary that a model was trained on: the one that is `named`, that of the
    folder it began with, what made its token files, or bytes; if it `is_chat`, with the folder's
    template. Raises SpecError where nobody says what its tokens mean, or a file says otherwise."""
    data, folder = spec.data, spec.model.pretrained
    origin = token_origin(data)
    began = None if folder is None else Path(folder)
    if named is None and began is not None and (began / FILE).is_file():
        named = began / FILE
    if named is None and origin is not None and not origin.is_of_bytes:
        named = None if origin.has_changed else Path(origin.tokenizer)
    if named is not None and origin is not None and origin.differs(file_of(named)):
        raise refused(
            "--tokenizer",
            f"the model was trained with tokens of {origin.tokenizer}, but {named} has "
            "a different vocabulary",
            "Use the tokenizer that the model was trained with.",
        )
    if is_chat:
        if named is None:
            raise refused(
                "--chat",
                "no chat template is known for this model",
                "Add `--tokenizer FOLDER`, a folder of a tokenizer with a chat template.",
            )
        return ChatVocabulary(named)
    if named is not None:
        return FileVocabulary(named)
    is_of_bytes = not data.is_of_files and data.function is None
    if is_of_bytes or (origin is not None and origin.is_of_bytes):
        return ByteVocabulary()
    raise refused(
        "--tokenizer",
        "the model was trained on a token file, and its tokenizer is unknown",
        f"Add `--tokenizer FILE`, a {FILE}.",
    )


def token_origin(data: DataSpec) -> TokenOrigin | None:
    """Return the tokenizer of a training's tokens, by the first of its files with a record."""
    paths = [data.path, *(source.path for source in data.sources or ())]
    origins = (read_origin(Path(path)) for path in paths if path is not None)
    return next((origin for origin in origins if origin is not None), None)


def windows(tokens: Sequence[int], length: int) -> Iterable[Sequence[int]]:
    """Yield stretches of at most `length` tokens and the one behind them, each token but the first
    being a target once."""
    for first in range(0, len(tokens) - 1, length):
        yield tokens[first : first + length + 1]
