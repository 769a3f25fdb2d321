"""Record the random numbers that a model draws while it runs, above all the masks of dropout, by
the operators that draw them, and replace them by others.

From the draws of all ranks' models in a step follow the draws that one device needs to compute the
same: per sample the random numbers drawn for it, on whichever rank it was.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ptrain.internals.autograd import is_in_backward
from ptrain.models.ledger import OperatorMode
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.jobs.record import digest
from ptrain.verification.parts import canonical_modules, held

_CHANCES = {"bernoulli", "bernoulli_", "native_dropout"}
_UNIFORM = {"rand", "rand_like", "uniform", "uniform_"}
_NORMAL = {"randn", "randn_like", "normal", "normal_"}
_OTHERS = {
    "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "poisson",
    "randint", "randint_like", "randperm", "random_", "_sample_dirichlet", "_standard_gamma",
}  # fmt: skip
_SLOPES = "rrelu_with_noise"  # drawn into its second argument, by which it multiplies the first
_DRAWN = _CHANCES | _UNIFORM | _NORMAL | _OTHERS | {_SLOPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomDraw:
    """One tensor that an operator `kind` drew: in which module (`path`), as the how many-th there
    (`number`) in which pass of the outermost module that ran (`outer`, `call`: from 0 on, of those
    without gradients from -1 down). `kept`: of a mask the share that it lets pass."""

    path: str
    number: int
    outer: str
    call: int
    kind: str
    value: Tensor
    kept: float = 1.0

    def stilled(self) -> Tensor | None:
        """Return what drops nothing and adds nothing: a mask that is divided by its share is one
        then. None of what has no such value."""
        levels = dict.fromkeys(_CHANCES, self.kept) | {"native_dropout": 1.0}
        levels |= dict.fromkeys(_UNIFORM, 0.5) | dict.fromkeys(_NORMAL, 0.0)
        level = levels.get(self.kind)
        return None if level is None else torch.full_like(self.value, level)


@dataclass(slots=True)
class ModuleVisit:
    """A pass of the module at `place` (which of the models, its path) that runs, and how many
    tensors it has drawn itself."""

    place: tuple[int, str]
    drawn: int = 0


Replace = Callable[[RandomDraw], Tensor | None]
Seen = tuple[tuple[int, str], int, str]  # a place, the how many-th of a visit, the bits
Rows = tuple[str, ...]


class DrawMode(OperatorMode):
    """`with DrawMode(model) as drawn:` around a step. `draws` are those of forward passes,
    `again` those of backward passes, which repeat a part of one; `rows` are checksums of the rows
    that a pass of the outermost module was given. `replace` returns what is to stand in the place
    of a draw, if anything; in backward that is what stood there in forward. With `keeps` backward
    draws what forward drew. Attention that drops
    out within its kernel has no mask to be seen: it drops nothing in here (`hidden`)."""

    def __init__(
        self, *models: nn.Module, replace: Replace = lambda draw: None, keeps: bool = False
    ) -> None:
        super().__init__()
        self.draws: list[RandomDraw] = []
        self.again: list[RandomDraw] = []
        self.rows: dict[tuple[str, int], Rows] = {}
        self.times: dict[tuple[str, int], int] = {}  # how many passes of these rows came before
        self.hidden: set[str] = set()
        self._models, self._replace, self._keeps = models, replace, keeps
        self._running: list[ModuleVisit] = []
        self._visits: dict[tuple[int, str, bool], int] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._outer, self._call = "", 0
        self._replaced: dict[str, Tensor] = {}
        self._of_visits: dict[Seen, list[Tensor]] = {}
        self._stood: dict[int, Tensor] = {}  # in the place of a draw of `draws`
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for index, model in enumerate(self._models):
            for path, module in canonical_modules(model):
                begins = module.register_forward_pre_hook(
                    partial(self._begins, (index, path)), prepend=True, with_kwargs=True
                )
                ends = module.register_forward_hook(self._ends, always_call=True)
                self._hooks.callback(begins.remove)
                self._hooks.callback(ends.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def _begins(self, place: tuple[int, str], module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._running and not is_in_backward():
            self._begins_outermost(place, _rows_of((args, kwargs)))
        self._running.append(ModuleVisit(place))

    def _begins_outermost(self, place: tuple[int, str], rows: Rows) -> None:
        """A pass without gradients (a frozen part, a recomputation's forward, an evaluation) has a
        number of its own, as one side may make more of these."""
        graded = torch.is_grad_enabled()
        count = self._visits.get((*place, graded), 0)
        self._visits[*place, graded] = count + 1
        self._outer, self._call = place[1], count if graded else -1 - count
        self._counts.clear()
        self.times[place[1], self._call] = sum(
            outer == place[1] and (call >= 0) == graded and its == rows
            for (outer, call), its in self.rows.items()
        )
        self.rows[place[1], self._call] = rows

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function._schema.name.partition("::")[2]
        is_again = is_in_backward()
        if not (self._running or is_again):
            return function(*args, **kwargs)
        if name not in _DRAWN:
            return function(*self._undropped(function, args), **kwargs)
        result = function(*args, **kwargs)
        visit = self._running[-1] if self._running else ModuleVisit((0, ""))
        place = visit.place
        if name == _SLOPES and not (len(args) > 4 and args[4]):
            return result  # in evaluation it draws none
        drawn = result[1] if isinstance(result, tuple) else result
        value = held(args[1] if name == _SLOPES else drawn)
        draw = RandomDraw(
            path=place[1], number=self._counts.get(place, 0), outer=self._outer, call=self._call,
            kind=name, value=value.detach().clone(), kept=_kept(name, args),
        )  # fmt: skip
        other = self._instead(draw, visit, is_again)
        if other is None:
            return result
        other = other.to(value)
        if name == _SLOPES:
            return args[0] * args[1].copy_(other)
        if isinstance(result, tuple):
            return args[0] * other / draw.kept, other
        return result.copy_(other) if name.endswith("_") else other

    def _instead(self, draw: RandomDraw, visit: ModuleVisit, is_again: bool) -> Tensor | None:
        """Keep a draw; return what is to stand in its place. What is drawn again is told by its
        bits, as the generator is put back for it, and by where that is: small masks are alike in
        many places. Backward goes through the visits of a place from the last to the first. A part
        of a module that is recomputed by itself is told by its bits alone."""
        bits = digest(draw.value)
        seen = visit.place, visit.drawn, bits
        visit.drawn += 1
        if is_again:
            self.again.append(draw)
            known = self._of_visits.get(seen, [])
            if known:
                return known.pop() if len(known) > 1 else known[0]
            other = self._before(draw) if self._keeps else None
            return self._replaced.get(bits) if other is None and not self._running else other
        self._counts[visit.place] = draw.number + 1
        self.draws.append(draw)
        other = self._replace(draw)
        if other is not None:
            self._replaced[bits] = self._stood[id(draw)] = other
            self._of_visits.setdefault(seen, []).append(other)
        return other

    def _before(self, draw: RandomDraw) -> Tensor | None:
        """Return what forward had where backward draws again: in the module that it is in, or of
        the only draw of that kind; None where several may be meant."""
        alike = [its for its in self.draws if _is_alike(its, draw) and draw.path in ("", its.path)]
        if len(alike) != 1:
            return None
        return self._stood.get(id(alike[0]), alike[0].value)

    def _undropped(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Fused attention, and its backward pass, drop nothing."""
        names = [argument.name for argument in function._schema.arguments]
        place = names.index("dropout_p") if "dropout_p" in names else len(args)
        if place >= len(args) or not args[place]:
            return args
        self.hidden |= {self._running[-1].place[1]} if self._running else set()
        return *args[:place], 0.0, *args[place + 1 :]


def _rows_of(given: Any) -> Rows:
    first = next((leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)), None)
    if first is None or not first.dim():
        return ()
    return tuple(digest(row.flatten()) for row in held(first.detach()))


def _kept(name: str, args: tuple[Any, ...]) -> float:
    """Return the share that a mask lets pass, where one number says it."""
    if name not in _CHANCES or len(args) < 2 or not isinstance(args[1], float | int):
        return 1.0 if name not in _CHANCES else 0.5
    return 1 - args[1] if name == "native_dropout" else float(args[1])


Key = tuple[str, int]  # a module's path, the how many-th draw in it


@dataclass(frozen=True, slots=True)
class RankDraw:
    """A draw of one rank, in the pass `call` of the samples `rows`, which so many passes of the
    rank had before (`times`)."""

    rank: int
    call: int
    rows: Rows
    times: int
    value: Tensor


@dataclass(slots=True)
class EveryonesDraws:
    """Of a step, on every rank. What a look-up finds out on the way: `lost`, modules whose draws
    cannot be told by samples (of slices of features or tokens, of a later stage); `unlike`, modules
    in which ranks that have the same samples drew differently, with these ranks; `alone`, draws of
    one device that no rank has; `used`, those that it has too."""

    by_key: dict[Key, list[RankDraw]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    alone: set[Key] = field(default_factory=set)
    unlike: dict[str, tuple[int, ...]] = field(default_factory=dict)
    used: set[Key] = field(default_factory=set)

    @classmethod
    def gathered(cls, drawn: DrawMode, ranks: Ranks) -> EveryonesDraws:
        """All ranks call it."""
        body = io.BytesIO()
        passes = {place: (place[1], its, drawn.times[place]) for place, its in drawn.rows.items()}
        own = [
            [draw.path, draw.number, passes[draw.outer, draw.call], *_packed(draw.value)]
            for draw in drawn.draws
        ]
        torch.save(own, body)
        result = cls()
        for rank, its in enumerate(ranks.bytes(body.getvalue())):
            draws = torch.load(io.BytesIO(its), weights_only=True)
            for path, number, (call, rows, times), value, dtype in draws:
                held = RankDraw(rank, call, rows, times, value.to(dtype))
                result.by_key.setdefault((path, number), []).append(held)
        return result

    def of(self, draw: RandomDraw, rows: Rows, times: int = 0) -> Tensor | None:
        """Return what one device is to draw for these samples, which so many of its passes had
        before; None where nothing tells."""
        key = draw.path, draw.number
        if key not in self.by_key:
            self.alone.add(key)
            return None
        self.used.add(key)
        held = _of_such_passes(self.by_key[key], draw, rows, times)
        shapes, first = {its.value.shape for its in held}, held[0].value
        value = None
        if same := [its for its in held if its.rows == rows]:
            value = self._of_replicas(draw.path, same)
        elif shapes == {draw.value.shape} and all(torch.equal(its.value, first) for its in held):
            value = first
        if value is None or value.shape != draw.value.shape:
            value = self._by_rows(draw, rows, held)
        if value is None:
            self.lost.add(draw.path)
        return value

    def _by_rows(self, draw: RandomDraw, rows: Rows, held: Sequence[RankDraw]) -> Tensor | None:
        """Of every sample its own rows, of whichever pass has them."""
        whole, dim = draw.value.shape, None
        passes: dict[tuple[int, Rows], list[RankDraw]] = {}
        for its in held:
            passes.setdefault((its.call, its.rows), []).append(its)
        known: dict[str, list[Tensor]] = {}
        for (_, its_rows), group in passes.items():
            value, count = self._of_replicas(draw.path, group), len(its_rows)
            dim = None if value is None else _dim_of_rows(whole, len(rows), value.shape, count)
            if value is None or dim is None:
                return None
            for row, block in zip(its_rows, value.movedim(dim, 0).chunk(count), strict=True):
                known.setdefault(row, []).append(block)
        if dim is None or not all(row in known for row in rows):
            return None
        blocks = [known[row].pop(0) if len(known[row]) > 1 else known[row][0] for row in rows]
        return torch.cat(blocks).movedim(0, dim)

    def _of_replicas(self, path: str, same: Sequence[RankDraw]) -> Tensor | None:
        """Return what ranks with the same samples drew for them; None where they have slices."""
        first = same[0].value
        if any(its.value.shape != first.shape for its in same):
            return None
        if differ := [its.rank for its in same if not torch.equal(its.value, first)]:
            self.unlike.setdefault(path, (same[0].rank, *differ))
        return first

    def of_first(self, draw: RandomDraw, rows: Rows) -> Tensor | None:
        """Return what the first of the ranks with these samples drew, in the modules in which they
        drew differently."""
        held = self.by_key.get((draw.path, draw.number), [])
        same = (its for its in held if its.rows == rows and its.call == draw.call)
        first = next(same, None)
        if first is None or draw.path not in self.unlike:
            return None
        return first.value if first.value.shape == draw.value.shape else None


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


def _dim_of_rows(whole: torch.Size, count: int, part: torch.Size, its_count: int) -> int | None:
    """Return the only dimension that grows as the number of samples does."""
    fits = (
        dim
        for dim in range(len(whole))
        if its_count and count and whole[dim] * its_count == part[dim] * count
        and whole[dim] % count == 0 and (count != its_count or not dim)
        and (*whole[:dim], *whole[dim + 1 :]) == (*part[:dim], *part[dim + 1 :])
    )  # fmt: skip
    return next(fits, None) if len(whole) == len(part) else None


def _packed(value: Tensor) -> tuple[Tensor, torch.dtype]:
    """Return a tensor as it is sent, a mask of zeros and ones in bytes, and its dtype."""
    own = value.detach().cpu().contiguous()
    return own.bool() if bool(((own == 0) | (own == 1)).all()) else own, own.dtype


def drawn_again_otherwise(drawn: DrawMode) -> Iterator[RandomDraw]:
    """Yield what backward passes drew that no forward pass had, though one drew such a tensor."""
    seen = {digest(draw.value) for draw in drawn.draws}
    for draw in drawn.again:
        alike = [its for its in drawn.draws if _is_alike(its, draw)]
        if alike and digest(draw.value) not in seen:
            yield draw


def _is_alike(left: RandomDraw, right: RandomDraw) -> bool:
    return (left.kind, left.value.shape) == (right.kind, right.value.shape)
