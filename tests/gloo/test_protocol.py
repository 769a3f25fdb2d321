"""The verification protocol on ranks: the message of each stage, and the stages that follow it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.verification.options import VerifyOptions
from ptrain.verification.preconditions import REPEATED
from ptrain.verification.protocol import STAGES
from tests.gloo.cases import strategy_case
from tests.gloo.verify_runs import LATE, ProgramChanges, check_assumptions, verify_spec
from tests.jobs import TINY, run_job
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

SHORT = VerifyOptions(steps=4)
SMALL = (
    *(each for each in TINY if "layers" not in each and "batch" not in each),
    "batch.sequence=32",
)
STRATEGIES = sorted(path.stem for path in Path("specs/strategies").glob("*.yaml"))


def tiny_spec(name: str, *overrides: str) -> Spec:
    return require_runnable(load(name, (*TINY, "batch.global=8", *overrides)))


def checks_by_stage(checks) -> list[str]:
    return list(dict.fromkeys(check.name.partition(": ")[0] for check in checks))


PRESUPPOSED = {
    None: {},
    ProgramChanges.EVERY_TIME_ANEW: {"the same run twice": "step 0: loss has other bits on rank 0"},
}


@pytest.mark.parametrize("otherwise", PRESUPPOSED)
def test_each_precondition_is_checked_and_the_one_that_fails_is_named(
    ranks: Ranks, otherwise: ProgramChanges | None
) -> None:
    spec = strategy_case("zero3", 2, accumulate=1).spec()
    found = ranks.run(2, check_assumptions, spec, otherwise)
    assert found[0] == found[1]
    failed = {check.name: check.why for check in found[0] if not check.holds}
    expected = dict(PRESUPPOSED[otherwise])
    assert failed.keys() == expected.keys(), failed
    assert all(words in failed[name] for name, words in expected.items()), failed
    assert [check.name for check in found[0]] == [REPEATED, "state that ranks share"]


def test_a_verification_holds_in_all_stages_on_all_ranks(ranks: Ranks) -> None:
    spec = strategy_case("zero3", 2, layout="zero16", accumulate=2).spec()
    asked = VerifyOptions(steps=3, every_collective=True)
    one, other = ranks.run(2, verify_spec, spec, asked)
    assert (one.checks, one.notes, one.root_cause) == (other.checks, other.notes, other.root_cause)
    assert one.holds, [f"{check.name}: {check.why}" for check in one.checks if not check.holds]
    assert checks_by_stage(one.checks) == list(STAGES) == list(one.seconds)
    names = {check.name for check in one.checks}
    assert "preconditions: collectives" in names
    assert any("7 of them with permuted sums" in note for note in one.notes)
    exact, own = one.trajectories.values()
    assert not exact["references"]  # the run keeps to the fixed figures, of which 16 bits have none
    assert len(own["references"]) == 3
    for steps in (exact, own):
        assert len(steps["losses"]) == len(steps["differences"]) == 3
        assert all(
            off <= most for off, most in zip(steps["differences"], steps["allowed"], strict=True)
        )


@pytest.mark.nightly  # by default the command verifies one, below
def test_one_rank_is_verified(ranks: Ranks) -> None:
    spec = strategy_case("zero3", 1, accumulate=1).spec()
    (found,) = ranks.run(1, verify_spec, spec, SHORT)
    assert found.holds
    names = {check.name for check in found.checks}
    assert not any("ranks share" in name for name in names)
    assert "a single rank shares nothing" in found.notes


@pytest.mark.parametrize(
    "otherwise",
    [ProgramChanges.LATE_RATE, pytest.param(ProgramChanges.LATE_NAN, marks=pytest.mark.nightly)],
)
def test_a_trajectory_stops_at_the_first_mismatch_and_lists_the_skipped_steps(
    ranks: Ranks, otherwise: ProgramChanges
) -> None:
    spec = strategy_case("ddp", 2, accumulate=1).spec()
    found = ranks.run(2, verify_spec, spec, VerifyOptions(steps=8), otherwise)[0]
    failed = {check.name: check.why for check in found.checks if not check.holds}
    first = LATE + (
        otherwise is ProgramChanges.LATE_RATE
    )  # an update shows in the next step's loss
    why = failed["trajectory in fp64: loss of every step"]
    assert why.startswith(f"step {first}: the loss is ")
    assert ("nan" in why) is (otherwise is ProgramChanges.LATE_NAN)
    assert not found.holds
    assert found.notes[-1] == "trajectory in fp64 fails: trajectory in own dtypes not checked"
    assert found.root_cause is not None  # the steps up to there, compared with one device
    assert found.root_cause.step == LATE


def test_the_command_verifies_a_run_folder_and_ends_with_0(tmp_path: Path) -> None:
    spec = tiny_spec("ddp", "mesh.dp_replicate=1")
    folder = tmp_path / "a-run"
    folder.mkdir()
    (folder / "spec.resolved.yaml").write_text(json.dumps(spec.resolved, default=str))
    code, job = run_job(["verify", "a-run", "--steps", "3"], cwd=tmp_path, is_forked=True)
    assert code == 0, job.output + job.error
    assert job.lines[0].startswith("ddp · llama")
    assert any(line.startswith("verdict: holds (") for line in job.lines)
    assert job.lines[-1].startswith("Next: ")


@pytest.mark.nightly
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_holds(ranks: Ranks, name: str) -> None:
    spec = require_runnable(load(name, SMALL))
    found = ranks.run(spec.world_size, verify_spec, spec, SHORT, timeout=300)[0]
    assert found.holds, [f"{check.name}: {check.why}" for check in found.checks if not check.holds]
