"""Whether ptrain runs with the torch that is installed, which is not imported to know it."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ptrain.errors import refused
from ptrain.version import REFERENCE_TORCH, TESTED_TORCH, TORCH_RANGE, VERSION


def counted_torch() -> str:
    """Return the version whose bytes are counted: the one that is installed, if `exact` is claimed
    for it; else that of the tables."""
    minor = torch_minor()
    return minor if minor in TESTED_TORCH else REFERENCE_TORCH


@cache
def torch_version() -> str:
    """Return the version of torch that is installed, as a file of its says: torch is not imported,
    and reading all distributions takes a while. Nothing where none is, or it does not say."""
    torch = find_spec("torch")
    file = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    text = file.read_text() if file and file.exists() else ""
    version = re.search(r"^__version__ = '(.*)'", text, re.MULTILINE)
    return version.group(1) if version else ""


def torch_minor() -> str:
    """Return that version without its last number: `2.13`."""
    return ".".join(torch_version().split(".")[:2])


def require_torch() -> None:
    """Raises SpecError where no torch is installed, or one that ptrain does not run with. A torch
    that says no version is taken as it is."""
    version = torch_version()
    if (version or find_spec("torch") is None) and not runs_with(version):
        state = f"{version} is installed" if version else "is not installed"
        raise refused(
            "torch",
            f"{state}; ptrain needs {TORCH_RANGE}",
            f"Run `pip install 'torch{TORCH_RANGE}'`.",
        )


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
        "torch": torch_version() or "not installed",
        "python": sys.version.split()[0],
    }


def _minor(version: str) -> tuple[int, int]:
    """(2, 13) of 2.13.0+cpu, (0, 0) of what does not begin so."""
    number = re.match(r"(\d+)\.(\d+)", version)
    return (int(number[1]), int(number[2])) if number else (0, 0)
