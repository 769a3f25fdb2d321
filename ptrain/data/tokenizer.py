"""The byte tokenizer: a document is its UTF-8 bytes between BOS and EOS, 259 ids in all."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BOS, EOS, PAD = 256, 257, 258
VOCAB = 259


def encode(text: str) -> NDArray[np.uint16]:
    body = np.frombuffer(text.encode(), dtype=np.uint8)
    return np.concatenate(([BOS], body, [EOS])).astype(np.uint16)


def decode(tokens: Iterable[int]) -> str:
    """The text of these ids, specials left out; a character that was cut shows as U+FFFD."""
    return bytes(token for token in tokens if token < BOS).decode(errors="replace")
