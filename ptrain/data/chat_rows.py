"""Chats as rows of tokens: read, rendered by the chat template of the tokenizer's folder, with the
answers marked, and packed.

Rows: `messages` with a role and content each, or `conversations` as ShareGPT has them, with `from`
and `value`. Rendering and tokenization are transformers' own. A template may mark answers (`{%
generation %}`). For others the answer is the difference between the chat rendered before it and
after it; a template that renders an earlier answer differently once others follow (it drops the
reasoning of all but the last) gives one sample for every answer.

Packing: a row holds whole chats one after the other, and is padded where the next would not fit.
Each chat ends with a token that is in none of them (`model.document_end`), which separates them and
pads. Two arrays [rows, sequence + 1] are written: tokens, and for each token whether it is a
target, an input only, or the first of a chat.
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
    batches,
    has_rows,
    lacking,
    requested,
    require_encodable,
    rows,
    token_dtype,
)
from ptrain.data.vocabulary import FILE, INPUT, START, TARGET, mask_beside, size_of
from ptrain.errors import Fault, PtrainError, library, refused
from ptrain.models.boundary import boundary

ANSWERS = "assistant"  # the role whose messages are learned
_TOOLS = "tools"
# By the names that ShareGPT's datasets have for them.
_ROLES: Mapping[object, str] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", ANSWERS), ANSWERS),
    **dict.fromkeys(("tool", "observation"), "tool"),
    "system": "system",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages as a template takes them, with the tools that a model may call, and where they
    stand."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    place: str


def chats(path: Path, field: str | None) -> Iterator[Chat]:
    """Yield the chats of a file of JSON lines or Parquet, the messages of which stand in `field`;
    None: in `messages`, or else in `conversations`. Raises SpecError, with the row, for what is
    none."""
    if not has_rows(path):
        raise refused(
            str(path),
            "chats must be in JSON lines or Parquet",
            "Use a .jsonl or .parquet file, or remove `--chat`.",
        )
    fields = OF_CHATS if field is None else (field,)
    yield from (_of_row(row, fields, place) for place, row in rows(path, fields, [_TOOLS]))


def _of_row(row: object, fields: Sequence[str], place: str) -> Chat:
    said = row if isinstance(row, dict) else {}
    field = next((name for name in fields if said.get(name) is not None), fields[0])
    messages = said.get(field)
    if messages == []:
        raise refused(place, f"the list in the field {field!r} is empty", "Remove the row.")
    if not isinstance(messages, list):
        raise refused(
            place,
            lacking(row, field, "list of messages"),
            "Add `--field NAME`, the field of the messages.",
        )
    tools = said.get(_TOOLS) or None
    if tools is not None and not isinstance(tools, list):
        raise refused(place, "its tools are not a list", "Use a list, as chat templates expect.")
    numbered = enumerate(messages, 1)
    return Chat(
        messages=[_message(message, f"{place}, message {number}") for number, message in numbered],
        tools=tools,
        place=place,
    )


def _message(message: object, place: str) -> dict[str, Any]:
    """Return a message without the fields that a column has and this one has not."""
    message = _of_speaker(message, place)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _no_message(place, lacking(message, "role", "string"))
    said = {key: value for key, value in message.items() if value is not None}
    content = said.get("content")
    if content is None and not said.get("tool_calls"):
        raise _no_message(place, lacking(message, "content", "string"))
    if isinstance(content, str):
        require_encodable(content, place)
    return {"content": None, **said}  # as templates have it beside a call of tools


def _of_speaker(message: object, place: str) -> object:
    """Return a message of ShareGPT in the words of templates; any other as it is."""
    if not isinstance(message, dict) or "role" in message or "from" not in message:
        return message
    role = _ROLES.get(message["from"]) if isinstance(message["from"], str) else None
    if role is None:
        raise refused(
            place, f"unknown role {message['from']!r}", f"Use one of {', '.join(map(str, _ROLES))}."
        )
    return {"role": role, "content": message.get("value")}


def _no_message(place: str, finding: str) -> PtrainError:
    return refused(
        place,
        finding,
        'Use messages of the form `[{"role": "user", "content": "…"}, {"role": "assistant", …}]`.',
    )


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
        transformers = library("transformers", "--chat", "rendering chats needs Transformers")
        folder = folder.parent if folder.name == FILE else folder
        if not (folder / FILE).is_file():
            raise refused(
                _PLACE,
                f"{folder} is not a folder with a {FILE}",
                "Use the folder of a model that Transformers loads.",
            )
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
        text: str = self._tokenizer.apply_chat_template(
            chat.messages[:number], tools=chat.tools, tokenize=False, add_generation_prompt=is_ready
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
            raise refused(
                chat.place,
                f"the template renders the messages before answer {number} differently "
                "once the answer follows",
                "Mark the answers of the model in the template: "
                "`{% generation %}…{% endgeneration %}`.",
            )
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
    finding = (
        f"{folder} has no chat template" if lacks else (f"{folder} is not a tokenizer: {error}")
    )
    remedy = "Add a chat_template.jinja to the folder, for example that of a chat model."
    return Fault(
        place=_PLACE, finding=finding, remedy=remedy if lacks else f"Use a folder with a {FILE}."
    )


def _unrendered(chat: Chat, error: BaseException) -> Fault:
    return Fault(
        place=chat.place,
        finding=f"the chat template rejects it: {type(error).__name__}: {error}",
        remedy="Correct the chat, or remove it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPacking:
    """How chats become rows: of how many tokens a sample is, whether a row holds several, and the
    token that stands between two, if one is named."""

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
    """Write the rows of all chats, whose messages stand in `field` as `chats` reads it, to `out`,
    and what their tokens are beside it; return how much there is. A chat that is longer than a row
    is cut behind the last answer that fits, or left out where none does, as one without an answer
    is. Raises SpecError for what cannot be read or written, and where no token can stand between
    two chats."""
    named = _named(template, packing)
    dtype, width = token_dtype(template.size), packing.sequence + 1

    def encoded(done: TokenizingProgress) -> Iterator[Encoded]:
        for batch, after in batches(texts, lambda path: chats(path, field), done):
            samples = [template.samples(chat) for chat in batch]
            if (token := done.separator) is None:
                token = _separator(template, samples, packing) if named is None else named
            kept = [_fitting(several, width, token, packing) for several in samples]
            fates = Counter(map(_fate, samples, kept))
            whole = [sample for several in kept for sample in several.samples]
            rows = _rows(whole, packing, token)
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
            raise _nothing(str(texts[0]), done)

    how = [packing.sequence, packing.is_packed, named]
    request = [*requested(texts, out, template.path), template.text, how, field]
    arrays = {out: ((width,), dtype), mask_beside(out): ((width,), np.uint8)}
    return TokenFiles(arrays=arrays, request=request, tokenizer=template.path).write(encoded, tell)


def _named(template: ChatTemplate, packing: ChatPacking) -> int | None:
    """Return the token that is to stand between two chats, if one is named."""
    if packing.separator is None:
        return None
    if (token := template.token(packing.separator)) is None:
        raise refused(
            "--separator",
            f"the tokenizer has no token {packing.separator!r}",
            "Use a token of the tokenizer.",
        )
    return token


def _separator(
    template: ChatTemplate, samples: Sequence[Sequence[ChatSample]], packing: ChatPacking
) -> int:
    """Return the first special token that stands in none of these."""
    known = {int(n) for several in samples for sample in several for n in np.unique(sample.tokens)}
    free = [token for token in template.special_tokens() if token not in known]
    if free or not packing.is_packed:  # what pads a chat behind its end may be any
        return [*free, 0][0]
    raise refused(
        "--separator",
        "every special token of the tokenizer occurs in chats, so none can separate chats",
        "Add `--separator TOKEN`, a token that occurs in no chat; or `--alone` for one "
        "chat per row.",
    )


class _Fate(StrEnum):
    """What becomes of a chat."""

    WHOLE = "whole"
    CUT = "cut"
    UNANSWERED = "unanswered"
    TOO_LONG = "too long"
    DIVIDED = "divided"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitting:
    """What of a chat can stand in a row, and whether some has the separator within it."""

    samples: list[ChatSample]
    is_divided: bool


def _fitting(
    samples: Sequence[ChatSample], width: int, separator: int, packing: ChatPacking
) -> _Fitting:
    """Return what of a chat can stand in a row: nothing that has the separator within it."""
    cut = [sample if len(sample.tokens) <= width else sample.cut(width) for sample in samples]
    learned = [sample for sample in cut if sample.is_target[1:].any()]
    kept = [
        sample
        for sample in learned
        if not (packing.is_packed and (sample.tokens == separator).any())
    ]
    return _Fitting(samples=kept, is_divided=len(kept) < len(learned))


def _fate(samples: Sequence[ChatSample], fitting: _Fitting) -> _Fate:
    if fitting.samples:
        is_whole = [*map(id, samples)] == [*map(id, fitting.samples)]
        return _Fate.WHOLE if is_whole else _Fate.CUT
    if fitting.is_divided:
        return _Fate.DIVIDED
    has_answer = any(sample.is_target[1:].any() for sample in samples)
    return _Fate.TOO_LONG if has_answer else _Fate.UNANSWERED


def _nothing(place: str, done: TokenizingProgress) -> PtrainError:
    """What is wrong with chats of which none is in a row."""
    if done.divided:
        return refused(
            "--separator",
            f"{done.divided} of {done.documents} chats contain the separator",
            "Use a token that occurs in no chat, or add `--alone`.",
        )
    if done.too_long:
        return refused(
            place,
            f"none of {done.documents} chats has an answer that fits",
            "Use a larger `--sequence`.",
        )
    return refused(
        place,
        f"none of {done.documents} chats has a message of {ANSWERS!r} after another message",
        f"Use chats in which answers have the role {ANSWERS!r}.",
    )


def _rows(
    samples: Sequence[ChatSample], packing: ChatPacking, separator: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return rows of tokens, and of what they are."""
    width = packing.sequence + 1
    sizes = [len(sample.tokens) + 1 for sample in samples]  # and a separator, which may be cut off
    packed = pack(sizes, width + 1) if packing.is_packed else [[n] for n in range(len(sizes))]
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


def pack(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Return which of these go together, none of them larger than the room: the largest first, each
    where it fits first. They stay in their order, as far as may be."""
    bins: list[list[int]] = []
    left: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = sizes[number]
        place = next((n for n, rest in enumerate(left) if size <= rest), len(bins))
        if place == len(bins):
            bins.append([])
            left.append(room)
        bins[place].append(number)
        left[place] -= size
    return sorted(map(sorted, bins))
