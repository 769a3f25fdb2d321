"""`ptrain selftest`: what it runs, what it writes, and when it fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ptrain.cli import selftest
from ptrain.cli.main import main
from ptrain.spec.names import names
from ptrain.train.notebook import Run


def _choose(monkeypatch, name):
    monkeypatch.setattr(selftest, "names", lambda: names()._replace(kinds=[name]))


def test_a_machine_without_gpus_runs_two_ranks_and_writes_the_page(tmp_path, monkeypatch, capsys):
    _choose(monkeypatch, "zero1")
    page = tmp_path / "page.md"
    assert main(["selftest", "--brief", "--device", "cpu", "--out", str(page)]) == 0
    (row,) = [line for line in page.read_text().splitlines() if "zero1" in line]
    assert row.startswith("| ok | zero1 | 2 | as predicted | ")
    assert "1 of 1 specs pass" in capsys.readouterr().out


def test_losses_of_another_training_fail(tmp_path, monkeypatch):
    def train(written, *, run_dir):  # what one device gets differs in the last step
        run_dir.mkdir()
        last = 2.0 if written["mesh"] else 2.1
        lines = [json.dumps({"loss": loss}) for loss in (3.0, last)]
        (run_dir / "metrics.jsonl").write_text("\n".join(lines))
        return Run(run_dir, {"verdict": "holds"})

    monkeypatch.setattr(selftest, "train", train)
    _choose(monkeypatch, "ddp")
    page = tmp_path / "page.md"
    assert main(["selftest", "--brief", "--device", "cpu", "--out", str(page)]) == 1
    assert "| FAIL | ddp | 2 | as predicted | 4.8e-02 (limit 1e-04) |" in page.read_text()


RESULT = selftest.Result(name="zero3", ranks=2, holds=True, seconds=1.0, apart=1e-7, limit=1e-4)


@pytest.mark.parametrize(
    "change", [{"holds": False}, {"apart": 2e-4}, {"apart": float("nan")}, {"error": "rank 1 died"}]
)
def test_a_spec_passes_only_if_everything_does(change):
    assert RESULT.passes
    assert not replace(RESULT, **change).passes


def test_specs_of_one_axis_span_all_ranks_and_larger_ones_are_named():
    specs, left_out = selftest._cases(4, "cpu", selftest.listing(*selftest._FOLDERS))
    ranks = {spec.name: spec.world_size for spec in specs}
    assert ranks["zero3"] == 4
    assert ranks["tp"] == 4
    assert left_out == {"3d": 8, "5d": 32}


def test_more_ranks_than_gpus_are_rejected(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "gpus", lambda: 2)
    assert main(["selftest", "--ranks", "4", "--device", "cuda"]) == 2
    assert "4 ranks, and 2 GPUs" in capsys.readouterr().err


def test_ranks_may_share_gpus_and_then_nothing_is_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("PTRAIN_SHARE_GPUS", "1")
    monkeypatch.setattr(selftest, "gpus", lambda: 1)
    monkeypatch.setattr(selftest, "_result", lambda spec, *_: replace(RESULT, name=spec.name))
    _choose(monkeypatch, "ddp")
    page = tmp_path / "page.md"
    words = ["--ranks", "2", "--device", "cuda", "--brief", "--out", str(page)]
    assert main(["selftest", *words]) == 0
    assert "Not measured on GPUs that ranks share" in page.read_text()
