"""What a loss in chunks allocates behind the blocks of a built-in model: the committed tables,
evaluated (`traces.loss_tables` makes them), and put in the place of a whole loss.

A whole model's forward pass is the same up to the end of its last block, and its backward pass from
there on; so is a last stage's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ptrain.axes.tensor.costs import Cut
from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart
from ptrain.derivation.monomials import Monomial, evaluated, merged, monomials
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import LossSpec, Spec
from ptrain.timeline import Mark, Run

MODEL, STAGE = "model", "stage"
PLACES = (MODEL, STAGE)
PLAIN, FUSED = "plain", "fused"
CUT, SAVED, NAIVE = "cut", "saved", "naive"  # kinds of `traces.tensor_tables`

# Of sizes, in the order in which they are divided by: features; tokens of this rank between the
# blocks, of a chunk and of what is left; the vocabulary, all of it and the rank's part.
SYMBOLS = ("hidden", "tokens", "chunk", "rest", "vocab_all", "vocab", "tp")

_BLOCK = "blocks.*"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSetting:
    """What a table depends on, and the values of its symbols; `sequence` are all tokens of a
    sample."""

    shape: ModelShape
    batch: int
    sequence: int
    compute: DType
    loss: LossSpec
    cut: Cut | None = None

    @property
    def name(self) -> str:
        """Of the way in its file."""
        if self.cut is None:
            return FUSED if self.loss.fused else PLAIN
        return self.cut.kind.replace(SAVED, CUT)  # what a block saves is nothing to the head

    @property
    def chunk(self) -> int:
        assert self.loss.chunk is not None, "a loss in chunks"
        return min(self.loss.chunk, self.batch * self.sequence)

    @property
    def chunks(self) -> int:
        """Those that are full."""
        return self.batch * self.sequence // self.chunk

    @property
    def values(self) -> dict[str, int]:
        shape, cut = self.shape, self.cut
        tokens = self.batch * self.sequence
        return {
            "tokens": tokens // (cut.degree if cut and cut.step.is_sequence else 1),
            "hidden": shape.hidden,
            "chunk": self.chunk,
            "rest": tokens % self.chunk,
            "vocab_all": shape.vocab,
            "vocab": cut.slice_of(shape.vocab) if cut else shape.vocab,
            "tp": cut.degree if cut else 1,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHead:
    """As `monomials.merged` gives it: what follows the last block in forward and precedes it in
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


def is_tabulated(kind: str) -> bool:
    """Return whether this kind of cut has tables of its own."""
    return not kind.startswith((SAVED, NAIVE))


def is_known(shape: ModelShape, compute: DType, loss: LossSpec) -> bool:
    """Return whether a table tells what such a loss allocates where its operators are whole.
    torch's fused one goes other ways in fp16, and with fewer words than features."""
    return not loss.fused or (compute is not DType.FP16 and shape.vocab >= shape.hidden)


def setting_of(spec: Spec, cut: Cut | None) -> LossSetting | None:
    """None of a loss that is not in chunks."""
    if spec.loss.chunk is None:
        return None
    assert isinstance(spec.model, ModelShape), "a built-in model"
    return LossSetting(
        shape=spec.model,
        batch=spec.batch.micro,
        sequence=spec.batch.sequence,
        compute=spec.precision.effective.parameters,
        loss=spec.loss,
        cut=cut,
    )


def ends(setting: LossSetting, place: str) -> LossHead:
    """Return the passes of a loss in chunks and the size of its output, at the end of a whole model
    or of a last stage (`place`)."""
    name = file_name(setting.shape, setting.compute, setting.batch)
    table = archive.table(TablePart.LOSS, name)
    entry = table[setting.name][place]
    values = setting.values
    sizes = evaluated(_sizes(name), values, setting.compute.itemsize)
    of_phase = entry["rest" if values["rest"] else "even"]
    forward, backward = (
        tuple(_items(of_phase[phase], table["parts"], sizes, setting.chunks))
        for phase in ("forward", "backward")
    )
    output = 0 if entry["output"] is None else sizes[entry["output"]]
    return LossHead(forward=forward, backward=backward, output=output)


def file_name(shape: ModelShape, compute: DType, batch: int) -> str:
    """Return the name of the table of a shape."""
    tied = "tied" if shape.tied else "untied"
    precision = "full" if compute in (DType.FP32, DType.FP64) else "bf16"
    return f"{shape.family}-{tied}-{precision}{'-one' if batch == 1 else ''}"


def _items(
    listed: dict[str, list[int]], parts: Sequence[list[Any]], sizes: Sequence[int], chunks: int
) -> Iterator[Any]:
    """Of so many full chunks; runs that follow each other are one."""
    few = listed["few"]
    if chunks <= len(few):
        yield from merged(parts[few[chunks - 1]], sizes)
        return
    front, every, between, later, behind = (
        list(merged(parts[index], sizes)) for index in listed["pieces"]
    )
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


@cache
def _sizes(name: str) -> tuple[Monomial, ...]:
    return monomials(archive.table(TablePart.LOSS, name))


def _without(events: list[Any], end: list[Any]) -> list[Any] | None:
    """`events` up to this end of theirs; None where it is another."""
    if not end:
        return events
    return events[: -len(end)] if events[-len(end) :] == end else None
