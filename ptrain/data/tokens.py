"""Token files and the byte tokenizer.

A token file is a memory-mapped `.npy` array of token ids: one dimension, cut into samples anywhere,
or two, one sample per row. The byte tokenizer turns a document into its UTF-8 bytes between BOS and
EOS, 259 ids in all.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptrain.errors import refused

BOS, EOS, PAD = 256, 257, 258
VOCAB = 259


def encode(text: str) -> NDArray[np.uint16]:
    body = np.frombuffer(text.encode(), dtype=np.uint8)
    return np.concatenate(([BOS], body, [EOS])).astype(np.uint16)


def decode(tokens: Iterable[int]) -> str:
    """The text of these ids, specials left out; a character that was cut shows as U+FFFD."""
    return bytes(token for token in tokens if token < BOS).decode(errors="replace")


INPUT, TARGET, START = 0, 1, 2  # what a token of a row is: START, with which a document begins
_MAKE = "Run `ptrain tokenize TEXT... --out FILE.npy` to write a token file."


def open_tokens(path: Path, place: str = "data.path") -> NDArray[np.unsignedinteger]:
    """Map a token file, which stands at a `place` of the spec. Its ids are compared with the
    vocabulary batch by batch."""
    tokens = _mapped(path, place, _MAKE)
    if tokens.ndim not in (1, 2) or tokens.dtype not in (np.uint8, np.uint16, np.uint32):
        raise refused(
            place,
            f"{path} contains {tokens.dtype} of shape {tokens.shape}; token ids must be "
            "uint16 or uint32 with one or two dimensions",
            "Write them with `numpy.save(path, ids.astype(numpy.uint16))`.",
        )
    return tokens


def open_mask(path: Path, tokens: NDArray[Any], place: str) -> NDArray[Any]:
    """Map the file that says which of these tokens are targets."""
    remedy = "Write it with `numpy.save(path, mask.astype(bool))`, one value per token."
    mask = _mapped(path, place, remedy)
    is_alike = mask.shape == tokens.shape
    if mask.dtype not in (np.bool_, np.uint8) or (mask.size == tokens.size and not is_alike):
        finding = f"{path} contains {mask.dtype} of shape {mask.shape}; a mask must be bool"
        raise refused(place, f"{finding} with the shape of its tokens", remedy)
    if not is_alike:
        raise refused(place, f"{path} has {mask.size} values for {tokens.size} tokens", remedy)
    return mask


def mask_beside(path: Path) -> Path:
    """Return where `ptrain tokenize` writes what the tokens of a file of rows are."""
    return path.with_suffix(f".mask{path.suffix}")


def _mapped(path: Path, place: str, remedy: str) -> NDArray[Any]:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or "not a readable file"
        raise refused(place, f"{path}: {reason}", remedy) from error
    except (ValueError, EOFError) as error:
        raise refused(place, f"{path} is not a complete .npy array", remedy) from error
    if not isinstance(values, np.ndarray):  # an .npz archive loads as a mapping
        raise refused(place, f"{path} is an archive, not a .npy array", remedy)
    return values
