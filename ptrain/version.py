"""The version, the torch versions that it runs with, and those of which the tests show that `exact`
is exact."""

import re
from importlib.util import find_spec
from pathlib import Path

VERSION = "0.1.0"
TORCH_RANGE = ">=2.11,<2.14"  # as pip reads it; a test holds pyproject.toml to it
TESTED_TORCH = ("2.11", "2.13")


def is_tested(torch: str) -> bool:
    """Return whether `exact` is claimed for this version of torch."""
    return ".".join(torch.split(".")[:2]) in TESTED_TORCH


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
