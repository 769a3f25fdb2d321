"""Tables of the pages: activations, other tools' names, keys and long contexts; and what all tables
share: Markdown, strategies on as many ranks each, and their tuples as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from _machine import ROOT

from ptrain.algebra.legality import require
from ptrain.cost import Estimate, State
from ptrain.derivation.estimate import derive
from ptrain.report.table import size
from ptrain.selection.recompute import settled
from ptrain.spec.load import load
from ptrain.spec.placement import DATA_AXES, Axis
from ptrain.spec.reference import KeyRow, reference
from ptrain.spec.spec import Spec
from ptrain.spec.text import read

RANKS = 4
# The preset's two key-value heads are too few for as many ranks of tp, its four layers for two
# stages on each rank of pp.
MODEL = ("model.kv_heads=4", "model.layers=8")
# In one micro-batch: the paper knows no accumulation; what that repeats `sync` says. A pipeline has
# as many as the longest of its schedules needs.
SAMPLES, MICROBATCHES = 16, 8


def table(columns: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell or '–' for cell in line)} |\n" for line in lines)


@cache
def on_ranks(name: str) -> Spec:
    """A strategy on RANKS ranks, its axes of one degree; three axes of 2 are twice as many."""
    factors = load(name).spec.factors
    degree = round(RANKS ** (1 / len(factors)))
    mesh = ", ".join(f"{factor.axis}: {degree}" for factor in factors)
    data_degree = degree ** sum(factor.axis in DATA_AXES for factor in factors)
    times = MICROBATCHES if any(factor.axis is Axis.PP for factor in factors) else 1
    batch = [f"batch.global={SAMPLES}", f"batch.micro={SAMPLES // data_degree // times}"]
    return require(load(name, [f"mesh={{{mesh}}}", *MODEL, *batch]))


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
        "written",
        *(f"saved, `{name}`" for name in ATTENTIONS),
        *(f"peak, `{name}`" for name in ATTENTIONS),
        "off the device",
        "computed again",
    ]

    def rows() -> Iterator[Sequence[str]]:
        for written in MODES:
            sdpa, eager = (_exact(written, name) for name in ATTENTIONS)
            yield (
                ", ".join(f"`{each}`" for each in written).replace("=", ": ") or "nothing (R)",
                *(size(each.bytes_of(State.ACTIVATIONS)) for each in (sdpa, eager)),
                *(size(max(row.device_bytes for row in each.peak)) for each in (sdpa, eager)),
                " · ".join(map(size, (_off(sdpa), _off(eager)))) if _off(sdpa) else "–",
                " · ".join(map(_again, (sdpa, eager))),
            )

    return table(columns, rows())


def _exact(written: Sequence[str], attention: str) -> Estimate:
    name, *overrides = BASE
    return derive(settled(load(name, [*overrides, f"attention={attention}", *written]))).exact


def _off(exact: Estimate) -> int:
    rows = [row for row in exact.memory if row.state is State.ACTIVATIONS]
    return max(row.host_bytes + row.file_bytes for row in rows)


def _again(exact: Estimate) -> str:
    most = max(exact.operations, key=lambda row: row.again)
    return f"{most.again / most.forward:.0%}"


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


def keys() -> str:
    """Every key of a spec by its dotted name: what it takes, its default, and what it means."""
    return table(["key", "takes", "default", "meaning"], map(_key_row, reference()))


def _key_row(row: KeyRow) -> Sequence[str]:
    return f"`{row.place}`", _text(row.takes), _text(row.default), _text(row.about)


def _text(text: str) -> str:
    """Without what Markdown would take for marks of its own."""
    return text.replace("|", r"\|").replace("*", r"\*")


DEVICES, GB, AT_MOST = 64, 1e9, 1.0
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
                cells.append(f"{exact.step.seconds:.1f} s · {exact.peak_bytes() / GB:.2f} GB")
    columns = ["tokens", "cp", "ring", "zigzag", "all-gather", "Ulysses, or 8 × ring"]
    return table(columns, ((*case, *cells) for case, cells in by_case.items()))


TABLES = {
    "modes of activations": modes,
    "flags": flags,
    "dials": dials,
    "keys": keys,
    "long contexts": long_contexts,
}
