"""The tables of other tools' names, made of specs/flags.yaml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from _machine import ROOT
from _tables import table, tuples

from ptrain.spec.load import load
from ptrain.spec.text import read

FLAGS = ROOT / "specs" / "flags.yaml"


def flags() -> str:
    """Other tools' names and flags, the tuple they mean and the spec that has it."""
    tools = _data()["tools"]

    def rows() -> Iterator[Sequence[str]]:
        for row in _data()["placements"]:
            name, *overrides = row["spec"]
            spec = load(name, overrides).spec
            written = " ".join((name, *overrides))
            yield [f"`{written}`", tuples(spec), *(row.get(tool, "") for tool in tools)]

    return table(["SPEC", "Θ,Ω,G,A", *tools], rows())


def dials() -> str:
    """Other tools' names of dials."""
    tools = _data()["tools"]
    rows = ([row["dial"], *(row.get(tool, "") for tool in tools)] for row in _data()["dials"])
    return table(["key of a spec", *tools], rows)


@cache
def _data() -> Mapping[str, Any]:
    root = read(FLAGS).root
    assert isinstance(root, dict), "specs/flags.yaml is a mapping"
    return root


TABLES = {"flags": flags, "dials": dials}
