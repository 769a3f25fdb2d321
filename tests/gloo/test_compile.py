"""Compiled blocks and losses on every kind of mesh: gradients and traffic equal the eager step's,
nothing is compiled twice, and peaks are as predicted and simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from shutil import which
from typing import Any

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Estimate, Phase
from ptrain.derivation.estimate import derive
from ptrain.installed import torch_minor
from ptrain.report.record import compare_estimates
from ptrain.simulation.execute import simulate
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from tests.gloo.compiled_runs import run_pair
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

# Up to torch 2.12, a compiled program declares the log-sum-exp of attention in fp64 as fp32.
IS_DOUBLE = torch_minor() not in ("2.11", "2.12")
TOLERANCE = 1e-12 if IS_DOUBLE else 1e-4
SMALL = [
    "model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.ffn=64",
    "model.head_dim=16", "batch={global: 4, micro: 1, sequence: 16}",
    *(["precision.compute=fp64"] if IS_DOUBLE else []),
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
    "ring": ("cp-ring",),
    "experts": ("ep",),
    "experts of one rank": ("ddp", "model.experts=4", "model.aux_loss=0.01"),
    "recomputed": ("zero3", M),
    "recomputed in part": ("zero3", M, "recompute=selective"),
    "recomputed, pp": ("pp-1f1b", M),
    "documents": ("ddp", "model.document_start=1"),
    "scores in memory": ("ddp", "attention=eager"),
    "whole matrices": ("muon",),
    "dropout": ("ddp", DROPOUT),
    "dropout, recomputed": ("zero3", DROPOUT, M),
}
# A vocabulary with which the peaks are in the loss.
LOSS, ALL, WORDS = "compile=loss", "compile=all", "model.vocab=1024"
ROWS_OF_LOSSES: Mapping[str, tuple[str, ...]] = {
    "loss, ddp": ("ddp", LOSS, WORDS),
    "loss, zero3": ("zero3", LOSS, WORDS),
    "loss, pp": ("pp-1f1b", LOSS, WORDS),
    "loss, tied": ("zero3", LOSS, WORDS, "model.tied=true"),
    "loss, padded": ("zero1", LOSS, "model.vocab=1000", "model.vocab_multiple=64"),
    "loss, capped": ("ddp", LOSS, WORDS, "model.logit_soft_cap=30"),
    "loss, ring": ("cp-ring", LOSS, WORDS),
    "loss, experts": ("ep", LOSS, "model.vocab=1024"),
    "all, zero2": ("zero2", ALL, WORDS),
    "all, tied and padded": (
        "zero3", ALL, "model.vocab=1000", "model.vocab_multiple=64", "model.tied=true"
    ),
    "all, pp": ("pp-1f1b", ALL, WORDS),
    "all, pp, tied": ("pp-1f1b", ALL, WORDS, "model.tied=true"),
    "all, recomputed": ("zero3", ALL, WORDS, M),
    "all, ulysses": ("cp-ulysses", ALL, WORDS),
    "all, parameters off the device": ("fsdp-offload", ALL, WORDS),
}  # fmt: skip
BY_DEFAULT = ("tp, sharded tokens", "dropout, recomputed", "all, tied and padded")
MEASURED_BY_DEFAULT = ("all, tied and padded",)
needs_compiler = pytest.mark.skipif(
    which("g++") is None, reason="inductor compiles with a C++ compiler"
)


def specs_of(row: str) -> tuple[Spec, Spec]:
    """Return the eager and the compiled spec of a row."""
    name, *overrides = ROWS[row] if row in ROWS else ROWS_OF_LOSSES[row]
    shape = SMALL if name != "ep" else [word for word in SMALL if "ffn" not in word]
    words = [*shape, "compile=block", *overrides]
    eager, compiled = load(name, [*words, "compile=none"]), load(name, words)
    return require_runnable(eager), require_runnable(compiled)


def programs_of(spec: Spec, rank: int) -> int:
    """Return how many programs a rank compiles: one of blocks, one of the loss."""
    has_loss = spec.degree(Axis.PP) == 1 or rank == spec.world_size - 1
    return spec.compile.has_blocks + (spec.compile.has_loss and has_loss)


def require_equal(predicted: Estimate, measured: Estimate) -> None:
    """Require equal states, peaks and traffic, to the byte."""
    checks = compare_estimates(predicted, measured)
    assert {"memory", "peak", "traffic"} <= {check.name.split()[0] for check in checks}
    assert not [check for check in checks if check.predicted != check.measured]


def drop_setup_traffic(estimate: Estimate) -> Estimate:
    """Return an estimate without the traffic of the first steps, in which DDP makes its buckets."""
    steady = tuple(row for row in estimate.traffic if row.key.phase is not Phase.SETUP)
    return replace(estimate, traffic=steady)


def traffic(estimate: Estimate) -> dict[Any, tuple[int, int]]:
    return {row.key: (row.calls, row.payload_bytes) for row in estimate.traffic}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row in BY_DEFAULT else pytest.mark.nightly)
        for row in (*ROWS, *ROWS_OF_LOSSES)
    ],
)
def test_compiled_steps_have_the_gradients_and_the_traffic_of_eager_ones(
    ranks: Ranks, row: str
) -> None:
    eager, compiled = specs_of(row)
    pairs = ranks.run(compiled.world_size, run_pair, eager, compiled, "aot_eager", timeout=600.0)
    for rank, pair in enumerate(pairs):
        assert pair.difference <= TOLERANCE and pair.without_gradient == 0
        assert pair.compiled.losses == pytest.approx(pair.eager.losses, abs=TOLERANCE)
        assert pair.compiled.programs == (programs_of(compiled, rank),) * 2
        assert pair.compiled.breaks == 0
        assert traffic(pair.compiled.measured) == traffic(pair.eager.measured)


@needs_compiler
@pytest.mark.timeout(900)  # longer than the ranks may take, whose answer would else be left unread
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row in MEASURED_BY_DEFAULT else pytest.mark.nightly)
        for row in (*ROWS, *ROWS_OF_LOSSES)
    ],
)
def test_compiled_steps_are_predicted_and_simulated_to_the_byte(ranks: Ranks, row: str) -> None:
    eager, spec = specs_of(row)
    exact = derive(spec, facts_of(spec)).exact
    last = spec.world_size - 1
    require_equal(exact.of_rank(last), simulate(spec, last).estimate)
    pairs = ranks.run(spec.world_size, run_pair, eager, spec, "inductor", timeout=600.0)
    for rank, pair in enumerate(pairs):
        is_half = not IS_DOUBLE and row == "fsdp-mixed"  # products of bf16
        assert pair.difference <= (0.05 if is_half else TOLERANCE)
        require_equal(drop_setup_traffic(exact.of_rank(rank)), pair.compiled.measured)
