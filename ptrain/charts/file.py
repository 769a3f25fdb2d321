"""Where a picture goes: refused before anything is computed, and written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ptrain.charts.canvas import Format, require_canvas
from ptrain.errors import PtrainError, refused


def require_writable(path: Path, option: str = "--chart") -> Format:
    """Return the format that the name's ending asks for; `option` named the file. Raises SpecError
    for another ending, a folder in place of a file, a folder that is not there or may not be
    written, and where the extra is not installed."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in list(Format):
        ends = f"ends in .{ending}" if ending else "has no ending"
        raise refused(option, f"{path} {ends}", "name a file that ends in .png or .svg")
    try:
        if not path.parent.is_dir():
            finding = f"there is no folder {path.parent}"
            raise refused(option, finding, "make it first, or choose another")
        if path.is_dir():
            raise refused(option, f"{path} is a folder", "name a file in it")
    except OSError as error:
        raise _cannot(path, error, option) from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise refused(option, f"the folder {path.parent} may not be written", "choose another")
    require_canvas(option)
    return Format(ending)


def write_whole(path: Path, content: bytes, option: str = "--chart") -> None:
    """Into a temporary neighbour, then renamed. Raises SpecError at the `option` that names it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        raise _cannot(path, error, option) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _cannot(path: Path, error: OSError, option: str = "--chart") -> PtrainError:
    return refused(option, f"{path}: cannot write: {error.strerror}", "choose another file")
