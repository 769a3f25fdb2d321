"""The vocabulary that a model was trained on, and its windows of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ptrain.data.chat_rows import ChatTemplate
from ptrain.data.tokenized import TokenOrigin, read_origin
from ptrain.data.vocabulary import FILE, ByteVocabulary, FileVocabulary, Vocabulary, file_of
from ptrain.errors import refused
from ptrain.spec.job import DataSpec
from ptrain.spec.spec import Spec


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
