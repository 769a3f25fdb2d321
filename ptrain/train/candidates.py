"""`--resume PATH|auto`: which checkpoints a training may continue from, and why from none of them.
Torch-free: the parent refuses here what needs no rank to be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ptrain.errors import PtrainError, SpecError, refused
from ptrain.spec.spec import Spec
from ptrain.train import environment, lineage, manifest
from ptrain.train.folder import ROOT, RunFolder, is_of_agent, run_of_agent, saved_since, shown
from ptrain.train.manifest import Manifest
from ptrain.train.options import Options

AUTO = "auto"


def candidates(source: str, own: RunFolder) -> list[Path]:
    """Return the checkpoints in the order in which they are tried, the newest first.

    `auto` are those of this run folder and no other: a run beside it may be of another text, seed
    or learning rate, whatever its name. A path is a checkpoint or a run folder.
    """
    return manifest.complete(own.checkpoints) if source == AUTO else _given(Path(source))


def again(before: str | None, own: RunFolder) -> str:
    """Return what ranks that are started anew continue from: the checkpoints that their run has
    written, and as long as there are none what the first attempt was told."""
    return AUTO if saved_since(own) else before or AUTO


def is_done(spec: Spec, own: RunFolder) -> bool:
    """Return whether the run has saved its last step, after which there is nothing to continue."""
    return any(manifest.step_of(path) >= spec.train.steps for path in saved_since(own))


def continued(options: Options) -> Options:
    """The options of a rank that torch's agent started anew: it goes on with the run that the
    attempt before began. As given where that agent has begun none: this is the first attempt.

    TORCHELASTIC_RESTART_COUNT does not tell: an agent whose own ranks lived, and are started anew
    because those of another node died, does not count that.
    """
    agent = environment.agent()
    run = options.run_dir or run_of_agent(agent)
    if run is None or not is_of_agent(run, agent):
        return options
    return replace(options, run_dir=run, resume=again(options.resume, RunFolder(run)))


def require_resumable(spec: Spec, options: Options) -> None:
    """Raises SpecError for a continuation that the manifests and the sizes of files rule out."""
    source, own = options.resume, RunFolder(options.run_dir or ROOT / "new")
    complaints: list[str] = []
    for path in candidates(source, own) if source else ():
        try:
            checkpoint = manifest.read(path)
        except PtrainError as error:
            complaints.append(str(error))
            continue
        if damaged := manifest.wrong_sizes(path, checkpoint):
            complaints.append(f"checkpoint {shown(path)}: {damaged[0]}")
            continue
        require_fitting(spec, source or "", path, checkpoint)
        return
    if source and (source != AUTO or complaints):
        raise none_sound(source, complaints)


def require_fitting(spec: Spec, source: str, path: Path, checkpoint: Manifest) -> None:
    """Raises SpecError for a checkpoint of a training that is done, or of another model."""
    if checkpoint.step >= spec.train.steps:
        finding = f"already at step {checkpoint.step} of {spec.train.steps}"
        raise refused(_place(source), finding, f"set train.steps above {checkpoint.step}")
    if fault := lineage.other_model(checkpoint.trained, spec):
        raise SpecError(replace(fault, source=f"checkpoint {shown(path)}"))


def none_sound(source: str, complaints: Sequence[str]) -> SpecError:
    """Return the refusal that says that there is no checkpoint, or what is wrong with each."""
    if not complaints:
        remedy = "train with checkpoint.every=N or checkpoint.at_end=true, or leave --resume out"
        return refused(_place(source), "holds no checkpoint", remedy)
    several = f"none of the {len(complaints)} checkpoints there can be used"
    finding = several if len(complaints) > 1 else "the only checkpoint there cannot be used"
    return refused(
        _place(source),
        f"{finding}: {'; '.join(complaints)}",
        "continue from another checkpoint, or leave --resume out to train anew",
    )


def _place(source: str) -> str:
    return f"--resume {source if source == AUTO else shown(Path(source))}"


def _given(path: Path) -> list[Path]:
    """A checkpoint, or those of a run folder or of its `checkpoints/`, newest first."""
    if (path / manifest.NAME).exists() or manifest.is_name(path.name):
        return [path]
    return manifest.complete(path / "checkpoints") or manifest.complete(path)
