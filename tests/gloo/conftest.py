"""One pool of runs for all tests of this folder; with --record, what they gave is written down."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from ptrain.traces import tensor_parts
from tests.gloo import (
    context_runs,
    expert_rank_runs,
    expert_runs,
    fidelity,
    keep_runs,
    pipeline_runs,
    tensor_runs,
)
from tests.gloo.forked import Forked
from tests.gloo.outcomes import Runs
from tests.gloo.recording import write
from tests.ranks import Ranks


@pytest.fixture(scope="session")
def runs(ranks: Ranks, request: pytest.FixtureRequest) -> Iterator[Runs]:
    kept = Runs(ranks)
    yield kept
    if request.config.getoption("--record"):
        print(f"\nwritten: {write(kept, ['pytest', *sys.argv[1:]])}")


@pytest.fixture
def forked_traces() -> Iterator[None]:
    """What a rank of cp has is traced in processes that need not import torch."""
    with mock.patch.object(tensor_parts, "Popen", Forked):
        yield


@pytest.fixture(scope="session", autouse=True)
def record_matrices(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.config.getoption("--record"):
        for runs in (
            context_runs,
            expert_runs,
            expert_rank_runs,
            tensor_runs,
            pipeline_runs,
            keep_runs,
            fidelity,
        ):
            for page in runs.MATRIX.write():
                print(f"\nwritten: {page}")
