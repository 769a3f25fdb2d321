"""`ptrain simulate` of many identical blocks by a few gives the figures of running all."""

from __future__ import annotations

import pytest

from ptrain.derivation.allocator import steady_reserved
from ptrain.simulation import execute
from ptrain.simulation.equal_blocks import equal_blocks
from ptrain.simulation.execute import SimulatedRank, simulate
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from tests.unit.test_simulation import STRATEGIES, TINY, small

WIDE = ("model.vocab=264", "pipeline.split=[9, 9]", "batch={global: 4, micro: 1, sequence: 16}")
REPLAYED = (
    "zero1",
    "zero2",
    "zero3",
    "muon",
    "fsdp-mixed",
    "fsdp-offload",
    "hsdp",
    "activation-offload",
    "checkpoint-full",
    "checkpoint-selective",
    "optimizer-in-backward",
)
MANY = (*TINY, "model.layers=20")


def assert_equal_to_every_block(spec: Spec) -> SimulatedRank:
    few, every = simulate(spec), simulate(spec, every_block=True)
    assert few.estimate == every.estimate
    assert few.memory_history == every.memory_history
    for expands in (False, True):
        assert steady_reserved(few.run.stream.allocated_step(), expands=expands) == steady_reserved(
            every.run.stream.allocated_step(), expands=expands
        )
    assert every.replayed is None
    return few


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("zero3", ('activations={"0-3": M, "4-8": M}',)),  # ranges of blocks that do not run
        pytest.param("zero3", ("prefetch=2",), marks=pytest.mark.nightly),
        pytest.param("pp-1f1b", ("model.layers=18", *WIDE), marks=pytest.mark.nightly),
        pytest.param("activation-offload", (), marks=pytest.mark.nightly),
    ],
)
def test_a_few_of_many_identical_blocks_represent_all(
    strategy: str, changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 9 blocks, since 20 take longer."""
    monkeypatch.setattr(execute, "FEWEST", 3)
    monkeypatch.setattr(execute, "LEAST", 9)
    spec = small(strategy, *TINY, "model.layers=9", *changes)
    assert assert_equal_to_every_block(spec).replayed == 9


@pytest.mark.nightly
def test_activations_that_are_most_at_another_moment_with_few_blocks_are_no_repetition() -> None:
    """With few the logits of the last stage decide, with many the blocks of the stage before."""
    spec = small("pp-zbv", "pipeline.split=[20, 20, 20, 20]", "model.layers=80", "model.vocab=1000")
    assert simulate(spec).replayed is None


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_few_blocks_represent_all_in_every_strategy(strategy: str) -> None:
    degree = load(strategy).spec.degree(Axis.PP)
    layers = 20 * (2 * degree if degree > 1 else 1)
    few = assert_equal_to_every_block(small(strategy, f"model.layers={layers}", "model.vocab=264"))
    assert few.replayed or strategy not in REPLAYED


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("zero3", ('activations={"0-2": M, "3-19": R}',)),
        ("zero3", ("unit=model",)),
        ("ddp-zero-redundancy", ()),
        ("zero3", ("prefetch=6",)),  # what is gathered ahead ends beyond the runs with few
    ],
)
def test_every_block_runs_if_blocks_are_treated_differently(
    strategy: str, changes: tuple[str, ...]
) -> None:
    assert equal_blocks(small(strategy, *MANY, *changes), 0) is None


@pytest.mark.nightly
def test_a_bucket_that_later_blocks_may_fill_is_no_repetition() -> None:
    """20 blocks of 36 kB: the first bucket of DistributedDataParallel takes 1 MiB."""
    assert simulate(small("ddp", *MANY)).replayed is None
