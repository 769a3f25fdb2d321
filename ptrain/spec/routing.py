"""The key `routing`: the distribution of tokens over experts, as a word or as counts per expert."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ptrain.spec.leaf import INVALID, Choice, UserFile, one_of, reject
from ptrain.spec.text import read_bytes

MAX_BYTES = 2**28  # of a file
FORM = "{LAYER: [rank][micro-batch][expert], …}: the choices of a rank's tokens, by layer"

Choices = tuple[int, ...]  # by expert


class Bound(StrEnum):
    """A bound of the load that routing can put on a rank."""

    BEST = "best"
    WORST = "worst"


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """The number of choices per expert.

    `counts[layer][rank][micro-batch][expert]` has one entry per name in `layers`. Ranks are those
    with different tokens, in mesh order: ranks that differ only along tp or pp share a row.
    """

    layers: tuple[str, ...]
    counts: tuple[tuple[tuple[Choices, ...], ...], ...]

    def rank_choices(self, layer: str, rank: int) -> tuple[Choices, ...]:
        """Return the choices of a rank's tokens in a layer, by micro-batch."""
        return self.counts[self.layers.index(layer)][rank]

    def to_counts(self) -> dict[str, list[list[list[int]]]]:
        """Return the counts in file syntax."""
        return {
            layer: [[list(choices) for choices in of_rank] for of_rank in of_layer]
            for layer, of_layer in zip(self.layers, self.counts, strict=True)
        }


Routing = Bound | Histogram | None  # None: balanced, every expert is chosen equally often


class RoutingText(Choice):
    """A routing word, or the counts themselves; they have already replaced a file name."""

    def convert(self, value: Any) -> object:
        if not isinstance(value, Mapping):
            return INVALID
        if wrong := find_error(value):
            reject(*wrong)
        return value

    def schema(self) -> dict[str, Any]:
        file = {
            "type": "string",
            "pattern": r"\\.[jJ][sS][oO][nN]$",
            "description": f"a JSON file with counts: {FORM}",
        }
        counts: dict[str, Any] = {"type": "integer", "minimum": 0}
        for about in ("by expert", "by micro-batch", "by rank"):
            counts = {"type": "array", "items": counts, "description": about}
        counts = {
            "type": "object",
            "additionalProperties": counts,
            "minProperties": 1,
            "description": "the counts of such a file",
        }
        return one_of(super().schema(), file, counts)


def read_routing(written: object) -> Routing:
    """Return the routing for a word, or for counts that `slip` accepts."""
    if isinstance(written, Mapping):
        return parse_histogram(written)
    return None if written == "balanced" else Bound(str(written))


def plain_routing(routing: Routing) -> object:
    """Return a routing in file syntax."""
    if isinstance(routing, Bound):
        return routing.value
    return routing.to_counts() if isinstance(routing, Histogram) else routing


def parse_histogram(plain: Mapping[str, Any]) -> Histogram:
    """Return the histogram for counts that `slip` accepts."""
    return Histogram(
        layers=tuple(plain),
        counts=tuple(
            tuple(tuple(tuple(choices) for choices in of_rank) for of_rank in of_layer)
            for of_layer in plain.values()
        ),
    )


def find_error(plain: object) -> tuple[str, str] | None:
    """Return the finding and the remedy for malformed counts; None if they are well-formed.

    The rules of the expert axis check that the counts fit the spec.
    """
    wrong = next(_find_slips(plain), None)
    return wrong if wrong is None else (wrong, f"Use {FORM}.")


def _find_slips(plain: object) -> Iterator[str]:
    """Yield descriptions of malformed counts, by place."""
    if not isinstance(plain, Mapping) or not plain:
        yield "there are no counts by layer"
        return
    for layer, of_layer in plain.items():
        if not isinstance(of_layer, list):
            yield f"{layer} has no list of ranks"
            return
        for rank, of_rank in enumerate(of_layer):
            if not isinstance(of_rank, list):
                yield f"{layer}, rank {rank}: no list of micro-batches"
                return
            for number, choices in enumerate(of_rank):
                at = f"{layer}, rank {rank}, micro-batch {number}"
                if not isinstance(choices, list):
                    yield f"{at}: no list of experts"
                    return
                for expert, count in enumerate(choices):
                    # `type`, because JSON's true is an int in Python.
                    if type(count) is not int or count < 0:
                        yield f"{at}: {count!r} for expert {expert} is not a count"


def read(path: Path) -> dict[str, Any] | str:
    """Return the contents of a JSON file, or the reason why it cannot be read."""
    data = read_bytes(path, MAX_BYTES)
    if isinstance(data, str):
        return data
    if len(data) > MAX_BYTES:
        return f"it is larger than {MAX_BYTES:,} bytes"
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON: {error}"
    return plain if isinstance(plain, dict) else "it does not contain a mapping of layers"


FILE = UserFile(".json", read, find_error, f"Use a JSON file, {FORM}, or a routing name.")
