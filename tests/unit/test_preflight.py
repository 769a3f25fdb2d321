"""The messages of a training before its first step."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptrain.derivation.estimate import derive
from ptrain.errors import PtrainError
from ptrain.spec.load import load
from ptrain.train import session
from ptrain.train.options import parse_options
from ptrain.train.session import _announce


def test_a_warning_of_the_prediction_follows_the_preflight(caplog):
    for per_node, warned in ((1, 1), (16, 0)):
        spec = load("tp", [f"cluster.devices_per_node={per_node}"]).spec
        world = SimpleNamespace(device=torch.device("cpu"))
        options = SimpleNamespace(spec="tp", overrides=(), allow_import=False)
        session = SimpleNamespace(heading="tp", spec=spec, world=world, options=options)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="ptrain"):
            _announce(session, derive(spec).exact, "")
        lines = [record.getMessage() for record in caplog.records]
        assert lines[1].startswith("preflight  peak ")
        assert sum("warning: tp spans 2 nodes" in line for line in lines[2:]) == warned


def test_a_launched_rank_rejects_an_invalid_checkpoint_before_building_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is built")

    monkeypatch.setattr(session, "interpret", build)
    (tmp_path / "empty").mkdir()
    words = ["zero3", "mesh.dp_shard=1", "--resume", str(tmp_path / "empty")]
    with pytest.raises(PtrainError, match="contains no checkpoint"):
        session.train_rank(parse_options([*words, "--run-dir", str(tmp_path / "run")]))
    assert not (tmp_path / "run").exists()
