"""Conversion of chats to rows of tokens: the samples of chats are packed, and written with marks.

Packing: a row holds complete chats, one after the other, and is padded if the next does not fit.
Each chat ends with a token that occurs in none of them (`model.document_end`), which separates the
chats and pads. Two arrays [rows, sequence + 1] are written: the tokens, and for each token whether
it is a target, only an input, or the first of a chat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptrain.data.chats import ANSWERS, ChatSample, ChatTemplate, read_chats
from ptrain.data.tokenized import (
    Encoded,
    Tell,
    TokenFiles,
    TokenizingProgress,
    batch_documents,
    request_identity,
    token_dtype,
)
from ptrain.data.vocabulary import (
    INPUT,
    START,
    TARGET,
    mask_path,
)
from ptrain.errors import PtrainError, input_error


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
