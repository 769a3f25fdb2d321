"""Faults of loops whose ranks have slices of the samples' tokens (context parallelism by hand).
What modules are given, what the loss asks for and what comes back to a module is compared with the
same tokens' of one device; what departs first is put right in one more step of the loop, or, of
attention, measured by other tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ptrain.report.finding import Certainty, Culprit, Departure, Subject
from ptrain.verification.factors import multiple
from ptrain.verification.jobs.modules import Calls
from ptrain.verification.jobs.probe import autocast_of, probed, untouched
from ptrain.verification.jobs.record import ForwardCall, StepRecorder
from ptrain.verification.jobs.token_slices import TokenSlice, slice_of, tokens_of
from ptrain.verification.jobs.words import families
from ptrain.verification.names import canonical_modules
from ptrain.verification.outputs import is_real

if TYPE_CHECKING:
    from ptrain.verification.jobs.inquiry import Inquiry

_NEAR = 1e-3  # relative: what a slice has of one device's tensor; a fault is larger
_ROUNDED_AWAY = 4  # roundings of a logit: smaller effects are seen on one side by chance
_MOST_TOKENS = 16  # that are changed, one after the other, to see which others notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """What the passes of one module get in the place of what they have: leaves of what it is given
    by their place, and the gradient of the first tensor that it returns."""

    given: Mapping[int, Tensor] | None = None
    upstream: Tensor | None = None


@contextmanager
def forced(model: nn.Module, places: Mapping[str, Forced]) -> Iterator[None]:
    """Within it these modules, by path, get other inputs or gradients."""
    modules = dict(canonical_modules(model))
    with ExitStack() as stack:
        for path, instead in places.items():
            if instead.given is not None:
                before = partial(_give, instead.given)
                handle = modules[path].register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(handle.remove)
            if instead.upstream is not None:
                after = partial(_hand_back, instead.upstream)
                stack.callback(modules[path].register_forward_hook(after).remove)
        yield


def _give(given: Mapping[int, Tensor], module: nn.Module, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    return tree_unflatten([given.get(at, leaf) for at, leaf in enumerate(leaves)], spec)


def _hand_back(upstream: Tensor, module: nn.Module, args: Any, output: Any) -> Any:
    first = next(leaf for leaf in tree_leaves(output) if is_real(leaf))

    def put(leaf: Any) -> Any:
        if leaf is not first or not leaf.requires_grad:
            return leaf
        copy = leaf.clone()
        copy.register_hook(lambda gradient: upstream.to(gradient))
        return copy

    return tree_map(put, output)


class SliceInquiry:
    """`culprit` by all ranks alike; `modules` are the passes of this rank's modules."""

    def __init__(self, inquiry: Inquiry, modules: Calls) -> None:
        self.inquiry, self.own = inquiry, modules
        self.ranks, self.step = inquiry.ranks, inquiry.step
        self.slice = slice_of(self.step.expected.calls, self.step.seen.calls)

    def culprit(self, first: Sequence[Departure]) -> Culprit | None:
        """Return what a trial proves; None where ranks have no slices, or none does."""
        if not all(self.ranks.gather(self.slice is not None)):
            return None
        assert self.slice is not None, "every rank has a slice"
        with self.inquiry.drawing.replayed(self.inquiry.pair.reference.model):
            self.truth = probed(self.inquiry.pair.reference.model, self.step.expected.calls).modules
        of_inputs = self._of_inputs(self.slice)
        return of_inputs or self._of_loss(self.slice) or self._of_attention(self.slice) or (
            self._of_exchanges(self.slice)
        )  # fmt: skip

    def _blame(
        self, state: Subject, factor: str, place: str, sentence: str, tried: str,
        who: Sequence[int] = (),
    ) -> Culprit:  # fmt: skip
        everyone = tuple(range(self.ranks.size))
        return Culprit(
            state=state, axis=self.ranks.axis_of(everyone), factor=factor, place=place,
            step=self.step.differences.step, ranks=tuple(who) or everyone, sentence=sentence,
            certainty=Certainty.PROVEN, tried=tried,
        )  # fmt: skip

    def _left(self, places: Mapping[str, Forced]) -> float | None:
        """Run the step with this in some modules; how far it is from one device's, if near."""
        self.inquiry.rewind()
        pair, draws = self.inquiry.pair, self.inquiry.drawing
        model = pair.loop.model
        with StepRecorder(model, pair.holds) as seen, draws.repeated(model), forced(model, places):
            pair.loop.step(self.inquiry.share)
        return self.inquiry.left(seen.gradients)

    def _of_inputs(self, part: TokenSlice) -> Culprit | None:
        """Numbers that a module is given (places, masks, labels) which are not its tokens'."""
        mine: dict[str, dict[int, Tensor]] = {}
        shifts: dict[str, list[int]] = {}
        for (path, number), call in self.own.items():
            right = self.truth.get((path, 0))
            if number or right is None:
                continue
            pairs = zip(tree_leaves(call.given), tree_leaves(right.given), strict=False)
            for at, (own, whole) in enumerate(pairs):
                both = isinstance(own, Tensor) and isinstance(whole, Tensor)
                if not both or own.is_floating_point() or not own.dim():
                    continue
                truth = part.of(whole, own)
                if truth is not None and not torch.equal(truth, own):
                    mine.setdefault(path, {})[at] = truth
                    shift = (truth.long() - own.long()).unique()
                    shifts[path] = [int(shift)] if shift.numel() == 1 else []
        reports = self.ranks.gather({path: shifts[path] for path in mine})
        places = list(dict.fromkeys(path for report in reports for path in report))
        if not places:
            return None
        left = self._left({path: Forced(given=given) for path, given in mine.items()})
        if left is None:
            return None
        who = [rank for rank, report in enumerate(reports) if report]
        offsets = [report.get(places[0], [0]) for report in reports]
        is_shift = all(len(its) == 1 for its in offsets)
        place = families(places) or "the model"
        what = (
            f"{place} is given the places of its tokens as if its slice began elsewhere "
            f"({', '.join(f'rank {rank}: {offsets[rank][0]} too few' for rank in who)}): positions "
            "must begin where the rank's slice does"
            if is_shift
            else f"{place} is given other numbers (places, a mask, labels) than one device has of "
            "the same tokens: cut them as the tokens are cut"
        )
        return self._blame(
            Subject.ACTIVATIONS, "positions not offset by rank" if is_shift else "other inputs",
            place, f"{what}, over {self._axis()}.",
            f"with those of its own tokens the gradients are one device's to {left:.1e}", who,
        )  # fmt: skip

    def _axis(self) -> str:
        return self.ranks.axis_of(range(self.ranks.size))

    def _of_loss(self, part: TokenSlice) -> Culprit | None:
        """What the loss asks of the logits: of which token, and with which weight."""
        own = self.step.seen.calls[0].upstream.get(0)
        truth = None if own is None else part.of(self.step.expected.calls[0].upstream.get(0), own)
        if not all(self.ranks.gather(own is not None and truth is not None and own.dim() == 3)):
            return None
        assert own is not None and truth is not None, "every rank has both"
        labels = AskedTokens.of(own, truth)
        reports = [AskedTokens(**its) for its in self.ranks.gather(labels.plain())]
        factors = [report.factor for report in reports]
        is_even = max(factors) - min(factors) <= _NEAR * max(map(abs, factors))
        if all(report.is_right for report in reports) and is_even:
            return None
        sizes = dict.fromkeys((float(self.ranks.size), *map(float, self.ranks.degrees.values())))
        for factor in dict.fromkeys((*sizes, 1.0, max(factors), min(factors))):
            left = self._left({"": Forced(upstream=factor * truth)})
            if left is not None:
                return self._said_of_loss(reports, f"{left:.1e}")
        return None

    def _said_of_loss(self, reports: Sequence[AskedTokens], left: str) -> Culprit:
        tried = (
            f"with one device's gradient of the logits of each slice's tokens the gradients are "
            f"one device's to {left}"
        )
        who = [rank for rank, report in enumerate(reports) if not report.is_right]
        if not who:
            listed = ", ".join(f"rank {n}: × {its.factor:.3g}" for n, its in enumerate(reports))
            return self._blame(
                Subject.LOSS, "averaged slice by slice", "loss",
                f"Each rank of {self._axis()} divides the loss by the number of targets in its own "
                f"slice, and these numbers differ ({listed} of one device's): divide the sum of "
                "the loss by the number of targets in the whole samples.", tried,
            )  # fmt: skip
        at_ends = all(reports[rank].at_end for rank in who)
        asks = "another token than" if any(reports[rank].other for rank in who) else "nothing, not"
        count = sum(reports[rank].other + reports[rank].lacking for rank in who)
        if at_ends:
            return self._blame(
                Subject.BATCH, "labels shifted within a slice", "labels",
                f"The last token of a slice is asked for {asks} the one that follows it in the "
                f"sample ({count} labels), which the next rank over {self._axis()} has: shift "
                "labels before samples are cut into slices.", tried, who,
            )  # fmt: skip
        return self._blame(
            Subject.BATCH, "labels of other tokens", "labels",
            f"Of {count} tokens of the slices the loss asks something else than of the same tokens "
            f"on one device: cut labels as tokens are cut over {self._axis()}.", tried, who,
        )  # fmt: skip

    def _of_attention(self, part: TokenSlice) -> Culprit | None:
        """Which tokens notice another one: measured, on both sides. The model itself is called, on
        all ranks as often."""
        if not all(self.ranks.gather(len(self.step.seen.calls) == 1)):
            return None
        width = part.whole[1]
        count = min(width, _MOST_TOKENS)
        changed = torch.linspace(0, width - 1, count).long().unique().tolist()
        self.inquiry.rewind()
        pair, drawing = self.inquiry.pair, self.inquiry.drawing
        plain, model = pair.reference.model, pair.loop.model
        with untouched(plain), drawing.stilled(plain):
            right = noticed(plain, self.step.expected.calls[0], changed, range(width))
        with untouched(model), drawing.stilled(model):
            own = noticed(model, self.step.seen.calls[0], changed, part.columns.tolist())
        known = right is not None and own is not None
        if not all(self.ranks.gather(known)):
            return None
        assert right is not None and own is not None, "every rank knows both"
        truth = right[:, part.columns]
        blind, sees = seen_by_one(truth, own), seen_by_one(own, truth)
        pairs = [
            [int(part.columns[column]), changed[row]]
            for tensor in (blind, sees)
            for row, column in tensor.nonzero()[:1].tolist()
        ]
        reports = self.ranks.gather([int(blind.sum()), int(sees.sum()), pairs])
        who = [rank for rank, (lacking, more, _) in enumerate(reports) if lacking or more]
        if not who:
            return None
        lacking, more, pairs = reports[who[0]]
        token, other = pairs[0]
        verb = "does not notice" if lacking else "notices"
        factor = "sees too few tokens" if lacking else "sees tokens that it must not"
        counts = f"{lacking} pairs of tokens less and {more} more than on one device"
        return self._blame(
            Subject.ACTIVATIONS, factor, "attention",
            f"On rank {who[0]} token {token} {verb} token {other}, which on one device it "
            f"{'does' if lacking else 'does not'}: the mask of attention must be that of the "
            f"tokens' places in the whole sample (a slice's queries begin at its first token, keys "
            f"of all of {self._axis()} at theirs), and all of their keys must be brought there.",
            f"tokens are changed one by one, and what changes of the logits is compared: {counts}",
            who,
        )  # fmt: skip

    def _of_exchanges(self, part: TokenSlice) -> Culprit | None:
        """The last module that returns what it must, and to which another gradient comes back."""
        root, whole = self.own.get(("", 0)), self.truth.get(("", 0))
        factor = 1.0
        if root is None or whole is None or root.upstream is None:
            is_right = False
        else:
            truth = part.of(whole.upstream, root.upstream)
            fit = None if truth is None else multiple(root.upstream.flatten(), truth.flatten())
            is_right = fit is not None and fit.holds(_NEAR)
            factor = 1.0 if fit is None else fit.factor
        if not all(self.ranks.gather(is_right)):
            return None
        mine: dict[str, Tensor] = {}
        for (path, number), call in self.own.items():
            right = self.truth.get((path, 0))
            if number or right is None or call.upstream is None or right.upstream is None:
                continue
            truth = part.of(right.upstream, call.upstream)
            if truth is not None and not _is_near(call.upstream, factor * truth):
                mine[path] = factor * truth
        everyones = self.ranks.gather(list(mine))
        last = next((paths[-1] for paths in everyones if paths), None)
        if last is None:
            return None
        family = families([last, last])
        alike = {
            path: Forced(upstream=gradient)
            for path, gradient in mine.items()
            if _stars(path) == _stars(last)
        }
        left = self._left(alike)
        if left is None:
            return None
        return self._blame(
            Subject.GRADIENTS, "another gradient comes back", families(alike) or family,
            f"{families(alike) or family} returns what it does on one device, and the gradient "
            f"that comes back to it is not one device's: where the other ranks over {self._axis()} "
            "use it too (keys and values), backward must sum the gradients of all of them "
            "(reduce-scatter); with its own part alone a rank has not reduced them.",
            f"with one device's gradient of what it returns, all gradients are one device's to "
            f"{left:.1e}",
        )  # fmt: skip


def _stars(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _is_near(own: Tensor, truth: Tensor) -> bool:
    size = torch.linalg.vector_norm(own.double() - truth.double())
    return bool(size <= _NEAR * torch.linalg.vector_norm(truth.double()))


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTokens:
    """What a rank's loss asks of its tokens beside one device's: how many have another target, how
    many have none where one device has one, whether all of these stand at the end of the slice, and
    the factor of the others' gradient."""

    other: int
    lacking: int
    at_end: bool
    factor: float

    @classmethod
    def of(cls, own: Tensor, truth: Tensor) -> AskedTokens:
        """[samples, tokens, vocabulary] both: gradients of logits."""
        has, should = ((side < 0).sum(-1) == 1 for side in (own, truth))
        other = has & should & (own.argmin(-1) != truth.argmin(-1))
        lacking = should & ~own.abs().amax(-1).bool()
        wrong = other | lacking
        right = should & ~wrong
        fit = multiple(own[right].flatten(), truth[right].flatten()) if bool(right.any()) else None
        before = wrong[:, :-1]
        return cls(
            other=int(other.sum()), lacking=int(lacking.sum()),
            at_end=bool(wrong.any()) and not bool(before.any()),
            factor=1.0 if fit is None else fit.factor,
        )  # fmt: skip

    @property
    def is_right(self) -> bool:
        return not (self.other or self.lacking)

    def plain(self) -> dict[str, Any]:
        return {
            "other": self.other, "lacking": self.lacking, "at_end": self.at_end,
            "factor": self.factor,
        }  # fmt: skip


def noticed(
    model: Callable[..., Any], call: ForwardCall, changed: Sequence[int], columns: Sequence[int]
) -> Tensor | None:
    """Return [changed, columns]: by how much logits are others, relative to the largest, when the
    token at a place of the whole sample is another one; roundings of their dtype are 1. `columns`:
    the places of the tokens that the model is given. None of a model that returns no logits of its
    tokens, or draws. All ranks call it alike."""
    tokens = tokens_of(call)
    assert tokens is not None, "the slice was found by them"
    (before, eps), (again, _) = (_logits(model, call, tokens) for _ in range(2))
    known = before.dim() == 3 and before.shape[:2] == tokens.shape and torch.equal(before, again)
    rows = []
    for place in changed:
        other = tokens.clone()
        if place in columns:
            column = list(columns).index(place)
            other[:, column] = tokens[:, column].roll(1) if tokens.size(0) > 1 else 0
            same = other[:, column] == tokens[:, column]
            other[same, column] = (tokens[same, column] + 1) % (int(tokens.max()) + 1)
        after, _ = _logits(model, call, other)  # where this rank has it not, another one has
        rows.append((after - before).abs().amax((0, 2)) if known else torch.zeros(1))
    return torch.stack(rows) / (eps * before.abs().max()) if known else None


def seen_by_one(those: Tensor, others: Tensor) -> Tensor:
    """Return where `those` notice, by more than what is rounded away, and `others` nothing."""
    return (those > _ROUNDED_AWAY) & (others == 0)


@torch.no_grad()
def _logits(model: Callable[..., Any], call: ForwardCall, tokens: Tensor) -> tuple[Tensor, float]:
    """Return the logits in fp64, and the roundings of their dtype."""
    first = tokens_of(call)

    def instead(leaf: Any) -> Any:
        return tokens if leaf is first else leaf

    args, kwargs = tree_map(instead, (call.args, call.kwargs))
    with autocast_of([call]):
        output = model(*args, **kwargs)
    logits = next(leaf for leaf in tree_leaves(output) if is_real(leaf))
    return logits.double().nan_to_num(posinf=0, neginf=0), torch.finfo(logits.dtype).eps
