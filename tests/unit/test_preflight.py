"""What a training says before its first step."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import torch

from ptrain.derivation.estimate import derive
from ptrain.spec.load import load
from ptrain.train.session import _announce


def test_a_warning_of_the_prediction_stands_below_the_preflight(caplog):
    for per_node, warned in ((1, 1), (16, 0)):
        spec = load("tp", [f"cluster.devices_per_node={per_node}"]).spec
        world = SimpleNamespace(device=torch.device("cpu"))
        options = SimpleNamespace(spec="tp", overrides=(), allow_import=False)
        session = SimpleNamespace(heading="tp", spec=spec, world=world, options=options)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="ptrain"):
            _announce(session, derive(spec).exact)
        lines = [record.getMessage() for record in caplog.records]
        assert lines[1].startswith("preflight  peak ")
        assert sum("warning: tp spans 2 nodes" in line for line in lines[2:]) == warned
