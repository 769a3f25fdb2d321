"""`--resume PATH|auto`: which checkpoints a training may continue from, and why from none of them.
Torch-free: the parent refuses here what needs no rank to be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ptrain.errors import PtrainError, SpecError, refused
from ptrain.spec.spec import Spec
from ptrain.train import lineage, manifest
from ptrain.train.folder import RunFolder, shown
from ptrain.train.manifest import Manifest

AUTO = "auto"


def candidates(asked: str, own: RunFolder, name: str) -> tuple[list[Path], list[str]]:
    """Checkpoints in the order in which they are tried, and what hid others.

    `auto` are those of this run folder, then those of runs of the same spec beside it, newest
    first. A path is a checkpoint or a run folder.
    """
    if asked != AUTO:
        return _given(Path(asked)), []
    complaints: list[str] = []
    beside = []
    for run in sorted(own.path.parent.glob(f"*-{name}*"), reverse=True):
        for path in manifest.complete(run / "checkpoints") if run != own.path else ():
            try:
                beside += [path] if manifest.read(path).spec == name else []
            except PtrainError as error:  # nobody's, and the end of no other run
                complaints.append(str(error))
    return [*manifest.complete(own.checkpoints), *beside], complaints


def require_resumable(spec: Spec, asked: str | None, own: RunFolder) -> None:
    """Raises SpecError for a continuation that the manifests and the sizes of files rule out."""
    complaints: list[str] = []
    for path in candidates(asked, own, spec.name)[0] if asked else ():
        try:
            found = manifest.read(path)
        except PtrainError as error:
            complaints.append(str(error))
            continue
        if damaged := manifest.wrong_sizes(path, found):
            complaints.append(f"checkpoint {shown(path)}: {damaged[0]}")
            continue
        require_fitting(spec, asked or "", path, found)
        return
    if asked and (asked != AUTO or complaints):
        raise none_sound(asked, complaints)


def require_fitting(spec: Spec, asked: str, path: Path, found: Manifest) -> None:
    """Raises SpecError for a checkpoint of a training that is done, or of another model."""
    if found.step >= spec.train.steps:
        finding = f"already at step {found.step} of {spec.train.steps}"
        raise refused(_place(asked), finding, f"set train.steps above {found.step}")
    if fault := lineage.other_model(found.trained, spec):
        raise SpecError(replace(fault, source=f"checkpoint {shown(path)}"))


def none_sound(asked: str, complaints: Sequence[str]) -> SpecError:
    """There is no checkpoint, or each has what its complaint says."""
    if not complaints:
        remedy = "train with checkpoint.every=N or checkpoint.at_end=true, or leave --resume out"
        return refused(_place(asked), "holds no checkpoint", remedy)
    several = f"none of the {len(complaints)} checkpoints there can be used"
    finding = several if len(complaints) > 1 else "the only checkpoint there cannot be used"
    return refused(
        _place(asked),
        f"{finding}: {'; '.join(complaints)}",
        "continue from another checkpoint, or leave --resume out to train anew",
    )


def _place(asked: str) -> str:
    return f"--resume {asked if asked == AUTO else shown(Path(asked))}"


def _given(path: Path) -> list[Path]:
    """A checkpoint, or those of a run folder or of its `checkpoints/`, newest first."""
    if (path / manifest.NAME).exists() or manifest.is_name(path.name):
        return [path]
    return manifest.complete(path / "checkpoints") or manifest.complete(path)
