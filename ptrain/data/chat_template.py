"""Chats as a model is given them: rendered by the template of its tokenizer's folder, with the
answers told apart from all else. Both are transformers' own.

A template may mark what the model says (`{% generation %}`). Of others it follows from what the
template makes of a chat before an answer, ready for it, and behind it: the answer is the
difference. A template that renders an answer in another way once others follow (the thoughts of all
but the last are left out) gives a sample for every answer, which is what a model is given then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptrain.data.chats import ANSWERS, Chat
from ptrain.data.vocabulary import FILE, size_of
from ptrain.errors import Fault, refused
from ptrain.models.boundary import boundary

_PLACE = "--tokenizer"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSample:
    """Tokens, and whether each is learned."""

    tokens: NDArray[np.int64]
    is_target: NDArray[np.bool_]

    def cut(self, size: int) -> ChatSample:
        """Return the tokens up to the end of the last answer of which all is in the first so many;
        none where there is no such answer."""
        is_last = self.is_target & ~np.append(self.is_target[1:], False)
        ends = [end for end in np.flatnonzero(is_last) + 1 if end <= size]
        end = ends[-1] if ends else 0
        return ChatSample(tokens=self.tokens[:end], is_target=self.is_target[:end])


class ChatTemplate:
    """The tokenizer of a `folder`, or of the one in which a tokenizer.json is, in the file `path`,
    of so many tokens (`size`), and its template, of this `text`. Raises SpecError for a folder
    without them."""

    def __init__(self, folder: Path) -> None:
        try:
            import transformers
        except ImportError as error:
            finding = "chats are rendered by transformers, which is not installed"
            raise refused("--chat", finding, "pip install transformers") from error
        folder = folder.parent if folder.name == FILE else folder
        if not (folder / FILE).is_file():
            finding = f"{folder} is no folder with a {FILE}"
            raise refused(_PLACE, finding, "name the folder of a model that transformers loads")
        self.folder, self.path = folder, folder / FILE
        transformers.utils.logging.set_verbosity_error()
        with boundary(lambda error: _unread(folder, error)):
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            self.text: str = self._tokenizer.get_chat_template()
        self._marks_answers = _MARKS.search(self.text) is not None
        self.size = size_of(self._tokenizer.get_vocab())
        self._end: int | None = self._tokenizer.eos_token_id

    def token(self, word: str) -> int | None:
        """Return the token of a word that is one; None where it is none."""
        known: dict[str, int] = self._tokenizer.get_vocab()
        return known.get(word)

    def special_tokens(self) -> list[int]:
        """Return the tokens that are no text, those first with which samples are padded."""
        tokenizer = self._tokenizer
        named = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id]
        added = tokenizer.added_tokens_decoder
        others = sorted(token for token, word in added.items() if word.special)
        return [*dict.fromkeys(token for token in (*named, *others) if token is not None)]

    def samples(self, chat: Chat) -> list[ChatSample]:
        """Return the samples that a chat gives, none where it has no answer. Raises SpecError for a
        chat that the template refuses."""
        behind = [n for n, message in enumerate(chat.messages, 1) if message["role"] == ANSWERS]
        if not behind or behind[-1] == 1:  # what begins a chat answers nothing
            return []
        with boundary(lambda error: _unrendered(chat, error)):
            if self._marks_answers:
                return [self._marked(chat)]
            texts = [*self._told_apart(chat, [number for number in behind if number > 1])]
            return [self._encoded(text, spans) for text, spans in texts]

    def question(self, text: str) -> list[int]:
        """Return the tokens of a chat that begins with what a user says, ready for an answer."""
        chat = Chat(messages=[{"role": "user", "content": text}], tools=None, place="PROMPT")
        with boundary(lambda error: _unrendered(chat, error)):
            rendered = self._rendered(chat, 1, is_ready=True)
            tokens: list[int] = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return tokens

    def answer_end(self) -> int | None:
        """Return the last special token of an answer, which may be another than a text's end; None
        where it has none."""
        said = [{"role": role, "content": "a"} for role in ("user", ANSWERS)]
        (sample,) = self.samples(Chat(messages=said, tools=None, place=_PLACE))
        special = sample.is_target & np.isin(sample.tokens, self.special_tokens())
        return int(sample.tokens[special][-1]) if special.any() else None

    def _rendered(self, chat: Chat, number: int, *, is_ready: bool = False) -> str:
        """Return the text of the first messages; if it `is_ready`, for an answer."""
        messages = chat.messages[:number]
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=chat.tools, tokenize=False, add_generation_prompt=is_ready
        )
        return text

    def _told_apart(self, chat: Chat, behind: Sequence[int]) -> Iterator[tuple[str, list[Span]]]:
        """Yield texts with the spans of the answers that end after so many messages."""
        texts = [self._rendered(chat, number) for number in behind]
        spans = [
            (self._begin(chat, number, text), len(text))
            for number, text in zip(behind, texts, strict=True)
        ]
        if all(texts[-1].startswith(text) for text in texts):
            yield texts[-1], spans
        else:
            yield from ((text, [span]) for text, span in zip(texts, spans, strict=True))

    def _begin(self, chat: Chat, number: int, text: str) -> int:
        """Return where the last answer of a text begins: where the model goes on, or where the two
        part, if a template begins an answer in another way than it shows it."""
        ready = self._rendered(chat, number - 1, is_ready=True)
        begin = _num_shared(ready, text)
        if begin < len(ready) and begin < len(self._rendered(chat, number - 1).rstrip()):
            finding = f"the template shows what is before answer {number} in another way behind it"
            remedy = (
                "mark what the model says in the template: {% generation %}…{% endgeneration %}"
            )
            raise refused(chat.place, finding, remedy)
        return begin

    def _encoded(self, text: str, spans: Sequence[Span]) -> ChatSample:
        encoding = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        tokens = np.asarray(encoding["input_ids"], dtype=np.int64)
        first, last = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        is_target = np.zeros(len(tokens), dtype=np.bool_)
        for begin, end in spans:
            own = (begin <= first) & (first < end) & (last <= end)
            ended = np.flatnonzero(own & (tokens == self._end))
            if len(ended):  # a line break behind the end of an answer nobody waits for
                own[ended[-1] + 1 :] = False
            is_target |= own
        return ChatSample(tokens=tokens, is_target=is_target)

    def _marked(self, chat: Chat) -> ChatSample:
        encoding = self._tokenizer.apply_chat_template(
            chat.messages,
            tools=chat.tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return ChatSample(
            tokens=np.asarray(encoding["input_ids"], dtype=np.int64),
            is_target=np.asarray(encoding["assistant_masks"]) == 1,
        )


def _num_shared(first: str, second: str) -> int:
    """Return how many characters two texts begin with alike."""
    both = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in both if a != b), min(len(first), len(second)))


def _unread(folder: Path, error: BaseException) -> Fault:
    lacks = "chat_template" in str(error)
    finding = f"{folder} has no chat template" if lacks else f"{folder} is no tokenizer: {error}"
    remedy = "put a chat_template.jinja into it, as models for chats have one"
    return Fault(
        place=_PLACE, finding=finding, remedy=remedy if lacks else f"name a folder with a {FILE}"
    )


def _unrendered(chat: Chat, error: BaseException) -> Fault:
    finding = f"the chat template refuses it: {type(error).__name__}: {error}"
    return Fault(place=chat.place, finding=finding, remedy="mend it, or leave it out")
