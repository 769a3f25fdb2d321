"""The pytest plugin of ptrain: fixtures that return the assertions of `ptrain.testing`.

It imports no torch, so that collecting tests stays fast.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def trains_like_one_device() -> Callable[..., None]:
    """The assertion `trains_like_one_device(my_loop, num_ranks=2)`.

    It calls `my_loop`, which returns the result of `ptrain.verify`, on every rank, and fails with
    the root cause of a mismatch. See `ptrain.testing.assert_trains_like_one_device`.
    """
    from ptrain.testing import assert_trains_like_one_device

    return assert_trains_like_one_device


@pytest.fixture
def verified() -> Callable[..., None]:
    """The assertion `verified("train.yaml", quick=True)`, which runs `ptrain verify` on a spec."""
    from ptrain.testing import assert_verified

    return assert_verified
