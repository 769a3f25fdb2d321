"""Faults planted in running programs: the verdict fails and names the fault. All of
them at night."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.interpreter.program import interpret
from ptrain.report.finding import Certainty, Subject
from ptrain.runtime.world import World
from ptrain.train.exchange import Exchange
from ptrain.verification.preconditions import observe_run
from tests.faults.alarms import EXPERTS, SEEDS, STRATEGIES, layouts, verify_clean
from tests.faults.catalogue import FAULTS
from tests.faults.effects import effect_of
from tests.faults.of_batches import DDP
from tests.faults.of_states import flipped
from tests.faults.trials import tried
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
# Told by the norm in front of the layer: a router's losses of slices of the tokens are shares,
# which are compared with nothing.
NOT_LOCALISED = {"routers' losses divided by a rank's own tokens over cp"}
# Explained as those of any loop, by a trial that undoes them.
PROVEN = {
    "HSDP replicas not reduced",
    "a flipped bit in replicated parameters: bit 30",
    "a flipped bit in replicated parameters: highest bit of the exponent",
    "a flipped bit in replicated parameters: sign",
    "a flipped bit in sharded parameters: exponent",
    "gradients not summed over cp",
    "gradients summed over neither cp nor data ranks",
    "gradients zeroed too late",
    "last micro-batch only",
    "never reduced: no synchronization on the last micro-batch",
    "norm gradients under SP unsynchronised",
    "one tensor left out of the reduction",
    "stale 16-bit copy of a master",
    "stale parameters after an update",
    "stale shard after an update",
    "tied embedding not reduced",
    "updated shards not gathered",
    "weight decay missing on one rank",
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
def test_a_fault_is_caught_and_localised_and_its_cause_is_named_rightly_or_not_at_all(
    ranks: Ranks, name: str
) -> None:
    """They are planted in the interpreter's own code, where a user causes none of them: a verdict
    says what differs first and on which ranks, and a cause where those of any loop explain it."""
    trial = tried(ranks, name)
    assert trial.caught
    assert trial.localised is (name not in NOT_LOCALISED), trial.line
    assert trial.named or not trial.names_one_cause, trial.line
    assert trial.certainty is Certainty.PROVEN or name not in PROVEN, trial.line


@pytest.mark.nightly
@pytest.mark.parametrize("name", UNDETECTABLE)
def test_the_matrix_below_the_band_matches_its_description(ranks: Ranks, name: str) -> None:
    assert not tried(ranks, name).caught


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_the_run_in_which_it_is_planted(ranks: Ranks, name: str) -> None:
    fault = FAULTS[name]
    assert max(ranks.run(fault.setting.world, effect_of, name, not fault.undetectable)) > 0


def bits_that_are_seen() -> list[int]:
    """On this rank of a pool: of a replicated fp32 parameter, whatever the bit."""
    spec = DDP.spec()
    world = World.join(spec.timeout)
    exchange = Exchange(world)
    found = []
    for bit in range(32):
        program = interpret(spec, world=world)
        flipped(bit)(program)
        watch = observe_run(program, exchange, every_collective=False)
        if watch.root_cause is not None and watch.root_cause.state is Subject.PARAMETERS:
            found.append(bit)
    return found


@pytest.mark.nightly
def test_any_flipped_bit_of_replicated_state_is_caught(ranks: Ranks) -> None:
    assert ranks.run(2, bits_that_are_seen) == [list(range(32))] * 2


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *EXPERTS])
def test_no_strategy_raises_a_false_alarm_in_any_layout(
    ranks: Ranks, strategy: str, seed: int
) -> None:
    for layout in layouts(strategy):
        found = verify_clean(ranks, strategy, layout, seed)
        assert not found.failing, f"{layout}: {found.line}"
