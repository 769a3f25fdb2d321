"""Chats as rows of tokens, packed: a row holds whole chats, one behind the other, and is padded
where the next would not fit. Behind a chat stands a token that is in none of them, which tells them
apart (`model.document_end`) and pads.

Two arrays of rows [rows, sequence + 1] stand beside each other: of tokens, and of what each is,
which is a target, an input alone, or one with which a chat begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptrain.data.chat_template import ChatSample, ChatTemplate
from ptrain.data.chats import chats
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
from ptrain.errors import refused


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
    field: str,
    tell: Tell,
) -> TokenizingProgress:
    """Write the rows of all chats to `out`, and what their tokens are beside it; return how much
    there is. A chat that is longer than a row is cut behind the last answer that fits, or left out
    where none does, as one without an answer is. Raises SpecError for what cannot be read or
    written, and where no token can stand between two chats."""
    named = _named(template, packing)
    dtype, width = token_dtype(template.size), packing.sequence + 1

    def encoded(done: TokenizingProgress) -> Iterator[Encoded]:
        for batch, after in batches(texts, lambda path: chats(path, field), done):
            samples = [template.samples(chat) for chat in batch]
            token = done.separator
            if token is None:
                token = _separator(template, samples, packing) if named is None else named
            kept = [_fitting(several, width, token, packing) for several in samples]
            whole = [sample for several in kept for sample in several]
            rows = _rows(whole, packing, token)
            done = replace(
                after,
                tokens=done.tokens + sum(len(sample.tokens) for sample in whole),
                entries=done.entries + len(rows[0]),
                targets=done.targets + int((rows[1] == TARGET).sum()),
                cut=done.cut + sum(_is_cut(*both) for both in zip(samples, kept, strict=True)),
                left_out=done.left_out + sum(not several for several in kept),
                separator=token,
            )
            yield rows, done
        if not done.entries:
            finding = f"none of {done.documents} chats has an answer that fits"
            raise refused(str(texts[0]), finding, "write a longer --sequence")

    how = [packing.sequence, packing.is_packed, named]
    request = [*requested(texts, out, template.path), template.text, how, field]
    arrays = {out: ((width,), dtype), mask_beside(out): ((width,), np.uint8)}
    return TokenFiles(arrays=arrays, request=request).write(encoded, tell)


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


def _fitting(
    samples: Sequence[ChatSample], width: int, separator: int, packing: ChatPacking
) -> list[ChatSample]:
    """Return what of a chat can stand in a row: nothing that has the separator within it."""
    cut = [sample if len(sample.tokens) <= width else sample.cut(width) for sample in samples]
    return [
        sample
        for sample in cut
        if sample.is_target[1:].any()
        and not (packing.is_packed and (sample.tokens == separator).any())
    ]


def _is_cut(samples: Sequence[ChatSample], kept: Sequence[ChatSample]) -> bool:
    """Return whether a part of a chat is left out, and not all of it."""
    return bool(kept) and [*map(id, samples)] != [*map(id, kept)]


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
