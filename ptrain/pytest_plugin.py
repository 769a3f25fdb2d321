"""The plugin that pytest loads where ptrain is installed: the fixtures `trains_like_one_device` and
`verified` are `ptrain.testing`'s assertions, without an import. Torch-free: so is collecting."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def trains_like_one_device() -> Callable[..., None]:
    """`trains_like_one_device(my_loop, num_ranks=2)` starts ranks, on each of which `my_loop`
    returns what `ptrain.verify` returns; it fails with the root cause's words."""
    from ptrain.testing import assert_trains_like_one_device

    return assert_trains_like_one_device


@pytest.fixture
def verified() -> Callable[..., None]:
    """`verified("train.yaml", quick=True)` is `ptrain verify` of a spec."""
    from ptrain.testing import assert_verified

    return assert_verified
