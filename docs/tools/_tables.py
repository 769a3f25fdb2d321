"""Generate tables of the pages: activations, other tools' settings, keys and long contexts.

The helpers for all tables are here too: Markdown, strategies on equal numbers of ranks, placements
as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import starmap
from pathlib import Path
from typing import Any

from _machine import ROOT
from _script import table

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Estimate, State
from ptrain.derivation.estimate import derive
from ptrain.report.table import memory_text
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.check import KeyRow, iter_key_rows
from ptrain.spec.foreign import shared_answer
from ptrain.spec.load import load
from ptrain.spec.placement import DATA_AXES, Axis
from ptrain.spec.spec import Spec
from ptrain.spec.text import read

RANKS = 4
# The preset's two key-value heads are too few for as many ranks of tp, its four layers for two
# stages on each rank of pp.
MODEL = ("model.kv_heads=4", "model.layers=8")
# In one micro-batch: the paper knows no accumulation; what that repeats `sync` says. A pipeline has
# as many as the longest of its schedules needs.
SAMPLES, MICROBATCHES = 16, 8


@cache
def on_ranks(name: str) -> Spec:
    """A strategy on RANKS ranks, its axes of one degree; three axes of 2 are twice as many."""
    factors = load(name).spec.factors
    degree = round(RANKS ** (1 / len(factors)))
    mesh = ", ".join(f"{factor.axis}: {degree}" for factor in factors)
    data_degree = degree ** sum(factor.axis in DATA_AXES for factor in factors)
    times = MICROBATCHES if any(factor.axis is Axis.PP for factor in factors) else 1
    batch = [f"batch.global={SAMPLES}", f"batch.micro={SAMPLES // data_degree // times}"]
    return require_runnable(load(name, [f"mesh={{{mesh}}}", *MODEL, *batch]))


def tuples(spec: Spec) -> str:
    text = " ⊗ ".join(f"{factor.axis} {factor.placement}" for factor in spec.factors)
    return text.replace("*", r"\*")


BASE = ("zero3", "batch.sequence=2048", "batch.micro=1")
MODES = (
    (),
    ("activations=M", "recompute={every: 2}"),
    ("activations=M", "recompute=attention"),
    ("activations=M", "recompute=selective"),
    ("activations=M",),
    ("activations=M@host",),
    ("activations=O",),
)
ATTENTIONS = ("sdpa", "eager")


def modes() -> str:
    """What every mode of the blocks' activations saves, with both kinds of attention."""
    columns = [
        "setting",
        *(f"saved, `{name}`" for name in ATTENTIONS),
        *(f"peak, `{name}`" for name in ATTENTIONS),
        "offloaded",
        "recomputed",
    ]

    def rows() -> Iterator[Sequence[str]]:
        for written in MODES:
            sdpa, eager = (_exact(written, name) for name in ATTENTIONS)
            yield (
                ", ".join(f"`{each}`" for each in written).replace("=", ": ") or "default (R)",
                *(memory_text(each.bytes_of(State.ACTIVATIONS)) for each in (sdpa, eager)),
                *(
                    memory_text(max(row.device_bytes for row in each.peak))
                    for each in (sdpa, eager)
                ),
                " · ".join(map(memory_text, (_off(sdpa), _off(eager)))) if _off(sdpa) else "–",
                " · ".join(map(_again, (sdpa, eager))),
            )

    return table(columns, rows())


def _exact(written: Sequence[str], attention: str) -> Estimate:
    name, *overrides = BASE
    return derive(resolve_auto(load(name, [*overrides, f"attention={attention}", *written]))).exact


def _off(exact: Estimate) -> int:
    rows = [row for row in exact.memory if row.state is State.ACTIVATIONS]
    return max(row.host_bytes + row.file_bytes for row in rows)


def _again(exact: Estimate) -> str:
    most = max(exact.operations, key=lambda row: row.again)
    return f"{most.again / most.forward:.0%}"


FLAGS = ROOT / "specs" / "flags.yaml"
HINTS = ROOT / "specs" / "hints.yaml"
_ANSWER = re.compile(r"([\w.]+)=(.+?)(?:; .*)?")  # `key=value; a sentence`


def families() -> Sequence[str]:
    """Return the names of all strategies by family: data, offload, activations, tp, cp, pp."""
    return tuple(dict.fromkeys(row["spec"][0] for row in _data(FLAGS)["placements"]))


def coming_from(tool: str) -> str:
    """Return the settings of a tool with the spec or key that has the same effect."""

    def rows() -> Iterator[Sequence[str]]:
        for row in _data(FLAGS)["placements"]:
            if theirs := row.get(tool):
                name, *overrides = row["spec"]
                spec = load(name, overrides).spec
                yield theirs, f"`{' '.join((name, *overrides))}`", tuples(spec)
        for row in _data(FLAGS)["dials"]:
            if theirs := row.get(tool):
                yield theirs, row["dial"], "option"

    return table([tool, "spec", "Θ,Ω,G,A"], rows())


def config_keys(tool: str) -> str:
    """Return the keys of a tool's config file with the key of a spec that replaces each."""
    by_answer: dict[str, list[str]] = {}
    for key, answers in _data(HINTS)["keys"][tool].items():
        texts = answers.values() if isinstance(answers, dict) else (answers,)
        # Braces stand for the value of another key of the file.
        fixed = [text for text in map(shared_answer, texts) if not re.search(r"\{[\w.]+\}", text)]
        matches = [match.groups() for match in map(_ANSWER.fullmatch, fixed) if match]
        values: dict[str, list[str]] = {}
        for ours, value in dict.fromkeys(matches):
            values.setdefault(ours, []).append(value)
        if values:
            cell = "; ".join(starmap(_setting, values.items()))
            by_answer.setdefault(cell, []).append(f"`{key}`")
    rows = ((", ".join(theirs), ours) for ours, theirs in by_answer.items())
    return table([tool, "spec"], rows)


def _setting(key: str, values: Sequence[str]) -> str:
    if len(values) == 1:
        return f"`{key}: {values[0]}`"
    return f"`{key}`: {', '.join(f'`{value}`' for value in values)}"


@cache
def _data(path: Path) -> Mapping[str, Any]:
    root = read(path).root
    assert isinstance(root, dict), f"{path} is a mapping"
    return root


def keys() -> str:
    """Return the table of all keys: allowed values, default, meaning and an example of each."""
    return table(["key", "values", "default", "meaning", "example"], map(_key_row, iter_key_rows()))


def _key_row(row: KeyRow) -> Sequence[str]:
    example = f"`{row.example}`" if row.example else ""
    return f"`{row.place}`", _text(row.takes), _text(row.default), _text(row.about), example


def _text(text: str) -> str:
    """Without what Markdown would take for marks of its own."""
    return text.replace("|", r"\|").replace("*", r"\*")


DEVICES, AT_MOST = 64, 1.0
TOKENS = 2**23  # of a step
CHUNK = 2048  # tokens whose logits are there at once: of 128k words all would take the most memory


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of a sample, and the degrees of cp at which its variants stand side by side."""

    tokens: int
    degrees: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.tokens // 2**10}k" if self.tokens < 2**20 else f"{self.tokens // 2**20}M"


LENGTHS = (Length(2**17, (8,)), Length(2**18, (8, 16)), Length(2**20, (16, 32, 64)))


def variants(degree: int) -> Iterator[tuple[object, str]]:
    """Yield what a spec writes for attention over cp, and its mode of A: of the eight heads of keys
    each rank has some."""
    yield "ring", "S"
    yield "zigzag", "S"
    yield "all-gather", "S*"
    yield ("ulysses" if degree <= 8 else {"ulysses": 8, "ring": degree // 8}), "S"


def mapping(length: Length, degree: int, attention: object, mode: str) -> dict[str, Any]:
    """Return a spec: states sharded over all devices, blocks computed again."""
    mesh = {"dp_shard": DEVICES // degree, "cp": degree}
    return {
        "name": f"{length.name}-cp{degree}",
        "model": {"preset": "llama3.1-8b"},
        "mesh": mesh,
        "placement": {"dp_shard": "S*,S,S,R", "cp": f"S*,S,S,{mode}"},
        "precision": {"layout": "zero16"},
        "batch": {"global": TOKENS // length.tokens, "micro": 1, "sequence": length.tokens},
        "context": {"attention": attention},
        "activations": "M",
        "loss": {"chunk": CHUNK},
        "cluster": {"preset": "h100-64"},
    }


def long_contexts() -> str:
    """Steps and peaks by length, degree and variant, for a page."""
    by_case: dict[tuple[str, str], list[str]] = {}
    for length in LENGTHS:
        for degree in length.degrees:
            cells = by_case.setdefault((length.name, str(degree)), [])
            for attention, mode in variants(degree):
                exact = derive(load(mapping(length, degree, attention, mode)).spec).exact
                assert exact.step is not None, "the cluster has rates"
                cells.append(f"{exact.step.seconds:.1f} s · {memory_text(exact.peak_bytes())}")
    columns = [
        "tokens",
        "cp",
        "ring",
        "zigzag",
        "all-gather",
        "ulysses; from cp 16 `{ulysses: 8, ring: cp/8}`",
    ]
    return table(columns, ((*case, *cells) for case, cells in by_case.items()))


TABLES = {
    "modes of activations": modes,
    **{f"coming from {tool}": partial(coming_from, tool) for tool in _data(FLAGS)["tools"]},
    **{f"keys of {tool}": partial(config_keys, tool) for tool in _data(HINTS)["keys"]},
    "keys": keys,
    "long contexts": long_contexts,
}
