"""Checks in one process that a model that is not built in gives equal results on shards of the
tokens and on the full sequence.

A few tokens go through the full model. Then each rank's shard goes through it with its positions.
The tensors that a module passes to attention must be shards of its earlier ones, and attention
returns the shard of its earlier result. This proves that only attention mixes tokens, and
that positions are the given ones. A difference is reported for the first module that shows it. A
model with dropout runs once more with equal random numbers: the numbers for a shard must be the
shard of the numbers for the full sequence.

Training such a model uses the same replacement: it receives the positions of its tokens, and the
heads of its attention go to a core that reaches the tokens of other ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ptrain.axes.context.attention import Span, context_of, spans_at
from ptrain.axes.context.draw import spans_text
from ptrain.axes.context.rules import uncut_heads
from ptrain.axes.context.run.slices import MicroBatchCut, SlicedMasks, masks_at
from ptrain.errors import SpecError, input_error
from ptrain.facts.model import AttentionFacts
from ptrain.internals.dispatch import disable_modes
from ptrain.internals.fakes import READ, detect_fake_mode
from ptrain.internals.part import replace_attributes
from ptrain.models.boundary import UserCodeError
from ptrain.models.contract import forward_of
from ptrain.models.external import named_in_spec
from ptrain.models.facts import (
    POSITIONS,
    AttendingCall,
    AttentionWatch,
    attention_by,
    logits_at,
    not_plain,
)
from ptrain.models.ledger import OperatorMode
from ptrain.models.meta import on_meta
from ptrain.models.modes import (
    DropoutCall,
    copied_buffers,
    drawn_state,
    dropout_by,
    fork_generators,
    in_mode,
    reseed,
    without_dropout,
)
from ptrain.spec.misfits import divisors
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.steps.step import ContextParallel
from ptrain.units import with_noun

# (core for all tokens, scale) -> core over cp
CoreOver = Callable[[nn.Module, float | None], nn.Module]


class TorchCore(nn.Module):
    """torch's attention to all tokens. `is_grouped` is True if keys may have fewer heads than
    queries."""

    def __init__(self, scale: float | None, *, is_grouped: bool) -> None:
        super().__init__()
        self.scale, self.is_grouped = scale, is_grouped

    def forward(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_TT: Tensor | None = None
    ) -> Tensor:
        assert mask_TT is None, "attention over cp is plain causal"
        return F.scaled_dot_product_attention(
            q_BHTD, k_BGTD, v_BGTD, is_causal=True, scale=self.scale, enable_gqa=self.is_grouped
        )


class _Cores:
    """Cores over cp by the arguments of calls, created on first use."""

    def __init__(self, core_over: CoreOver) -> None:
        self._core_over = core_over
        self._known: dict[tuple[float | None, bool], nn.Module] = {}

    def attend(self, attend: Callable[..., Tensor], call: AttendingCall) -> Tensor:
        """Return the attention output of a call.

        Args:
            attend: torch's original function.
            call: The call.

        Raises:
            SpecError: The call is not plainly causal.
        """
        if call.fault:
            raise input_error(
                "model",
                f"attention {call.fault}, unlike with a few tokens",
                "Use plain causal attention for all lengths, or remove `mesh.cp`.",
            )
        key = call.scale, call.is_grouped
        if key not in self._known:
            inner = TorchCore(call.scale, is_grouped=call.is_grouped)
            self._known[key] = self._core_over(inner, call.scale)
        # A core calls torch's attention function itself, which this module replaced. Without the
        # original it would call itself without end.
        with replace_attributes(F, scaled_dot_product_attention=attend):
            y_BHTD: Tensor = self._known[key](call.query, call.key, call.value)
        return y_BHTD


class ContextAttentionMixin(nn.Module):
    """A mixin for the class of an attention module. During its forward, including recomputation,
    torch's attention function is replaced by a core over cp."""

    _cores: _Cores

    def forward(self, *given: Any, **named: Any) -> Any:
        torchs: Any = F.scaled_dot_product_attention
        with attention_by(partial(self._cores.attend, torchs)):
            return super().forward(*given, **named)


def attend_over_cp(module: nn.Module, core_over: CoreOver) -> None:
    """Let a module attend over cp, by changing its class in place."""
    kind = type(module)
    module.__class__ = type(
        kind.__name__, (ContextAttentionMixin, kind), {"__module__": kind.__module__}
    )
    vars(module)["_cores"] = _Cores(core_over)


def give_positions(model: nn.Module, argument: str, spans: tuple[Span, ...]) -> None:
    """Pass the positions of tokens to every forward pass of a model.

    Args:
        model: The model, on which a forward pre-hook is registered.
        argument: The keyword argument that receives the positions, [1, T]. "" changes nothing.
        spans: The token ranges (first, end), end exclusive, in the rank's order.
    """
    if argument:
        hook = partial(_with_positions, argument=argument, spans=spans)
        model.register_forward_pre_hook(hook, with_kwargs=True)


def _with_positions(
    _: nn.Module, given: Any, named: Any, *, argument: str, spans: tuple[Span, ...]
) -> tuple[Any, Any]:
    device = next(x.device for x in tree_iter(given) if isinstance(x, Tensor))
    return given, {**named, argument: positions_of(spans, device)}


def positions_of(spans: tuple[Span, ...], device: torch.device) -> Tensor:
    """Return the positions of tokens.

    Args:
        spans: The token ranges (first, end), end exclusive, in the rank's order.
        device: The device of the result.

    Returns:
        The positions from 0, [1, T] in int64.
    """
    parts = [torch.arange(first, behind, device=device) for first, behind in spans]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


# Draws of random numbers in a forward pass, by dropout or otherwise. A rank's pass must draw the
# shard of the numbers that the pass of all tokens drew.


_DROPOUT = "dropout"
_ATTENTION = "_scaled_dot_product"  # over cp attention has no dropout


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw of random numbers of this shape by an operator in the code of `module`."""

    module: str
    operator: str
    shape: tuple[int, ...]


@contextmanager
def intercept_draws(
    watch: AttentionWatch,
    *,
    drop: Callable[[Draw, DropoutCall], Tensor],
    meet: Callable[[Draw], None],
) -> Iterator[None]:
    """Temporarily replace dropouts, and report all other random draws.

    Args:
        watch: The record of the running module, which names the place of a draw.
        drop: Returns the result of a dropout, given the draw and the call. Its draws are ignored.
        meet: Called with each draw that is not a dropout.
    """
    draws = _Draws(watch, meet)

    def dropped(call: DropoutCall) -> Tensor:
        draw = Draw(watch.running_module, _DROPOUT, tuple(call.input.shape))
        with draws.ignore_draws():
            return drop(draw, call)

    with draws, dropout_by(dropped):
        yield


class SlicedDraws:
    """A check of a rank's draws against the draws of all tokens, in order.

    Args:
        before: The draws of all tokens.
        masks: The dropout masks of the rank's tokens.
        in_training: The masks of a training micro-batch, which must not confuse other sizes with
            the rank's tokens.
        refuse: Returns the error for a draw that is not the shard of the earlier one, and a reason.
    """

    def __init__(
        self,
        before: Sequence[Draw],
        masks: SlicedMasks,
        in_training: SlicedMasks,
        refuse: Callable[[Draw, str], SpecError],
    ) -> None:
        self._before, self._masks, self._in_training = deque(before), masks, in_training
        self._refuse = refuse

    def check_pass(self, watch: AttentionWatch) -> AbstractContextManager[None]:
        """Return a context for the rank's pass."""
        return intercept_draws(watch, drop=self._check_dropout, meet=self._check_draw)

    def require_all(self) -> None:
        """Raise for draws of all tokens that the rank's pass did not make."""
        if self._before:
            raise self._refuse(self._before[0], "draws random numbers that ranks of cp do not draw")

    def _check_dropout(self, draw: Draw, call: DropoutCall) -> Tensor:
        before = self._next_draw(draw)
        if draw.shape == before.shape:  # not of tokens: all ranks draw equal numbers
            if self._is_ambiguous(draw.shape):
                what = (
                    f"applies dropout to {_shape_text(draw.shape)}, which has the size of the "
                    "local tokens but does not contain tokens"
                )
                raise self._refuse(draw, what)
            return call.by_before()
        if not self._masks.are_of(draw.shape) or self._masks.of_all(draw.shape) != before.shape:
            what = (
                f"applies dropout to {_shape_text(before.shape)}, and with the local tokens to "
                f"{_shape_text(draw.shape)}; "
            )
            raise self._refuse(draw, f"{what}only masks [samples, tokens, …] can be sharded")
        return self._masks.drop(call)

    def _is_ambiguous(self, shape: Sequence[int]) -> bool:
        first = self._in_training.samples if shape[0] == self._masks.samples else shape[0]
        return self._in_training.are_of((first, *shape[1:]))

    def _check_draw(self, draw: Draw) -> None:
        if draw.shape != self._next_draw(draw).shape:
            what = (
                f"draws random numbers itself ({draw.operator}), with different shapes for local "
            )
            raise self._refuse(draw, f"{what}and for all tokens")

    def _next_draw(self, draw: Draw) -> Draw:
        before = self._before.popleft() if self._before else None
        if before is None or (before.module, before.operator) != (draw.module, draw.operator):
            raise self._refuse(draw, "draws random numbers that a single device does not draw")
        return before


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


class _Draws(OperatorMode):
    """Observes operators that draw random numbers."""

    def __init__(self, watch: AttentionWatch, meet: Callable[[Draw], None]) -> None:
        super().__init__()
        self._watch, self._meet = watch, meet
        self._is_hidden = False

    def ignore_draws(self) -> AbstractContextManager[None]:
        """Temporarily ignore draws."""
        return replace_attributes(self, _is_hidden=True)

    def on_operator(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        name = function._schema.name.partition("::")[2]
        draws = torch.Tag.nondeterministic_seeded in function.tags
        if draws and not self._is_hidden and not name.startswith(_ATTENTION):
            shape = next(tuple(x.shape) for x in tree_iter(result) if isinstance(x, Tensor))
            self._meet(Draw(self._watch.running_module, name, shape))


Spans = tuple[Span, ...]
Around: TypeAlias = "Callable[[AttentionWatch], AbstractContextManager[None]]"

_TOKENS = 1  # the dimension of inputs and logits
_OF_HEADS = 2  # the dimension of tokens in heads [B, H, T, D]
_CHUNK = 2  # minimum tokens of a chunk; the number of chunks is the spec's
_MOST_TOKENS = 4096  # at most, attention is no more work than the other operators
_BY_DROPOUT = "Apply dropout to [samples, tokens, …] with torch.nn.functional.dropout, "
_BY_DROPOUT += "as nn.Dropout does"
_OPERATIONS = 10**9  # maximum of a forward pass, for less than a second


def require_slices(model: nn.Module, spec: Spec, attending: AttentionFacts | None) -> None:
    """Check that a model gives equal results on shards of the tokens and on all tokens.

    This costs forward passes of a few tokens: three of the full model, and one or two for each of
    two ranks. On fake tensors, which have no values, results are not compared.

    Args:
        model: The model, with weights or on fake tensors.
        spec: The spec.
        attending: The attention modules, None for a built-in model.

    Raises:
        SpecError: Results differ, attention is not plainly causal, or Ulysses cannot divide the
            heads.
    """
    if (step := context_of(spec)) is None or attending is None:
        return
    _require_heads(spec, attending)
    _require_plain(model, spec, attending)
    if detect_fake_mode() is None:
        _Rehearsal(model, spec, attending, _shorten_sequence(model, step)).require_alike()


def _shorten_sequence(model: nn.Module, step: ContextParallel) -> ContextParallel:
    """Return the step for a sequence that goes through the model in less than a second.

    It is the full sequence if that is short enough.
    """
    chunks = step.ulysses * step.ring * (2 if step.is_balanced else 1)
    weights = sum(parameter.numel() for parameter in model.parameters())
    tokens = min(_MOST_TOKENS, _OPERATIONS // (2 * weights))
    per_chunk = min(step.sequence // chunks, max(_CHUNK, tokens // chunks))
    return replace(step, sequence=chunks * per_chunk)


def _require_plain(model: nn.Module, spec: Spec, attending: AttentionFacts) -> None:
    """Raise SpecError if attention to all of a sample's tokens is not plainly causal.

    The rehearsal has fewer tokens, on which attention may differ. The check runs on meta tensors,
    which have no values. If the model's code needs values, it is skipped: calls are checked when
    they run.
    """
    place, name = named_in_spec(model, spec)

    def meet(module: str, call: AttendingCall) -> Tensor:
        if call.fault:
            raise not_plain(place, module or name, call)
        return call.query.new_empty(call.query.shape)

    positions = positions_of(((0, spec.batch.sequence),), torch.device("meta"))
    # Meters must not count tensors of a check, and numbers that it draws must not shift those of
    # the run.
    with disable_modes(), fork_generators(), suppress(UserCodeError, *READ):
        with forward_of(model, positions, spec):  # the model's code may be impossible to copy
            bare = on_meta(model)
        with AttentionWatch(bare, meet).watch():
            logits_at(bare, positions, attending.positions, spec)


def _require_heads(spec: Spec, attending: AttentionFacts) -> None:
    tp = spec.degree(Axis.TP)
    for module in attending.modules:
        counts = {"": module.heads.heads, " of keys": module.heads.kv_heads}
        for what, heads in counts.items():
            if heads % tp:
                finding = f"tp={tp} does not divide {with_noun(heads, 'head')}{what} of "
                finding += f"{module.name}; cp needs equal numbers of heads on each rank"
                choice = ", ".join(map(str, divisors(heads)))
                raise input_error("mesh.tp", finding, f"Use one of {choice} for `mesh.tp`.")
        if faults := [*uncut_heads(spec, module.heads.heads // tp, module.name)]:
            raise SpecError(*faults)


def _micro_batch_cut(spec: Spec) -> MicroBatchCut:
    slices = spec.degree(Axis.CP) * (spec.degree(Axis.TP) if spec.is_sequence_parallel else 1)
    return MicroBatchCut(samples=spec.batch.micro, slices=slices)


def _no_context(_: AttentionWatch) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class _AttentionResult:
    """A module's call of attention, and its result."""

    call: AttendingCall
    output: Tensor


class _Rehearsal:
    """The forward passes of a model on the tokens of `step`."""

    def __init__(
        self, model: nn.Module, spec: Spec, attending: AttentionFacts, step: ContextParallel
    ) -> None:
        self.model, self.spec, self.step = model, spec, step
        self.positions = attending.positions
        self.place, self.name = named_in_spec(model, spec)
        self.whole: dict[str, _AttentionResult] = {}
        self._is_drawing = False
        self._torchs: Callable[..., Tensor] = F.scaled_dot_product_attention

    def require_alike(self) -> None:
        """Raise SpecError for the first mismatch.

        The model runs in training mode without dropout, or in evaluation mode if it still draws
        random numbers.
        """
        # Positions start at 0 on the first rank and later on the last one. The ranks between would
        # cost a pass each and add no further case.
        ends, every = {0, self.step.ulysses * self.step.ring - 1}, ((0, self.step.sequence),)
        with copied_buffers(self.model), fork_generators(), without_dropout(self.model):
            before = drawn_state()
            # A first pass in training mode shows if the model draws numbers in spite of disabled
            # dropout.
            with in_mode(self.model, training=True):
                self._run(every, self._record_attention)
            with in_mode(self.model, training=drawn_state() == before):
                whole = self._run(every, self._record_attention)
                for index in sorted(ends):
                    self._require_rank(spans_at(self.step, index), whole)
        with copied_buffers(self.model), fork_generators(), in_mode(self.model, training=True):
            self._require_draws(every, sorted(ends))

    def _require_draws(self, every: Spans, ends: Sequence[int]) -> None:
        """Raise SpecError for draws that are not the shard of the draws of all tokens."""
        before: list[Draw] = []

        def note(draw: Draw, call: DropoutCall) -> Tensor:
            before.append(draw)
            return call.by_before()

        self._is_drawing = True
        reseed(0)
        whole = self._run(
            every, self._record_attention, partial(intercept_draws, drop=note, meet=before.append)
        )
        in_training = context_of(self.spec)
        assert in_training is not None, "the model is cut over cp"
        for index in ends if before else ():
            masks = masks_at(
                self.step,
                index,
                MicroBatchCut(samples=1, slices=self.step.ulysses * self.step.ring),
            )
            known = masks_at(in_training, index, _micro_batch_cut(self.spec))
            draws = SlicedDraws(before, masks, known, self._draw_error)
            # The pass of all tokens started from this seed, so draws are comparable only from here.
            reseed(0)
            self._require_rank(spans_at(self.step, index), whole, draws.check_pass)
            draws.require_all()

    def _draw_error(self, draw: Draw, what: str) -> SpecError:
        return input_error(
            self.place, f"{draw.module or self.name} {what}", f"{_BY_DROPOUT}, or remove `mesh.cp`."
        )

    def _run(
        self,
        spans: Spans,
        attend: Callable[[str, AttendingCall], Tensor],
        around: Around = _no_context,
    ) -> Tensor:
        positions = positions_of(spans, next(self.model.parameters()).device)
        watch = AttentionWatch(self.model, attend)
        with watch.watch(), around(watch):
            return logits_at(self.model, positions, self.positions, self.spec).detach()

    def _record_attention(self, module: str, call: AttendingCall) -> Tensor:
        output = call.by_torch(self._torchs)
        self.whole[module] = _AttentionResult(call, output)
        return output

    def _require_rank(self, spans: Spans, whole: Tensor, around: Around = _no_context) -> None:
        logits = self._run(spans, partial(self._replay_attention, spans), around)
        if not _is_alike(logits, _take_spans(whole, spans, _TOKENS)):
            raise self._difference_error(spans, self.name, "returns different logits")

    def _replay_attention(self, spans: Spans, module: str, call: AttendingCall) -> Tensor:
        if (before := self.whole.get(module)) is None or call.fault:
            raise self._difference_error(
                spans, module, call.fault or "computes attention where it did not"
            )
        for what in ("query", "key", "value"):
            given = _take_spans(getattr(before.call, what), spans, _OF_HEADS)
            if not _is_alike(getattr(call, what), given):
                raise self._difference_error(
                    spans, module, f"passes a different {what} to attention"
                )
        return _take_spans(before.output, spans, _OF_HEADS)

    def _difference_error(self, spans: Spans, module: str, what: str) -> SpecError:
        finding = f"{module or self.name}, given only tokens {spans_text(spans)} of "
        finding += f"{self.step.sequence}, "
        finding += f"{what} than with all tokens: "
        if self._is_drawing:
            finding += "its random draws depend on the number of tokens"
            return input_error(self.place, finding, f"{_BY_DROPOUT}, or remove `mesh.cp`.")
        if self.positions:
            finding += f"{self.name} does not use the {self.positions} that it receives"
            remedy = "Take all positions from this argument"
        else:
            finding += f"the forward of {self.name} accepts no positions"
            remedy = (
                f"Add an argument {POSITIONS[1]}, int64 [1, tokens], with positions in the full "
            )
            remedy += "sequence"
        finding += ", or tokens interact outside of attention"
        return input_error(self.place, finding, f"{remedy}; or remove `mesh.cp`.")


def _take_spans(x: Tensor, spans: Spans, dim: int) -> Tensor:
    return torch.cat([x.narrow(dim, first, behind - first) for first, behind in spans], dim)


def _is_alike(own: Tensor, whole: Tensor) -> bool:
    """Return True if two tensors are equal except for rounding.

    Products of other sizes sum in another order. Results at wrong positions differ by the magnitude
    of the values.
    """
    if own.shape != whole.shape or own.dtype != whole.dtype:
        return False
    # The square root of eps lies far above the rounding errors of a sum and far below the values
    # themselves.
    bound = torch.finfo(whole.dtype).eps ** 0.5 * whole.abs().nan_to_num().max().item()
    return torch.allclose(own, whole, rtol=0.0, atol=bound, equal_nan=True)
