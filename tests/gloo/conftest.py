"""One pool of runs for all tests of this folder; with --record, what they gave is written down."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.gloo import keep_runs, pipeline_runs, tensor_runs
from tests.gloo.outcomes import Runs
from tests.gloo.recording import write
from tests.ranks import Ranks


@pytest.fixture(scope="session")
def runs(ranks: Ranks, request: pytest.FixtureRequest) -> Iterator[Runs]:
    kept = Runs(ranks)
    yield kept
    if request.config.getoption("--record"):
        print(f"\nwritten: {write(kept, ['pytest', *sys.argv[1:]])}")


@pytest.fixture(scope="session", autouse=True)
def record_tensor(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.config.getoption("--record") and tensor_runs.RESULTS:
        print(f"\nwritten: {tensor_runs.write(tensor_runs.RESULTS, ['pytest', *sys.argv[1:]])}")


@pytest.fixture(scope="session", autouse=True)
def record_pipeline(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.config.getoption("--record"):
        for page in pipeline_runs.write(pipeline_runs.RESULTS, ["pytest", *sys.argv[1:]]):
            print(f"\nwritten: {page}")


@pytest.fixture(scope="session", autouse=True)
def record_keep(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.config.getoption("--record") and keep_runs.RESULTS:
        print(f"\nwritten: {keep_runs.write(keep_runs.RESULTS, ['pytest', *sys.argv[1:]])}")
