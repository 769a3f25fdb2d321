"""Test a loop by relations that need no second program.

Gradients of earlier steps must not matter, and later tokens must not be visible. The gradient of
the logits also shows the target of each position, whether the loss takes the unchanged logits, and
whether a label belongs to another document.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ptrain.report.finding import RootCause, Subject
from ptrain.report.record import Check
from ptrain.verification.compare import condition_check
from ptrain.verification.jobs.job import Job, NoComms, Tolerance, map_tensors
from ptrain.verification.jobs.modules import (
    Calls,
    ModuleCall,
    ModuleRecorder,
    input_tokens,
    is_within,
    probe_model,
    recorded_autocast,
)
from ptrain.verification.jobs.record import ForwardCall, ModelState, StepRecorder, reseed
from ptrain.verification.jobs.root_causes import list_families, make_untested_cause
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.jobs.step import DrawReplay
from ptrain.verification.parts import canonical_modules, difference, fit_multiple, norm

_NEARLY_ALL = 0.99  # share of targets that the right offset predicts
_RARELY = 0.9  # share above which a second offset makes the task unclear
_FEWEST = 8  # targets that are needed to determine a task
_FITS = 1e-4  # relative residual of a gradient that fits


def find_language_task(call: ForwardCall) -> tuple[Tensor, Tensor, int | None] | None:
    """Return the tokens, the mask of positions with a target, and the offset of the targets.

    The targets of a cross-entropy are the positions of the negative gradients.

    Returns:
        Tokens and mask are [samples, positions]. The offset is 0 to 2, or None if it is unclear.
        The result is None if the model has no token input, no logits for it, or too few targets.
    """
    tokens, gradient = input_tokens(call), call.upstream.get(0)
    if tokens is None or gradient is None or gradient.dim() != 3:
        return None
    if gradient.shape[:2] != tokens.shape or int(tokens.max()) >= gradient.size(2):
        return None
    has_target, targets = (gradient < 0).sum(-1) == 1, gradient.argmin(-1)
    shares = []
    for shift in range(3):
        length = tokens.size(1) - shift
        has = has_target[:, :length]
        if int(has.sum()) < _FEWEST:
            return None
        right = targets[:, :length][has] == tokens[:, shift:][has]
        shares.append(float(right.double().mean()))
    *_, second, most = sorted(shares)
    is_clear = most >= _NEARLY_ALL and second <= _RARELY
    return tokens, has_target, shares.index(most) if is_clear else None


def describe_softmax(call: ForwardCall) -> str:
    """Return a phrase for probabilities that the loss gets in place of logits; "" for logits.

    The gradient of the output shows it: the gradient of a cross-entropy of a softmax has another
    form.
    """
    output, gradient = call.output, call.upstream.get(0)
    if output is None or gradient is None or gradient.shape != output.shape or output.dim() < 2:
        return ""
    rows, slopes = (tensor.double().flatten(0, -2) for tensor in (output, gradient))
    has = slopes.abs().amax(-1) > 0
    rows, slopes = rows[has], slopes[has]
    if len(rows) < _FEWEST or rows.size(-1) < 3:
        return ""
    targets = torch.nn.functional.one_hot(slopes.argmin(-1), rows.size(-1)).double()
    plain = rows.softmax(-1) - targets
    if _is_multiple(slopes, plain):
        are = bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() < _FITS).all())
        return "probabilities, whose rows sum to one" if are else ""
    shares = rows.softmax(-1)
    twice = shares.softmax(-1) - targets
    back = shares * (twice - (shares * twice).sum(-1, keepdim=True))
    return "their softmax" if _is_multiple(slopes, back) else ""


def _is_multiple(slopes: Tensor, expected: Tensor) -> bool:
    """Return True if one tensor is a multiple of the other."""
    return fit_multiple(slopes.flatten(), expected.flatten()).is_within(_FITS)


_ORDERS = 3  # permutations of the samples
_LOOSE = 10  # tolerances: addends may be summed in another order

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TriedRelation:
    """A relation that was tested: its check, and the root cause if it is violated."""

    check: Check
    root_cause: RootCause | None

    @classmethod
    def from_cause(
        cls,
        name: str,
        root_cause: RootCause | None = None,
        *,
        why: str = "",
        value: float | None = None,
    ) -> TriedRelation:
        """Return the relation, which holds if it has no root cause.

        Args:
            name: The name of the relation, shown after "shared code:".
            root_cause: The root cause of a violation, None if the relation holds.
            why: The reason in the check. Default: factor and place of the root cause.
            value: The measurement, None if it is no number.
        """
        otherwise = why or (f"{root_cause.factor}: {root_cause.place}" if root_cause else "")
        return cls(
            condition_check(f"shared code: {name}", value, root_cause is None, otherwise),
            root_cause,
        )


class RelationTests:
    """The tests on the reference after the comparison. They change its state.

    Attributes:
        notes: Relations that were not tested, and the reasons.
    """

    def __init__(
        self, job: Job, wholes: Mapping[str, ParameterShard], limit: Tolerance, *,
        drawing: DrawReplay, document_end: int | None = None,
    ) -> None:  # fmt: skip
        self._job, self._wholes, self._limit = job, wholes, limit
        self._num_ranks, self._drawing = drawing.ranks.size, drawing
        self._document_end = document_end
        self.notes: list[str] = []

    def test_relations(self, batch: Any, trained: Collection[str]) -> Iterator[TriedRelation]:
        """Yield the results of the tests with one batch.

        `trained` are the parameters that had a gradient in some step.
        """
        state = ModelState.copy_of(self._job.model)
        with ModuleRecorder(self._job.model) as modules:
            seen = self._step(batch)
        if not seen.gradients:
            self.notes.append("code shared by both sides: not tested, no optimizer steps")
            return
        yield from self._test_gradient_flow(modules.calls, trained)
        yield from self._test_repeated_batch(state, seen.gradients, batch)
        state.restore()
        yield from self._test_targets(seen.calls)

    def _step(self, batch: Any) -> StepRecorder:
        """Run one step with a fixed seed and without dropout, and return its record."""
        model = self._job.model
        still = self._drawing.disable(model)  # no dropout: passes are comparable
        with (
            reseed(model),
            StepRecorder(model, self._wholes) as seen,
            still,
            NoComms(),
        ):
            self._job.step(batch)
        return seen

    def _test_gradient_flow(
        self, calls: Calls, trained: Collection[str]
    ) -> Iterator[TriedRelation]:
        """Test that gradients reach every trainable module whose output is used later."""
        inner = dict(canonical_modules(self._job.model))
        order = [path for path, _ in calls]
        has = [c.upstream is not None and bool(c.upstream.any()) for c in calls.values()]
        last = max((n for n, known in enumerate(has) if known), default=0)
        lost = [
            path
            for n, ((path, number), call) in enumerate(calls.items())
            if path and n < last and not has[n] and call.output is not None
            and any(parameter.requires_grad for parameter in inner[path].parameters())
            and not any(is_within(name, path) for name in trained)
            and not _is_returned(calls.get(("", number)), call.output)
            and not any(is_within(order[m], path) for m in range(n + 1, last + 1) if has[m])
        ]  # fmt: skip
        yield TriedRelation.from_cause("gradients come back through the model", self._proven_cause(
            Subject.GRADIENTS, "no gradient in the reference either", [],
            f"{list_families(lost)} gets only zero gradients, although its parameters are "
            "trainable: after it the model is detached (detach(), no_grad(), .data), "
            "multiplies by zero weights, or does not use its output.",
            "Remove what cuts it off, or freeze what is meant to stay.",
            "in every step its parameters have no gradient, and later modules have one",
            place=list_families(lost),
        ) if lost else None, why=f"none reaches {list_families(lost)}")  # fmt: skip

    def _test_repeated_batch(
        self, state: ModelState, gradients: Tensors, batch: Any
    ) -> Iterator[TriedRelation]:
        """Test that a batch gives equal gradients again, whatever is in `.grad`."""
        before = state.gradient_rows(self._wholes)
        state.restore(gradients=False)
        again = self._step(batch).gradients
        names = [name for name in gradients if name in again]
        grown = [
            n
            for n in names
            if self._relative_difference(again[n], gradients[n], gradients[n]) > 0.0
        ]
        is_added = bool(grown) and all(
            self._relative_difference(
                again[n] - gradients[n], gradients[n] - before.get(n, 0.0), gradients[n]
            )
            <= _LOOSE * self._limit.gradients
            for n in grown
        )
        yield TriedRelation.from_cause("a step starts without gradients", self._proven_cause(
            Subject.GRADIENTS, "previous step added, in the reference too", grown,
            "Both loops add a step's gradient to that of the previous step.",
            "Set gradients to None after every update (optimizer.zero_grad()).",
            "run twice on one batch from the same parameters, the second gradient includes "
            "the first",
        ) if is_added else None)  # fmt: skip

    def _test_targets(self, calls: Sequence[ForwardCall]) -> Iterator[TriedRelation]:
        """Test the targets of a language model, and its causal mask."""
        if calls and (given := describe_softmax(calls[0])):
            yield TriedRelation.from_cause("the loss takes logits", self._proven_cause(
                Subject.LOSS, "softmax before cross-entropy", [],
                f"Cross-entropy takes logits and applies softmax itself, but it gets {given}.",
                "Remove the softmax on both sides.",
                "the gradient of the logits is that of a cross-entropy of their softmax",
                place="loss",
            ), why=given)  # fmt: skip
            return
        task = find_language_task(calls[0]) if calls else None
        if task is None:
            self.notes.append(
                "labels and the causal mask: not tested, no logits of tokens are seen"
            )
            return
        tokens, has_label, shift = task
        name = "labels are the next tokens"
        seen = self._test_causality(calls[0], tokens) if shift in (0, 1) else None
        if shift == 0 and (seen is None or seen.root_cause is not None):
            self.notes.append(
                "the labels are the tokens themselves: intended if the task is to copy"
            )
            return
        if shift in (0, 2):
            says, fix = (
                ("the current token", "Shift the labels by one: logits[:, :-1] against "
                 "tokens[:, 1:]")
                if shift == 0
                else ("the token after the next", "The model or the data already shifts the "
                      "labels: shift them once")
            )  # fmt: skip
            yield TriedRelation.from_cause(name, self._proven_cause(
                Subject.BATCH, "labels not shifted" if shift == 0 else "labels shifted twice", [],
                f"The loss has {says} as the target of every position.", f"{fix}.",
                f"according to the gradient of the loss the target is {says}",
                place="labels",
            ), why=f"the target of every position is {says}")  # fmt: skip
            return
        if shift != 1:
            self.notes.append("the causal mask: not tested, the labels are not the next tokens")
            return
        yield TriedRelation.from_cause(name)
        if seen is not None:
            yield seen
        yield from self._test_document_ends(tokens, has_label)

    def _test_document_ends(self, tokens: Tensor, has_label: Tensor) -> Iterator[TriedRelation]:
        """Test that the last token of a document has no target."""
        if (end := self._document_end) is None:
            self.notes.append(
                "labels across documents: not tested; if samples have several documents, set "
                "the token that ends one: `Terms(document_end=...)`"
            )
            return
        ends = tokens[:, :-1] == end
        if not bool(ends.any()):
            self.notes.append(f"labels across documents: not tested, no sample has token {end}")
            return
        count = int((ends & has_label[:, :-1]).sum())
        across = f"{count} of {int(ends.sum())} tokens {end} have a label"
        yield TriedRelation.from_cause("no label is of another document", self._proven_cause(
            Subject.BATCH, "labels across documents", [],
            f"The last token of a document (token {end}) has the first token of the next "
            "document as its target.",
            "Ignore these labels (ignore_index) on both sides.",
            f"{across}, according to the gradient of their logits",
            place="labels",
        ) if count else None, why=across)  # fmt: skip

    def _test_causality(self, call: ForwardCall, tokens: Tensor) -> TriedRelation | None:
        """Test that changed tokens in the second half leave the logits of the first half."""
        at = tokens.size(1) // 2
        other = tokens.clone()
        other[:, at:] = other[:, at:].roll(1, 0) if tokens.size(0) > 1 else other[:, at:].flip(1)
        earlier = (other != tokens).any(1, keepdim=True).expand_as(tokens).clone()
        earlier[:, at:] = False
        size = self._logits_change(call, tokens, other, earlier)
        if size is None:
            self.notes.append(
                "the causal mask: not tested, the model draws random numbers or keeps counters"
            )
            return None
        holds = size <= _LOOSE * self._limit.outputs
        return TriedRelation.from_cause(
            "no token sees its future", None if holds else self._proven_cause(
            Subject.ACTIVATIONS, "no causal mask", [],
            "A position sees later tokens and has the next one as its target.",
            "Give attention a causal mask (is_causal=True) on both sides.",
            f"other tokens from position {at} on change the earlier logits by {size:.3g}",
            place="attention",
        ), why="logits change with later tokens", value=size)  # fmt: skip

    def _logits_change(
        self, call: ForwardCall, tokens: Tensor, other: Tensor, where: Tensor
    ) -> float | None:
        """Return the relative change of the logits at `where` if `other` replaces the tokens.

        `where` is [samples, positions]. Returns None for a model that does not repeat its output.
        """

        def instead(leaf: Any) -> Any:
            same = isinstance(leaf, Tensor) and leaf.shape == tokens.shape
            return other if same and torch.equal(leaf, tokens) else leaf

        before = self._logits(call, call.args, call.kwargs)
        if not torch.equal(before, self._logits(call, call.args, call.kwargs)):
            return None
        after = self._logits(call, *tree_map(instead, (call.args, call.kwargs)))
        where = where.to(before.device)
        rows = before[where], after[where]
        return norm(rows[0] - rows[1]) / max(norm(rows[0]), 1e-30)  # all logits may be zero

    def _logits(self, call: ForwardCall, args: Any, kwargs: Any) -> Tensor:
        """Return the model's first output tensor in fp64, with a fixed seed and without dropout."""
        still = self._drawing.disable(self._job.model)
        with torch.no_grad(), reseed(self._job.model), recorded_autocast([call]), still:
            output = self._job.model(*args, **kwargs)
        return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)).double()

    def _relative_difference(self, left: Tensor, right: Tensor, scale: Tensor) -> float:
        """Return the difference relative to `scale`; 0.0 within the tolerance."""
        size = norm(left - right)
        return 0.0 if size <= self._limit.gradients * norm(scale) else size / (norm(scale) or 1.0)

    def _proven_cause(
        self, state: Subject, factor: str, names: Sequence[str], sentence: str, fix: str,
        tried: str, place: str = "",
    ) -> RootCause:  # fmt: skip
        """Return a proven root cause of code that both sides share."""
        place = place or list_families(names)
        return shared_root_cause(
            state, factor, place, sentence, fix, tried, num_ranks=self._num_ranks
        )


def order_rounding(
    model: nn.Module, calls: Sequence[ForwardCall], drawing: DrawReplay
) -> dict[str, float]:
    """Return the largest relative change of each parameter's gradient if samples are permuted.

    It measures rounding over `_ORDERS` permutations. The rounding of a sum is large relative to the
    sum if its addends cancel.

    Args:
        model: The reference's model.
        calls: The recorded forward passes of a step.
        drawing: Disables the model's random draws.
    """
    sums: list[dict[str, Tensor]] = []
    for seed in range(_ORDERS + 1):  # the first: as they are
        passes = [_permute_samples(call, seed) if seed else call for call in calls]
        with drawing.disable(model):
            gradients = probe_model(model, passes).gradients
        names = gradients[0] if all(gradients) else {}
        sums.append({name: torch.stack([its[name] for its in gradients]).sum(0) for name in names})
    first = sums[0]
    return {
        name: max(difference(its[name], own, norm(own)) for its in sums[1:])
        for name, own in first.items()
        if all(name in its for its in sums)
    }


def _permute_samples(call: ForwardCall, seed: int) -> ForwardCall:
    """Return a forward pass with its samples permuted by a seed."""
    given = call.args, call.kwargs
    order = torch.randperm(_num_rows(given), generator=torch.Generator().manual_seed(seed))
    args, kwargs = map_tensors(given, lambda rows: rows[order])
    upstream = {
        place: gradient[order] if gradient.dim() and len(gradient) == len(order) else gradient
        for place, gradient in call.upstream.items()
    }
    return replace(call, args=args, kwargs=kwargs, upstream=upstream)


def shared_root_cause(
    state: Subject, factor: str, place: str, sentence: str, fix: str, tried: str, *,
    num_ranks: int, step: int = 0,
) -> RootCause:  # fmt: skip
    """Return a proven root cause of code that the reference runs too, on all ranks.

    Args:
        state: The kind of state that is wrong.
        factor: A short label of the difference.
        place: The module, function or operator.
        sentence: The explanation.
        fix: The instruction.
        tried: The test that proves it.
        num_ranks: The number of ranks; all are named.
        step: The step, from 0.
    """
    said = make_untested_cause(
        state, factor, place, sentence, fix, step=step, ranks=range(num_ranks)
    )
    return said.as_proven(tried)


def _num_rows(batch: Any) -> int:
    """Return the first dimension that all tensors of a batch share, or 0."""
    sizes: set[int] = set()
    map_tensors(batch, lambda rows: sizes.add(len(rows)))
    return sizes.pop() if len(sizes) == 1 else 0


def _is_returned(root: ModuleCall | None, output: Tensor) -> bool:
    """Return True if the model returns this tensor."""
    returned = () if root is None else (root.output, *root.others)
    return any(
        tensor is not None and tensor.shape == output.shape and torch.equal(tensor, output)
        for tensor in returned
    )
