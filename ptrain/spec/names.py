"""Look-up of named specs, models, clusters and rates in `specs/`.

Strategies and their aliases are data in `specs/`, so that no module contains a strategy's name. A
wheel includes the folder as `ptrain/_specs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ptrain.errors import SpecError
from ptrain.spec.leaf import find_similar
from ptrain.spec.text import SourceMark, Tree, read

SPEC_FOLDERS = ("strategies", "experts", "paper", "node")
_HERE = Path(__file__).resolve()


class Names(NamedTuple):
    """The contents of `specs/names.yaml`: the default spec, one spec per kind of placement, and the
    names that other tools use."""

    default: str
    kinds: list[str]
    aliases: dict[str, str]


@cache
def specs_folder() -> Path:
    """Return the folder of the specs: `ptrain/_specs` in a wheel, otherwise `specs/` next to the
    package."""
    packed = _HERE.parents[1] / "_specs"
    return packed if packed.is_dir() else _HERE.parents[2] / "specs"


def folder_of(tree: Tree) -> Path:
    """Return the folder to which relative file names in a spec refer."""
    return Path(tree.source).parent if Path(tree.source).suffix else Path()


def home_of(tree: Tree) -> Path | None:
    """Return the folder of the user's spec file with symlinks resolved, as Python does for a
    script.

    Returns None for built-in specs and for specs that are not files.
    """
    file = Path(tree.source).resolve()
    is_file = bool(tree.source) and file.is_file()
    return file.parent if is_file and not file.is_relative_to(specs_folder()) else None


def file_of_preset(name: str, folder: Path) -> Path | None:
    """Return the file of a preset: in the spec's `folder`, otherwise in the working directory.

    The working directory is searched for files that a command has just written there. Returns None
    if neither folder has the file.
    """
    return next((file for file in (folder / name, Path(name)) if file.exists()), None)


@cache
def load_table(file: str | Path) -> Mapping[str, Any]:
    """Return the mapping in a file of `specs/`."""
    values = read(specs_folder() / file).root
    assert isinstance(values, dict), f"{file} is a mapping"
    return values


@cache
def load_names() -> Names:
    """Return the contents of `specs/names.yaml`."""
    return Names(**load_table("names.yaml"))


@cache
def list_files(*folders: str) -> Mapping[str, Path]:
    """Return the YAML files in these folders of `specs/`, by name.

    Cached, because one prediction makes about two hundred look-ups; files that are added later are
    not found.
    """
    files = (path for folder in folders for path in sorted((specs_folder() / folder).iterdir()))
    return {path.stem: path for path in files if path.suffix == ".yaml"}


def resolve_alias(name: str) -> str:
    """Return the strategy name for an alias from another tool, or `name` if it is no alias."""
    return load_names().aliases.get(name.strip().lower().replace("-", "_"), name)


def find_spec(name: str) -> Path:
    """Return the file of a named spec. Raises SpecError with similar names if there is none."""
    known = list_files(*SPEC_FOLDERS)
    if name not in known:
        name = resolve_alias(name)
    if name in known:
        return known[name]
    finding, remedy = explain_missing(name, "spec", *SPEC_FOLDERS)
    raise SpecError(SourceMark(source=_shorten(name)).make_fault("", finding, remedy))


def explain_missing(name: str, kind: str, *folders: str) -> tuple[str, str]:
    """Return the finding and the remedy for a name that has no file in `folders`.

    Args:
        name: The name that was looked up.
        kind: The noun for messages, such as `spec`, `strategy` or `model`.
        folders: The folders of `specs/` that were searched.
    """
    known = tuple(list_files(*folders))
    for other in {"models", "clusters"}.difference(folders):
        if name in list_files(other):
            section = other.removesuffix("s")
            return f"{name!r} is a {section}, not a {kind}", f"Use `{section}.preset={name}`."
    guess = find_similar(name, [*known, *(load_names().aliases if kind != "model" else ())])
    lists = (
        "Run `ptrain specs` to list them."
        if kind in ("spec", "strategy")
        else f"Available: {', '.join(known)}."
    )
    remedy = f"Did you mean {guess!r}? {lists}" if guess else lists
    file = "" if kind == "strategy" else " A file name works too."
    return f"there is no {kind} named {_shorten(name)!r}", f"{remedy}{file}"


def _shorten(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."


@cache
def load_strategy(name: str) -> dict[str, Any] | None:
    """Return the contents of a strategy's spec file, or None if there is no such strategy."""
    path = list_files("strategies").get(resolve_alias(name))
    return dict(load_table(path)) if path else None


def explain_invalid_preset(error: SpecError) -> tuple[str, str]:
    """Return the finding and the remedy for a preset whose file has faults."""
    findings = "; ".join(str(fault).splitlines()[0] for fault in error.faults)
    remedies = dict.fromkeys(fault.remedy for fault in error.faults if fault.remedy)
    return f"the preset is invalid: {findings}", "; ".join(remedies)
