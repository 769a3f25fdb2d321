"""Attention of a model that is not built in, as far as it goes through torch's
scaled_dot_product_attention: which modules call it and with what, and another in its place.

It is called by its name, `torch.nn.functional.scaled_dot_product_attention`, or through whatever
looks that up when it runs, as transformers and nn.MultiheadAttention do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.errors import SpecError, refused
from ptrain.facts.model import Attending, AttendingModule, AttentionHeads
from ptrain.models.chain import TOKENS
from ptrain.models.contract import forward_of, require_logits
from ptrain.models.dropout import DropoutCall, dropout_by
from ptrain.models.modes import copied_buffers, forked, in_mode
from ptrain.models.roles import named_in_spec
from ptrain.models.transformer import Transformer
from ptrain.spec.spec import Spec

_NAME = "torch.nn.functional.scaled_dot_product_attention"
POSITIONS = ("position_ids", "positions")  # what an argument for them is called
_NO_CP = "or write no cp"
_KINDS = 29  # of tokens, which every vocabulary has
_OF_HEADS = 4  # dimensions: samples, heads, tokens, features
# By the name of a config's field: attention to fewer tokens than all before, which transformers
# writes as a mask only where a pass has as many tokens or more.
_WINDOWS = ("sliding_window", "attention_chunk_size")
_BY_LENGTH = ("dynamic", "longrope")  # rotations that depend on the last position of a pass


@dataclass(frozen=True, slots=True)
class AttendingCall:
    """One call: its heads [B, H, T, D], and what is said beside."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    is_grouped: bool

    @property
    def fault(self) -> str:
        """What of it is more than plain causal attention of some tokens to themselves; nothing of
        what is not."""
        shapes = [tuple(x.shape) for x in (self.query, self.key, self.value)]
        (*samples, length, features), key, value = shapes
        if self.mask is not None:
            return "is given a mask"
        if not self.is_causal:
            return "is not causal"
        if self.dropout:
            return f"drops out {self.dropout:g} of its scores"
        if len(shapes[0]) != _OF_HEADS:
            return f"is given queries of {len(shapes[0])} dimensions, not [B, H, T, D]"
        if key != value or (key[0], *key[2:]) != (samples[0], length, features):
            return f"has queries {[*shapes[0]]}, keys {[*key]} and values {[*value]}"
        return ""

    @property
    def heads(self) -> AttentionHeads:
        """Of what heads it is."""
        return AttentionHeads(
            heads=self.query.shape[1],
            kv_heads=self.key.shape[1],
            head_dim=self.query.shape[-1],
        )

    def by_torch(self, attend: Callable[..., Tensor], *heads: Tensor) -> Tensor:
        """Return what `attend`, torch's own function, makes of the call, or of other heads."""
        return attend(
            *(heads or (self.query, self.key, self.value)),
            attn_mask=self.mask,
            dropout_p=self.dropout,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.is_grouped,
        )


@contextmanager
def replaced_attention(replacement: Callable[..., Tensor]) -> Iterator[None]:
    """Within it the name stands for `replacement`, which is called as torch's function is."""
    functional: Any = F
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = replacement
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


@contextmanager
def attention_by(attend: Callable[[AttendingCall], Tensor]) -> Iterator[None]:
    """Within it `attend` is given every call."""

    def attended(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return attend(
            AttendingCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        )

    with replaced_attention(attended):
        yield


class AttentionWatch:
    """Follows the attention of a model's forward passes: `attend` is given each call, with the name
    of the module whose code makes it."""

    def __init__(self, model: nn.Module, attend: Callable[[str, AttendingCall], Tensor]) -> None:
        self._model, self._attend = model, attend
        self._running: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Calls made within it are given on."""
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                enter, leave = self._entering(name), self._leaving
                stack.callback(module.register_forward_pre_hook(enter).remove)
                handle = module.register_forward_hook(leave, always_call=True)
                stack.callback(handle.remove)
            stack.enter_context(attention_by(self._called))
            yield

    @property
    def running(self) -> str:
        """The module whose code runs; "" is the model."""
        return self._running[-1] if self._running else ""

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._running.append(name)

        return enter

    def _leaving(self, *_: Any) -> None:
        self._running.pop()

    def _called(self, call: AttendingCall) -> Tensor:
        return self._attend(self.running, call)


def attending_of(model: nn.Module, spec: Spec) -> Attending | None:
    """Return what slices of the tokens need of a model that is not built in; None without cp.
    Raises SpecError for attention that is more than plainly causal. Runs the model forward, on a
    few tokens."""
    if not spec.has_token_slices or isinstance(model, Transformer):
        return None
    place, name = named_in_spec(model, spec)
    _require_all_before(getattr(model, "config", None), place, name, spec)
    torchs: Callable[..., Tensor] = F.scaled_dot_product_attention
    known: dict[str, AttentionHeads] = {}

    def note(module: str, call: AttendingCall) -> Tensor:
        if call.fault:
            raise not_plain(place, module or name, call)
        if module in known:
            finding = f"{module or name} attends twice in a forward pass"
            raise refused(place, finding, f"let a module of its own do each, {_NO_CP}")
        known[module] = call.heads
        return call.by_torch(torchs)

    dropping: dict[str, None] = {}

    def note_dropout(call: DropoutCall) -> Tensor:
        dropping[watch.running] = None
        return call.by_before()

    watch = AttentionWatch(model, note)
    count, argument = min(TOKENS, spec.batch.sequence), _positions(model)
    positions = torch.arange(count, device=next(model.parameters()).device).unsqueeze(0)
    with (
        in_mode(model, training=True), copied_buffers(model), forked(),
        watch.watching(), dropout_by(note_dropout),
    ):  # fmt: skip
        logits_at(model, positions, argument, spec)
    if not known:
        finding = f"no module of {name} attends by {_NAME}, the way to tokens of other ranks"
        raise refused(place, finding, f"let its attention call it by this name, {_NO_CP}")
    modules = tuple(AttendingModule(name=module, heads=heads) for module, heads in known.items())
    return Attending(modules=modules, positions=argument, dropping=tuple(dropping))


def logits_at(model: nn.Module, positions: Tensor, argument: str, spec: Spec) -> Tensor:
    """Return the logits that `model` gives of some tokens at these positions [1, T], with which it
    is called by an argument of this name, if it has one. Raises SpecError as `logits_of`."""
    tokens = 1 + positions % _KINDS
    with forward_of(model, tokens, spec), torch.enable_grad():  # without a gradient they are none
        output = model(tokens, **({argument: positions} if argument else {}))
    return require_logits(output, model, tokens, spec)


def _positions(model: nn.Module) -> str:
    try:
        known = inspect.signature(model.forward).parameters
    except ValueError:  # a builtin may have no signature
        return ""
    return next((name for name in POSITIONS if name in known), "")


def not_plain(place: str, module: str, call: AttendingCall) -> SpecError:
    """Return the refusal of a call that is more than plain causal attention, of this module."""
    finding = f"the attention of {module} {call.fault}, and cp joins parts of plain causal "
    finding += "attention"
    remedy = f"let it call {_NAME}(…, is_causal=True) alone"
    if call.dropout and call.is_causal:
        remedy = "let it keep them all (in a config of transformers attention_dropout: 0, or "
        remedy += "attn_pdrop: 0)"
    return refused(place, finding, f"{remedy}, {_NO_CP}")


def _require_all_before(config: Any, place: str, name: str, spec: Spec) -> None:
    """Raises SpecError for a config of transformers by which attention, or what positions mean,
    depends on how many tokens a pass has: a rank's pass has a slice of them."""
    at = place if place != "model.hf" else "model.config"
    for field in _WINDOWS:
        size = getattr(config, field, None)
        if isinstance(size, int) and 0 < size <= spec.batch.sequence:
            finding = f"{field} of {name} is {size}, and a sample has {spec.batch.sequence} tokens"
            finding += ": cp joins parts of attention to all tokens before"
            remedy = f"write {field}: null or {spec.batch.sequence + 1}, {_NO_CP}"
            raise refused(at, finding, remedy)
    for kind, original in _rotations(getattr(config, "rope_parameters", None)):
        original = original or getattr(config, "max_position_embeddings", 0)
        if kind in _BY_LENGTH and original < spec.batch.sequence:
            finding = f"rotations of {name} are {kind}: they depend on how many tokens a pass has, "
            finding += f"beyond {original}, and a rank of cp has a slice of {spec.batch.sequence}"
            remedy = f"write another rope_type, at most {original} tokens, {_NO_CP}"
            raise refused(at, finding, remedy)


def _rotations(parameters: object) -> Iterator[tuple[str, int]]:
    """Yield kind and original length of a config's rotations, which each kind of layer may have."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters["rope_type"], parameters.get("original_max_position_embeddings", 0)
        return
    for inner in parameters.values():
        yield from _rotations(inner)
