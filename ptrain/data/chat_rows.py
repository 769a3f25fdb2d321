"""Chats as rows of tokens, packed: a row holds whole chats, one behind the other, and is padded
where the next would not fit. Behind a chat stands a token that is in none of them, which tells them
apart (`model.document_end`) and pads.

Two arrays of rows [rows, sequence + 1] stand beside each other: of tokens, and of what each is,
which is a target, an input alone, or one with which a chat begins.
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

from ptrain.data.chat_template import ChatSample, ChatTemplate
from ptrain.data.chats import ANSWERS, chats
from ptrain.data.tokenized import (
    Encoded,
    Tell,
    TokenFiles,
    TokenizingProgress,
    batches,
    requested,
    token_dtype,
)
from ptrain.data.tokens import INPUT, START, TARGET, mask_beside
from ptrain.errors import PtrainError, refused


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
            token = done.separator
            if token is None:
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
    files = TokenFiles(arrays=arrays, request=request, tokenizer=template.path)
    return files.write(encoded, tell)


def _named(template: ChatTemplate, packing: ChatPacking) -> int | None:
    """Return the token that is to stand between two chats, if one is named."""
    if packing.separator is None:
        return None
    token = template.token(packing.separator)
    if token is None:
        finding = f"the tokenizer has no token {packing.separator!r}"
        raise refused("--separator", finding, "name one that it has")
    return token


def _separator(
    template: ChatTemplate, samples: Sequence[Sequence[ChatSample]], packing: ChatPacking
) -> int:
    """Return the first special token that stands in none of these."""
    known = {int(n) for several in samples for sample in several for n in np.unique(sample.tokens)}
    free = [token for token in template.special_tokens() if token not in known]
    if free or not packing.is_packed:  # what pads a chat behind its end may be any
        return [*free, 0][0]
    finding = "every special token of the tokenizer stands in chats, and none can tell them apart"
    remedy = "name a token that stands in none: --separator TOKEN; or --alone, a chat a row"
    raise refused("--separator", finding, remedy)


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
        finding = f"{done.divided} of {done.documents} chats have the separator within them"
        return refused("--separator", finding, "name a token that stands in none, or write --alone")
    if done.too_long:
        finding = f"none of {done.documents} chats has an answer that fits"
        return refused(place, finding, "write a longer --sequence")
    finding = f"none of {done.documents} chats has a message of {ANSWERS!r} behind another"
    remedy = f"give chats in which the role of who answers is {ANSWERS!r}"
    return refused(place, finding, remedy)


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
