"""Fixtures of the torch-free tests: bytes are those of one fixed torch version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ptrain import installed
from ptrain.version import REFERENCE_TORCH


@pytest.fixture(scope="module", autouse=True)
def _torch_of_the_tables() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installed, "torch_minor", lambda: REFERENCE_TORCH)
        yield
