"""The table of long sequences over cp: steps and peaks that are predicted of Llama 3.1 8B at 128k,
256k and 1M tokens on 64 H100s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from _tables import table

from ptrain.derivation.estimate import Derivation, derive
from ptrain.spec.load import load

DEVICES, GB, AT_MOST = 64, 1e9, 1.0
TOKENS = 2**23  # of a step
CHUNK = 2048  # tokens whose logits are there at once: of 128k words all would take the most memory
_WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from ptrain.cli.main import main; "
    "raise SystemExit(main(sys.argv[1:]))"
)


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


def predicted(length: Length) -> Iterator[tuple[str, ...]]:
    """Yield a row for each degree and variant."""
    for degree in length.degrees:
        for attention, mode in variants(degree):
            spec = load(mapping(length, degree, attention, mode)).spec
            yield length.name, str(degree), str(spec.context.attention), *figures(derive(spec))


def figures(derivation: Derivation) -> Iterator[str]:
    """Yield peak, time of a step, what of it waits for cp, and what cp sends."""
    exact = derivation.exact
    assert exact.step is not None, "the cluster has rates"
    waits = exact.step.exposed().get(("cp",), 0.0)
    sent = sum(row.sent_bytes for row in exact.traffic if row.key.axes == ("cp",))
    yield from (f"{exact.peak_bytes() / GB:.2f}", f"{exact.step.seconds:.1f}")
    yield from (f"{waits / exact.step.seconds:.1%}", f"{sent / GB:.0f}")


def long_contexts() -> str:
    """Steps and peaks by length, degree and variant, for a page."""
    by_case: dict[tuple[str, str], list[str]] = {}
    for length in LENGTHS:
        for tokens, degree, _, peak, seconds, *_ in predicted(length):
            by_case.setdefault((tokens, degree), []).append(f"{seconds} s · {peak} GB")
    columns = ["tokens", "cp", "ring", "zigzag", "all-gather", "Ulysses, or 8 × ring"]
    return table(columns, ((*case, *cells) for case, cells in by_case.items()))


TABLES = {"long contexts": long_contexts}
