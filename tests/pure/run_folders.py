"""Run folders as a training leaves them, without one."""

from __future__ import annotations

from pathlib import Path

from ptrain.algebra.legality import require_runnable
from ptrain.spec.load import load
from ptrain.train import manifest
from ptrain.train.folder import Claim, open_run
from ptrain.train.manifest import Manifest

SPEC = require_runnable(load("zero3"))


def open_folder(given: Path | None = None, *, resuming: bool = False) -> Claim:
    return open_run(SPEC, given=given, resuming=resuming, command="ptrain train")


def write_run(run: Path, *steps: int, model: object = None) -> list[Path]:
    """Return a run with manifests of checkpoints of these steps."""
    paths = [run / "checkpoints" / manifest.folder_name(step) for step in steps]
    for path, step in zip(paths, steps, strict=True):
        path.mkdir(parents=True)
        (path / "__0_0.distcp").write_bytes(bytes(64))
        files = manifest.file_digests(path, ["__0_0.distcp"])
        was = manifest.trained_sections(SPEC) | ({"model": model} if model else {})
        manifest.write(
            path,
            Manifest(step=step, spec="zero3", world_size=2, torch="2", files=files, trained=was),
        )
    return paths
