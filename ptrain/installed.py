"""Which torch is installed, by what its distribution says of itself: torch is not imported."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from ptrain.errors import refused
from ptrain.version import TORCH_RANGE, runs_with


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


def _version() -> str | None:
    try:
        return metadata.version("torch") or None  # None of a folder that pip left half removed
    except metadata.PackageNotFoundError:
        return None
