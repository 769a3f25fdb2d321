"""A trained model that goes on with texts and judges them, on the CPU, in fp32.

Each token is computed from the window before it, anew: nothing is kept between tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.convert.saved import SavedModel
from ptrain.convert.vocabulary import vocabulary_of, windows
from ptrain.data.vocabulary import Vocabulary
from ptrain.errors import refused
from ptrain.models.initialize import cast


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
        begun = self.vocabulary.tokens(prompt)
        if not begun:
            raise refused("PROMPT", "the text has no token", "give a text to begin with")
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
            raise refused("--score", "there is nothing to foresee in it", "give a longer text")
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
            finding = f"it makes token {largest}, and {key} is {size}"
            raise refused(
                "--tokenizer", finding, "name the tokenizer that the model was trained on"
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
