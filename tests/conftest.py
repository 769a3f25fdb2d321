"""Shared by all tests: one thread per process, one pool of ranks, the `nightly` marker."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the ranks

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly", action="store_true", help="also run what is marked nightly (the full matrix)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: the full matrix; runs with --nightly only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--nightly"):
        return
    skip = pytest.mark.skip(reason="runs with --nightly")
    for item in items:
        if "nightly" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks.run(2, function, *args)` -> one result per rank; see tests/ranks.py."""
    pool = Ranks()
    yield pool
    pool.close()
