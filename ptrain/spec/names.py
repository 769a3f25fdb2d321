"""Where named specs, models and clusters stand.

`specs/` is data: strategies and their aliases are read from there, so that no module knows a
strategy's name. A wheel carries the folder as `ptrain/_specs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ptrain.errors import SpecError
from ptrain.spec.leaf import nearest
from ptrain.spec.text import SourceMark, read

SPEC_FOLDERS = ("strategies", "experts", "paper", "node")
_HERE = Path(__file__).resolve()


class Names(NamedTuple):
    """`specs/names.yaml`: the default spec, one spec per kind of placement, and other tools'
    names."""

    default: str
    kinds: list[str]
    aliases: dict[str, str]


@cache
def root() -> Path:
    """The folder of the specs: in the wheel, else beside the package."""
    packed = _HERE.parents[1] / "_specs"
    return packed if packed.is_dir() else _HERE.parents[2] / "specs"


def file_of_preset(name: str, folder: Path) -> Path | None:
    """Return the file that a preset names: beside the spec, in whose `folder` it is looked for
    first, else where the command runs, as a file that was just written there; None without."""
    return next((file for file in (folder / name, Path(name)) if file.exists()), None)


@cache
def table_of(file: str | Path) -> Mapping[str, Any]:
    """Return the mapping that a file of `specs/` is."""
    values = read(root() / file).root
    assert isinstance(values, dict), f"{file} is a mapping"
    return values


@cache
def names() -> Names:
    return Names(**table_of("names.yaml"))


@cache
def listing(*folders: str) -> Mapping[str, Path]:
    """Name -> file of everything in these folders of `specs/`, as the process finds them first: a
    prediction asks two hundred times."""
    files = (path for folder in folders for path in sorted((root() / folder).iterdir()))
    return {path.stem: path for path in files if path.suffix == ".yaml"}


def canonical(name: str) -> str:
    """The name that an alias of other tools stands for."""
    return names().aliases.get(name.strip().lower().replace("-", "_"), name)


def find_spec(name: str) -> Path:
    """Return the file of a named spec. Raises a SpecError that says what is known instead."""
    known = listing(*SPEC_FOLDERS)
    if name not in known:
        name = canonical(name)
    if name in known:
        return known[name]
    finding, remedy = missing(name, "spec", *SPEC_FOLDERS)
    raise SpecError(SourceMark(source=_short(name)).fault("", finding, remedy))


def missing(name: str, kind: str, *folders: str) -> tuple[str, str]:
    """Finding and remedy for a name that no file bears."""
    known = tuple(listing(*folders))
    for other in {"models", "clusters"}.difference(folders):
        if name in listing(other):
            section = other.removesuffix("s")
            return f"{name!r} is a {section}, not a {kind}", f"Use `{section}.preset={name}`."
    guess = nearest(name, [*known, *(names().aliases if kind != "model" else ())])
    lists = (
        "Run `ptrain specs` to list them."
        if kind in ("spec", "strategy")
        else f"Available: {', '.join(known)}."
    )
    remedy = f"Did you mean {guess!r}? {lists}" if guess else lists
    file = "" if kind == "strategy" else " A file name works too."
    return f"there is no {kind} named {_short(name)!r}", f"{remedy}{file}"


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."


@cache
def strategy(name: str) -> dict[str, Any] | None:
    """Return what a named strategy's spec file says, or None."""
    path = listing("strategies").get(canonical(name))
    return dict(table_of(path)) if path else None


def unusable(error: SpecError) -> tuple[str, str]:
    """Return finding and remedy of a preset in whose file these faults are."""
    findings = "; ".join(str(fault).splitlines()[0] for fault in error.faults)
    remedies = dict.fromkeys(fault.remedy for fault in error.faults if fault.remedy)
    return f"the preset is invalid: {findings}", "; ".join(remedies)
