"""Conversion of chats to rows of tokens: read, render with a chat template, mark the answers, pack.

Input rows: `messages` with a role and a content each, or `conversations` in the format of ShareGPT,
with `from` and `value`. Transformers renders and tokenizes them. A template may mark answers (`{%
generation %}`). For others the answer is the difference between the chat rendered before it and
after it. A template that renders an earlier answer differently once others follow (because it drops
the reasoning of all but the last) gives one sample per answer.

Packing: a row holds complete chats, one after the other, and is padded if the next does not fit.
Each chat ends with a token that occurs in none of them (`model.document_end`), which separates the
chats and pads. Two arrays [rows, sequence + 1] are written: the tokens, and for each token whether
it is a target, only an input, or the first of a chat.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptrain.data.tokenized import (
    OF_CHATS,
    Encoded,
    Tell,
    TokenFiles,
    TokenizingProgress,
    batch_documents,
    has_rows,
    missing_field_finding,
    read_rows,
    request_identity,
    require_encodable,
    token_dtype,
)
from ptrain.data.vocabulary import FILE, INPUT, START, TARGET, mask_path, vocabulary_size
from ptrain.errors import Fault, PtrainError, input_error, library
from ptrain.models.boundary import convert_exceptions

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
    if isinstance(content, str):
        require_encodable(content, place)
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
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                # Neither downloads nor runs code of the folder.
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
            )
            self.text: str = self._tokenizer.get_chat_template()
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
            return [self._encode_text(text, spans) for text, spans in texts]

    def question_tokens(self, text: str) -> list[int]:
        """Return the tokens of a chat with this user message, up to the start of the answer."""
        chat = Chat(messages=[{"role": "user", "content": text}], tools=None, place="PROMPT")
        with convert_exceptions(lambda error: _render_fault(chat, error)):
            rendered = self._render_messages(chat, 1, is_ready=True)
            tokens: list[int] = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return tokens

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
        text: str = self._tokenizer.apply_chat_template(
            chat.messages[:number], tools=chat.tools, tokenize=False, add_generation_prompt=is_ready
        )
        return text

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

    def _encode_text(self, text: str, spans: Sequence[Span]) -> ChatSample:
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
        return ChatSample(tokens=tokens, is_target=is_target)

    def _encode_marked(self, chat: Chat) -> ChatSample:
        """Encode a chat whose template marks the answers."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPacking:
    """The layout of chats in rows.

    Attributes:
        sequence: Tokens per sample.
        is_packed: True if a row holds several chats.
        separator: The token between two chats. None: the first unused special token.
    """

    sequence: int
    is_packed: bool = True
    separator: str | None = None


def tokenize_chats(
    texts: Sequence[Path],
    out: Path,
    template: ChatTemplate,
    packing: ChatPacking,
    *,
    field: str | None,
    tell: Tell,
) -> TokenizingProgress:
    """Write the rows of all chats to `out`, and the marks of their tokens next to it.

    A chat that is longer than a row is truncated after the last answer that fits. It is left out if
    no answer fits, as are chats without an answer.

    Args:
        texts: The files of chats.
        out: The token file to write.
        template: The tokenizer and chat template.
        packing: The layout of the rows.
        field: The field of the messages. None: `messages`, else `conversations`.
        tell: Called with the progress, at the start and after each batch.

    Returns:
        The final progress.

    Raises:
        SpecError: A file cannot be read or written, no chat fits, or no token can separate chats.
    """
    named = _named_separator(template, packing)
    dtype, width = token_dtype(template.size), packing.sequence + 1

    def encoded(done: TokenizingProgress) -> Iterator[Encoded]:
        for batch, after in batch_documents(texts, lambda path: read_chats(path, field), done):
            samples = [template.make_samples(chat) for chat in batch]
            if (token := done.separator) is None:
                token = _free_separator(template, samples, packing) if named is None else named
            kept = [_fit_samples(several, width, token, packing) for several in samples]
            fates = Counter(map(_classify_chat, samples, kept))
            whole = [sample for several in kept for sample in several.samples]
            rows = _build_rows(whole, packing, token)
            done = replace(
                after,
                tokens=done.tokens + sum(len(sample.tokens) for sample in whole),
                entries=done.entries + len(rows[0]),
                targets=done.targets + int((rows[1] == TARGET).sum()),
                cut=done.cut + fates[_Fate.CUT],
                unanswered=done.unanswered + fates[_Fate.UNANSWERED],
                too_long=done.too_long + fates[_Fate.TOO_LONG],
                divided=done.divided + fates[_Fate.DIVIDED],
                separator=token,
            )
            yield rows, done
        if not done.entries:
            raise _no_rows_error(str(texts[0]), done)

    how = [packing.sequence, packing.is_packed, named]
    request = [*request_identity(texts, out, template.path), template.text, how, field]
    arrays = {out: ((width,), dtype), mask_path(out): ((width,), np.uint8)}
    return TokenFiles(arrays=arrays, request=request, tokenizer=template.path).write(encoded, tell)


def _named_separator(template: ChatTemplate, packing: ChatPacking) -> int | None:
    """Return the id of the separator that the packing names, None if it names none.

    Raises:
        SpecError: The tokenizer has no such token.
    """
    if packing.separator is None:
        return None
    if (token := template.token_id(packing.separator)) is None:
        raise input_error(
            "--separator",
            f"the tokenizer has no token {packing.separator!r}",
            "Use a token of the tokenizer.",
        )
    return token


def _free_separator(
    template: ChatTemplate, samples: Sequence[Sequence[ChatSample]], packing: ChatPacking
) -> int:
    """Return the first special token that occurs in none of these samples.

    Raises:
        SpecError: Each special token occurs, and rows hold several chats.
    """
    known = {int(n) for several in samples for sample in several for n in np.unique(sample.tokens)}
    free = [token for token in template.special_tokens() if token not in known]
    if free or not packing.is_packed:  # any token may pad a row that holds a single chat
        return [*free, 0][0]
    raise input_error(
        "--separator",
        "every special token of the tokenizer occurs in chats, so none can separate chats",
        "Add `--separator TOKEN`, a token that occurs in no chat; or `--alone` for one "
        "chat per row.",
    )


class _Fate(StrEnum):
    """The result of a chat: in a row, truncated, or left out for one of three reasons."""

    WHOLE = "whole"
    CUT = "cut"
    UNANSWERED = "unanswered"
    TOO_LONG = "too long"
    DIVIDED = "divided"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitting:
    """The samples of a chat that fit into a row. `is_divided`: some contain the separator."""

    samples: list[ChatSample]
    is_divided: bool


def _fit_samples(
    samples: Sequence[ChatSample], width: int, separator: int, packing: ChatPacking
) -> _Fitting:
    """Return the samples of a chat that fit into a row, truncated if necessary.

    Samples with the separator are left out if rows are packed.
    """
    cut = [sample if len(sample.tokens) <= width else sample.truncate(width) for sample in samples]
    # The first token of a row is never predicted.
    learned = [sample for sample in cut if sample.is_target[1:].any()]
    kept = [
        sample
        for sample in learned
        if not (packing.is_packed and (sample.tokens == separator).any())
    ]
    return _Fitting(samples=kept, is_divided=len(kept) < len(learned))


def _classify_chat(samples: Sequence[ChatSample], fitting: _Fitting) -> _Fate:
    """Return the result of a chat, from its samples before and after fitting."""
    if fitting.samples:
        is_whole = [*map(id, samples)] == [*map(id, fitting.samples)]
        return _Fate.WHOLE if is_whole else _Fate.CUT
    if fitting.is_divided:
        return _Fate.DIVIDED
    has_answer = any(sample.is_target[1:].any() for sample in samples)
    return _Fate.TOO_LONG if has_answer else _Fate.UNANSWERED


def _no_rows_error(place: str, done: TokenizingProgress) -> PtrainError:
    """Return the error for chats of which none is in a row."""
    if done.divided:
        return input_error(
            "--separator",
            f"{done.divided} of {done.documents} chats contain the separator",
            "Use a token that occurs in no chat, or add `--alone`.",
        )
    if done.too_long:
        return input_error(
            place,
            f"none of {done.documents} chats has an answer that fits",
            "Use a larger `--sequence`.",
        )
    return input_error(
        place,
        f"none of {done.documents} chats has a message of {ANSWERS!r} after another message",
        f"Use chats in which answers have the role {ANSWERS!r}.",
    )


def _build_rows(
    samples: Sequence[ChatSample], packing: ChatPacking, separator: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows of tokens and of marks, both [rows, sequence + 1]."""
    width = packing.sequence + 1
    # Each chat takes one more token, its separator. Rows have one column more than they return,
    # so that the last separator need not fit.
    sizes = [len(sample.tokens) + 1 for sample in samples]
    packed = pack_sizes(sizes, width + 1) if packing.is_packed else [[n] for n in range(len(sizes))]
    # Padding is the separator, too: it ends the last document of a row.
    tokens = np.full((len(packed), width + 1), separator, dtype=np.int64)
    marks = np.full((len(packed), width + 1), INPUT, dtype=np.uint8)
    for row, numbers in enumerate(packed):
        first = 0
        for sample in (samples[number] for number in numbers):
            own = slice(first, first + len(sample.tokens))
            tokens[row, own] = sample.tokens
            marks[row, own] = np.where(sample.is_target, TARGET, INPUT)
            marks[row, first] = START
            first = own.stop + 1
    return tokens[:, :width], marks[:, :width]


def pack_sizes(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Return groups of items whose sizes sum to at most `room` (first-fit decreasing).

    The items of a group, and the groups by their first item, are in ascending order.

    Args:
        sizes: The sizes of the items, none larger than `room`.
        room: The capacity of a group.
    """
    bins: list[list[int]] = []
    left: list[int] = []
    # First-fit decreasing needs at most 11/9 of the fewest possible groups, plus 6/9 (Dósa, 2007).
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = sizes[number]
        place = next((n for n, rest in enumerate(left) if size <= rest), len(bins))
        if place == len(bins):
            bins.append([])
            left.append(room)
        bins[place].append(number)
        left[place] -= size
    return sorted(map(sorted, bins))
