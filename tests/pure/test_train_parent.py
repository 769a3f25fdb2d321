"""The torch-free half of training: options, schedule, run folder, the blamed rank, and the
manifest."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ptrain import files
from ptrain.algebra.legality import require_runnable
from ptrain.cli.train import load_checked
from ptrain.errors import PtrainError
from ptrain.spec.job import OptimizerSpec, ScheduleSpec
from ptrain.spec.load import load
from ptrain.train import launch, loop_inputs, options, rank_start, tracker
from ptrain.train.heading import rank_stage_texts
from ptrain.train.launch import Failure, LauncherSignals, Rank
from ptrain.train.loop_inputs import learning_rate
from tests.pure.pipeline_specs import spec

ROOT = Path(__file__).parents[2]


def test_the_parent_of_a_training_imports_no_torch():
    code = "import sys, ptrain.cli.train; print({'torch', 'numpy'} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "set()"


# -- options


def test_the_first_word_is_the_spec_unless_it_is_an_override():
    assert options.parse_options(["ddp", "train.steps=3"]).spec == "ddp"
    asked = options.parse_options(["train.steps=3", "--json", "mesh.dp_shard=4"])
    assert asked.spec == options.parse_options([]).spec
    assert asked.overrides == ("train.steps=3", "mesh.dp_shard=4")


def test_the_spec_may_follow_its_overrides_and_there_is_one():
    asked = options.parse_options(["train.steps=3", "ddp"])
    assert (asked.spec, asked.overrides) == ("ddp", ("train.steps=3",))
    with pytest.raises(PtrainError, match="one SPEC"):
        options.parse_options(["ddp", "zero1"])


@pytest.mark.parametrize("wrong", ["--nnodes=0", "--max-restarts=-1", "--measure=-3", "--nnodes=x"])
def test_a_number_that_makes_no_sense_is_rejected(wrong, capsys):
    with pytest.raises(SystemExit) as left:
        options.parse_options(["ddp", wrong])
    assert left.value.code == 2
    assert wrong.partition("=")[0] in capsys.readouterr().err


def test_several_nodes_need_a_place_to_meet():
    with pytest.raises(PtrainError, match=r"--nnodes 2: .*\n.*--rdzv-endpoint HOST:PORT"):
        options.parse_options(["ddp", "--nnodes", "2"])
    meeting = ["--rdzv-endpoint", "a:1", "--rdzv-id", "0123456789abcdef"]
    asked = options.parse_options(["ddp", "--nnodes", "2", *meeting])
    assert options.elastic_argv(asked)[-4:] == meeting
    assert asked.wants_elastic


@pytest.mark.parametrize("word", [[], ["--rdzv-id", "job-4711"]])
def test_nodes_meet_under_a_secret_id(word):
    with pytest.raises(PtrainError, match=r"--rdzv-id.*\n  remedy: .*--rdzv-id [0-9a-f]{32}"):
        options.parse_options(["ddp", "--nnodes", "2", "--rdzv-endpoint", "a:1", *word])


def test_restarts_on_one_machine_open_no_port_of_torchs():
    assert not options.parse_options(["ddp", "--max-restarts", "1"]).wants_elastic


def test_an_override_may_be_spelled_as_an_option():
    assert options.parse_options(["ddp", "--train.steps=3"]).overrides == ("train.steps=3",)


def test_device_is_an_override():
    assert options.parse_options(["ddp", "--device", "cpu"]).overrides == ("device=cpu",)


def test_every_option_of_a_rank_survives_the_way_to_it(tmp_path):
    asked = options.Options(
        spec="ddp",
        overrides=("train.steps=3",),
        resume=str(tmp_path),
        run_dir=Path("somewhere"),
        json=True,
        strict=True,
        force=True,
        allow_import=True,
        quiet=True,
        tensorboard=True,
        measure=5,
        prepared=True,
    )
    assert options.parse_options(options.to_argv(asked)) == asked


@pytest.mark.parametrize("words", [["log.trackers=[tensorboard]"], ["--tensorboard"]])
def test_a_tracker_that_is_not_installed_is_rejected_before_anything_is_written(
    words, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    said = (
        r"log\.trackers: tensorboard needs .*\n  remedy: Run `pip install 'ptrain\[tensorboard\]'`"
    )
    with pytest.raises(PtrainError, match=said):
        load_checked(options.parse_options(["zero1", *words]))
    assert not [*tmp_path.iterdir()]


def test_a_tracker_that_is_named_twice_is_given_all_once():
    chosen = options.parse_options(["zero1", "--tensorboard"])
    spec = require_runnable(load("zero1", ["log.trackers=[wandb,tensorboard]"]))
    assert tracker.tracker_names(spec, chosen) == ("wandb", "tensorboard")


def test_a_checkpoint_that_does_not_exist_is_rejected_at_once(tmp_path):
    with pytest.raises(PtrainError, match="no such folder"):
        options.parse_options(["ddp", "--resume", str(tmp_path / "none")])


# -- traces


def test_a_profiled_step_beyond_the_last_is_rejected_with_the_range():
    spec = require_runnable(load("ddp", ["profile=[9]", "train.steps=5"]))
    with pytest.raises(PtrainError, match=r"profile: there is no step 9\n.* from 1 to 5"):
        options.require_profiled_steps(spec)


def test_a_metered_step_is_not_traced_but_the_one_after_the_meters():
    spec = require_runnable(load("ddp", ["profile=[1,2,3,5]", "train.steps=9"]))
    assert loop_inputs.moved_profiles(spec, (2, 3)) == {2: 4, 3: 4}
    line = loop_inputs.moved_profiles_line(spec, (2, 3))
    assert "step 2 and 3 is measured; step 4 of 9 is traced" in line
    ddp = require_runnable(load("ddp", ["profile=[5]"]))
    assert loop_inputs.moved_profiles_line(ddp, (2, 3)) == ""


# -- schedule


def test_warm_up_is_linear_and_reaches_the_rate():
    optimizer = OptimizerSpec(lr=1.0, schedule=ScheduleSpec(warmup=4))
    assert [learning_rate(optimizer, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_cosine_goes_from_the_rate_to_its_fraction_and_stays_there():
    optimizer = OptimizerSpec(
        lr=2.0, schedule=ScheduleSpec(warmup=2, decay_steps=10, min_lr_ratio=0.1)
    )
    assert learning_rate(optimizer, 2) == pytest.approx(2.0)
    assert learning_rate(optimizer, 7) == pytest.approx(2.0 * 0.55)
    assert learning_rate(optimizer, 12) == learning_rate(optimizer, 99) == pytest.approx(0.2)


# -- run folder


def test_a_text_appears_whole_and_for_its_owner_only(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": 1})
    files.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


# -- who is blamed


def rank(number: int, code: int | None, *, said: str = "", tmp_path: Path) -> Rank:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    error_file = tmp_path / f"{number}.json"
    if said:
        error_file.write_text(json.dumps({"message": {"message": said, "extraInfo": {}}}))
    return Rank(number, process, tmp_path / f"{number}.log", error_file, code, ended=float(number))


LOST = "RuntimeError: [gloo/tcp/pair.cc:559] Connection closed by peer [127.0.0.1]:4711"


def test_a_killed_rank_is_blamed_and_not_those_that_lost_it(tmp_path):
    ranks = [rank(0, 3, said=LOST, tmp_path=tmp_path), rank(1, -9, tmp_path=tmp_path)]
    blamed = launch.select_root_cause(launch.find_failures(ranks, time.monotonic()), [])
    assert blamed.rank.rank == 1
    assert "SIGKILL" in blamed.cause


def test_the_rank_that_raised_is_blamed_with_its_message(tmp_path):
    ranks = [
        rank(0, 3, said=LOST, tmp_path=tmp_path),
        rank(1, 3, said="ValueError: no such token", tmp_path=tmp_path),
    ]
    blamed = launch.select_root_cause(launch.find_failures(ranks, time.monotonic()), [])
    assert blamed.cause == "raised ValueError: no such token"


def test_a_live_silent_rank_is_blamed_for_the_ranks_that_wait_for_it(tmp_path):
    waiting = rank(0, 3, said="RuntimeError: Timed out waiting 8000ms", tmp_path=tmp_path)
    silent = rank(1, None, tmp_path=tmp_path)
    found = launch.find_failures([waiting, silent], time.monotonic())
    assert launch.select_root_cause(found, [silent]).rank is silent


def test_a_stopped_rank_is_blamed_before_another_silent_one(tmp_path):
    waiting = rank(0, 3, said="RuntimeError: Timed out waiting 4000ms", tmp_path=tmp_path)
    silent, stopped = rank(1, None, tmp_path=tmp_path), rank(2, None, tmp_path=tmp_path)
    stopped.stopped = time.monotonic()
    found = launch.find_failures([waiting, silent, stopped], time.monotonic())
    assert all(map(launch.has_timed_out, found))
    blamed = launch.select_root_cause(found, [silent, stopped])
    assert blamed.rank is stopped and "was stopped (SIGSTOP)" in blamed.cause


def test_of_several_silent_ranks_the_one_that_is_waited_for_is_blamed(tmp_path):
    told = (
        "RankFailed: stage 3: waiting for rank 2 (stage 2) to send micro-batch 5: Timed out waiting"
    )
    waiting = rank(3, 3, said=told, tmp_path=tmp_path)
    living = [rank(number, None, tmp_path=tmp_path) for number in (0, 1, 2)]
    found = launch.find_failures([waiting, *living], time.monotonic())
    assert launch.select_root_cause(found, living).rank is living[2]


def test_a_rank_of_a_pipeline_is_called_by_its_stage_too(tmp_path):
    failed = rank(1, 3, said="RankFailed: stage 1, micro-batch 2: KeyError: 4", tmp_path=tmp_path)
    failed.has = "stages 1 and 2"
    found = launch.find_failures([failed], time.monotonic())
    text = launch.format_failure(launch.select_root_cause(found, []), 1)
    assert text == "error: rank 1 (stages 1 and 2) failed: stage 1, micro-batch 2: KeyError: 4"


@pytest.mark.parametrize(
    ("mesh", "schedule", "parts"),
    [
        ({"pp": 2, "dp_shard": 2}, "1f1b", ["stage 0", "stage 0", "stage 1", "stage 1"]),
        ({"dp_shard": 2, "pp": 2}, "zbv", ["stages 0 and 3", "stages 1 and 2"] * 2),
        ({"dp_shard": 2}, "1f1b", []),
    ],
)
def test_ranks_are_distinguished_by_their_part_of_the_model(mesh, schedule, parts):
    pipeline = {"schedule": schedule} if "pp" in mesh else {}
    assert list(rank_stage_texts(spec(mesh, pipeline))) == parts


def test_a_rank_that_is_stopped_fails_after_some_seconds(tmp_path):
    stopped = rank(1, None, tmp_path=tmp_path)
    stopped.stopped = 100.0
    assert not launch.find_failures([stopped], 100.0 + launch.STOPPED_FOR - 0.1)
    assert launch.find_failures([stopped], 100.0 + launch.STOPPED_FOR)


@pytest.mark.parametrize("code", launch.ORDERLY)
def test_an_orderly_end_is_no_failure(tmp_path, code):
    ended = rank(0, code, tmp_path=tmp_path)
    ended.log = tmp_path / "logs" / "rank0.log"
    (tmp_path / "summary.json").touch()
    assert not launch.find_failures([ended], math.inf)


def test_exit_code_1_without_a_summary_is_a_python_failure(tmp_path):
    ended = rank(0, 1, tmp_path=tmp_path)
    ended.log = tmp_path / "logs" / "rank0.log"
    assert launch.find_failures([ended], math.inf)


def test_the_message_names_rank_cause_and_last_words_and_folds_the_rest(tmp_path):
    failed = rank(1, -9, tmp_path=tmp_path)
    failed.log.write_text("one\ntwo\nframe #3: c10::Error\n")
    text = launch.format_failure(Failure(rank=failed, cause="was killed by SIGKILL"), 4)
    assert text.startswith("error: rank 1 was killed by SIGKILL")
    assert "| two" in text and "frame #3" not in text
    assert "3 more failed because of it" in text


# -- signals


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with LauncherSignals().record_signals(), rank_start.record_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with rank_start.record_signals() as interrupts:
            signal.raise_signal(signal.SIGHUP)
        assert rank_start.strongest_signal(interrupts.flags()) is signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)
