"""The version, the torch versions that it runs with, and those of which the tests show that `exact`
is exact."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

VERSION = "0.1.0"
TORCH_RANGE = ">=2.11,<2.16"  # as pip reads it; a test holds pyproject.toml to it
TESTED_TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")  # benchmarks/torch_versions.py
REFERENCE_TORCH = "2.13"  # what tables and pages are of, and is counted where no torch is installed


def is_tested(torch: str) -> bool:
    """Return whether `exact` is claimed for this version of torch."""
    return ".".join(torch.split(".")[:2]) in TESTED_TORCH


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
