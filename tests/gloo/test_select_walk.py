"""`ptrain select` at a small size: from a question to a placement that runs and is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import jobs
from tests.pure.test_traced_search import TINY

pytestmark = [pytest.mark.gloo, pytest.mark.nightly]


def test_a_winner_is_predicted_and_validated_on_ranks_of_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PTRAIN_CACHE", str(tmp_path / "cache"))
    searched = ["--cluster", "h100-8", "--devices", "2"]
    searched += ["--where", "tp=1", "--where", "pp=1", "--where", "micro<=2"]
    asked = ["select", "qwen3-0.6b", *TINY, *searched, "--exact", "2", "--out", "job.yaml"]
    code, selected = jobs.run_job(asked, cwd=tmp_path)
    assert code == 0, selected.error
    assert "derived with the model itself, traced" in selected.output
    for asked in (["predict", "job.yaml"], ["validate", "job.yaml", "device=cpu", "cluster=null"]):
        code, job = jobs.run_job(asked, cwd=tmp_path)
        assert code == 0, job.error
