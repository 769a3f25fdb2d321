"""The ranks of one spec, started from outside: what a command and a benchmark have in common.
Torch-free."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptrain.errors import VerdictFailed
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_yaml
from ptrain.train.folder import RunFolder
from ptrain.train.heading import parts_of_ranks
from ptrain.train.launch import launch
from ptrain.verification.options import VerifyOptions, to_argv


class Interrupted(Exception):
    """By a signal; `code` is what the command ends with."""

    def __init__(self, code: int) -> None:
        super().__init__(f"interrupted, exit code {code}")
        self.code = code


def start(spec: Spec, options: VerifyOptions, folder: Path) -> dict[str, Any]:
    """Verify `spec` in a new private `folder`; return the record, empty where only an account was
    asked for. `options` say how; `spec` and `folder` take the place of theirs.

    Raises RankFailed, PtrainError in a rank's words, Interrupted.
    """
    (folder / "logs").mkdir(mode=0o700, parents=True)
    written = folder / "spec.resolved.yaml"
    written.write_text(to_yaml(spec.resolved), encoding="utf-8")
    argv = to_argv(replace(options, spec=str(written), overrides=(), folder=folder))
    run = RunFolder(folder)
    code = launch(
        argv,
        num_ranks=spec.world_size,
        folder=run,
        parts=parts_of_ranks(spec),
        module="ptrain.verification",
    )
    if code not in (0, VerdictFailed.exit_code):
        raise Interrupted(code)
    if options.account is not None:
        return {}
    record: dict[str, Any] = json.loads(run.summary.read_text(encoding="utf-8"))
    return record
