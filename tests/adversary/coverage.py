"""The coverage of the grammar by a set of specs: keys, kinds of value, and pairs of these."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ptrain.spec.load import load
from tests.adversary.key_values import values


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Counts of specs by `place=label` and by pairs of labels."""

    specs: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, written: Mapping[str, Any]) -> None:
        """Count one more spec, in whatever form its tuples are written."""
        tuples = {"placement": load(dict(written)).spec.resolved["placement"]}
        present = sorted({*labels(written), *labels(tuples)})
        self.specs.update(present)
        self.pairs.update(itertools.combinations(present, 2))

    def missing(self, wanted: Iterable[str] | None = None) -> list[str]:
        """Return the kinds of value that no spec has."""
        return [label for label in (every_label() if wanted is None else wanted)
                if not self.specs[label]]  # fmt: skip

    def lines(self) -> list[str]:
        """Return the coverage of keys, of values and of pairs as text."""
        places = {label.partition("=")[0] for label in self.specs}
        every = [*every_label()]
        pairs = _pairs(Counter(label.partition("=")[0] for label in every))
        drawn_pairs = _pairs(Counter(label.partition("=")[0] for label in self.specs))
        return [
            f"keys: {len(places)} of {len(values())}",
            f"kinds of value: {len(self.specs)} of {len(every)}",
            f"pairs of them: {len(self.pairs)} of {pairs}, {drawn_pairs} of what was drawn",
        ]


def _pairs(kinds: Counter[str]) -> int:
    """Return the number of pairs of values of different keys."""
    every = sum(kinds.values())
    return (every**2 - sum(count**2 for count in kinds.values())) // 2


def every_label() -> Iterator[str]:
    """Yield a label for each kind of value of each key."""
    for place, kinds in values().items():
        yield from dict.fromkeys(f"{place}={kind.label}" for kind in kinds)


def labels(written: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of value of the keys in a spec."""
    for place, kinds in values().items():
        node: Any = written
        for key in place.split("."):
            node = node.get(key, ...) if isinstance(node, Mapping) else ...
        if node is not ...:
            kind = next((kind for kind in kinds if kind.holds(node)), None)
            if kind is not None:
                yield f"{place}={kind.label}"
