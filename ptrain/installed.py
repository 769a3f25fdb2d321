"""Which torch is installed, by what its distribution says of itself: torch is not imported."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from importlib.util import find_spec

from ptrain.errors import refused
from ptrain.version import TORCH_RANGE, VERSION


def require_torch() -> None:
    """Raises SpecError where no torch is installed, or one that ptrain does not run with. A torch
    that has no metadata, as one built in its source folder, is taken as it is."""
    version = _version()
    if version is None and find_spec("torch") is not None:
        return
    if version is None or not runs_with(version):
        state = "is not installed" if version is None else f"{version} is installed"
        finding = f"{state}, and ptrain runs with {TORCH_RANGE}"
        raise refused("torch", finding, f"pip install 'torch{TORCH_RANGE}'")


def runs_with(torch: str) -> bool:
    """Return whether this version of torch is within TORCH_RANGE, as pip reads it: `+cpu` does not
    count, and a pre-release of either bound is outside. A text that is no version is outside."""
    first, refused = (_minor(bound) for bound in re.findall(r"[\d.]+", TORCH_RANGE))
    minor = _minor(torch)
    is_early = minor == first and re.match(r"\d+\.\d+(\.0)*\.?(a|b|rc|dev)\d", torch)
    return first <= minor < refused and not is_early


def versions() -> dict[str, str]:
    """The versions of ptrain, torch and Python."""
    return {
        "ptrain": VERSION,
        "torch": _version() or "not installed",
        "python": platform.python_version(),
    }


def _version() -> str | None:
    try:
        return metadata.version("torch") or None  # None of a folder that pip left half removed
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> tuple[int, int]:
    """(2, 13) of 2.13.0+cpu, (0, 0) of what does not begin so."""
    number = re.match(r"(\d+)\.(\d+)", version)
    return (int(number[1]), int(number[2])) if number else (0, 0)
