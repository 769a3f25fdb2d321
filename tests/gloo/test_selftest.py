"""`ptrain selftest`: its steps, its page, and its failures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ptrain.cli import selftest
from ptrain.cli.main import main
from ptrain.derivation.estimate import derive
from ptrain.errors import RankFailed
from ptrain.spec.names import load_names
from ptrain.train.notebook import Run, load_trainable


def _choose(monkeypatch, *kinds):
    monkeypatch.setattr(selftest, "load_names", lambda: load_names()._replace(kinds=[*kinds]))


def test_a_machine_without_gpus_runs_two_ranks_and_writes_the_page(tmp_path, monkeypatch, capsys):
    _choose(monkeypatch, "zero1")
    page = tmp_path / "page.md"
    assert main(["selftest", "--brief", "--device", "cpu", "--out", str(page)]) == 0
    (row,) = [line for line in page.read_text().splitlines() if "zero1" in line]
    assert row.startswith("| ok | zero1 | 2 | as predicted | ")
    assert "1 of 1 specs pass" in capsys.readouterr().out


def _trainings(monkeypatch, *losses, fails=()):
    """Return a training that only writes these losses and raises for the numbers in `fails`."""
    written_losses, number = iter(losses), iter(range(len(losses)))

    def train(written, *, run_dir):
        run_dir.mkdir()
        lines = [json.dumps({"loss": loss}) for loss in next(written_losses)]
        (run_dir / "metrics.jsonl").write_text("\n".join(lines))
        if next(number) in fails:
            raise RankFailed("rank 1 hung\nmore")
        return Run(run_dir, {"verdict": "holds"})

    monkeypatch.setattr(selftest, "train", train)


def _page_of(tmp_path, *words):
    page = tmp_path / "page.md"
    code = main(["selftest", "--brief", "--device", "cpu", "--out", str(page), *words])
    return code, page.read_text()


@pytest.mark.parametrize("last", [2.1, float("nan")])
def test_losses_of_another_training_fail(tmp_path, monkeypatch, last):
    _trainings(monkeypatch, (3.0, 2.0), (3.0, last))
    _choose(monkeypatch, "ddp")
    code, page = _page_of(tmp_path)
    assert code == 1
    apart = "5.0e-02" if last == 2.1 else "inf"
    assert f"| FAIL | ddp | 2 | as predicted | {apart} (limit 1e-04) |" in page


def test_after_a_spec_that_failed_the_next_one_runs(tmp_path, monkeypatch):
    _trainings(monkeypatch, (3.0,), (3.0,), (3.0,), fails=(1,))
    _choose(monkeypatch, "ddp", "zero1")
    code, page = _page_of(tmp_path)
    assert code == 1
    assert "| FAIL | ddp | 2 | rank 1 hung |" in page
    assert "| ok | zero1 | 2 | as predicted |" in page


def test_an_interrupted_test_writes_its_results_so_far(tmp_path, monkeypatch):
    def result(spec, *_):
        if spec.name == "zero1":
            raise KeyboardInterrupt
        return replace(RESULT, name=spec.name)

    monkeypatch.setattr(selftest, "_test_spec", result)
    _choose(monkeypatch, "ddp", "zero1")
    code, page = _page_of(tmp_path)
    assert code == 130
    assert "| ok | ddp |" in page and "1 of 1 specs pass; interrupted before 1 more" in page


RESULT = selftest.SpecResult(
    name="zero3", ranks=2, holds=True, seconds=1.0, difference=1e-7, limit=1e-4
)


@pytest.mark.parametrize(
    "change",
    [
        {"holds": False},
        {"difference": 2e-4},
        {"difference": float("inf")},
        {"error": "rank 1 died"},
    ],
)
def test_a_spec_passes_only_if_everything_does(change):
    assert RESULT.has_passed
    assert not replace(RESULT, **change).has_passed


@pytest.mark.parametrize("ranks", [1, 3, 4, 6, 8])
def test_every_chosen_spec_can_run_on_so_many_ranks(ranks):
    specs, left_out = selftest._select_specs(ranks, "cpu", selftest.list_files(*selftest._FOLDERS))
    for spec in specs:
        derive(load_trainable(spec), is_timed=False)
    degrees = {spec.name: spec.world_size for spec in specs}
    assert degrees["zero3"] == ranks
    assert degrees["tp"] <= min(ranks, 4)  # it has four heads
    assert max(degrees.values()) <= ranks < min(left_out.values(), default=ranks + 1)


@pytest.mark.parametrize("size", selftest._SIZES, ids=lambda size: size[0])
@pytest.mark.parametrize("ranks", [1, 8])
def test_every_model_size_loads_with_a_calibrated_cluster(size, ranks):
    spec = selftest.size_spec(size, ranks, "h100-8")
    assert spec.world_size == ranks and spec.cluster.flops


def test_more_ranks_than_gpus_are_rejected(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "_usable_gpus", lambda: 2)
    assert main(["selftest", "--ranks", "4", "--device", "cuda"]) == 2
    assert "4 ranks, and torch finds 2 GPUs" in capsys.readouterr().err


def test_without_a_gpu_cuda_is_rejected(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "_usable_gpus", lambda: 0)
    assert main(["selftest", "--device", "cuda"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_one_message_before_anything_runs(
    tmp_path, monkeypatch, capsys
):
    _choose(monkeypatch, "ddp")
    monkeypatch.setattr(selftest, "_test_spec", None)
    for out in (tmp_path, tmp_path / "no" / "page.md"):
        assert main(["selftest", "--brief", "--device", "cpu", "--out", str(out)]) == 2
        assert "--out: cannot write" in capsys.readouterr().err


def test_ranks_may_share_gpus_and_then_nothing_is_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("PTRAIN_SHARE_GPUS", "1")
    monkeypatch.setattr(selftest, "_usable_gpus", lambda: 1)
    monkeypatch.setattr(selftest, "_test_spec", lambda spec, *_: replace(RESULT, name=spec.name))
    _choose(monkeypatch, "ddp")
    page = tmp_path / "page.md"
    words = ["--ranks", "2", "--device", "cuda", "--brief", "--out", str(page)]
    assert main(["selftest", *words]) == 0
    assert "Calibration" not in page.read_text()
