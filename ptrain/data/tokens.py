"""Token files: one-dimensional `.npy` arrays of token ids, mapped into memory and never read whole.

Make one from text with the byte tokenizer:

    python -m ptrain.data.tokens TEXT... --out FILE.npy
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ptrain.data.tokenizer import encode
from ptrain.errors import PtrainError

_MAKE = "make one with: python -m ptrain.data.tokens TEXT... --out FILE.npy"


def open_tokens(path: Path) -> NDArray[np.unsignedinteger]:
    """Map a token file. Its ids are compared with the vocabulary batch by batch."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or "not a readable file"
        raise PtrainError(f"data.path: {path}: {reason}; {_MAKE}") from error
    except (ValueError, EOFError) as error:
        raise PtrainError(f"data.path: {path} is not a whole .npy array; {_MAKE}") from error
    if not isinstance(tokens, np.ndarray):  # an .npz archive loads as a mapping
        raise PtrainError(f"data.path: {path} is an archive, not one .npy array; {_MAKE}")
    if tokens.ndim != 1 or tokens.dtype not in (np.uint8, np.uint16, np.uint32):
        raise PtrainError(
            f"data.path: {path} holds {tokens.dtype} of shape {tokens.shape}; token ids are "
            f"one-dimensional uint16 or uint32: numpy.save(path, ids.astype(numpy.uint16))"
        )
    return tokens


def write_tokens(texts: Sequence[Path], out: Path) -> int:
    """Encode text files, one document each, into a token file; the number of tokens."""
    encoded = [encode(_read(text)) for text in texts]
    tokens = np.concatenate(encoded)
    try:
        with out.open("wb") as file:  # np.save would append .npy to another suffix
            np.save(file, tokens, allow_pickle=False)
    except OSError as error:
        raise PtrainError(f"{out}: {error.strerror}") from error
    return len(tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ptrain.data.tokens", description=__doc__)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.npy")
    options = parser.parse_args(arguments)
    try:
        num_tokens = write_tokens(options.texts, options.out)
    except PtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{options.out}: {num_tokens} tokens; train on it with data.path={options.out}")
    return 0


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except OSError as error:
        raise PtrainError(f"{text}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PtrainError(f"{text} is not UTF-8 text (byte {error.start})") from error


if __name__ == "__main__":
    sys.exit(main())
