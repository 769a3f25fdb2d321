"""What a loss in chunks allocates behind the blocks of a built-in model: the committed tables,
evaluated (`traces.block_tables` makes them), and put in the place of a whole loss.

A whole model's forward pass is the same up to the end of its last block, and its backward pass from
there on; so is a last stage's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ptrain.derivation.archive import TablePart
from ptrain.derivation.tables import EvaluatedTable, Place, Setting, table
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import LossSpec
from ptrain.timeline import Mark, Run

# Of sizes, in the order in which they are divided by: features; tokens of this rank between the
# blocks, of a chunk and of what is left; the vocabulary, all of it and the rank's part.
SYMBOLS = ("hidden", "tokens", "chunk", "rest", "vocab_all", "vocab", "tp")

_BLOCK = "blocks.*"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHead:
    """As `tables.merged` gives it: what follows the last block in forward and precedes it in
    backward; `output`, bytes of what a stage hands on."""

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    output: int

    def around(self, phase: str, last: Sequence[Any]) -> list[Any]:
        """The last block's part in `forward` or `backward`, with this behind it or before it."""
        if phase == "forward":
            return [*last[: last.index((Mark.LEAVE, _BLOCK)) + 1], *self.forward]
        return [*self.backward, *last[last.index((Mark.PRE_BACKWARD, _BLOCK)) :]]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Events of `least` chunks or more: `every` and `later` are there once more for each chunk that
    is more."""

    least: int
    front: list[Any]
    every: list[Any]
    between: list[Any]
    later: list[Any]
    behind: list[Any]

    @property
    def listed(self) -> tuple[list[Any], ...]:
        return self.front, self.every, self.between, self.later, self.behind

    def fewest(self) -> Pieces:
        """The same with the smallest number of chunks that it is true of."""
        shorter = self._shorter()
        return self if shorter is None or self.least == 1 else shorter.fewest()

    def _shorter(self) -> Pieces | None:
        front = _without(self.front, self.every)
        behind = _without(self.behind[::-1], self.later[::-1])
        if front is None or behind is None:
            return None
        return replace(self, least=self.least - 1, front=front, behind=behind[::-1])


def has_own_tables(kind: str) -> bool:
    """Return whether this kind of cut has tables of its own."""
    return not kind.startswith(("saved", "naive"))


def is_known(shape: ModelShape, compute: DType, loss: LossSpec) -> bool:
    """Return whether a table tells what such a loss allocates where its operators are whole.
    torch's fused one goes other ways in fp16, and with fewer words than features."""
    return not loss.fused or (compute is not DType.FP16 and shape.vocab >= shape.hidden)


def chunk_of(setting: Setting) -> int:
    """Return the tokens of a chunk."""
    assert setting.loss.chunk is not None, "a loss in chunks"
    return min(setting.loss.chunk, setting.batch * setting.sequence)


def full_chunks(setting: Setting) -> int:
    """Return how many chunks are full."""
    return setting.batch * setting.sequence // chunk_of(setting)


def values_of(setting: Setting) -> dict[str, int]:
    """Return the values of SYMBOLS, on one rank."""
    shape, cut = setting.shape, setting.cut
    tokens = setting.batch * setting.sequence
    return {
        "hidden": shape.hidden,
        "tokens": tokens // (cut.degree if cut and cut.step.is_sequence else 1),
        "chunk": chunk_of(setting),
        "rest": tokens % chunk_of(setting),
        "vocab_all": shape.vocab,
        "vocab": cut.slice_of(shape.vocab) if cut else shape.vocab,
        "tp": cut.degree if cut else 1,
    }


def head_of(setting: Setting, place: Place) -> LossHead | None:
    """Return the passes of a loss in chunks and the size of its output, at the end of a whole model
    or of a last stage; None of a loss of whole logits."""
    if setting.loss.chunk is None:
        return None
    values = values_of(setting)
    evaluated = table(TablePart.LOSS, setting.without_context, values)
    entry = evaluated.content[place]
    of_phase = entry["rest" if values["rest"] else "even"]
    forward, backward = (
        tuple(_items(of_phase[phase], evaluated, full_chunks(setting)))
        for phase in ("forward", "backward")
    )
    output = 0 if entry["output"] is None else evaluated.sizes[entry["output"]]
    return LossHead(forward=forward, backward=backward, output=output)


def parts_of(listed: dict[str, list[int]], chunks: int) -> Iterator[int]:
    """Yield the numbers of the parts that so many full chunks are, one after the other."""
    few = listed["few"]
    if chunks <= len(few):
        yield few[chunks - 1]
        return
    front, every, between, later, behind = listed["pieces"]
    more = chunks - 1 - len(few)
    yield from (front, *[every] * more, between, *[later] * more, behind)


def _items(listed: dict[str, list[int]], evaluated: EvaluatedTable, chunks: int) -> Iterator[Any]:
    """Of so many full chunks; runs that follow each other are one."""
    few = listed["few"]
    if chunks <= len(few):
        yield from evaluated.events(few[chunks - 1])
        return
    front, every, between, later, behind = map(evaluated.events, listed["pieces"])
    more = chunks - 1 - len(few)
    pieces = (front, _times(every, more), between, _times(later, more), behind)
    last: Run | None = None
    for item in (item for piece in pieces for item in piece):
        if isinstance(item, Run):
            last = last.then(item) if last else item
            continue
        if last:
            yield last
        last = None
        yield item
    if last:
        yield last


def _times(events: Sequence[Any], more: int) -> Iterable[Run]:
    """The same run, again and again."""
    if not events or not more:
        return
    (run,) = events
    yield Run(max(run.rise, (more - 1) * run.net + run.rise), more * run.net)


def _without(events: list[Any], end: list[Any]) -> list[Any] | None:
    """`events` up to this end of theirs; None where it is another."""
    if not end:
        return events
    return events[: -len(end)] if events[-len(end) :] == end else None
