"""Undo one possible cause in a step that runs again, and measure the remaining difference of the
gradients, of the loss, and of the update repeated with these gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from ptrain.meters.traffic import group_of
from ptrain.models.ledger import OperatorMode, first_real, is_real, local_tensor
from ptrain.report.finding import DifferenceKind, Mismatch, RootCause, Subject
from ptrain.verification.capture import SampleFaults
from ptrain.verification.jobs.draws import changed_redraws
from ptrain.verification.jobs.job import COLLECTIVES, GlobalLoss, Tolerance, loss_value, map_tensors
from ptrain.verification.jobs.record import is_recorded_forward, shared_buffers
from ptrain.verification.jobs.root_causes import (
    PLAIN,
    list_families,
    make_root_cause,
    make_untested_cause,
)
from ptrain.verification.parts import canonical_modules, fit_multiple, local_cpu, number_difference

if TYPE_CHECKING:
    from ptrain.verification.jobs.inquiry import Inquiry
    from ptrain.verification.jobs.step import LoopPair, StepComparison

Context = AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class Trial:
    """The remaining difference after a possible cause is undone.

    Attributes:
        gradients: Largest relative difference of a gradient on any rank.
        before: The same figure before the trial.
        others: A phrase for other differences, or for things that could not be tried; "" if none.
    """

    gradients: float
    before: float
    others: str

    def is_near(self, limit: float, loosest: float = 0.1) -> bool:
        """Return True if the gradients match except for rounding.

        The difference must be within 10 tolerances (the addends may be summed in another order),
        and at most a tenth of the difference before. `loosest` bounds the tolerances of 16 bits.
        """
        return self.gradients <= min(10 * limit, max(limit, loosest), 0.1 * self.before)

    def confirm(self, blamed: RootCause, words: str) -> RootCause:
        """Return the root cause with this trial: proven, or fitting if others still differ."""
        tried = f"{words} the gradients match the reference to {self.gradients:.1e}"
        return blamed.as_fitting(tried + self.others) if self.others else blamed.as_proven(tried)


@dataclass(frozen=True, slots=True, kw_only=True)
class PossibleCause:
    """A root cause to try.

    Attributes:
        blamed: The root cause without a test.
        words: The phrase for the change that undoes it.
        run: Runs the trial. Returns None if the step cannot run.
        is_of_time: Whether the result depends on the speed of the ranks, as in a race.
    """

    blamed: RootCause
    words: str
    run: Callable[[], Trial | None]
    is_of_time: bool = False


# Name and ranks of a collective's process group; a message between two ranks has no ranks.
Started = list[tuple[str, list[int]]]
_MESSAGES = {"send", "recv_", "recv_any_source_"}
_GROUPS = {"process_group", "group_name"}  # arguments of c10d's and functional collectives


class CollectiveRecorder(OperatorMode):
    """A mode that records the collectives and messages that this rank starts (`started`, in order).

    `is_async` is set if a collective was started without waiting for it. With `waits`, each of
    these is waited for as it starts.
    """

    def __init__(self, *, waits: bool) -> None:
        super().__init__()
        self.started: Started = []
        self.is_async, self._waits = False, waits

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        names = [its.name for its in function._schema.arguments]
        if function.namespace not in COLLECTIVES or not _GROUPS.intersection(names):
            return result
        given, group = dict(zip(names, args, strict=False)) | kwargs, group_of((args, kwargs))
        is_message = function._schema.name.partition("::")[2] in _MESSAGES
        everyone = [] if is_message else dist.get_process_group_ranks(group)
        self.started.append((group.group_name, everyone))
        work = result[-1] if isinstance(result, tuple) else result
        # c10d operators return their Work as a ScriptObject; functional collectives return tensors
        if not is_message and isinstance(work, torch.ScriptObject):
            self.is_async |= bool(given.get("async_op", True))
            if self._waits:
                dist.Work.unbox(work).wait()
        return result


def can_finish(everyones: Sequence[Started]) -> bool:
    """Return True if all ranks finish when each waits for every collective as it starts.

    The collectives are replayed: one completes if it is next on all ranks of its group. Messages
    cannot be matched and give False.
    """
    left = [list(row) for row in everyones]
    while any(left):
        nexts = [(ranks, row[:1]) for row in left for _, ranks in row[:1]]
        together = next((on for on, its in nexts if all(left[r][:1] == its for r in on)), [])
        if not together:
            return False
        for rank in together:
            left[rank].pop(0)
    return True


@contextmanager
def without_cast_cache() -> Iterator[None]:
    """Temporarily disable autocast's cache of weight casts."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def hook_backward(begins: Callable[[list[Tensor]], Callable[[], None]]) -> Iterator[None]:
    """Temporarily call `begins` with the roots of each backward pass, and its result afterwards."""
    run = torch.autograd.backward  # Tensor.backward looks it up here (torch/_tensor.py, 2.13)

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        ends = begins([tensors] if isinstance(tensors, Tensor) else list(tensors))
        run(tensors, *args, **kwargs)
        ends()

    with patch.object(torch.autograd, "backward", backward):
        yield


def restore_buffers_after_backward(model: nn.Module) -> Context:
    """Return a context that restores the buffers after each backward pass.

    A recomputed part then writes its buffers once, in forward.
    """

    def begins(tensors: Any) -> Callable[[], None]:
        kept = [(its, local_cpu(its).clone()) for its in model.buffers()]
        return partial(copy_pairs, kept)

    return hook_backward(begins)


@torch.no_grad()
def copy_pairs(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write the second tensor of each pair to the first."""
    for tensor, value in pairs:
        local_tensor(tensor.detach()).copy_(value)


class BackwardGradients(ExitStack):
    """A context in which optimizers step with the gradients that the last backward pass left.

    Args:
        model: The loop's model.
        fitted: The parameters whose factor is determined.
        times: The factor by which the reference multiplies its gradients after backward.

    Attributes:
        has_replaced: Whether the optimizers would have received other gradients.
        factor: The factor between backward and optimizer, relative to `times`, as text. "" if it is
            1, or if the gradients are not a multiple.
    """

    def __init__(self, model: nn.Module, fitted: Iterable[Tensor], times: float) -> None:
        super().__init__()
        self.factor, self.has_replaced, self._times = "", False, times
        self._parameters = list(model.parameters())
        self._fitted = {id(its) for its in fitted}
        self._left: dict[int, Tensor] = {}

    def __enter__(self) -> Self:
        self.enter_context(hook_backward(lambda tensors: self._copy_gradients))
        # A hook of all optimizers: it runs after the loop's code, such as clipping.
        self.callback(register_optimizer_step_pre_hook(self._restore_gradients).remove)
        return self

    def _copy_gradients(self) -> None:
        """Copy the gradients after a backward pass."""
        gradients = {id(its): its.grad for its in self._parameters if its.grad is not None}
        self._left = {key: gradient.detach().clone() for key, gradient in gradients.items()}

    def _restore_gradients(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Fit the factor, and restore the gradients before an optimizer steps."""
        pairs = [
            (its, its.grad, self._left.pop(id(its)))
            for its in self._parameters
            if id(its) in self._left and its.grad is not None
        ]
        if fitted := [pair[1:] for pair in pairs if id(pair[0]) in self._fitted]:
            rows = [map(local_cpu, side) for side in zip(*fitted, strict=True)]
            own, left = (torch.cat([its.double().flatten() for its in row]) for row in rows)
            fit = fit_multiple(own, left)
            times = fit.factor / self._times
            self.factor = f"{times:.4g}" if fit.is_within(1e-3) and abs(times - 1) > PLAIN else ""
        for parameter, own, left in pairs:
            self.has_replaced |= not torch.equal(local_cpu(own), local_cpu(left))
            parameter.grad = left if self._times == 1.0 else left * self._times


# Autograd nodes that pass a gradient on to terms, or multiply it by a number. Means and sums are
# such nodes if they reduce stacked terms.
_LINEAR = {
    "AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "NegBackward0",
    "StackBackward0", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0",
    "UnsqueezeBackward0", "CloneBackward0",
}  # fmt: skip
_OF_STACKED = {"MeanBackward0", "SumBackward0"}


class AddTermGradient(torch.autograd.Function):
    """An operator that returns a tensor, and gives another one a constant gradient."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, term: Tensor, coefficient: float) -> Tensor:
        ctx.coefficient, ctx.like = coefficient, torch.empty_like(term)
        return first.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        # not scaled by the incoming gradient: the coefficient refers to the loss itself
        return gradient, torch.full_like(ctx.like, ctx.coefficient), None


class ScalarValues(TorchFunctionMode):
    """A mode that records the values of one-element tensors by autograd node."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Any, float] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.grad_fn is not None and result.numel() == 1:
            self.values[result.grad_fn] = float(result.detach())
        return result


class LossTerms(ExitStack):
    """A context around a step that records the terms of its loss, and changes their coefficients.

    Terms are named by their place in the model's output after the first tensor, or else by the
    operator that computes them.

    Args:
        model: The loop's model.
        times: Factors on the gradients of terms.
        joined: Coefficients of terms that the model returns, but the loss lacks.

    Attributes:
        coefficients: The coefficients of the terms in the loss.
        outputs: The terms that the model returns.
    """

    def __init__(
        self, model: nn.Module, times: Mapping[str, float] | None = None,
        joined: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.coefficients: dict[str, float] = {}
        self.outputs: set[str] = set()
        self._shares = [0.0, 0.0]  # sums of the terms: original, changed
        self._nodes: dict[Any, str] = {}
        self._scalars = ScalarValues()
        self._model, self._times, self._joined = model, times or {}, joined or {}

    def __enter__(self) -> Self:
        root = dict(canonical_modules(self._model))[""]
        self.callback(root.register_forward_hook(self._name_outputs).remove)
        self.enter_context(hook_backward(self._before_backward))
        self.enter_context(self._scalars)
        return self

    def changed_loss(self, loss: float | None) -> float | None:
        """Return the loss with the changed coefficients, or None without a loss."""
        was, now = self._shares
        return loss if loss is None or was == now or not was else loss * now / was

    def _before_backward(self, losses: list[Tensor]) -> Callable[[], None]:
        if len(losses) == 1 and losses[0].numel() == 1 and losses[0].grad_fn is not None:
            self._hook_terms(losses[0].grad_fn)
        return lambda: None

    def _name_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Name the scalar outputs of the model, and attach the joined terms to the first output."""
        first, joined = first_real(output), first_real(output)
        leaves, spec = tree_flatten_with_path(output)
        if first is None or not is_recorded_forward():
            return None
        put = []
        for place, leaf in leaves:
            if is_real(leaf) and leaf.numel() == 1 and leaf is not first and leaf.requires_grad:
                name = f"output{keystr(place)}"
                self.outputs.add(name)
                self._nodes[leaf.grad_fn] = name
                self._scalars.values[leaf.grad_fn] = float(leaf.detach())
                if name in self._joined:
                    self._shares[1] += self._joined[name] * float(leaf.detach())
                    joined, leaf = (
                        AddTermGradient.apply(joined, leaf, self._joined[name]),
                        leaf.detach(),
                    )
            put.append(leaf)
        return tree_unflatten([joined if leaf is first else leaf for leaf in put], spec)

    def _hook_terms(self, loss: Any) -> None:
        """Walk from the loss through linear operators to its terms, and hook each of them."""
        seen: dict[str, int] = {}
        nodes = [loss]
        while nodes:
            node = nodes.pop()
            inner = [its for its, _ in node.next_functions if its is not None]
            name = self._nodes.get(node, "")
            is_linear = node.name() in _LINEAR and (len(inner) == 1 or "Mul" not in node.name())
            is_linear |= node.name() in _OF_STACKED and inner[0].name() == "StackBackward0"
            if not name and is_linear:
                nodes += inner[::-1]
                continue
            name = name or node.name().removesuffix("Backward0")
            seen[name] = seen.get(name, 0) + 1
            full = name if seen[name] == 1 else f"{name} ({seen[name]})"
            value = self._scalars.values.get(node, math.nan)
            node.register_prehook(partial(self._scale_term, full, value))

    def _scale_term(
        self, name: str, value: float, gradients: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Record the coefficient of a term, and scale its gradient."""
        own, times = float(gradients[0].detach().double().sum()), self._times.get(name, 1.0)
        self.coefficients[name] = self.coefficients.get(name, 0.0) + own
        self._shares[0] += own * value
        self._shares[1] += times * own * value
        return (gradients[0] * times, *gradients[1:])


def possible_causes(inquiry: Inquiry, first: Sequence[Mismatch]) -> Iterator[PossibleCause]:
    """Yield the possible causes that can be undone without changes of the user's code."""
    loop, step = inquiry.pair.loop.model, first[0].step
    said = partial(make_untested_cause, step=step, ranks=range(inquiry.ranks.size))
    names = list_families([mismatch.name for mismatch in first])
    draws = partial(inquiry.drawing.repeat, loop)
    everyones = inquiry.ranks.gather((inquiry.starts.is_async, inquiry.starts.started))
    if any(is_async for is_async, _ in everyones):
        waited = PossibleCause(
            blamed=said(
                first[0].subject, "collective not waited for", names,
                "A collective is started (async_op=True) and its result is used before it is "
                "done.", "Wait for it first (`work.wait()`).",
            ),
            words="with every collective waited for where it starts",
            run=lambda: inquiry.run_trial(draws(), CollectiveRecorder(waits=True)), is_of_time=True,
        )  # fmt: skip
        if can_finish([started for _, started in everyones]):
            yield waited
        else:
            inquiry.untried += (
                "; waiting for every collective where it starts was not tried, as ranks that wait "
                "there might wait for each other forever"
            )
    if any(inquiry.ranks.gather(any(its.autocast for its in inquiry.step.seen.calls))):
        yield PossibleCause(
            blamed=said(
                first[0].subject, "stale casts of autocast", names,
                "Autocast keeps the casts of weights for as long as it is entered, and uses "
                "them for other values that are written to the weights meanwhile.",
                "Leave autocast before weights are written, or pass cache_enabled=False.",
            ),
            words="with autocast's cache off",
            run=lambda: inquiry.run_trial(draws(), without_cast_cache()),
        )  # fmt: skip
    yield PossibleCause(
        blamed=said(
            Subject.GRADIENTS, "overwritten before backward", names,
            "What forward keeps for backward is overwritten before backward uses it: an input "
            "that the next one is received into, or a weight that is written in between.",
            "Receive every micro-batch into its own buffer, and write after backward.",
        ),
        words="with copies of what is saved for backward",
        # a clone of each saved tensor does not see later writes
        run=lambda: inquiry.run_trial(
            draws(), torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda its: its)
        ),
    )  # fmt: skip
    yield from _changed_gradient_causes(inquiry, first)
    yield from _random_draw_causes(inquiry, said)


def explain_by_batches(
    inquiry: Inquiry, blamed: RootCause, ledger: SampleFaults | None
) -> RootCause | None:
    """Prove that ranks read wrong samples, by trials; return None if none succeeds.

    The trials give each rank an even share of the global batch, or all of it, or give the reference
    the samples that the ranks read. A job with evidence has batch numbers instead of samples, and
    is skipped. All ranks call it.
    """
    if inquiry.pair.loop.evidence:
        return None
    ranks, batch = inquiry.ranks, inquiry.batch
    every = tuple(range(ranks.size))
    groups = {"an even share": (every,), "all": ((ranks.rank,),)} | {
        f"an even share over {axis}": lines for axis, lines in ranks.axes.items()
    }
    sizes: set[int] = set()
    map_tensors(batch, lambda its: sizes.add(len(its)))

    def trials() -> Iterator[tuple[str, Trial | None]]:
        for what, lines in groups.items():
            line = next((its for its in lines if ranks.rank in its), (ranks.rank,))
            words = f"with {what} of the global batch on each rank"
            # ranks with unequal sample counts might run different numbers of collectives
            if not all(ranks.gather(all(size % len(line) == 0 for size in sizes))):
                inquiry.untried += f"; the step {words} was not run, as it does not divide evenly"
                continue
            part = partial(_split_rows, line.index(ranks.rank), len(line))
            yield words, inquiry.run_trial(share=map_tensors(batch, part))
        if ledger:
            rows = [row for row in range(ledger.count) if row not in ledger.missing]
            rows = sorted([*rows, *ledger.doubled])
            left = map_tensors(batch, lambda its: its[rows] if len(its) == ledger.count else its)
            words = "with the same samples left out, or read twice, in the reference"
            yield words, inquiry.try_reference(left)

    for words, trial in trials():
        if trial is not None and trial.is_near(inquiry.limit.gradients) and not trial.others:
            return trial.confirm(blamed, words)
    return None


def _split_rows(place: int, count: int, rows: Tensor) -> Tensor:
    """Return one of `count` nearly equal parts of the rows."""
    return rows.tensor_split(count)[place]


def _changed_gradient_causes(
    inquiry: Inquiry, first: Sequence[Mismatch]
) -> Iterator[PossibleCause]:
    """Yield the cause that differing gradients were changed between backward and the optimizer."""
    holds, ranks = inquiry.pair.holds, inquiry.ranks
    loop, clip = inquiry.pair.loop.model, ranks.gather(inquiry.step.clip_factor)[0]
    chosen = [holds[name].parameter for name in {its.name for its in first} & holds.keys()]
    if clip is None:
        inquiry.untried += (
            "; the gradients that backward leaves were not tried, as clipping changes them by more "
            "than one known factor"
        )
        return

    def run() -> tuple[BackwardGradients, Trial | None]:
        left = BackwardGradients(loop, chosen, clip)
        return left, inquiry.run_trial(inquiry.drawing.repeat(loop), before=[left])

    left, _ = run()
    everyones = ranks.gather((left.has_replaced, left.factor), tuple[bool, str])
    wrong = sorted({its.rank for its in first})
    if not all(everyones[rank][0] for rank in wrong):  # a rank without a change refutes it
        return
    factors = {everyones[rank][1] for rank in wrong}
    factor = min(factors) if len(factors) == 1 else ""
    yield PossibleCause(
        blamed=make_root_cause(
            first, ranks, state=Subject.GRADIENTS,
            factor=f"changed after backward{factor and f', × {factor}'}",
            sentence="The gradients that backward leaves are right. Before the optimizer steps "
            f"they are changed{factor and f' by the factor {factor}'}.",
            fix="Remove what scales or writes them there (a division, a clip, an unscaling of "
            "what was not scaled).",
        ),
        words="with the gradients that backward leaves"
        + f", multiplied by {clip:.4g} as in the reference" * (abs(clip - 1) > PLAIN),
        run=lambda: run()[1],
    )  # fmt: skip


def _random_draw_causes(inquiry: Inquiry, said: partial[RootCause]) -> Iterator[PossibleCause]:
    """Yield the possible causes that concern random draws."""
    if not inquiry.drawing.has_draws:
        return
    everyones, loop = inquiry.drawing.everyones, inquiry.pair.loop.model
    # equal on all ranks: they come from all-gathered draws
    alone, loop_only = everyones.alone, set(everyones.by_key) - everyones.used
    mine = sorted({draw.path or draw.outer for draw in changed_redraws(inquiry.drawing.loop)})
    again = {path for paths in inquiry.ranks.gather(mine) for path in paths}
    who = sorted({rank for its in everyones.unlike.values() for rank in its})

    def candidate(paths: Iterable[str], words: str, *what: Any, **masks: Any) -> PossibleCause:
        place = list_families(path or "the model" for path in sorted(paths))
        return PossibleCause(
            blamed=said(what[0], what[1], place, *what[2:]), words=words,
            run=lambda: inquiry.run_trial(inquiry.drawing.repeat(loop, **masks)),
        )  # fmt: skip

    if everyones.unlike:
        unlike = candidate(
            everyones.unlike, "with the masks of the first of them on all", Subject.RANDOM,
            "other masks for the same samples",
            f"Ranks {', '.join(map(str, who))} have the same samples but draw other masks for "
            "them, so their replicas differ.",
            "Seed these ranks identically, and differently from ranks with other samples.",
            alike=True,
        )  # fmt: skip
        axis = inquiry.ranks.differing_axis(who)
        yield replace(unlike, blamed=replace(unlike.blamed, ranks=tuple(who), axis=axis))
    if again:
        yield candidate(
            again, "with forward's masks in backward", Subject.GRADIENTS,
            "different mask in the recomputation",
            "The recomputation in backward draws other random numbers than forward.",
            "Preserve the generator's state (checkpoint(..., preserve_rng_state=True)), or "
            "draw outside of the recomputed code.",
            alike=True,
        )  # fmt: skip
    if alone:
        its = candidate(
            [path for path, _ in alone], "without dropout there", Subject.RANDOM,
            "dropout in the reference only",
            "The reference applies dropout, but no rank of the loop does.",
            "Use the same mode (model.train() before the step) and rate in both.",
        )  # fmt: skip
        yield replace(its, run=partial(inquiry.try_reference, inquiry.batch, alone))
    if loop_only:
        yield candidate(
            [path for path, _ in loop_only], "without dropout there", Subject.RANDOM,
            "dropout in the loop only",
            "The loop applies dropout, but the reference does not.",
            "Use the same mode (train, eval) and rate in both.", still=loop_only,
        )  # fmt: skip


def try_initial_values(
    said: RootCause, first: Sequence[Mismatch], pair: LoopPair, loss: GlobalLoss,
    step: Callable[[], StepComparison], limit: Tolerance,
) -> RootCause:  # fmt: skip
    """Give the loop the reference's initial values, run the first step, and judge the root cause.

    The parameters are replaced, or the buffer that the root cause names. All ranks call it.
    """
    ranks = loss.ranks
    if any(its.way is not DifferenceKind.VALUE or its.between for its in first):
        return said
    if said.state is Subject.PARAMETERS:
        for name, shard in pair.holds.items():
            shard.write(pair.wholes[name].parameter)
    else:
        path, _, leaf = said.place.rpartition(".")
        for name, its, own in list(shared_buffers(pair.reference.model, pair.loop.model)):
            if name == said.place and own.dtype is its.dtype:
                copy_pairs([(own, its)])
            elif name == said.place:  # a copy in place would round it again
                module = dict(canonical_modules(pair.loop.model))[path]
                setattr(module, leaf, its.to(own.device, copy=True))
    seen = step()
    both = [loss_value(its) for its in seen.losses]
    measured = loss.combine(*both)
    is_off = measured is not None and number_difference(both[0] or 0.0, measured) > limit.losses
    mine = [its.name.partition(" · ")[0] for its in seen.differences.mismatches]
    everyones = ranks.gather(mine + ["loss"] * is_off)
    what = f"with the reference's values of {said.place} on all ranks the first step"
    if apart := list_families(name for its in everyones for name in its):
        return said.as_fitting(f"{what} still differs ({apart})")
    return said.as_proven(f"{what} matches the reference: gradients, loss and update")
