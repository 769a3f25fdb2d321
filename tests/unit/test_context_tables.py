"""The tables of a block over the context axis equal traces of other shapes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from ptrain.cost import Spent, StepTime
from ptrain.derivation import estimate
from ptrain.derivation import layers as layer_tables
from ptrain.derivation.estimate import derive
from ptrain.derivation.layers import is_tabulated
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces import facts

GROUPED = {"preset": "llama-tiny", "heads": 8, "kv_heads": 4}
SHARDED = {
    "mesh": {"dp_shard": 2, "cp": 4},
    "placement": {"dp_shard": "S*,S,S,R", "cp": "S*,S,S,S"},
    "batch": {"global": 4, "micro": 1, "sequence": 512},
}
STAGED = {
    "mesh": {"pp": 2, "cp": 2},
    "placement": {"pp": "S,S,S,R", "cp": "R,R,R,S"},
    "batch": {"global": 4, "micro": 1, "sequence": 256},
}
GATHERED = {"mesh": {"cp": 4}, "placement": {"cp": "R,R,R,S*"}}
HYBRID = {"ulysses": 2, "ring": 2}
NIGHTLY = {
    "gather": {"context": {"attention": "all-gather"}, **GATHERED},
    "gather-again": {"context": {"attention": "all-gather"}, "activations": "M", **GATHERED},
    "ulysses-again": {"context": {"attention": "ulysses"}, "activations": "M"},
    "ulysses-chunk": {"context": {"attention": "ulysses"}, "loss": {"chunk": 16}},
    "ulysses-tied": {"context": {"attention": "ulysses"}, "model": {**GROUPED, "tied": True}},
    "zigzag": {"context": {"attention": "zigzag"}, **SHARDED},
    "zigzag-again": {"context": {"attention": "zigzag"}, "activations": "M", **SHARDED},
    "zigzag-stages": {"context": {"attention": "zigzag"}, **STAGED},
    "ring": {"context": {"attention": "ring"}, **SHARDED},
    "ring-stages": {"context": {"attention": "ring"}, "activations": "M", **STAGED},
    "hybrid": {"context": {"attention": HYBRID}, **SHARDED},
    "hybrid-again": {"context": {"attention": HYBRID}, "activations": "M", **SHARDED},
}


def spec_of(more: dict[str, Any]) -> Spec:
    return load(
        {
            "name": "long",
            "model": GROUPED,
            "mesh": {"cp": 2},
            "placement": {"cp": "R,R,R,S"},
            "batch": {"global": 4, "micro": 1, "sequence": 128},
            "precision": {"layout": "zero16"},
            "cluster": {"preset": "h100-8"},
            **more,
        }
    ).spec


def figures(exact: Any) -> tuple[Any, ...]:
    memory = {(row.rank, row.state): row.device_bytes for row in exact.memory}
    peaks = {(row.rank, row.phase): row.device_bytes for row in exact.peak}
    return memory, peaks, {*exact.traffic}


def seconds_of(step: StepTime) -> tuple[float, float]:
    """Return what a step takes without its wait for the host, and this wait."""
    waited = step.seconds_in(Spent.LAUNCHES)
    return step.seconds - waited, waited


def compare(more: dict[str, Any]) -> None:
    spec = spec_of(more)
    assert is_tabulated(spec)
    tabulated = derive(spec).exact
    with mock.patch.object(facts, "is_tabulated", lambda spec: False):
        read = facts.read_facts(spec, allow_import=False)
    with (
        mock.patch.object(layer_tables, "is_tabulated", lambda spec: False),
        mock.patch.object(estimate, "is_tabulated", lambda spec: False),
    ):
        traced = derive(spec, read).exact
    assert figures(tabulated) == figures(traced)
    assert tabulated.step is not None and traced.step is not None
    computed, waited = zip(*map(seconds_of, (tabulated.step, traced.step)), strict=True)
    assert computed[0] == pytest.approx(computed[1], rel=1e-9)
    # The tables of Ulysses have two views more in a layer's forward pass than a trace of the whole
    # job. No kernel runs for a view, but the host issues it as any operator.
    assert waited[0] == pytest.approx(waited[1], rel=0.03)


def test_tables_of_ulysses_equal_traces() -> None:
    compare({"context": {"attention": "ulysses"}})


@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_tables_over_cp_equal_traces(name: str) -> None:
    compare(NIGHTLY[name])
