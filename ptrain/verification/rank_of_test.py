"""`python -m ptrain.verification.rank_of_test FUNCTION FOLDER ARGUMENTS`: one rank of a test that
ptrain.testing runs. It calls the function, and leaves what it returned in FOLDER/rank0.json …"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ptrain.codec import encode
from ptrain.errors import refused
from ptrain.rooms.world import World
from ptrain.train.folder import write_json
from ptrain.train.rank_exit import live
from ptrain.verification.jobs.verdict import LoopVerdict


def run(words: Sequence[str]) -> int:
    """Run under a process group, unless there is one rank alone."""
    function, folder, arguments = words
    torch.set_num_threads(1)
    with ExitStack() as stack:
        world = World.join(device="cpu", backend="gloo")
        stack.callback(world.close)
        returned = _function(function)(*json.loads(arguments))
        write_json(Path(folder) / f"rank{world.rank}.json", _plain(returned))
    return 0


def _function(target: str) -> Any:
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise refused(
            "function",
            f"a rank cannot import {module}: no module named {error.name!r}",
            "Put its folder on the path of the tests.",
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, LoopVerdict):
        return {"holds": value.holds, "text": str(value), "culprit": encode(value.root_cause)}
    return value


if __name__ == "__main__":
    live(lambda: run(sys.argv[1:]))
