"""Token files: one-dimensional `.npy` arrays of token ids, mapped into memory and never read whole.

Make one from text with the byte tokenizer:

    python -m ptrain.data.tokens TEXT... --out FILE.npy
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptrain.data.tokenizer import encode
from ptrain.errors import PtrainError, refused

_MAKE = "make one with: python -m ptrain.data.tokens TEXT... --out FILE.npy"


def open_tokens(path: Path) -> NDArray[np.unsignedinteger]:
    """Map a token file. Its ids are compared with the vocabulary batch by batch."""
    tokens = _mapped(path, "data.path", _MAKE)
    if tokens.ndim != 1 or tokens.dtype not in (np.uint8, np.uint16, np.uint32):
        raise refused(
            "data.path",
            f"{path} holds {tokens.dtype} of shape {tokens.shape}; token ids are one-dimensional "
            "uint16 or uint32",
            "write them with numpy.save(path, ids.astype(numpy.uint16))",
        )
    return tokens


def open_mask(path: Path, num_tokens: int) -> NDArray[Any]:
    """Map the file that says which of so many tokens are targets."""
    remedy = "write it with numpy.save(path, mask.astype(bool)), a value for each token of path"
    mask = _mapped(path, "data.loss_mask", remedy)
    if mask.ndim != 1 or mask.dtype not in (np.bool_, np.uint8):
        finding = f"{path} holds {mask.dtype} of shape {mask.shape}; a mask is one-dimensional bool"
        raise refused("data.loss_mask", finding, remedy)
    if len(mask) != num_tokens:
        finding = f"{path} has {len(mask)} values for {num_tokens} tokens"
        raise refused("data.loss_mask", finding, remedy)
    return mask


def _mapped(path: Path, place: str, remedy: str) -> NDArray[Any]:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or "not a readable file"
        raise refused(place, f"{path}: {reason}", remedy) from error
    except (ValueError, EOFError) as error:
        raise refused(place, f"{path} is not a whole .npy array", remedy) from error
    if not isinstance(values, np.ndarray):  # an .npz archive loads as a mapping
        raise refused(place, f"{path} is an archive, not one .npy array", remedy)
    return values


def write_tokens(texts: Sequence[Path], out: Path) -> int:
    """Encode text files, one document each, into a token file; the number of tokens."""
    encoded = [encode(_read(text)) for text in texts]
    tokens = np.concatenate(encoded)
    try:
        with out.open("wb") as file:  # np.save would append .npy to another suffix
            np.save(file, tokens, allow_pickle=False)
    except OSError as error:
        raise refused(str(out), error.strerror or str(error), "choose another --out") from error
    return len(tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ptrain.data.tokens", description=__doc__)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.npy")
    options = parser.parse_args(arguments)
    try:
        num_tokens = write_tokens(options.texts, options.out)
    except PtrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{options.out}: {num_tokens} tokens; train on it with data.path={options.out}")
    return 0


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except OSError as error:
        raise refused(str(text), error.strerror or str(error), "give a text file") from error
    except UnicodeDecodeError as error:
        finding = f"is not UTF-8 text (byte {error.start})"
        raise refused(str(text), finding, "convert it to UTF-8") from error


if __name__ == "__main__":
    sys.exit(main())
