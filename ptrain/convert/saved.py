"""The model of a checkpoint in one process: loading, text generation and scoring.

The model runs on the CPU in fp32, whichever ranks saved it, with the tokenizer of its training.
Each token is computed from the window before it; there is no KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ptrain.data.chats import ChatTemplate
from ptrain.data.tokenized import TokenOrigin, read_origin
from ptrain.data.vocabulary import FILE, ByteVocabulary, FileVocabulary, Vocabulary, tokenizer_file
from ptrain.errors import input_error
from ptrain.models.initialize import build_model, cast_module, holds_buffers, kept_buffers
from ptrain.models.quantized import byte_values, dequantize_rows
from ptrain.runtime.world import World
from ptrain.spec.job import DataSpec
from ptrain.spec.load import load
from ptrain.spec.model import ExternalModel, ModelShape
from ptrain.spec.precision import Quantization
from ptrain.spec.spec import Spec
from ptrain.spec.text import read
from ptrain.train import checkpoint, manifest
from ptrain.train.checkpoint import IndexReader
from ptrain.train.exchange import Exchange
from ptrain.train.folder import RunFolder, display_path, require_run
from ptrain.train.manifest import Manifest
from ptrain.train.saving import suppress_single_process_warning

_MODEL = "model."


class SavedModel:
    """The parameters of a run's checkpoint.

    Args:
        run: The run folder.
        step: The step of the checkpoint. None: the newest.

    Attributes:
        spec: The spec of the run.
        gone: The pretrained folder of the model, if it no longer exists.
        folder: The checkpoint.
        parameters: The metadata of the parameters, by name.

    Raises:
        PtrainError: The run has no sound checkpoint.
    """

    def __init__(self, run: Path, step: int | None = None) -> None:
        self._resolved = RunFolder(run).resolved
        self.spec, self.gone = _spec_of(run)
        self.folder, self._sound = _find_checkpoint(run, step)
        metadata = self._reader().read_metadata()
        self.parameters: dict[str, TensorStorageMetadata] = {
            name.removeprefix(_MODEL): entry
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
        }

    def build(self, *, allow_import: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """Build the model, without loading the saved parameters.

        Returns:
            The module, and the buffers that it has from its pretrained folder, by name.

        Raises:
            SpecError: The pretrained folder no longer exists and may have contained buffers, or
                user code must run and `allow_import` is False.
        """
        spec = self.spec
        model = replace(spec.model, pretrained=None)  # all parameters are in the checkpoint
        module = build_model(
            model, sequence=spec.batch.sequence, allow_import=allow_import, seed=spec.train.seed
        )
        if isinstance(spec.model, ModelShape):
            return module, {}
        self.require_folder(needed=holds_buffers(module))
        folder = spec.model.pretrained
        return module, {} if folder is None else kept_buffers(module, folder)

    def require_folder(self, *, needed: bool) -> None:
        """Raise SpecError if the model needs its pretrained folder, which no longer exists.

        Args:
            needed: True if the model has tensors that checkpoints do not contain.
        """
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
                " If it contained none, remove `model.pretrained` from "
                f"{display_path(self._resolved)}."
            )
        raise input_error("model.pretrained", finding, remedy)

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self._sound.step

    def load(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Load these parameters with full shapes, on the CPU, in the dtype of the training.

        Args:
            names: Keys of `parameters`.

        Returns:
            The tensors by name; shards of several ranks are combined.
        """
        entries = {name: self.parameters[name] for name in names}
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
        }
        with suppress_single_process_warning():
            # `dcp.load` fills these tensors in place; it reshards what several ranks have saved.
            dcp.load({"model": tensors}, storage_reader=self._reader(), no_dist=True)
        return tensors

    def load_parameter(self, module: nn.Module, name: str) -> torch.Tensor:
        """Load a parameter in the shape that it has in a module that is not quantized.

        Args:
            module: The module.
            name: A key of `parameters`.
        """
        tensor = self.load([name])[name]
        if tensor.dtype is not torch.uint8:
            return tensor
        pairs = byte_values() if self.spec.frozen.dtype is Quantization.NF4 else None
        weight = module.get_parameter(name)
        return dequantize_rows(tensor, pairs, weight.shape[1], weight.dtype)

    def _reader(self) -> IndexReader:
        """Return a reader of the checkpoint's files."""
        return IndexReader(self.folder, listed=frozenset(self._sound.files))


def _spec_of(run: Path) -> tuple[Spec, Path | None]:
    """Return the spec of a run, and its pretrained folder if that no longer exists.

    The spec is then loaded without the folder: the checkpoint has all parameters.

    Raises:
        SpecError: The folder is no run folder.
    """
    resolved = require_run(run).resolved
    begun = read(resolved).value_at(("model", "pretrained"))
    gone = None if begun is None or Path(str(begun)).exists() else Path(str(begun))
    return load(str(resolved), ["model.pretrained=null"] if gone else []).spec, gone


def _find_checkpoint(run: Path, step: int | None) -> tuple[Path, Manifest]:
    """Return the newest sound checkpoint (of a step, unless None) and its manifest.

    Raises:
        SpecError: There is none.
    """
    complete = manifest.complete_checkpoints(RunFolder(run).checkpoints)
    wanted = [path for path in complete if step in (None, manifest.step_in_name(path))]
    if not wanted:
        has = ", ".join(str(manifest.step_in_name(path)) for path in complete) or "none"
        what = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise input_error(
            "RUN",
            f"{display_path(run)} does not have {what}; steps with a checkpoint: {has}",
            "Train with `checkpoint.at_end=true`, or use a step that has a checkpoint.",
        )
    path, sound, complaints = checkpoint.find_newest_sound(wanted, Exchange(World()))
    if path is None or sound is None:
        raise input_error(
            "RUN", complaints[0], "Restore it from a backup, use another `--step`, or train again."
        )
    return path, sound


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScore:
    """The score of a text.

    Attributes:
        tokens: The number of predicted tokens.
        loss: Nats per predicted token.
        bits: Bits per byte of the text.
    """

    tokens: int
    loss: float
    bits: float

    @property
    def perplexity(self) -> float:
        """The perplexity, exp(loss)."""
        return math.exp(self.loss)


class TextGenerator:
    """A model that continues and scores texts.

    Args:
        run: The run folder.
        step: The step of the checkpoint. None: the newest.
        tokenizer: A tokenizer.json or its folder. None: the tokenizer of the training.
        is_chat: Render each prompt as the user message of a chat.
        allow_import: Allow user code to run.

    Raises:
        PtrainError: The run has no sound checkpoint, or its tokenizer is unknown.
    """

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
        self.vocabulary: Vocabulary = load_vocabulary(saved.spec, tokenizer, is_chat=is_chat)
        self._model = _build_model(saved, allow_import=allow_import)
        _load_values(self._model, saved)
        self._model.eval()

    def generate(
        self, prompt: str, *, tokens: int, temperature: float, generator: torch.Generator
    ) -> str:
        """Return the continuation of a prompt.

        Args:
            prompt: The prompt.
            tokens: The maximum number of new tokens.
            temperature: The temperature of sampling; 0 selects the most probable token.
            generator: The random generator.

        Raises:
            SpecError: The prompt is empty, or has tokens beyond the vocabulary.
        """
        if not (begun := self.vocabulary.tokens(prompt)):
            raise input_error("PROMPT", "the prompt has no tokens", "Use a longer prompt.")
        self._require_known(begun)
        new: list[int] = []
        while len(new) < tokens:
            logits_V = self._logits([*begun, *new])[-1]
            token = _draw_token(logits_V, temperature, generator)
            if token == self.vocabulary.end:
                break
            new.append(token)
        return self.vocabulary.text(new)

    def score(self, text: str) -> TextScore:
        """Return the score of a text, computed window by window.

        Args:
            text: The text, with at least two tokens.

        Raises:
            SpecError: The text has fewer than two tokens, or tokens beyond the vocabulary.
        """
        tokens = self.vocabulary.tokens(text)
        if len(tokens) < 2:
            raise input_error("--score", "the text has fewer than two tokens", "Use a longer text.")
        self._require_known(tokens)
        sums = sum(self._losses(tokens))
        # Bits per byte compare models with different tokenizers.
        number, size = len(tokens) - 1, len(text.encode())
        return TextScore(tokens=number, loss=sums / number, bits=sums / math.log(2) / size)

    def _losses(self, tokens: Sequence[int]) -> Iterator[float]:
        """Yield the sum of losses of each window."""
        for window in token_windows(tokens, self.spec.batch.sequence):
            logits_TV = self._logits(window[:-1])
            yield F.cross_entropy(logits_TV, torch.tensor(window[1:]), reduction="sum").item()

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits [T, V] of the last T tokens, at most a sample's length."""
        window = torch.tensor([*tokens][-self.spec.batch.sequence :])
        with torch.no_grad():
            logits_BTV: Tensor = self._model(window[None])
        size, _ = self.spec.model.vocabulary  # later logits belong to padding
        return logits_BTV[0, :, :size].float()

    def _require_known(self, tokens: Sequence[int]) -> None:
        """Raise SpecError if a token is beyond the vocabulary of the model."""
        size, key = self.spec.model.vocabulary
        if size is not None and (largest := max(tokens)) >= size:
            raise input_error(
                "--tokenizer",
                f"it produces token {largest}, but {key} is {size}",
                "Use the tokenizer that the model was trained with.",
            )


def _build_model(saved: SavedModel, *, allow_import: bool) -> nn.Module:
    """Build the model in fp32."""
    module, _ = saved.build(allow_import=allow_import)
    cast_module(module, torch.float32)
    return module


def _load_values(module: nn.Module, saved: SavedModel) -> None:
    """Load the saved values into a model, one tensor at a time."""
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in saved.parameters:
                tensor.copy_(saved.load_parameter(module, name))


def _draw_token(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw a token from logits [V]."""
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities_V = (logits_V / temperature).softmax(-1)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


class ChatVocabulary(FileVocabulary):
    """The tokenizer of a folder with a chat template. A text is the user message of a chat."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._template = ChatTemplate(folder)
        end = self._template.answer_end()
        self.end = self.end if end is None else end

    def tokens(self, text: str) -> list[int]:
        return self._template.question_tokens(text)


def load_vocabulary(spec: Spec, named: Path | None, *, is_chat: bool = False) -> Vocabulary:
    """Return the tokenizer of a trained model.

    It is the named one, the one of the pretrained folder, the one of the token files, or the byte
    tokenizer, in this order.

    Args:
        spec: The spec of the training.
        named: A tokenizer.json or its folder. None: find the tokenizer of the training.
        is_chat: Render texts with the chat template of the folder.

    Raises:
        SpecError: The tokenizer is unknown, or differs from the one of the training.
    """
    data, folder = spec.data, spec.model.pretrained
    origin = token_origin(data)
    began = None if folder is None else Path(folder)
    if named is None and began is not None and (began / FILE).is_file():
        named = began / FILE
    if named is None and origin is not None and not origin.is_of_bytes:
        named = None if origin.has_changed else Path(origin.tokenizer)
    if named is not None and origin is not None and origin.differs(tokenizer_file(named)):
        raise input_error(
            "--tokenizer",
            f"the model was trained with tokens of {origin.tokenizer}, but {named} has "
            "a different vocabulary",
            "Use the tokenizer that the model was trained with.",
        )
    if is_chat:
        if named is None:
            raise input_error(
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
    raise input_error(
        "--tokenizer",
        "the model was trained on a token file, and its tokenizer is unknown",
        f"Add `--tokenizer FILE`, a {FILE}.",
    )


def token_origin(data: DataSpec) -> TokenOrigin | None:
    """Return the recorded tokenizer of the training data: the first record of its files."""
    paths = [data.path, *(source.path for source in data.sources or ())]
    origins = (read_origin(Path(path)) for path in paths if path is not None)
    return next((origin for origin in origins if origin is not None), None)


def token_windows(tokens: Sequence[int], length: int) -> Iterable[Sequence[int]]:
    """Yield windows of tokens that overlap by one.

    Args:
        tokens: The tokens of a text; fewer than two give no window.
        length: The number of targets of a window.

    Yields:
        `length` + 1 tokens; the last window may be shorter. Each token except the first is the
        target of one window.
    """
    for first in range(0, len(tokens) - 1, length):
        yield tokens[first : first + length + 1]
