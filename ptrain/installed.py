"""The installed torch: its version, read without importing it, and whether ptrain supports it."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ptrain.errors import input_error
from ptrain.version import REFERENCE_TORCH, TESTED_TORCH, TORCH_RANGE, VERSION


def counted_torch() -> str:
    """Return the torch version that predictions count bytes for, as `major.minor`.

    This is the installed version if it is tested, else `REFERENCE_TORCH`.
    """
    minor = torch_minor()
    return minor if minor in TESTED_TORCH else REFERENCE_TORCH


@cache
def torch_version() -> str:
    """Return the version of the installed torch, "" if there is none or its file has no version.

    It is read from `torch/version.py`. Importing torch takes seconds, and `importlib.metadata`
    scans all distributions.
    """
    torch = find_spec("torch")
    # `origin` is None for a folder named torch that is no package (a namespace package).
    file = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    text = file.read_text() if file and file.exists() else ""
    version = re.search(r"^__version__ = '(.*)'", text, re.MULTILINE)
    return version.group(1) if version else ""


def torch_minor() -> str:
    """Return the installed torch version as `major.minor`; "" without torch."""
    return ".".join(torch_version().split(".")[:2])


def require_torch() -> None:
    """Raise SpecError if torch is missing, or if its version is not supported.

    A torch whose version cannot be read is accepted.
    """
    version = torch_version()
    if (version or find_spec("torch") is None) and not runs_with(version):
        state = f"{version} is installed" if version else "is not installed"
        raise input_error(
            "torch",
            f"{state}; ptrain needs {TORCH_RANGE}",
            f"Run `pip install 'torch{TORCH_RANGE}'`.",
        )


def runs_with(torch: str) -> bool:
    """Return True if TORCH_RANGE contains this version of torch, as pip decides it.

    Local versions (`+cpu`) are ignored. Pre-releases of either bound, and texts that are no
    version, are outside the range.
    """
    first, limit = (_minor_version(bound) for bound in re.findall(r"[\d.]+", TORCH_RANGE))
    minor = _minor_version(torch)
    # pip sorts a pre-release before its release, hence below the first bound.
    is_early = minor == first and re.match(r"\d+\.\d+(\.0)*\.?(a|b|rc|dev)\d", torch)
    return first <= minor < limit and not is_early


def versions() -> dict[str, str]:
    """Return the versions of ptrain, torch and Python."""
    return {
        "ptrain": VERSION,
        "torch": torch_version() or "not installed",
        "python": sys.version.split()[0],
    }


def _minor_version(version: str) -> tuple[int, int]:
    """Return (2, 13) for `2.13.0+cpu`; (0, 0) for a text that does not begin with a version."""
    number = re.match(r"(\d+)\.(\d+)", version)
    return (int(number[1]), int(number[2])) if number else (0, 0)
