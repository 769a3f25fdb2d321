"""Slices of the tokens through a model that is not built in: it is given their positions, and the
heads of the modules that attend go to a core that reaches the tokens of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ptrain.axes.context.attention import Span
from ptrain.errors import refused
from ptrain.models.attending import AttendingCall, attention_by, replaced_attention

CoreOver = Callable[[nn.Module, float | None], nn.Module]  # of a core of all tokens, and a scale


class TorchCore(nn.Module):
    """torch's own attention to all tokens; `is_grouped`: it is told that keys may have fewer heads
    than queries."""

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
    """Cores over cp by what calls say, made when one first says it."""

    def __init__(self, core_over: CoreOver) -> None:
        self._core_over = core_over
        self._known: dict[tuple[float | None, bool], nn.Module] = {}

    def attend(self, attend: Callable[..., Tensor], call: AttendingCall) -> Tensor:
        """Return what the queries of a call attend to. `attend` is torch's own function. Raises
        SpecError for a call that is not plainly causal."""
        if call.fault:
            finding = f"attention {call.fault}, unlike with a few tokens"
            raise refused(
                "model", finding, "Use plain causal attention for all lengths, or remove `mesh.cp`."
            )
        key = call.scale, call.is_grouped
        if key not in self._known:
            inner = TorchCore(call.scale, is_grouped=call.is_grouped)
            self._known[key] = self._core_over(inner, call.scale)
        with replaced_attention(attend):
            y_BHTD: Tensor = self._known[key](call.query, call.key, call.value)
        return y_BHTD


class Reaching(nn.Module):
    """A class over that of a module that attends: while its forward runs, in backward again too,
    torch's attention is that of a core."""

    _cores: _Cores

    def forward(self, *given: Any, **named: Any) -> Any:
        torchs: Any = F.scaled_dot_product_attention
        with attention_by(partial(self._cores.attend, torchs)):
            return super().forward(*given, **named)


def reach(module: nn.Module, core_over: CoreOver) -> None:
    """Let a module attend over cp, in place."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (Reaching, kind), {"__module__": kind.__module__})
    vars(module)["_cores"] = _Cores(core_over)


def give_positions(model: nn.Module, argument: str, spans: tuple[Span, ...]) -> None:
    """Let every forward pass of a model have the positions of its tokens, those of `spans`, by the
    argument of this name; nothing where it has none."""
    if argument:
        hook = partial(_with_positions, argument=argument, spans=spans)
        model.register_forward_pre_hook(hook, with_kwargs=True)


def _with_positions(
    _: nn.Module, given: Any, named: Any, *, argument: str, spans: tuple[Span, ...]
) -> tuple[Any, Any]:
    device = next(x.device for x in tree_iter(given) if isinstance(x, Tensor))
    return given, {**named, argument: positions_of(spans, device)}


def positions_of(spans: tuple[Span, ...], device: torch.device) -> Tensor:
    """Return the positions [1, T] of the tokens of these spans."""
    parts = [torch.arange(first, behind, device=device) for first, behind in spans]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)
