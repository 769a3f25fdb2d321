"""The vocabulary that a model was trained on, and its windows of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ptrain.data.vocabulary import FILE, ByteVocabulary, FileVocabulary, Vocabulary
from ptrain.errors import refused
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec


def vocabulary_of(spec: Spec, named: Path | None) -> Vocabulary:
    """Return the vocabulary that a model was trained on: the one that is `named`, that of the
    folder it began with, or bytes. Raises SpecError where nobody says what its tokens mean."""
    if named is not None:
        return FileVocabulary(named)
    model, data = spec.model, spec.data
    if isinstance(model, ModelShape) and model.pretrained:
        beside = Path(model.pretrained) / FILE
        if beside.is_file():
            return FileVocabulary(beside)
    if not data.is_of_files and data.function is None:
        return ByteVocabulary()
    finding = "the model was trained on tokens of a file, and nobody says what they mean"
    raise refused("--tokenizer", finding, f"name a {FILE}")


def windows(tokens: Sequence[int], length: int) -> Iterable[Sequence[int]]:
    """Yield stretches of at most `length` tokens and the one behind them, each token but the first
    being a target once."""
    for first in range(0, len(tokens) - 1, length):
        yield tokens[first : first + length + 1]
