"""Undo one possible cause within a step that runs again, and measure what is left of the
difference: of the gradients, of the loss, and of the update repeated with these gradients.
"""

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
from ptrain.models.ledger import OperatorMode, local
from ptrain.models.watch import first_real, is_real
from ptrain.report.finding import Mismatch, RootCause, Subject, Way
from ptrain.verification.capture import Samples
from ptrain.verification.jobs.draws import drawn_again_otherwise
from ptrain.verification.jobs.job import (
    COLLECTIVES,
    GlobalLoss,
    Tolerance,
    each_tensor,
    number,
)
from ptrain.verification.jobs.record import counts, shared_buffers
from ptrain.verification.jobs.root_causes import PLAIN, blame, families, root_cause
from ptrain.verification.parts import canonical_modules, held, multiple, numbers_apart

if TYPE_CHECKING:
    from ptrain.verification.jobs.inquiry import Inquiry
    from ptrain.verification.jobs.step import LoopPair, StepComparison

Context = AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class Trial:
    """How far a step is from the reference's over all ranks, relative: its gradients, which were
    `before` away; `others`: what else still differs, or could not be tried, in words."""

    gradients: float
    before: float
    others: str

    def is_near(self, limit: float, loosest: float = 0.1) -> bool:
        """Return whether the gradients are right but for roundings: the same addends in another
        order, and a tenth of what differed."""
        return self.gradients <= min(10 * limit, max(limit, loosest), 0.1 * self.before)

    def of(self, blamed: RootCause, words: str) -> RootCause:
        """Return a root cause that was undone in these words, and put the gradients right: it is
        proven where loss and update are right then too."""
        tried = f"{words} the gradients match the reference to {self.gradients:.1e}"
        return blamed.proven(tried) if not self.others else blamed.fits(f"{tried}{self.others}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PossibleCause:
    """A possible cause: what is said of it, in words what undoes it, and the trial that does;
    `is_of_time`: the step depends on how fast its parts are."""

    blamed: RootCause
    words: str
    run: Callable[[], Trial | None]
    is_of_time: bool = False


# By the name of a group, and its ranks: a collective; nobody of a message between two ranks.
Started = list[tuple[str, list[int]]]
_MESSAGES = {"send", "recv_", "recv_any_source_"}
_GROUPS = {"process_group", "group_name"}  # an operator's argument


class Waited(OperatorMode):
    """While entered: the collectives and messages that this rank starts (`started`), and whether it
    does not wait for one of its collectives there (`is_async`). With `waits` each of these is
    waited for."""

    def __init__(self, *, waits: bool) -> None:
        super().__init__()
        self.started: Started = []
        self.is_async, self._waits = False, waits

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        names = [its.name for its in function._schema.arguments]
        if function.namespace not in COLLECTIVES or not _GROUPS.intersection(names):
            return result
        given, group = dict(zip(names, args, strict=False)) | kwargs, group_of((args, kwargs))
        is_message = function._schema.name.partition("::")[2] in _MESSAGES
        everyone = [] if is_message else dist.get_process_group_ranks(group)
        self.started.append((group.group_name, everyone))
        work = result[-1] if isinstance(result, tuple) else result
        if not is_message and isinstance(work, torch.ScriptObject):
            self.is_async |= bool(given.get("async_op", True))
            if self._waits:
                dist.Work.unbox(work).wait()
        return result


def come_to_end(everyones: Sequence[Started]) -> bool:
    """Return whether all ranks come to the end of what they start if each waits for every
    collective: all ranks of its group start it next. Where there are messages, nothing tells."""
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
    """Let autocast cast a weight wherever it is used."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def around_backward(begins: Callable[[list[Tensor]], Callable[[], None]]) -> Iterator[None]:
    """Call `begins` with what each backward pass starts from, and afterwards what it returns."""
    run = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        ends = begins([tensors] if isinstance(tensors, Tensor) else list(tensors))
        run(tensors, *args, **kwargs)
        ends()

    with patch.object(torch.autograd, "backward", backward):
        yield


def kept_in_backward(model: nn.Module) -> Context:
    """Undo what modules write to their buffers when they run within backward: a part that is
    recomputed writes once."""

    def begins(tensors: Any) -> Callable[[], None]:
        kept = [(its, held(its).clone()) for its in model.buffers()]
        return partial(put, kept)

    return around_backward(begins)


@torch.no_grad()
def put(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write the second of each pair to the first."""
    for tensor, value in pairs:
        local(tensor.detach()).copy_(value)


class AsBackwardLeft(ExitStack):
    """While entered, optimizers step with the gradients that the last backward pass left, `times`
    what the reference multiplies its own by. `has_replaced`: the gradients that they would have
    taken are others than backward left; `factor`: in words the multiple of those
    that they are, of the parameters in `fitted`; "" where they are none, or the same."""

    def __init__(self, model: nn.Module, fitted: Iterable[Tensor], times: float) -> None:
        super().__init__()
        self.factor, self.has_replaced, self._times = "", False, times
        self._parameters = list(model.parameters())
        self._fitted = {id(its) for its in fitted}
        self._left: dict[int, Tensor] = {}

    def __enter__(self) -> Self:
        self.enter_context(around_backward(lambda tensors: self._keep))
        self.callback(register_optimizer_step_pre_hook(self._put_back).remove)
        return self

    def _keep(self) -> None:
        gradients = {id(its): its.grad for its in self._parameters if its.grad is not None}
        self._left = {key: gradient.detach().clone() for key, gradient in gradients.items()}

    def _put_back(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        pairs = [
            (its, its.grad, self._left.pop(id(its)))
            for its in self._parameters
            if id(its) in self._left and its.grad is not None
        ]
        if fitted := [pair[1:] for pair in pairs if id(pair[0]) in self._fitted]:
            rows = [map(held, side) for side in zip(*fitted, strict=True)]
            own, left = (torch.cat([its.double().flatten() for its in row]) for row in rows)
            fit = multiple(own, left)
            times = fit.factor / self._times
            self.factor = f"{times:.4g}" if fit.holds(1e-3) and abs(times - 1) > PLAIN else ""
        for parameter, own, left in pairs:
            self.has_replaced |= not torch.equal(held(own), held(left))
            parameter.grad = left if self._times == 1.0 else left * self._times


# What passes a gradient on to several terms, or times a number; of a mean or a sum where it is of
# terms that are stacked.
_LINEAR = {
    "AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "NegBackward0",
    "StackBackward0", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0",
    "UnsqueezeBackward0", "CloneBackward0",
}  # fmt: skip
_OF_STACKED = {"MeanBackward0", "SumBackward0"}


class WithTerm(torch.autograd.Function):
    """A tensor whose backward gives another one a gradient too, which is a number."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, term: Tensor, coefficient: float) -> Tensor:
        ctx.coefficient, ctx.like = coefficient, torch.empty_like(term)
        return first.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.full_like(ctx.like, ctx.coefficient), None


class ScalarValues(TorchFunctionMode):
    """While entered: the `values` of single numbers, by the autograd node that made them."""

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
    """`with LossTerms(model) as terms:` around a step: the `coefficients` that the terms of a loss
    have in it, by name: what the model returns beside its first output by its key, else the
    operator that makes the term. `times`: what the gradients of these terms are multiplied by;
    `joined`: coefficients of terms of the model that are given one though the loss lacks them.
    `outputs`: the terms that the model returns."""

    def __init__(
        self, model: nn.Module, times: Mapping[str, float] | None = None,
        joined: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.coefficients: dict[str, float] = {}
        self.outputs: set[str] = set()
        self._shares = [0.0, 0.0]  # of the loss: as it is, and with other coefficients
        self._nodes: dict[Any, str] = {}
        self._scalars = ScalarValues()
        self._model, self._times, self._joined = model, times or {}, joined or {}

    def __enter__(self) -> Self:
        root = dict(canonical_modules(self._model))[""]
        self.callback(root.register_forward_hook(self._returned).remove)
        self.enter_context(around_backward(self._begins))
        self.enter_context(self._scalars)
        return self

    def of(self, loss: float | None) -> float | None:
        """Return what a loss that the step returned is with the other coefficients."""
        was, now = self._shares
        return loss if loss is None or was == now or not was else loss * now / was

    def _begins(self, losses: list[Tensor]) -> Callable[[], None]:
        if len(losses) == 1 and losses[0].numel() == 1 and losses[0].grad_fn is not None:
            self._watch(losses[0].grad_fn)
        return lambda: None

    def _returned(self, module: nn.Module, args: Any, output: Any) -> Any:
        first, joined = first_real(output), first_real(output)
        leaves, spec = tree_flatten_with_path(output)
        if first is None or not counts():
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
                    joined, leaf = WithTerm.apply(joined, leaf, self._joined[name]), leaf.detach()
            put.append(leaf)
        return tree_unflatten([joined if leaf is first else leaf for leaf in put], spec)

    def _watch(self, loss: Any) -> None:
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
            node.register_prehook(partial(self._weighed, full, value))

    def _weighed(
        self, name: str, value: float, gradients: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        own, times = float(gradients[0].detach().double().sum()), self._times.get(name, 1.0)
        self.coefficients[name] = self.coefficients.get(name, 0.0) + own
        self._shares[0] += own * value
        self._shares[1] += times * own * value
        return (gradients[0] * times, *gradients[1:])


def candidates(inquiry: Inquiry, first: Sequence[Mismatch]) -> Iterator[PossibleCause]:
    """Yield what may be wrong with a step that one can undo from outside."""
    loop, step = inquiry.pair.loop.model, first[0].step
    said = partial(blame, step=step, ranks=range(inquiry.ranks.size))
    names = families([mismatch.name for mismatch in first])
    draws = partial(inquiry.drawing.repeated, loop)
    everyones = inquiry.ranks.gather((inquiry.starts.is_async, inquiry.starts.started))
    if any(is_async for is_async, _ in everyones):
        waited = PossibleCause(
            blamed=said(
                first[0].subject, "collective not waited for", names,
                "A collective is started (async_op=True) and its result is used before it is "
                "done.", "Wait for it first (`work.wait()`).",
            ),
            words="with every collective waited for where it starts",
            run=lambda: inquiry.trial(draws(), Waited(waits=True)), is_of_time=True,
        )  # fmt: skip
        if come_to_end([started for _, started in everyones]):
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
            run=lambda: inquiry.trial(draws(), without_cast_cache()),
        )  # fmt: skip
    yield PossibleCause(
        blamed=said(
            Subject.GRADIENTS, "overwritten before backward", names,
            "What forward keeps for backward is overwritten before backward uses it: an input "
            "that the next one is received into, or a weight that is written in between.",
            "Receive every micro-batch into its own buffer, and write after backward.",
        ),
        words="with copies of what is saved for backward",
        # nothing that is written meanwhile reaches what forward saved
        run=lambda: inquiry.trial(
            draws(), torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda its: its)
        ),
    )  # fmt: skip
    yield from _of_changed_gradients(inquiry, first)
    yield from _of_masks(inquiry, said)


def of_shares(inquiry: Inquiry, blamed: RootCause, ledger: Samples | None) -> RootCause | None:
    """Prove that ranks read other samples: give them even shares of the global batch, or all of it;
    or give the reference what the ranks read of it. None of a job whose batch is a number. All
    ranks call it."""
    if inquiry.pair.loop.evidence:
        return None
    ranks, batch = inquiry.ranks, inquiry.batch
    every = tuple(range(ranks.size))
    groups = {"an even share": (every,), "all": ((ranks.rank,),)} | {
        f"an even share over {axis}": lines for axis, lines in ranks.axes.items()
    }
    sizes: set[int] = set()
    each_tensor(batch, lambda its: sizes.add(len(its)))

    def trials() -> Iterator[tuple[str, Trial | None]]:
        for what, lines in groups.items():
            line = next((its for its in lines if ranks.rank in its), (ranks.rank,))
            words = f"with {what} of the global batch on each rank"
            # ranks with other numbers of samples might run other numbers of collectives
            if not all(ranks.gather(all(size % len(line) == 0 for size in sizes))):
                inquiry.untried += f"; the step {words} was not run, as it does not divide evenly"
                continue
            part = partial(_part, line.index(ranks.rank), len(line))
            yield words, inquiry.trial(share=each_tensor(batch, part))
        if ledger:
            rows = [row for row in range(ledger.count) if row not in ledger.missing]
            rows = sorted([*rows, *ledger.doubled])
            left = each_tensor(batch, lambda its: its[rows] if len(its) == ledger.count else its)
            words = "with the same samples left out, or read twice, in the reference"
            yield words, inquiry.trial_of_reference(left)

    for words, trial in trials():
        if trial is not None and trial.is_near(inquiry.limit.gradients) and not trial.others:
            return trial.of(blamed, words)
    return None


def _part(place: int, count: int, rows: Tensor) -> Tensor:
    return rows.tensor_split(count)[place]


def _of_changed_gradients(inquiry: Inquiry, first: Sequence[Mismatch]) -> Iterator[PossibleCause]:
    """Yield that gradients are changed between backward and the optimizer, if those that differ
    are."""
    holds, ranks = inquiry.pair.holds, inquiry.ranks
    loop, clip = inquiry.pair.loop.model, ranks.gather(inquiry.step.clip)[0]
    chosen = [holds[name].parameter for name in {its.name for its in first} & holds.keys()]
    if clip is None:
        inquiry.untried += (
            "; the gradients that backward leaves were not tried, as clipping changes them by more "
            "than one known factor"
        )
        return

    def run() -> tuple[AsBackwardLeft, Trial | None]:
        left = AsBackwardLeft(loop, chosen, clip)
        return left, inquiry.trial(inquiry.drawing.repeated(loop), before=[left])

    left, _ = run()
    everyones = ranks.gather((left.has_replaced, left.factor), tuple[bool, str])
    wrong = sorted({its.rank for its in first})
    if not all(everyones[rank][0] for rank in wrong):  # a rank that does not clip changes nothing
        return
    factors = {everyones[rank][1] for rank in wrong}
    factor = min(factors) if len(factors) == 1 else ""
    yield PossibleCause(
        blamed=root_cause(
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


def _of_masks(inquiry: Inquiry, said: partial[RootCause]) -> Iterator[PossibleCause]:
    """Yield what may be wrong with the random numbers that were drawn."""
    if not inquiry.drawing.any:
        return
    everyones, loop = inquiry.drawing.everyones, inquiry.pair.loop.model
    # as on all ranks
    alone, loop_only = everyones.alone, set(everyones.by_key) - everyones.used
    mine = sorted({draw.path or draw.outer for draw in drawn_again_otherwise(inquiry.drawing.loop)})
    again = {path for paths in inquiry.ranks.gather(mine) for path in paths}
    who = sorted({rank for its in everyones.unlike.values() for rank in its})

    def candidate(paths: Iterable[str], words: str, *what: Any, **masks: Any) -> PossibleCause:
        place = families(path or "the model" for path in sorted(paths))
        return PossibleCause(
            blamed=said(what[0], what[1], place, *what[2:]), words=words,
            run=lambda: inquiry.trial(inquiry.drawing.repeated(loop, **masks)),
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
        axis = inquiry.ranks.axis_of(who)
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
        yield replace(its, run=partial(inquiry.trial_of_reference, inquiry.batch, alone))
    if loop_only:
        yield candidate(
            [path for path, _ in loop_only], "without dropout there", Subject.RANDOM,
            "dropout in the loop only",
            "The loop applies dropout, but the reference does not.",
            "Use the same mode (train, eval) and rate in both.", still=loop_only,
        )  # fmt: skip


def tried_start(
    said: RootCause, first: Sequence[Mismatch], pair: LoopPair, loss: GlobalLoss,
    step: Callable[[], StepComparison], limit: Tolerance,
) -> RootCause:  # fmt: skip
    """Try why ranks start otherwise than the reference: give the parameters, or the buffer that the
    root cause names, the reference's values, and run the first step. All ranks call it."""
    ranks = loss.ranks
    if any(its.way is not Way.VALUE or its.between for its in first):
        return said
    if said.state is Subject.PARAMETERS:
        for name, shard in pair.holds.items():
            shard.write(pair.wholes[name].parameter)
    else:
        path, _, leaf = said.place.rpartition(".")
        for name, its, own in list(shared_buffers(pair.reference.model, pair.loop.model)):
            if name == said.place and own.dtype is its.dtype:
                put([(own, its)])
            elif name == said.place:  # in a coarser dtype it would be rounded again
                module = dict(canonical_modules(pair.loop.model))[path]
                setattr(module, leaf, its.to(own.device, copy=True))
    seen = step()
    both = [number(its) for its in seen.losses]
    measured = loss.of(*both)
    is_off = measured is not None and numbers_apart(both[0] or 0.0, measured) > limit.losses
    mine = [its.name.partition(" · ")[0] for its in seen.differences.mismatches]
    everyones = ranks.gather(mine + ["loss"] * is_off)
    what = f"with the reference's values of {said.place} on all ranks the first step"
    if apart := families(name for its in everyones for name in its):
        return said.fits(f"{what} still differs ({apart})")
    return said.proven(f"{what} matches the reference: gradients, loss and update")
