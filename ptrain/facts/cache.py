"""The user's cache: facts of models that had to be traced, so that the next prediction of the same
one needs neither the seconds nor torch.

A trace is kept under what it depends on: the part of the spec that shapes it, the versions of torch
and transformers, and this very ptrain, file by file. What a spec's `target:` names is never kept:
its code may have changed where nobody sees it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path

import ptrain
from ptrain.facts.model import ModelFacts
from ptrain.facts.plain import from_plain, to_plain
from ptrain.spec.axis import DATA_AXES
from ptrain.spec.job import TrainSpec
from ptrain.spec.model import ExternalModel, HuggingFaceModel
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_mapping

_SUFFIX = ".json.gz"


def kept(spec: Spec, read: Callable[[], ModelFacts]) -> ModelFacts:
    """Return the facts that the cache has of a spec, else what `read` gives, which is put there. A
    cache that cannot be written is none."""
    if (path := _path(spec)) is None:
        return read()
    if (known := _read(path)) is not None:
        return known
    facts = read()
    if not facts.untraced:
        with suppress(OSError):
            _write(path, facts)
    return facts


def folder() -> Path:
    """Return where traces are kept: what PTRAIN_CACHE names, else `ptrain` in the user's folder of
    caches."""
    if chosen := os.environ.get("PTRAIN_CACHE"):
        return Path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "ptrain"
    home = Path.home()
    return (home / "Library/Caches" if sys.platform == "darwin" else home / ".cache") / "ptrain"


def files() -> Iterator[Path]:
    """Yield the files of the cache, by their names."""
    yield from sorted(folder().glob(f"*{_SUFFIX}"))


def traced_part(spec: Spec) -> Spec:
    """Return what a trace depends on, and nothing else, so that specs which differ elsewhere have
    the same."""
    cutting = tuple(factor for factor in spec.factors if factor.axis not in DATA_AXES)
    times = spec.batch.accumulate if cutting else 1  # a schedule of stages needs as many
    batch = replace(spec.batch, global_samples=times * spec.batch.micro, accumulate=times)
    return Spec(
        name="part",
        model=spec.model,
        factors=cutting,
        batch=batch,
        precision=spec.precision,
        train=replace(TrainSpec(), seed=spec.train.seed),
        unit=spec.unit,
        tensor=spec.tensor,
        pipeline=spec.pipeline,
        activations=spec.activations,
        loss=spec.loss,
        device="cuda" if spec.is_for_cuda else "cpu",
    )


def _path(spec: Spec) -> Path | None:
    """Return the file of a spec's facts; None where none are kept."""
    if isinstance(spec.model, ExternalModel):
        return None
    code = ["torch", *(["transformers"] if isinstance(spec.model, HuggingFaceModel) else [])]
    try:
        part = to_mapping(traced_part(spec), sync_is_written=False)
        text = json.dumps([part, list(map(metadata.version, code)), _sources()], sort_keys=True)
        home = folder()
    except (TypeError, RuntimeError, metadata.PackageNotFoundError):
        return None  # a config that is no JSON, a user without a home, a torch without metadata
    return home / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}{_SUFFIX}"


@cache
def _sources() -> str:
    """Return what changes with this ptrain: size and time of each of its files."""
    root = Path(ptrain.__file__).parent
    stats = ((path, path.stat()) for path in sorted(root.rglob("*.py")))
    lines = (f"{path.relative_to(root)} {s.st_size} {s.st_mtime_ns}" for path, s in stats)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _read(path: Path) -> ModelFacts | None:
    """Return the facts of a file; None where there is none, or none that can be read."""
    try:
        facts: ModelFacts = from_plain(json.loads(gzip.decompress(path.read_bytes())), ModelFacts)
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError):
        return None
    return facts


def _write(path: Path, facts: ModelFacts) -> None:
    """Put facts into a file, whole or not at all; it is its owner's alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(to_plain(facts, ModelFacts), separators=(",", ":"))
    new = path.with_suffix(f".{os.getpid()}")
    new.touch(mode=0o600)
    new.write_bytes(gzip.compress(text.encode(), mtime=0))
    new.replace(path)
