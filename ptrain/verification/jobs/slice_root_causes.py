"""Find faults of loops whose ranks have slices of the samples' tokens (context parallelism by
hand).

What modules receive, what the loss trains, which tokens influence others and which gradients return
to a module is compared with the same tokens on one device. The first mismatch is corrected in one
more step of the loop: another input of a module, another gradient of its output, the attention mask
of the tokens' real positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ptrain.models.arguments import first_real
from ptrain.report.finding import Certainty, RootCause, Subject
from ptrain.verification.jobs.metamorphic import AskedTokens
from ptrain.verification.jobs.modules import (
    Calls,
    TokenSlice,
    autocast_of,
    probed,
    slice_of,
    tokens_of,
    untouched,
)
from ptrain.verification.jobs.record import ForwardCall
from ptrain.verification.jobs.root_causes import families, family, proven
from ptrain.verification.parts import canonical_modules, multiple, relative

_HIDDEN = -1e4  # what a mask adds to the scores that it hides, or less (-inf)


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
    first = first_real(output)

    def put(leaf: Any) -> Any:
        if first is None or leaf is not first or not leaf.requires_grad:
            return leaf
        copy = leaf.clone()
        copy.register_hook(lambda gradient: upstream.to(gradient))
        return copy

    return tree_map(put, output)


_FILLED = (Tensor.masked_fill, Tensor.masked_fill_, torch.masked_fill)
_ADDED = (Tensor.add, Tensor.add_, torch.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)
_WEIGHED = (Tensor.softmax, torch.softmax, F.softmax)


class MaskOfPlaces(TorchFunctionMode):
    """While entered, scores of attention [..., queries, keys] are hidden where `seen` [queries,
    keys] says so, and nowhere else: in torch's attention, and in a softmax of scores that are
    masked by hand (filled, or added to)."""

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            args, kwargs = self._attended(args, kwargs)
        elif args and isinstance(args[0], Tensor) and self._are_scores(args[0]):
            if function in _FILLED and _hides(args[2] if len(args) > 2 else kwargs.get("value")):
                return args[0]  # the mask is laid over them before the softmax
            if function in _ADDED and len(args) > 1 and _hides(args[1]):
                return args[0]
            if function in _WEIGHED:
                hidden = ~self._seen.to(args[0].device)
                args = args[0].masked_fill(hidden, -torch.inf), *args[1:]
        return function(*args, **kwargs)

    def _are_scores(self, tensor: Tensor) -> bool:
        return tensor.shape[-2:] == self._seen.shape

    def _attended(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False))
        given |= kwargs
        if (given["query"].shape[-2], given["key"].shape[-2]) != tuple(self._seen.shape):
            return args, kwargs
        mask = self._seen.to(given["query"].device)
        return (), given | {"attn_mask": mask, "is_causal": False}


def _hides(value: Any) -> bool:
    """Return whether what scores are filled with, or what is added to them, hides some."""
    least = float(value.min()) if isinstance(value, Tensor) and value.numel() else value
    return isinstance(least, int | float) and least <= _HIDDEN


_ROUNDED_AWAY = 4  # roundings of a logit: smaller effects are seen on one side by chance


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
        rows.append(_apart(after, before) if known else torch.zeros(1))
    largest = _finite(before).abs().max().double()
    return torch.stack(rows) / (eps * largest) if known else None


def _apart(after: Tensor, before: Tensor) -> Tensor:
    """Return by how much the logits of each token are others, at most: [tokens] in fp64, one after
    the other, as all of them in fp64 are larger than the model."""
    pairs = zip(after.unbind(1), before.unbind(1), strict=True)
    return torch.stack([(_finite(a).double() - _finite(b)).abs().max() for a, b in pairs])


def _finite(logits: Tensor) -> Tensor:
    """Return logits of which those that a mask makes infinite are nothing."""
    return logits.nan_to_num(posinf=0, neginf=0)


def seen_by_one(those: Tensor, others: Tensor) -> Tensor:
    """Return where `those` notice, by more than what is rounded away, and `others` nothing."""
    return (those > _ROUNDED_AWAY) & (others == 0)


@torch.no_grad()
def _logits(model: Callable[..., Any], call: ForwardCall, tokens: Tensor) -> tuple[Tensor, float]:
    """Return the logits, and the roundings of their dtype."""
    first = tokens_of(call)

    def instead(leaf: Any) -> Any:
        return tokens if leaf is first else leaf

    args, kwargs = tree_map(instead, (call.args, call.kwargs))
    with autocast_of([call]):
        output = model(*args, **kwargs)
    logits = first_real(output)
    assert logits is not None, "it returned some before"
    return logits, torch.finfo(logits.dtype).eps


if TYPE_CHECKING:
    from ptrain.verification.jobs.inquiry import Inquiry

_NEAR = 1e-3  # relative: what a slice has of one device's tensor; a fault is larger
_MOST_TOKENS = 16  # that are changed, one after the other, to see which others notice


class SliceInquiry:
    """`root_cause` by all ranks alike; `modules` are the passes of this rank's modules."""

    def __init__(self, inquiry: Inquiry, modules: Calls) -> None:
        self.inquiry, self.own = inquiry, modules
        self.ranks, self.step = inquiry.ranks, inquiry.step
        self.slice = slice_of(self.step.expected.calls, self.step.seen.calls)

    def root_cause(self) -> RootCause | None:
        """Return what a trial proves, else what was measured; None where ranks have no slices, or
        nothing is known."""
        if not all(self.ranks.gather(self.slice is not None)):
            return None
        assert self.slice is not None, "every rank has a slice"
        with self.inquiry.drawing.replayed(self.inquiry.pair.reference.model):
            self.truth = probed(self.inquiry.pair.reference.model, self.step.expected.calls).modules
        fits: RootCause | None = None
        causes: tuple[Callable[[TokenSlice], RootCause | None], ...] = (
            self._of_inputs, self._of_loss, self._of_attention, self._of_exchanges,
        )  # fmt: skip
        for cause in causes:
            root_cause = cause(self.slice)
            if root_cause is not None and root_cause.certainty is Certainty.PROVEN:
                return root_cause
            fits = fits or root_cause
        return fits

    def _blame(
        self, state: Subject, factor: str, place: str, sentence: str, tried: str,
        who: Sequence[int] = (),
    ) -> RootCause:  # fmt: skip
        """The root cause that a trial proves; without `who` on every rank."""
        return proven(
            state, factor, place, sentence, tried, step=self.step.differences.step,
            ranks=who or range(self.ranks.size), axis=self._axis(),
        )  # fmt: skip

    def _left(
        self, places: Mapping[str, Forced], mask: AbstractContextManager[object] | None = None
    ) -> float | None:
        """Run the step with this in some modules; how far it is from one device's, if near."""
        model = self.inquiry.pair.loop.model
        repeated = self.inquiry.drawing.repeated(model)
        return self.inquiry.left_with(repeated, forced(model, places), mask or nullcontext())

    def _of_inputs(self, part: TokenSlice) -> RootCause | None:
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
            (
                f"{place} gets positions without the offset of its shard "
                f"({', '.join((f'rank {rank}: {offsets[rank][0]} too few' for rank in who))}). "
                "Positions must start at the offset of the rank's shard"
            )
            if is_shift
            else (
                f"{place} gets other inputs (positions, a mask, labels) than the reference "
                "for the same tokens. Shard them like the tokens"
            )
        )
        return self._blame(
            Subject.ACTIVATIONS, "positions not offset by rank" if is_shift else "other inputs",
            place, f"{what} (over {self._axis()}).",
            f"with the inputs of its tokens the gradients match the reference to {left:.1e}", who,
        )  # fmt: skip

    def _axis(self) -> str:
        return self.ranks.axis_of(range(self.ranks.size))

    def _of_loss(self, part: TokenSlice) -> RootCause | None:
        """What the loss asks of the logits: of which token, and with which weight."""
        own = self.step.seen.calls[0].upstream.get(0)
        truth = None if own is None else part.of(self.step.expected.calls[0].upstream.get(0), own)
        if not all(self.ranks.gather(own is not None and truth is not None and own.dim() == 3)):
            return None
        assert own is not None and truth is not None, "every rank has both"
        labels = AskedTokens.of(own, truth)
        reports = self.ranks.gather(labels, AskedTokens)
        with_targets = [report for report in reports if report.count] or reports
        factors = [report.factor for report in with_targets]
        is_even = max(factors) - min(factors) <= _NEAR * max(map(abs, factors))
        is_right = all(report.is_right for report in reports)
        if is_right and is_even:
            return None
        sizes = dict.fromkeys((float(self.ranks.size), *map(float, self.ranks.degrees.values())))
        factors = list(dict.fromkeys((*sizes, 1.0, max(factors), min(factors))))
        if is_right:
            return self._of_counts(own, labels.count, reports) or self._of_weights(
                truth, factors, reports
            )
        for factor in factors:
            left = self._left({"": Forced(upstream=factor * truth)})
            if left is not None:
                return self._said_of_labels(reports, f"{left:.1e}")
        return None

    def _of_counts(
        self, own: Tensor, count: int, reports: Sequence[AskedTokens]
    ) -> RootCause | None:
        """Each rank divides by its own number of targets: that is undone, and the number in the
        whole samples divides in its place."""
        whole = self.step.expected.calls[0].upstream[0]
        total = int(whole.abs().amax(-1).bool().sum())
        counts = [report.count for report in reports]
        if len(set(counts)) == 1:
            return None
        listed = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        for size in dict.fromkeys((self.ranks.size, *self.ranks.degrees.values(), 1)):
            left = self._left({"": Forced(upstream=own * (count * size / total))})
            if left is not None:
                return self._blame(
                    Subject.LOSS, "averaged per shard", "loss",
                    f"Each rank of {self._axis()} divides the loss by the number of targets "
                    f"in its shard, and these numbers differ ({listed}). Divide the sum of "
                    "the loss by the number of targets in the full samples.",
                    "with each rank's gradient of the logits times its number, and divided "
                    f"by the total ({total}), the gradients match the reference to {left:.1e}",
                )  # fmt: skip
        return None

    def _of_weights(
        self, truth: Tensor, factors: Sequence[float], reports: Sequence[AskedTokens]
    ) -> RootCause | None:
        listed = ", ".join(
            f"rank {n}: × {its.factor:.3g}" for n, its in enumerate(reports) if its.count
        )
        for factor in factors:
            left = self._left({"": Forced(upstream=factor * truth)})
            if left is not None:
                return self._blame(
                    Subject.LOSS, "shards of uneven weight", "loss",
                    "The tokens of a shard have other weights in the loss than in the "
                    f"reference, with different factors on the ranks of {self._axis()} "
                    f"({listed}). The numbers of targets do not explain them. Give each "
                    "token its weight in the full samples.",
                    "with the reference weight of each token the gradients match the "
                    f"reference to {left:.1e}",
                )  # fmt: skip
        return None

    def _said_of_labels(self, reports: Sequence[AskedTokens], left: str) -> RootCause:
        tried = (
            "with the reference gradient of the logits of each shard the gradients match the "
            f"reference to {left}"
        )
        who = [rank for rank, report in enumerate(reports) if not report.is_right]
        at_ends = all(reports[rank].at_end for rank in who)
        asks = (
            "another token than"
            if any(reports[rank].other for rank in who)
            else ("nothing instead of")
        )
        count = sum(reports[rank].other + reports[rank].lacking for rank in who)
        if at_ends:
            return self._blame(
                Subject.BATCH, "labels shifted within a shard", "labels",
                f"The last token of a shard has as its target {asks} the token that follows "
                f"it in the sample ({count} labels), which is on the next rank of "
                f"{self._axis()}. Shift labels before samples are sharded.", tried, who,
            )  # fmt: skip
        return self._blame(
            Subject.BATCH, "labels of other tokens", "labels",
            f"For {count} tokens of the shards the loss has other labels than the reference. "
            f"Shard labels like tokens over {self._axis()}.", tried, who,
        )  # fmt: skip

    def _of_attention(self, part: TokenSlice) -> RootCause | None:
        """Which tokens notice another one is measured on both sides, where the model itself is
        called, on all ranks as often; then the mask of their places is tried."""
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
        verb = "does not see" if lacking else "sees"
        factor = "sees too few tokens" if lacking else "sees tokens that it must not"
        counts = f"{lacking} pairs of tokens fewer and {more} more than in the reference"
        left = self._left_by_mask(right, changed, part)
        root_cause = self._blame(
            Subject.ACTIVATIONS, factor, "attention",
            f"On rank {who[0]} token {token} {verb} token {other}, which it "
            f"{'sees' if lacking else 'does not see'} in the reference. Use the attention "
            "mask of the token indices in the full sample (a shard's queries start at its "
            f"first token, the keys of all of {self._axis()} at theirs), and gather all of "
            "their keys.",
            f"with that mask the gradients match the reference to {left or 0.0:.1e}", who,
        )  # fmt: skip
        if left is not None:
            return root_cause
        measured = (
            "tokens were changed one by one, and the changes of the logits compared: "
            f"{counts}; no fix that was tried helps"
        )
        return replace(root_cause, certainty=Certainty.FITS, tried=measured)

    def _left_by_mask(
        self, right: Tensor, changed: Sequence[int], part: TokenSlice
    ) -> float | None:
        """Run the step with one device's mask, laid over the scores by the tokens' places in the
        whole sample. `right`: which tokens notice those that were changed, on one device. None
        where the mask is neither causal nor none, or does not help."""
        width = part.whole[1]
        tokens = torch.tensor(changed)[:, None], torch.arange(width)
        is_seen, before = right.cpu() > 0, tokens[1] < tokens[0]
        is_causal = not bool((is_seen & before).any())
        if not (is_causal or bool(is_seen.all())):
            return None
        columns = part.columns.tolist()
        everyones = self.ranks.gather([part.rows[0].item(), columns])
        first = part.rows[0].item()
        joined = [place for row, its in everyones if row == first for place in its]
        # Keys as they stand in a sample, or by rank: both on every rank, for each is a step of all,
        # and on some ranks the two may be alike.
        for keys in (list(range(width)), joined):
            places = part.columns[:, None], torch.tensor(keys)
            mask = places[1] <= places[0] if is_causal else torch.ones(len(columns), len(keys))
            left = self._left({}, MaskOfPlaces(mask.bool()))
            if left is not None:
                return left
        return None

    def _of_exchanges(self, part: TokenSlice) -> RootCause | None:
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
            if truth is not None and relative(call.upstream, factor * truth) > _NEAR:
                mine[path] = factor * truth
        everyones = self.ranks.gather(list(mine))
        last = next((paths[-1] for paths in everyones if paths), None)
        if last is None:
            return None
        alike = {
            path: Forced(upstream=gradient)
            for path, gradient in mine.items()
            if family(path) == family(last)
        }
        left = self._left(alike)
        if left is None:
            return None
        place = families(alike) or last
        return self._blame(
            Subject.GRADIENTS, "other gradient in backward", place,
            f"{place} returns its reference output, but the gradient of that output differs "
            f"from the reference. If the other ranks over {self._axis()} use it too (keys "
            "and values), backward must sum the gradients of all of them (reduce-scatter). "
            "Without that, each rank has a partial gradient.",
            "with the reference gradient of its output, all gradients match the reference to "
            f"{left:.1e}",
        )  # fmt: skip
