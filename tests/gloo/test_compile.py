"""Compiled blocks on every kind of mesh have the gradients, programs and traffic of the eager step,
and the predicted and simulated peaks."""

from __future__ import annotations

from collections.abc import Mapping
from shutil import which
from typing import Any

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Estimate
from ptrain.derivation.estimate import derive
from ptrain.report.record import compare_estimates
from ptrain.simulation.execute import simulate
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from tests.gloo.compiled_runs import run_pair
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

SMALL = [
    "model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.ffn=64",
    "model.head_dim=16", "batch={global: 4, micro: 1, sequence: 16}", "precision.compute=fp64",
]  # fmt: skip
DROPOUT, M = "model.dropout=0.1", "activations=M"
ROWS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("ddp",),
    "zero1": ("zero1",),
    "zero2": ("zero2",),
    "zero3": ("zero3",),
    "zero3, kept": ("zero3-keep",),
    "fsdp-mixed": ("fsdp-mixed",),
    "hsdp": ("hsdp", "batch.global=8"),
    "states off the device": ("zero-offload",),
    "parameters off the device": ("fsdp-offload",),
    "pp": ("pp-1f1b",),
    "pp, interleaved": ("pp-interleaved", "model.layers=4"),
    "tp": ("tp",),
    "tp, norms of heads": ("tp", "model.qk_norm=true"),
    "tp, sharded tokens": ("tp-sp",),
    "tp, sharded tokens and norms of heads": ("tp-sp", "model.qk_norm=true"),
    "ulysses": ("cp-ulysses",),
    "recomputed": ("zero3", M),
    "recomputed in part": ("zero3", M, "recompute=selective"),
    "recomputed, pp": ("pp-1f1b", M),
    "documents": ("ddp", "model.document_start=1"),
    "scores in memory": ("ddp", "attention=eager"),
    "whole matrices": ("muon",),
    "dropout": ("ddp", DROPOUT),
    "dropout, recomputed": ("zero3", DROPOUT, M),
}
BY_DEFAULT = ("tp, sharded tokens", "dropout, recomputed")
needs_compiler = pytest.mark.skipif(
    which("g++") is None, reason="inductor compiles with a C++ compiler"
)


def compiled_spec(row: str, *more: str) -> Spec:
    name, *overrides = ROWS[row]
    return require_runnable(load(name, [*SMALL, *overrides, *more]))


def traffic(estimate: Estimate) -> dict[Any, tuple[int, int]]:
    return {row.key: (row.calls, row.payload_bytes) for row in estimate.traffic}


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row in BY_DEFAULT else pytest.mark.nightly) for row in ROWS],
)
def test_compiled_blocks_have_the_gradients_and_the_traffic_of_eager_ones(
    ranks: Ranks, row: str
) -> None:
    compiled = compiled_spec(row, "compile=block")
    pairs = ranks.run(
        compiled.world_size, run_pair, compiled_spec(row), compiled, "aot_eager", timeout=600.0
    )
    for pair in pairs:
        assert pair.difference <= 1e-12 and pair.without_gradient == 0
        assert pair.compiled.losses == pytest.approx(pair.eager.losses, abs=1e-12)
        assert pair.compiled.programs == (1, 1) and pair.compiled.breaks == 0
        assert traffic(pair.compiled.measured) == traffic(pair.eager.measured)


@needs_compiler
@pytest.mark.timeout(900)  # longer than the ranks may take, whose answer would else be left unread
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row == "zero1" else pytest.mark.nightly) for row in ROWS],
)
def test_compiled_blocks_are_predicted_and_simulated_to_the_byte(ranks: Ranks, row: str) -> None:
    spec = compiled_spec(row, "compile=block")
    exact = derive(spec, facts_of(spec)).exact
    last = spec.world_size - 1
    checks = compare_estimates(exact.of_rank(last), simulate(spec, last).estimate)
    assert any(check.name.startswith("peak") for check in checks)
    assert not [check for check in checks if check.predicted != check.measured]
    pairs = ranks.run(
        spec.world_size, run_pair, compiled_spec(row), spec, "inductor", timeout=600.0
    )
    for rank, pair in enumerate(pairs):
        assert pair.difference <= 1e-12
        for row_of in pair.compiled.measured.peak:
            (own,) = (p for p in exact.peak if (p.rank, p.phase) == (rank, row_of.phase))
            assert own.device_bytes == row_of.device_bytes, f"{row_of.phase} of rank {rank}"
