"""Fixtures of this folder: one pool of runs shared by all tests. With --record, the results are
written to pages."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.forked import forked_traces
from tests.gloo import (
    activation_mode_runs,
    context_runs,
    expert_rank_runs,
    expert_runs,
    fidelity,
    matrix,
    pipeline_runs,
    tensor_runs,
)
from tests.gloo.outcomes import Runs
from tests.gloo.recording import write_page
from tests.ranks import Ranks

__all__ = ["forked_traces"]  # of every test of this folder


@pytest.fixture(scope="session")
def runs(ranks: Ranks, request: pytest.FixtureRequest) -> Iterator[Runs]:
    kept = Runs(ranks)
    yield kept
    if request.config.getoption("--record"):
        print(f"\nwritten: {write_page(kept, ['pytest', *sys.argv[1:]])}")


@pytest.fixture(scope="session", autouse=True)
def record_matrices(request: pytest.FixtureRequest) -> Iterator[None]:
    """In fp64 what parts from one device at all does so in the first steps; the others are for the
    pages, and for the night, and so are the simulations beside the runs."""
    chosen = str(request.config.getoption("markexpr"))
    matrix.is_run_in_full = request.config.getoption("--record") or "not nightly" not in chosen
    yield
    if request.config.getoption("--record"):
        for runs in (
            context_runs,
            expert_runs,
            expert_rank_runs,
            tensor_runs,
            pipeline_runs,
            activation_mode_runs,
            fidelity,
        ):
            for page in runs.MATRIX.write():
                print(f"\nwritten: {page}")
