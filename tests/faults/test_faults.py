"""Faults that are planted in running programs: the verdict fails, and says what is wrong. All of
them at night."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ptrain.interpreter.program import interpret
from ptrain.report.finding import Certainty
from ptrain.rooms.world import World
from ptrain.train.exchange import Exchange
from ptrain.verification.preconditions import consistency
from tests.faults.alarms import EXPERTS, SEEDS, STRATEGIES, calm, layouts
from tests.faults.catalogue import FAULTS
from tests.faults.effects import changes
from tests.faults.of_batches import DDP
from tests.faults.of_states import flipped
from tests.faults.trials import tried
from tests.faults.unexplained import NOT_LOCALISED, UNEXPLAINED
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

# One of each state and axis, and of each stage that finds one.
BY_DEFAULT = {
    "duplicate sample",
    "local normalisation",
    "clip by the local norm",
    "stale 16-bit copy of a master",
    "a flipped bit in replicated parameters: lowest bit",
    "norm gradients under SP unsynchronised",
    "loss divided by a rank's own count, unequal over cp",
    "dK and dV of own queries alone: zigzag",
    "counts of the micro-batch before (ep)",
    "experts twice in the norm",
}
# Named by what is seen, whose fix was not tried, does not explain all that differs, or is one of
# several that fit: what ranks share is compared and not repeated; degrees may be equal.
FITS = {
    "ranks of tp read different samples",
    "micro-batches of the last stage in another order than the first's",
    "dropout masks shared where they must differ (heads of tp)",
    "dropout masks different where they must be shared (tp)",
    "dropout masks shared by data ranks",
    "one rank of tp in evaluation mode",
    "ranks of cp read different samples: ring",
    "ranks of cp read different samples: zigzag",
    "ranks of cp read different samples: all-gather",
    "ranks of cp read different samples: ulysses",
    "ranks of cp read different samples: hybrid",
    "dropout masks different where slices of one must be taken (cp)",
    "ranks of cp have samples in different orders",
    "contiguous tokens for a zigzag ring",
    "contiguous targets for zigzag tokens",
    "a router's gradient lost",
    "a router's gradient lost among replicas",
    "a router's gradient lost under fully_shard",
    "experts' gradient times ep: replicas",
    "experts' gradient times ep: shards",
    "experts' gradient times ep: stages",
    "experts' gradient divided by ep: shards",
    "experts' gradient times tp",
    "folded experts' gradient times tp",
    "a router's gradient lost (ep)",
    "a router's gradient lost (ep, shards)",
    "a flipped bit in replicated parameters: lowest bit",
    "a flipped bit in replicated optimizer state: lowest bit",
}
UNDETECTABLE = sorted(name for name, fault in FAULTS.items() if fault.undetectable)


def named(names: list[str]) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.nightly)
        for name in names
    ]


def test_there_are_at_least_thirty_faults_and_some_run_by_default() -> None:
    assert len(FAULTS) - len(UNDETECTABLE) >= 30
    assert FAULTS.keys() >= BY_DEFAULT


@pytest.mark.parametrize("name", named([name for name in FAULTS if name not in UNDETECTABLE]))
def test_a_fault_is_caught_localised_and_named_or_not_explained(ranks: Ranks, name: str) -> None:
    trial = tried(ranks, name)
    assert trial.caught
    assert trial.localised is (name not in NOT_LOCALISED), trial.line
    fits = Certainty.UNEXPLAINED if name in UNEXPLAINED else Certainty.FITS
    assert trial.certainty is (fits if name in FITS | UNEXPLAINED else Certainty.PROVEN), trial.line
    assert trial.named or name in UNEXPLAINED, trial.line


@pytest.mark.nightly
@pytest.mark.parametrize("name", UNDETECTABLE)
def test_what_lies_below_the_band_is_what_is_said_to(ranks: Ranks, name: str) -> None:
    assert not tried(ranks, name).caught


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_the_run_in_which_it_is_planted(ranks: Ranks, name: str) -> None:
    fault = FAULTS[name]
    assert max(ranks.run(fault.setting.world, changes, name, not fault.undetectable)) > 0


def bits_that_are_seen() -> list[int]:
    """On this rank of a pool: of a replicated fp32 parameter, whatever the bit."""
    spec = DDP.spec()
    world = World.join(spec.timeout)
    exchange = Exchange(world)
    found = []
    for bit in range(32):
        program = interpret(spec, world=world)
        flipped(bit)(program)
        watch = consistency(program, exchange, every_collective=False)
        if watch.root_cause is not None and watch.root_cause.factor == f"flipped bit {bit}":
            found.append(bit)
    return found


@pytest.mark.nightly
def test_any_flipped_bit_of_replicated_state_is_caught_and_told(ranks: Ranks) -> None:
    assert ranks.run(2, bits_that_are_seen) == [list(range(32))] * 2


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *EXPERTS])
def test_no_strategy_raises_a_false_alarm_in_any_layout(
    ranks: Ranks, references: Path, strategy: str, seed: int
) -> None:
    for layout in layouts(strategy):
        found = calm(ranks, strategy, layout, seed, references)
        assert not found.failing, f"{layout}: {found.line}"


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What strategies that train alike have in common."""
    return tmp_path_factory.mktemp("references")
