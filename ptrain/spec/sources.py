"""Token files that a training draws from by weight."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

from ptrain.spec.leaf import Leaf, Real, Refused, Text, declared, describe, refuse

CYCLE = 2**16  # samples, at most, in which every source has its share


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A token file, and the share of samples that it has, over the sum of all weights."""

    path: str
    weight: float = 1.0
    loss_mask: str | None = None


_KEYS: Mapping[str, Leaf] = {
    "path": Text("a memory-mapped token file"),
    "weight": Real("its share of the samples, over the sum of all", 0.0, 1e9, open=True),
    "loss_mask": Text("as data.loss_mask, of this file", null=True),
}


@declared
class Sources(Leaf):
    """A list of token files, each with a weight."""

    def takes(self) -> str:
        return "a list of {path, weight, loss_mask}"

    def check(self, value: Any) -> object:
        if not isinstance(value, list) or not value:
            got = "an empty list" if value == [] else describe(value)
            refuse(f"must be {self.takes()}; got {got}", "write [{path: a.npy, weight: 2}, …]")
        sources = [_source(number, source) for number, source in enumerate(value, 1)]
        numbers: dict[str, int] = {}
        for number, source in enumerate(sources, 1):
            first = numbers.setdefault(os.path.abspath(source.path), number)
            if first != number:
                finding = f"source {number} is the file of source {first}: {source.path}"
                refuse(finding, "keep one of the two, with both weights added")
        for number, quota in enumerate(quotas([source.weight for source in sources]), 1):
            if not quota:
                finding = f"source {number} has less than one sample in {CYCLE}"
                refuse(finding, "write a larger weight, or leave it out")
        return tuple(sources)

    def say(self, value: object) -> object:
        if value is None:
            return None
        assert isinstance(value, tuple), "sources"
        said = ({key: getattr(source, key) for key in _KEYS} for source in value)
        return [{key: one for key, one in keys.items() if one is not None} for keys in said]

    def schema(self) -> dict[str, Any]:
        items = {
            "type": "object",
            "properties": {key: leaf.schema() for key, leaf in _KEYS.items()},
            "required": ["path"],
            "additionalProperties": False,
        }
        return {"type": "array", "items": items, "minItems": 1}


def _source(number: int, source: object) -> DataSource:
    """The fault of a value names its source and its key."""
    if not isinstance(source, dict):
        refuse(f"source {number} must be a mapping; got {describe(source)}", "write {path: FILE}")
    unknown = [str(key) for key in source if key not in _KEYS]
    if unknown:
        finding = f"source {number} has no key {unknown[0]!r}"
        refuse(finding, f"its keys are {', '.join(_KEYS)}")
    if "path" not in source:
        refuse(f"source {number} has no path", "write {path: FILE, weight: NUMBER}")
    values: dict[str, Any] = {}
    for key, value in source.items():
        try:
            values[key] = _KEYS[key].take(value)
        except Refused as error:
            refuse(f"source {number}, {key}: {error.finding}", error.remedy or "write another")
    return DataSource(**values)


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many samples of a cycle each source has: the shortest cycle in which shares are as
    the weights say, to the digit; where that is longer than CYCLE, as near as that many allow."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    cycle = lcm(*(share.denominator for share in shares))
    if cycle <= CYCLE:
        return tuple(int(share * cycle) for share in shares)
    whole = [int(share * CYCLE) for share in shares]
    rest = sorted(range(len(shares)), key=lambda n: whole[n] - shares[n] * CYCLE)
    for number in rest[: CYCLE - sum(whole)]:
        whole[number] += 1
    return tuple(whole)
