"""The version, and the torch versions for which the tests show that `exact` is exact."""

from __future__ import annotations

import platform
from importlib import metadata

VERSION = "0.1.0"
TESTED_TORCH = ("2.13",)


def versions() -> dict[str, str]:
    """Versions of ptrain, torch and Python, read off the installed packages: imports nothing."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    return {"ptrain": VERSION, "torch": torch, "python": platform.python_version()}


def is_tested(torch: str) -> bool:
    """Whether `exact` is claimed for this version of torch."""
    return ".".join(torch.split(".")[:2]) in TESTED_TORCH
