"""Chats: reading, rendering with a chat template, and the tokens of the answers.

Input rows: `messages` with a role and a content each, or `conversations` in the format of ShareGPT,
with `from` and `value`. Transformers renders and tokenizes them. A template may mark answers (`{%
generation %}`). For others the answer is the difference between the chat rendered before it and
after it. A template that renders an earlier answer differently once others follow (because it drops
the reasoning of all but the last) gives one sample per answer.

Special tokens in the text of users, systems and tools are encoded by their letters: otherwise a
text could end a message, or begin an answer. A template runs in the sandbox of Transformers, within
limits of time and memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptrain.data.tokenized import (
    OF_CHATS,
    has_rows,
    missing_field_finding,
    read_rows,
    require_encodable,
)
from ptrain.data.vocabulary import (
    FILE,
    MOST_TOKENIZER,
    vocabulary_size,
)
from ptrain.errors import Fault, PtrainError, input_error, library
from ptrain.models.boundary import convert_exceptions, limit_work
from ptrain.spec.text import require_file

ANSWERS = "assistant"  # the role whose messages are targets
_TOOLS = "tools"
# The roles of chat templates, by the names in datasets of ShareGPT.
_ROLES: Mapping[object, str] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", ANSWERS), ANSWERS),
    **dict.fromkeys(("tool", "observation"), "tool"),
    "system": "system",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat: its messages in the form that templates take, the available tools, and its place."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    place: str


def read_chats(path: Path, field: str | None) -> Iterator[Chat]:
    """Yield the chats of a file of JSON lines or Parquet.

    Args:
        path: The file.
        field: The field of the messages. None: `messages`, else `conversations`.

    Raises:
        SpecError: The file is unusable, or a row holds no chat. The error names the row.
    """
    if not has_rows(path):
        raise input_error(
            str(path),
            "chats must be in JSON lines or Parquet",
            "Use a .jsonl or .parquet file, or remove `--chat`.",
        )
    fields = OF_CHATS if field is None else (field,)
    yield from (_parse_chat(row, fields, place) for place, row in read_rows(path, fields, [_TOOLS]))


def _parse_chat(row: object, fields: Sequence[str], place: str) -> Chat:
    """Return the chat of a row. Raises SpecError if the row holds none."""
    entries = row if isinstance(row, dict) else {}
    field = next((name for name in fields if entries.get(name) is not None), fields[0])
    messages = entries.get(field)
    if messages == []:
        raise input_error(place, f"the list in the field {field!r} is empty", "Remove the row.")
    if not isinstance(messages, list):
        raise input_error(
            place,
            missing_field_finding(row, field, "list of messages"),
            "Add `--field NAME`, the field of the messages.",
        )
    tools = entries.get(_TOOLS) or None
    if tools is not None and not isinstance(tools, list):
        raise input_error(
            place, "its tools are not a list", "Use a list, as chat templates expect."
        )
    numbered = enumerate(messages, 1)
    return Chat(
        messages=[
            _parse_message(message, f"{place}, message {number}") for number, message in numbered
        ],
        tools=tools,
        place=place,
    )


def _parse_message(message: object, place: str) -> dict[str, Any]:
    """Return a message without empty fields: a Parquet row has all columns of its messages."""
    message = _convert_sharegpt(message, place)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _message_error(place, missing_field_finding(message, "role", "string"))
    entries = {key: value for key, value in message.items() if value is not None}
    content = entries.get("content")
    if content is None and not entries.get("tool_calls"):
        raise _message_error(place, missing_field_finding(message, "content", "string"))
    if content is not None and not isinstance(content, str):
        # A template would write the Python form of a list into the text.
        raise _message_error(place, missing_field_finding(message, "content", "string"))
    require_encodable(content or "", place)
    return {"content": None, **entries}  # templates expect the key in a message with tool calls


def _convert_sharegpt(message: object, place: str) -> object:
    """Return a message of ShareGPT with `role` and `content`; any other message unchanged."""
    if not isinstance(message, dict) or "role" in message or "from" not in message:
        return message
    role = _ROLES.get(message["from"]) if isinstance(message["from"], str) else None
    if role is None:
        raise input_error(
            place, f"unknown role {message['from']!r}", f"Use one of {', '.join(map(str, _ROLES))}."
        )
    return {"role": role, "content": message.get("value")}


def _message_error(place: str, finding: str) -> PtrainError:
    """Return the error of a message with a wrong or missing field."""
    return input_error(
        place,
        finding,
        'Use messages of the form `[{"role": "user", "content": "…"}, {"role": "assistant", …}]`.',
    )


_PLACE = "--tokenizer"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]
_MARK = "\uf8f0\uf8f1"  # two letters for private use, which occur in no text together
# Files of a tokenizer: their endings, and those that have its words.
_READ = (".json", ".jinja", ".txt", ".model")
INDEX = "model.safetensors.index.json"
_LARGE = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "model.safetensors.index.json",
)
_MOST_CONFIG = 4 * 2**20  # bytes of any other file
_MOST_SECONDS, _MOST_BYTES = 1.0, 150 * 2**20  # to render one chat


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSample:
    """The tokens of a chat, and for each token whether it is a target."""

    tokens: NDArray[np.int64]
    is_target: NDArray[np.bool_]

    def truncate(self, size: int) -> ChatSample:
        """Return the tokens up to the end of the last answer that fits into `size` tokens.

        It is empty if no answer fits.

        Args:
            size: The maximum number of tokens.
        """
        is_last = self.is_target & ~np.append(self.is_target[1:], False)
        ends = [end for end in np.flatnonzero(is_last) + 1 if end <= size]
        end = ends[-1] if ends else 0
        return ChatSample(tokens=self.tokens[:end], is_target=self.is_target[:end])


class ChatTemplate:
    """The tokenizer and chat template of a folder.

    Args:
        folder: The folder, or the tokenizer.json in it.

    Attributes:
        folder: The folder.
        path: The tokenizer.json.
        size: The number of token ids.
        text: The text of the template.

    Raises:
        SpecError: The folder lacks one of them, or Transformers is not installed.
    """

    def __init__(self, folder: Path) -> None:
        transformers = library("transformers", "--chat", "rendering chats needs Transformers")
        folder = folder.parent if folder.name == FILE else folder
        if not (folder / FILE).is_file():
            raise input_error(
                _PLACE,
                f"{folder} is not a folder with a {FILE}",
                "Use the folder of a model that Transformers loads.",
            )
        self.folder, self.path = folder, folder / FILE
        transformers.utils.logging.set_verbosity_error()
        with convert_exceptions(lambda error: _folder_fault(folder, error)):
            for file in folder.iterdir():  # which of them are read, Transformers decides
                if file.suffix in _READ:
                    is_large = file.name in (FILE, *_LARGE)
                    require_file(file, MOST_TOKENIZER if is_large else _MOST_CONFIG)
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                # Neither downloads nor runs code of the folder.
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
            )
            self.text: str = self._tokenizer.get_chat_template()
        words = self._tokenizer.added_tokens_decoder.values()
        # The longest first, since one may be a prefix of another.
        special = sorted({str(word) for word in words if word.special}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._marks_answers = _MARKS.search(self.text) is not None
        self.size = vocabulary_size(self._tokenizer.get_vocab())
        self._end: int | None = self._tokenizer.eos_token_id

    def token_id(self, word: str) -> int | None:
        """Return the id of a word, None if it is no token."""
        known: dict[str, int] = self._tokenizer.get_vocab()
        return known.get(word)

    def special_tokens(self) -> list[int]:
        """Return the special tokens, starting with the tokens that usually pad samples."""
        tokenizer = self._tokenizer
        named = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id]
        added = tokenizer.added_tokens_decoder
        others = sorted(token for token, word in added.items() if word.special)
        return [*dict.fromkeys(token for token in (*named, *others) if token is not None)]

    def make_samples(self, chat: Chat) -> list[ChatSample]:
        """Return the samples of a chat; none if it has no answer.

        Raises:
            SpecError: The template rejects the chat, or changes earlier messages once an answer
                follows.
        """
        ends = [n for n, message in enumerate(chat.messages, 1) if message["role"] == ANSWERS]
        if not ends or ends[-1] == 1:  # a first message answers none
            return []
        with convert_exceptions(lambda error: _render_fault(chat, error)):
            if self._marks_answers:
                return [self._encode_marked(chat)]
            texts = [*self._answer_spans(chat, [number for number in ends if number > 1])]
            return [self._encode_text(chat, text, spans) for text, spans in texts]

    def question_tokens(self, text: str) -> list[int]:
        """Return the tokens of a chat with this user message, up to the start of the answer."""
        chat = Chat(messages=[{"role": "user", "content": text}], tools=None, place="PROMPT")
        with convert_exceptions(lambda error: _render_fault(chat, error)):
            rendered = self._render_messages(chat, 1, is_ready=True)
            return self._encode_text(chat, rendered, [], is_ready=True).tokens.tolist()

    def answer_end(self) -> int | None:
        """Return the last special token of an answer, None if it has none.

        It may differ from the end token of a text.
        """
        entries = [{"role": role, "content": "a"} for role in ("user", ANSWERS)]
        (sample,) = self.make_samples(Chat(messages=entries, tools=None, place=_PLACE))
        special = sample.is_target & np.isin(sample.tokens, self.special_tokens())
        return int(sample.tokens[special][-1]) if special.any() else None

    def _render_messages(self, chat: Chat, number: int, *, is_ready: bool = False) -> str:
        """Render the first `number` messages; with `is_ready`, up to the start of an answer."""
        with limit_work(_MOST_SECONDS, _MOST_BYTES):  # a template may loop forever
            text: str = self._tokenizer.apply_chat_template(
                chat.messages[:number],
                tools=chat.tools,
                tokenize=False,
                add_generation_prompt=is_ready,
            )
        return text

    def _user_words(self, chat: Chat, text: str, *, is_ready: bool) -> list[int]:
        """Return the positions in a text of special tokens that are text of a message.

        They are found by rendering the chat again, with a mark before each of them. Answers may
        contain special tokens, which the model learns to write.

        Raises:
            SpecError: The template treats such a message differently.
        """
        if not any(self._special.search(message) for message in _user_texts(chat.messages)):
            return []
        marked = replace(chat, messages=_mark_words(chat.messages, self._special, _MARK))
        for number in range(len(chat.messages), 0, -1):
            pieces = self._render_messages(marked, number, is_ready=is_ready).split(_MARK)
            if "".join(pieces) == text:
                return [*accumulate(map(len, pieces[:-1]))]
        raise input_error(
            chat.place,
            "the template changes a message with special tokens of the tokenizer",
            "Remove these words from the message.",
        )

    def _answer_spans(self, chat: Chat, ends: Sequence[int]) -> Iterator[tuple[str, list[Span]]]:
        """Yield texts with the spans of their answers.

        This is one text if each earlier rendering is a prefix of the last, else one text per
        answer.

        Args:
            chat: The chat.
            ends: The number of messages up to and including each answer.
        """
        texts = [self._render_messages(chat, number) for number in ends]
        spans = [
            (self._answer_start(chat, number, text), len(text))
            for number, text in zip(ends, texts, strict=True)
        ]
        if all(texts[-1].startswith(text) for text in texts):
            yield texts[-1], spans
        else:
            yield from ((text, [span]) for text, span in zip(texts, spans, strict=True))

    def _answer_start(self, chat: Chat, number: int, text: str) -> int:
        """Return the position at which the last answer of a text begins.

        This is the end of the generation prompt, or the first difference between prompt and text if
        the template renders the start of an answer differently.

        Raises:
            SpecError: The messages before the answer are rendered differently once it follows.
        """
        ready = self._render_messages(chat, number - 1, is_ready=True)
        begin = _num_shared(ready, text)
        if begin < len(ready) and begin < len(self._render_messages(chat, number - 1).rstrip()):
            raise input_error(
                chat.place,
                f"the template renders the messages before answer {number} differently "
                "once the answer follows",
                "Mark the answers of the model in the template: "
                "`{% generation %}…{% endgeneration %}`.",
            )
        return begin

    def _encode_text(
        self, chat: Chat, text: str, spans: Sequence[Span], *, is_ready: bool = False
    ) -> ChatSample:
        """Encode a text, with the tokens inside the spans as targets."""
        # The template has written the special tokens. `verbose` warns about long texts.
        encoding = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        tokens = np.asarray(encoding["input_ids"], dtype=np.int64)
        first, last = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        is_target = np.zeros(len(tokens), dtype=np.bool_)
        for begin, end in spans:
            own = (begin <= first) & (first < end) & (last <= end)
            ended = np.flatnonzero(own & (tokens == self._end))
            if len(ended):  # generation stops at the end token: a line break after it is no target
                own[ended[-1] + 1 :] = False
            is_target |= own
        words = self._user_words(chat, text, is_ready=is_ready)
        sample = ChatSample(tokens=tokens, is_target=is_target)
        return self._as_text(sample, text, (first, last), words)

    def _as_text(
        self,
        sample: ChatSample,
        text: str,
        offsets: tuple[NDArray[np.int64], NDArray[np.int64]],
        words: Sequence[int],
    ) -> ChatSample:
        """Replace special tokens that are text of a message by the tokens of their letters.

        Args:
            sample: The encoded text.
            text: The text.
            offsets: The first character of each token, and the one after its last.
            words: The positions of the words to replace.
        """
        if not words:
            return sample
        tokens, is_target = sample.tokens.tolist(), sample.is_target.tolist()
        is_special = np.isin(sample.tokens, self.special_tokens())
        for word in reversed(words):
            match = self._special.match(text, word)
            # A token may include blanks around its word.
            covers = is_special & (offsets[0] <= word) & (word < offsets[1])
            for place in np.flatnonzero(covers).tolist():
                assert match is not None, "positions are those of matches"
                letters = self._tokenizer.tokenize(match[0], split_special_tokens=True)
                numbers = self._tokenizer.convert_tokens_to_ids(letters)
                tokens[place : place + 1] = numbers
                is_target[place : place + 1] = [is_target[place]] * len(numbers)
        return ChatSample(
            tokens=np.asarray(tokens, dtype=np.int64),
            is_target=np.asarray(is_target, dtype=np.bool_),
        )

    def _encode_marked(self, chat: Chat) -> ChatSample:
        """Encode a chat whose template marks the answers."""
        text = self._render_messages(chat, len(chat.messages))  # within limits
        encoding = self._tokenizer.apply_chat_template(
            chat.messages,
            tools=chat.tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        sample = ChatSample(
            tokens=np.asarray(encoding["input_ids"], dtype=np.int64),
            is_target=np.asarray(encoding["assistant_masks"]) == 1,
        )
        if not (words := self._user_words(chat, text, is_ready=False)):
            return sample
        plain = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        first, last = np.asarray(plain["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        assert plain["input_ids"] == encoding["input_ids"], "one text has one encoding"
        return self._as_text(sample, text, (first, last), words)


def _user_texts(value: Any) -> Iterator[str]:
    """Yield the texts in messages whose special tokens count as text: all but those of answers."""
    match value:
        case str():
            yield value
        case dict() if value.get("role") != ANSWERS:
            yield from chain.from_iterable(map(_user_texts, value.values()))
        case list():
            yield from chain.from_iterable(map(_user_texts, value))


def _mark_words(value: Any, special: re.Pattern[str], mark: str) -> Any:
    """Return messages with a mark before each special token in the texts of `_user_texts`."""
    match value:
        case str():
            return special.sub(lambda word: mark + word[0], value)
        case dict() if value.get("role") != ANSWERS:
            return {key: _mark_words(inner, special, mark) for key, inner in value.items()}
        case list():
            return [_mark_words(inner, special, mark) for inner in value]
        case _:
            return value


def _num_shared(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    both = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in both if a != b), min(len(first), len(second)))


def _folder_fault(folder: Path, error: BaseException) -> Fault:
    """Return the fault of a folder without a tokenizer or chat template."""
    lacks = "chat_template" in str(error)
    finding = (
        f"{folder} has no chat template" if lacks else (f"{folder} is not a tokenizer: {error}")
    )
    remedy = "Add a chat_template.jinja to the folder, for example that of a chat model."
    return Fault(
        place=_PLACE, finding=finding, remedy=remedy if lacks else f"Use a folder with a {FILE}."
    )


def _render_fault(chat: Chat, error: BaseException) -> Fault:
    """Return the fault of a chat that the template rejects."""
    return Fault(
        place=chat.place,
        finding=f"the chat template rejects it: {type(error).__name__}: {error}",
        remedy="Correct the chat, or remove it.",
    )
