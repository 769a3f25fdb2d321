"""What all ranks' models drew in a step, and of that what one device must draw to compute the same:
of each sample what was drawn for it, on whichever rank it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptrain.verification.jobs.compare import digest
from ptrain.verification.jobs.draws import DrawMode, RandomDraw, Rows
from ptrain.verification.jobs.job import Ranks

Key = tuple[str, int]  # a module's path, the how many-th draw in it
_BITS = "bits"  # a mask of zeros and ones, eight in a byte


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDraw:
    """A draw of one rank, in the pass `call` of the samples `rows`, which so many passes of the
    rank had before (`times`)."""

    rank: int
    call: int
    rows: Rows
    value: Tensor
    times: int = 0


@dataclass(slots=True)
class EveryonesDraws:
    """Of a step, on every rank. What a look-up finds out on the way: `assumed`, modules of which
    ranks have slices, taken to lie in the order of the ranks; `lost`, modules whose draws cannot be
    told by samples; `unlike`, modules in which ranks that have the same samples drew differently,
    with these ranks; `alone`, draws of one device that no rank has."""

    by_key: dict[Key, list[RankDraw]] = field(default_factory=dict)
    assumed: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    alone: set[Key] = field(default_factory=set)
    unlike: dict[str, tuple[int, ...]] = field(default_factory=dict)
    used: set[Key] = field(default_factory=set)
    passes: dict[int, set[Rows]] = field(default_factory=dict)  # by number, of all ranks

    @classmethod
    def gathered(cls, drawn: DrawMode, ranks: Ranks) -> EveryonesDraws:
        """All ranks call it."""
        packed = [_packed(draw.value) for draw in drawn.draws]
        rows = list(drawn.rows.items())
        own = {
            "draws": [
                [draw.path, draw.number, draw.outer, draw.call, *how]
                for draw, (how, _) in zip(drawn.draws, packed, strict=True)
            ],
            "rows": [
                [outer, call, drawn.times[outer, call], list(row)] for (outer, call), row in rows
            ],
        }
        everyones = ranks.gather(own)
        bodies = ranks.bytes([body for _, body in packed])
        result = cls()
        for rank, (report, body) in enumerate(zip(everyones, bodies, strict=True)):
            known = {(outer, call): tuple(row) for outer, call, _, row in report["rows"]}
            times = {(outer, call): before for outer, call, before, _ in report["rows"]}
            for (_, call), row in known.items():
                result.passes.setdefault(call, set()).add(row)
            start = 0
            for path, number, outer, call, kind, shape, size in report["draws"]:
                value = _unpacked(body[start : start + size], kind, shape)
                start += size
                draw = RankDraw(
                    rank=rank, call=call, rows=known[outer, call], value=value,
                    times=times[outer, call],
                )  # fmt: skip
                result.by_key.setdefault((path, number), []).append(draw)
        return result

    def __bool__(self) -> bool:
        return bool(self.by_key)

    def of(self, draw: RandomDraw, rows: Rows, times: int = 0) -> Tensor | None:
        """Return what one device is to draw for these samples, which so many of its passes had
        before; None where nothing tells."""
        key = draw.path, draw.number
        if key not in self.by_key:
            self.alone.add(key)
            return None
        self.used.add(key)
        held = _of_such_passes(self.by_key[key], draw, rows, times)
        held = self._of_known_samples(draw, held, rows)
        value = self._in_one_pass(draw, rows, held)
        if value is None and _is_one(held) and held[0].value.shape == draw.value.shape:
            value = held[0].value
        if value is None:
            value = self._by_rows(draw, rows, held)
        if value is None:
            self.lost.add(draw.path)
        return value

    def _of_known_samples(
        self, draw: RandomDraw, held: Sequence[RankDraw], rows: Rows
    ) -> Sequence[RankDraw]:
        """A later stage is given what an earlier one returned: the samples of its n-th pass are
        those of the n-th pass of the ranks that are given samples."""
        wanted = set(rows)
        if any(set(its.rows) & wanted for its in held):
            return held
        known = {
            call: [row for row in its if set(row) & wanted] for call, its in self.passes.items()
        }
        if any(
            len(known[its.call]) != 1 or len(known[its.call][0]) != len(its.rows) for its in held
        ):
            return held
        self.assumed.add(draw.path)
        return [replace(its, rows=known[its.call][0]) for its in held]

    def _in_one_pass(self, draw: RandomDraw, rows: Rows, held: Sequence[RankDraw]) -> Tensor | None:
        """These samples are those of a pass of some ranks, or slices of them are."""
        same = [its for its in held if its.rows == rows]
        if not same:  # slices of the tokens, or a stage, whose input is none of one device's
            known = {its.rank for its in held if set(its.rows) & set(rows)}
            same = [its for its in held if its.call == draw.call and len(its.rows) == len(rows)]
            if known or len({its.rank for its in same}) < len(same):
                return None
            self.assumed |= {draw.path} if same else set()
        return self._together(draw, same, len(draw.value.shape) + 1)

    def _by_rows(self, draw: RandomDraw, rows: Rows, held: Sequence[RankDraw]) -> Tensor | None:
        """Of every sample its own rows, of whichever pass has them."""
        passes: dict[tuple[int, Rows], list[RankDraw]] = {}
        for its in held:
            passes.setdefault((its.call, its.rows), []).append(its)
        places: dict[str, list[tuple[Tensor, int]]] = {}
        for (_, its_rows), group in passes.items():
            dim = _dim_of_rows(draw.value.shape, len(rows), group[0].value.shape, len(its_rows))
            if dim is None or not its_rows:
                return None
            value = self._together(draw, group, dim)
            if value is None:
                return None
            blocks = _blocks(value, dim, len(its_rows))
            for place, row in enumerate(its_rows):
                places.setdefault(row, []).append((blocks, place))
        if not all(places.get(row) for row in rows):
            return None
        dim = _dim_of_rows(
            draw.value.shape, len(rows), held[0].value.shape, len(held[0].rows)
        )  # the same for all
        assert dim is not None, "every pass has it"
        chosen = [places[row].pop(0) if len(places[row]) > 1 else places[row][0] for row in rows]
        stacked = torch.stack([blocks[place] for blocks, place in chosen])
        return stacked.flatten(0, 1).movedim(0, dim)

    def _together(self, draw: RandomDraw, same: Sequence[RankDraw], rows_dim: int) -> Tensor | None:
        """Return what ranks with the same samples drew for them: one of them, or their slices one
        after the other."""
        if not same:
            return None
        first, whole = same[0].value, draw.value.shape
        if first.dim() != len(whole) or any(its.value.shape != first.shape for its in same):
            return None
        cut = [
            dim for dim in range(first.dim()) if dim != rows_dim and first.size(dim) != whole[dim]
        ]
        if not cut:
            differ = [its.rank for its in same if not torch.equal(its.value, first)]
            if differ:
                self.unlike.setdefault(draw.path, (same[0].rank, *differ))
            return first
        if len(cut) > 1 or first.size(cut[0]) * len(same) != whole[cut[0]]:
            return None
        self.assumed.add(draw.path)
        return torch.cat([its.value for its in same], cut[0])

    def of_first(self, draw: RandomDraw, rows: Rows) -> Tensor | None:
        """Return what the first of the ranks with these samples drew, in the modules in which they
        drew differently."""
        held = self.by_key.get((draw.path, draw.number), [])
        same = (its for its in held if its.rows == rows and its.call == draw.call)
        first = next(same, None)
        if first is None or draw.path not in self.unlike:
            return None
        return first.value if first.value.shape == draw.value.shape else None

    def doubled(self) -> tuple[int, ...]:
        """Return ranks that drew the same, every time, for other samples."""
        by_rank: dict[int, list[RankDraw]] = {}
        for held in self.by_key.values():
            for its in held:
                by_rank.setdefault(its.rank, []).append(its)
        first, *others = by_rank or {0: []}
        own = by_rank.get(first, [])
        alike = [
            rank
            for rank in others
            if len(by_rank[rank]) == len(own)
            and all(_is_copy(a, b) for a, b in zip(own, by_rank[rank], strict=True))
        ]
        return (first, *alike) if alike else ()


def _of_such_passes(
    held: Sequence[RankDraw], draw: RandomDraw, rows: Rows, times: int
) -> Sequence[RankDraw]:
    """Return the draws of passes with gradients for one with, of those without for one without; and
    where the same samples pass several times, of the same time; whatever there is, where none of
    these has all the samples."""
    graded = [its for its in held if (its.call >= 0) == (draw.call >= 0)] or held
    same = [its for its in graded if its.times == times]
    is_whole = not Counter(rows) - Counter(row for its in same for row in its.rows)
    return same if same and is_whole else graded


def _is_copy(left: RankDraw, right: RankDraw) -> bool:
    apart = bool(left.rows) and not set(left.rows) & set(right.rows)
    return apart and torch.equal(left.value, right.value)


def _is_one(held: Sequence[RankDraw]) -> bool:
    first = held[0].value
    return all(its.value.shape == first.shape and torch.equal(its.value, first) for its in held)


def _dim_of_rows(whole: torch.Size, count: int, part: torch.Size, its_count: int) -> int | None:
    """Return the dimension that grows as the number of samples does."""
    if len(whole) != len(part):
        return None
    fits = (
        dim
        for dim in range(len(whole))
        if its_count and whole[dim] * its_count == part[dim] * count
        and whole[dim] % count == 0 and (count != its_count or not dim)
    )  # fmt: skip
    return next(fits, None)


def _blocks(value: Tensor, dim: int, count: int) -> Tensor:
    """[samples, elements of each along `dim`, the other dimensions]."""
    moved = value.movedim(dim, 0)
    return moved.reshape(count, moved.size(0) // count, *moved.shape[1:])


def _packed(value: Tensor) -> tuple[list[Any], bytes]:
    """(kind, shape, number of bytes), and the bytes."""
    array = value.detach().cpu().contiguous()
    kind = str(array.dtype).removeprefix("torch.")
    if bool(((array == 0) | (array == 1)).all()):
        body = np.packbits(array.bool().flatten().numpy()).tobytes()
        return [f"{_BITS} {kind}", list(array.shape), len(body)], body
    body = array.flatten().view(torch.uint8).numpy().tobytes()
    return [kind, list(array.shape), len(body)], body


def _unpacked(body: bytes, kind: str, shape: Sequence[int]) -> Tensor:
    size = torch.Size(shape).numel()
    dtype = getattr(torch, kind.rpartition(" ")[2])
    if kind.startswith(_BITS):
        bits = np.unpackbits(np.frombuffer(body, np.uint8), count=size)
        return torch.from_numpy(bits).to(dtype).view(*shape)
    raw = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0)
    return raw.view(dtype).view(*shape).clone()


def drawn_again_otherwise(drawn: DrawMode) -> Iterator[RandomDraw]:
    """Yield what backward passes drew that no forward pass had, though one drew such a tensor."""
    seen = {digest(draw.value) for draw in drawn.draws}
    for draw in drawn.again:
        alike = [its for its in drawn.draws if _is_alike(its, draw)]
        if alike and digest(draw.value) not in seen:
            yield draw


def _is_alike(left: RandomDraw, right: RandomDraw) -> bool:
    return (left.kind, left.value.shape) == (right.kind, right.value.shape)
