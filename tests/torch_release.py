"""The installed version of torch, for behavior that depends on it."""

from __future__ import annotations

import torch

from ptrain.installed import torch_minor


def numbers(version: str) -> tuple[int, ...]:
    """Return (2, 13) for 2.13.0+cpu."""
    return tuple(map(int, version.split(".")[:2]))


def is_since(version: str) -> bool:
    """Return True if the installed torch is of this version or a later one."""
    assert torch.__version__.startswith(torch_minor())
    return numbers(torch.__version__) >= numbers(version)
