"""Record the random numbers that a model draws, above all dropout masks, and replace them.

Operators that draw are intercepted at dispatch. The draws of all ranks in a step are all-gathered.
From them, the single-device reference takes for each sample the numbers that were drawn for it on
the rank that processed it.
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
from ptrain.verification.jobs.record import checksum
from ptrain.verification.parts import canonical_modules, local_cpu

_CHANCES = {"bernoulli", "bernoulli_", "native_dropout"}
_UNIFORM = {"rand", "rand_like", "uniform", "uniform_"}
_NORMAL = {"randn", "randn_like", "normal", "normal_"}
_OTHERS = {
    "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "poisson",
    "randint", "randint_like", "randperm", "random_", "_sample_dirichlet", "_standard_gamma",
}  # fmt: skip
_SLOPES = "rrelu_with_noise"  # fills its argument `noise`, which multiplies `self`
_DRAWN = _CHANCES | _UNIFORM | _NORMAL | _OTHERS | {_SLOPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomDraw:
    """A tensor of random numbers that one operator drew.

    Attributes:
        path: Path of the module that drew it.
        number: Index of the draw among those of this module in this pass of `outer`.
        outer: Path of the outermost module that ran.
        call: Index of the pass of `outer`: from 0 for passes with gradients, from -1 down for
            passes without.
        kind: Name of the operator.
        value: The numbers.
        kept: For masks, the probability that an element is kept.
    """

    path: str
    number: int
    outer: str
    call: int
    kind: str
    value: Tensor
    kept: float = 1.0

    def neutral_value(self) -> Tensor | None:
        """Return a value that disables the draw, or None if its kind has none.

        A Bernoulli mask becomes its probability, so that a division by it gives 1. Uniform numbers
        become 0.5, normal ones 0.
        """
        levels = dict.fromkeys(_CHANCES, self.kept) | {"native_dropout": 1.0}
        levels |= dict.fromkeys(_UNIFORM, 0.5) | dict.fromkeys(_NORMAL, 0.0)
        level = levels.get(self.kind)
        return None if level is None else torch.full_like(self.value, level)


@dataclass(slots=True)
class ModuleVisit:
    """A running pass of the module at `place` (model index, path).

    `drawn` counts the tensors that it has drawn, without those of its submodules.
    """

    place: tuple[int, str]
    drawn: int = 0


Replace = Callable[[RandomDraw], Tensor | None]
Seen = tuple[tuple[int, str], int, str]  # module, index of the draw in its visit, checksum
Rows = tuple[str, ...]


class DrawRecorder(OperatorMode):
    """A mode that records the random draws of models, and replaces them.

    Use it as a context: `with DrawRecorder(model) as drawn:`.

    Fused attention kernels apply dropout without a visible mask. Their dropout is disabled, and
    their modules are listed in `hidden`.

    Args:
        models: The models whose modules are tracked.
        replace: Returns the value that replaces a draw, or None to keep it. A recomputation in
            backward takes the value that forward got.
        keeps: Whether a draw in backward without a recorded replacement takes forward's value.

    Attributes:
        draws: The draws of forward passes.
        again: The draws of backward passes, which recompute a part of a forward pass.
        rows: Checksums of the input rows, by pass of an outermost module.
        times: Number of earlier passes with the same rows, by pass of an outermost module.
        hidden: Paths of the modules whose attention dropout was disabled.
    """

    def __init__(
        self, *models: nn.Module, replace: Replace = lambda draw: None, keeps: bool = False
    ) -> None:
        super().__init__()
        self.draws: list[RandomDraw] = []
        self.again: list[RandomDraw] = []
        self.rows: dict[tuple[str, int], Rows] = {}
        self.times: dict[tuple[str, int], int] = {}  # earlier passes with equal rows
        self.hidden: set[str] = set()
        self._models, self._replace, self._keeps = models, replace, keeps
        self._running: list[ModuleVisit] = []
        self._visits: dict[tuple[int, str, bool], int] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._outer, self._call = "", 0
        self._replaced: dict[str, Tensor] = {}
        self._of_visits: dict[Seen, list[Tensor]] = {}
        self._stood: dict[int, Tensor] = {}  # replacements, by id of a draw in `draws`
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for index, model in enumerate(self._models):
            for path, module in canonical_modules(model):
                # prepended: draws of other pre-hooks belong to this module
                begins = module.register_forward_pre_hook(
                    partial(self._before_module, (index, path)), prepend=True, with_kwargs=True
                )
                # always_call: a forward pass that raises must leave the stack too
                ends = module.register_forward_hook(self._after_module, always_call=True)
                self._hooks.callback(begins.remove)
                self._hooks.callback(ends.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def _before_module(
        self, place: tuple[int, str], module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        """Push a module that begins to run; start a new pass if it is outermost in forward."""
        if not self._running and not is_in_backward():
            self._start_pass(place, _row_keys((args, kwargs)))
        self._running.append(ModuleVisit(place))

    def _start_pass(self, place: tuple[int, str], rows: Rows) -> None:
        """Start a pass of an outermost module, and record its rows.

        Passes without gradients (frozen parts, checkpointed forwards, evaluations) are numbered
        separately, because one side may run more of them.
        """
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

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; record its draw, and replace it in the result if required."""
        name = function._schema.name.partition("::")[2]
        is_again = is_in_backward()
        if not (self._running or is_again):
            return function(*args, **kwargs)
        if name not in _DRAWN:
            return function(*self._disable_dropout(function, args), **kwargs)
        result = function(*args, **kwargs)
        visit = self._running[-1] if self._running else ModuleVisit((0, ""))
        place = visit.place
        if name == _SLOPES and not (len(args) > 4 and args[4]):
            return result  # argument 4 is `training`: evaluation draws nothing
        # native_dropout returns (output, mask)
        drawn = result[1] if isinstance(result, tuple) else result
        value = local_cpu(args[1] if name == _SLOPES else drawn)
        draw = RandomDraw(
            path=place[1], number=self._counts.get(place, 0), outer=self._outer, call=self._call,
            kind=name, value=value.detach().clone(), kept=_keep_probability(name, args),
        )  # fmt: skip
        other = self._replace_draw(draw, visit, is_again)
        if other is None:
            return result
        # A replacement may come from a rank with another dtype or device.
        other = other.to(value)
        if name == _SLOPES:
            return args[0] * args[1].copy_(other)
        if isinstance(result, tuple):
            return args[0] * other / draw.kept, other
        # in-place operators must return the tensor that they wrote
        return result.copy_(other) if name.endswith("_") else other

    def _replace_draw(self, draw: RandomDraw, visit: ModuleVisit, is_again: bool) -> Tensor | None:
        """Record a draw, and return its replacement, or None.

        A recomputation restores the generator state, so its draw has the same bits as forward's.
        The bits alone are ambiguous, because small masks are equal in many places, so the module
        and the draw's index in its pass are compared too. Backward reaches the passes of a module
        from the last to the first. If a part of a module is recomputed separately, only the bits
        are known.
        """
        bits = checksum(draw.value)
        seen = visit.place, visit.drawn, bits
        # Counted in backward, too: a recomputed pass draws in the order of the forward pass.
        visit.drawn += 1
        if is_again:
            self.again.append(draw)
            known = self._of_visits.get(seen, [])
            if known:
                return known.pop() if len(known) > 1 else known[0]
            other = self._forward_value(draw) if self._keeps else None
            return self._replaced.get(bits) if other is None and not self._running else other
        self._counts[visit.place] = draw.number + 1
        self.draws.append(draw)
        other = self._replace(draw)
        if other is not None:
            self._replaced[bits] = self._stood[id(draw)] = other
            self._of_visits.setdefault(seen, []).append(other)
        return other

    def _forward_value(self, draw: RandomDraw) -> Tensor | None:
        """Return the value that forward used for a draw of backward, or None if it is ambiguous.

        Candidates have the same kind and shape, and the same module if that is known.
        """
        alike = [
            its for its in self.draws if _is_same_kind(its, draw) and draw.path in ("", its.path)
        ]
        if len(alike) != 1:
            return None
        return self._stood.get(id(alike[0]), alike[0].value)

    def _disable_dropout(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a fused attention operator with `dropout_p` set to 0."""
        names = [argument.name for argument in function._schema.arguments]
        place = names.index("dropout_p") if "dropout_p" in names else len(args)
        if place >= len(args) or not args[place]:
            return args
        self.hidden |= {self._running[-1].place[1]} if self._running else set()
        return *args[:place], 0.0, *args[place + 1 :]


def _row_keys(given: Any) -> Rows:
    """Return a checksum of each row of the first tensor in an input tree."""
    first = next((leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)), None)
    if first is None or not first.dim():
        return ()
    return tuple(checksum(row.flatten()) for row in local_cpu(first.detach()))


def _keep_probability(name: str, args: tuple[Any, ...]) -> float:
    """Return the probability that an element of a mask is kept; 1.0 for other operators.

    Bernoulli operators with a tensor of probabilities count as 0.5.
    """
    if name not in _CHANCES or len(args) < 2 or not isinstance(args[1], float | int):
        return 1.0 if name not in _CHANCES else 0.5
    return 1 - args[1] if name == "native_dropout" else float(args[1])


Key = tuple[str, int]  # a module's path, and the index of the draw in it


@dataclass(frozen=True, slots=True)
class RankDraw:
    """A draw of one rank, with the samples (`rows`) of its pass.

    `call` is the index of the pass, and `times` the number of earlier passes with the same rows.
    """

    rank: int
    call: int
    rows: Rows
    times: int
    value: Tensor


@dataclass(slots=True)
class AllDraws:
    """The draws of all ranks in one step, and the results of the look-ups.

    Attributes:
        by_key: The draws by module path and index.
        lost: Modules whose draws cannot be attributed to samples: they are sharded by features or
            tokens, or drawn in a later pipeline stage.
        alone: Draws of the reference that no rank has.
        unlike: For each module in which ranks with equal samples drew differently, these ranks.
        used: Draws that both the reference and a rank have.
    """

    by_key: dict[Key, list[RankDraw]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    alone: set[Key] = field(default_factory=set)
    unlike: dict[str, tuple[int, ...]] = field(default_factory=dict)
    used: set[Key] = field(default_factory=set)

    @classmethod
    def gather(cls, drawn: DrawRecorder, ranks: Ranks) -> AllDraws:
        """All-gather the draws of all ranks. All ranks call it."""
        body = io.BytesIO()
        passes = {place: (place[1], its, drawn.times[place]) for place, its in drawn.rows.items()}
        own = [
            [draw.path, draw.number, passes[draw.outer, draw.call], *_pack_mask(draw.value)]
            for draw in drawn.draws
        ]
        torch.save(own, body)
        result = cls()
        for rank, its in enumerate(ranks.gather_bytes(body.getvalue())):
            # Only tensors and plain values: unpickling the bytes of another rank could run code.
            draws = torch.load(io.BytesIO(its), weights_only=True)
            for path, number, (call, rows, times), value, dtype in draws:
                held = RankDraw(rank, call, rows, times, value.to(dtype))
                result.by_key.setdefault((path, number), []).append(held)
        return result

    def value_for(self, draw: RandomDraw, rows: Rows, times: int = 0) -> Tensor | None:
        """Return the value of the reference's draw for these samples, or None if it is unknown.

        The draw of a rank with the same rows comes first, then a draw that is equal on all ranks,
        then a concatenation by samples. The look-up is recorded in `alone`, `used`, `lost` and
        `unlike`.

        Args:
            draw: The draw of the reference.
            rows: Checksums of the samples in its pass.
            times: Number of the reference's earlier passes with the same rows.
        """
        key = draw.path, draw.number
        if key not in self.by_key:
            self.alone.add(key)
            return None
        self.used.add(key)
        held = _matching_passes(self.by_key[key], draw, rows, times)
        shapes, first = {its.value.shape for its in held}, held[0].value
        value = None
        if same := [its for its in held if its.rows == rows]:
            value = self._replica_value(draw.path, same)
        elif shapes == {draw.value.shape} and all(torch.equal(its.value, first) for its in held):
            value = first
        if value is None or value.shape != draw.value.shape:
            value = self._join_rows(draw, rows, held)
        if value is None:
            self.lost.add(draw.path)
        return value

    def _join_rows(self, draw: RandomDraw, rows: Rows, held: Sequence[RankDraw]) -> Tensor | None:
        """Concatenate each sample's rows from the ranks' draws; None if a sample is missing."""
        whole, dim = draw.value.shape, None
        passes: dict[tuple[int, Rows], list[RankDraw]] = {}
        for its in held:
            passes.setdefault((its.call, its.rows), []).append(its)
        known: dict[str, list[Tensor]] = {}
        for (_, its_rows), group in passes.items():
            value, count = self._replica_value(draw.path, group), len(its_rows)
            dim = None if value is None else _find_row_dim(whole, len(rows), value.shape, count)
            if value is None or dim is None:
                return None
            for row, block in zip(its_rows, value.movedim(dim, 0).chunk(count), strict=True):
                known.setdefault(row, []).append(block)
        if dim is None or not all(row in known for row in rows):
            return None
        blocks = [known[row].pop(0) if len(known[row]) > 1 else known[row][0] for row in rows]
        return torch.cat(blocks).movedim(0, dim)

    def _replica_value(self, path: str, same: Sequence[RankDraw]) -> Tensor | None:
        """Return the draw of ranks with the same samples, or None if they hold shards of it.

        Ranks that differ are recorded in `unlike`; the first rank's value counts.
        """
        first = same[0].value
        if any(its.value.shape != first.shape for its in same):
            return None
        if differ := [its.rank for its in same if not torch.equal(its.value, first)]:
            self.unlike.setdefault(path, (same[0].rank, *differ))
        return first

    def first_rank_value(self, draw: RandomDraw, rows: Rows) -> Tensor | None:
        """Return the draw of the first rank with these samples, if ranks drew differently.

        Args:
            draw: The draw of the reference.
            rows: Checksums of the samples in its pass.

        Returns:
            The value; None if the ranks drew equal numbers, if no rank has the draw, or if its
            shape differs.
        """
        held = self.by_key.get((draw.path, draw.number), [])
        same = (its for its in held if its.rows == rows and its.call == draw.call)
        first = next(same, None)
        if first is None or draw.path not in self.unlike:
            return None
        return first.value if first.value.shape == draw.value.shape else None


def _matching_passes(
    held: Sequence[RankDraw], draw: RandomDraw, rows: Rows, times: int
) -> Sequence[RankDraw]:
    """Return the rank draws that match a draw's kind of pass (with or without gradients).

    If some of them have the same number of earlier passes, and these cover all rows, only those are
    returned.
    """
    graded = [its for its in held if (its.call >= 0) == (draw.call >= 0)] or held
    same = [its for its in graded if its.times == times]
    is_whole = not Counter(rows) - Counter(row for its in same for row in its.rows)
    return same if same and is_whole else graded


def _find_row_dim(whole: torch.Size, count: int, part: torch.Size, its_count: int) -> int | None:
    """Return the only dimension whose size is proportional to the number of samples, or None.

    `whole` has `count` samples, and `part` has `its_count`.
    """
    fits = (
        dim
        for dim in range(len(whole))
        if its_count and count and whole[dim] * its_count == part[dim] * count
        and whole[dim] % count == 0 and (count != its_count or not dim)
        and (*whole[:dim], *whole[dim + 1 :]) == (*part[:dim], *part[dim + 1 :])
    )  # fmt: skip
    return next(fits, None) if len(whole) == len(part) else None


def _pack_mask(value: Tensor) -> tuple[Tensor, torch.dtype]:
    """Return a tensor on the CPU and its dtype; masks of zeros and ones are packed as bool."""
    own = value.detach().cpu().contiguous()
    return own.bool() if bool(((own == 0) | (own == 1)).all()) else own, own.dtype


def changed_redraws(drawn: DrawRecorder) -> Iterator[RandomDraw]:
    """Yield backward's draws of a kind and shape that forward drew, but with other bits."""
    seen = {checksum(draw.value) for draw in drawn.draws}
    for draw in drawn.again:
        alike = [its for its in drawn.draws if _is_same_kind(its, draw)]
        if alike and checksum(draw.value) not in seen:
            yield draw


def _is_same_kind(left: RandomDraw, right: RandomDraw) -> bool:
    """Return True if two draws have the same operator and shape."""
    return (left.kind, left.value.shape) == (right.kind, right.value.shape)
