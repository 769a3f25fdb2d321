"""Rewrites the tables of specs/README.md: `python benchmarks/specs_readme.py`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; the rest is written by hand.
`flags` and `dials` come from specs/flags.yaml, `methods` from the files of the strategies and their
predictions. `--check` exits 1 if a table is not what it would be now. Nothing is run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from _machine import ROOT
from _readmes import compare, on_ranks, rewrite, table, tuples

from ptrain.costs import TIERS, Estimate, State
from ptrain.derivation.estimate import derive
from ptrain.report.table import largest, size
from ptrain.spec.keep import belongs_to_rank
from ptrain.spec.load import load
from ptrain.spec.names import listing
from ptrain.spec.placement import Distribution, Mode, Tier
from ptrain.spec.spec import Spec
from ptrain.spec.text import read

README = ROOT / "specs" / "README.md"
FLAGS = ROOT / "specs" / "flags.yaml"
BLOCK = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BASE = "ddp"
STATES = {State.PARAMETERS: "Θ", State.OPTIMIZER: "Ω", State.GRADIENTS: "G"}
LETTERS = STATES | {State.ACTIVATIONS: "A"}

Row = Mapping[str, Any]


def flags() -> str:
    """Other tools' names and flags, the tuple they mean and the spec that has it."""
    tools = _data()["tools"]

    def rows() -> Iterator[Sequence[str]]:
        for row in _data()["placements"]:
            name, *overrides = row["spec"]
            spec = load(name, overrides).spec
            written = " ".join((name, *overrides))
            yield [*(row.get(tool, "") for tool in tools), tuples(spec), f"`{written}`"]

    return table([*tools, "Θ,Ω,G,A", "SPEC"], rows())


def dials() -> str:
    """Other tools' names of dials."""
    tools = _data()["tools"]
    rows = ([row["dial"], *(row.get(tool, "") for tool in tools)] for row in _data()["dials"])
    return table(["key of a spec", *tools], rows)


def methods() -> str:
    """Every strategy: what it saves, along which dimension, at what cost."""
    base = _exact(BASE)

    def rows() -> Iterator[Sequence[str]]:
        for name in sorted(listing("strategies"), key=_order):
            exact = _exact(name)
            copied = exact.copied_bytes()
            yield [
                f"`{name}`",
                _saves(on_ranks(name)),
                " × ".join(factor.axis for factor in on_ranks(name).factors),
                *(_by_tier(exact, state) for state in STATES),
                f"{exact.sent_bytes() / base.sent_bytes():.3g}×",
                size(copied) if copied else "",
            ]

    columns = ["method", "what it saves", "dimension", *STATES.values()]
    return table([*columns, "sent", "copied between tiers"], rows())


def _order(name: str) -> tuple[bool, str]:
    return name != BASE, name


@cache
def _exact(name: str) -> Estimate:
    return derive(on_ranks(name)).exact


def _by_tier(exact: Estimate, state: State) -> str:
    most = largest(exact.memory)
    sizes = {tier: most.get((state, tier)) for tier in TIERS}
    told = [f"{size(number)}{_WHERE[tier]}" for tier, number in sizes.items() if number]
    return " + ".join(told) or "0"


_WHERE = dict(zip(TIERS, ("", " host", " file"), strict=True))


def _saves(spec: Spec) -> str:
    """`Ω and G ÷ dp_shard`, `Θ off the device` …"""
    told: dict[str, list[str]] = {}
    for factor in spec.factors:
        for state, letter in LETTERS.items():
            mode = factor.placement[state]
            is_own = state is State.ACTIVATIONS and belongs_to_rank(mode)
            for words in _kept(mode) if is_own else _saving(mode, factor.axis):
                told.setdefault(words, []).append(letter)
    parts = (f"{', '.join(dict.fromkeys(letters))} {words}" for words, letters in told.items())
    return "; ".join(parts) or "nothing: the measure of all others"


def _kept(mode: Mode) -> Iterator[str]:
    """Of A that is a rank's own: S@host, its O, is no slice."""
    if mode.distribution is Distribution.MATERIALIZED:
        yield "recomputed"
    else:
        yield from _saving(Mode(Distribution.REPLICATED, mode.tier), "")


def _saving(mode: Mode, axis: str) -> Iterator[str]:
    match mode.distribution:
        case Distribution.SHARDED | Distribution.GATHERED:
            yield f"÷ {axis}"
        case Distribution.MATERIALIZED:
            yield "not kept"
        case Distribution.REPLICATED:
            pass
    match mode.tier:
        case Tier.HOST:
            yield "on the host"
        case Tier.FILE:
            yield "in files"
        case Tier.DEVICE:
            pass


@cache
def _data() -> Mapping[str, Any]:
    root = read(FLAGS).root
    assert isinstance(root, dict), "specs/flags.yaml is a mapping"
    return root


TABLES = {"flags": flags, "dials": dials, "methods": methods}


def rewritten(text: str) -> str:
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[4], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    new = rewritten(text)
    if args.check:
        return compare(README, new)
    return rewrite(README, new, f"{len(BLOCK.findall(text))} tables")


if __name__ == "__main__":
    sys.exit(main())
