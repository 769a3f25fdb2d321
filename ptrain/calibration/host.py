"""What the host takes around operators: tiny models' passes against the operators in them,
called by themselves. The rest is modules, autograd, and what only looks at a tensor."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ptrain.calibration.bench import Bench, RateSheet, Work
from ptrain.models.build import build
from ptrain.models.initialize import initialize
from ptrain.models.ledger import OperatorMode
from ptrain.models.work import sizes_of
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.rates import Hook, OperatorKind

_SHAPES = (  # of both families, so small that operators compute next to nothing
    {"family": "llama", "layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 16},
    {"family": "gpt", "layers": 2, "hidden": 16, "heads": 2},
)
_VOCAB, _SAMPLES, _TOKENS = 260, 2, 4


class _Called(OperatorMode):
    """Operators that ran while it was entered: `number` of all, and those that compute, to be
    called again."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.computing: list[Callable[[], object]] = []

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        ran = sizes_of(function, args, kwargs, result)
        self.number += len(ran)
        if any(what.kind is not OperatorKind.VIEW for what in ran):
            self.computing.append(partial(function, *args, **kwargs))
        return result

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def again(self) -> None:
        """Call what computes."""
        for call in self.computing:
            call()


def host(bench: Bench, sheet: RateSheet) -> None:
    """Of both families the mean."""
    excess: dict[Hook, list[float]] = {}
    for shape in _SHAPES:
        for hook, work in _passes(_model(shape), bench.device):
            work()  # gradients are there, to which backward adds
            with _Called() as called:
                work()
            more = bench.busy_seconds(work) - bench.busy_seconds(called.again)
            excess.setdefault(hook, []).append(more / called.number)
    for hook, seconds in excess.items():
        sheet.note("hooks", hook, seconds=statistics.fmean(seconds))


def _model(fields: dict[str, object]) -> nn.Module:
    written: dict[str, object] = {
        "model": {**fields, "vocab": _VOCAB},
        "mesh": {},
        "batch": {"micro": _SAMPLES, "sequence": _TOKENS},
    }
    shape = load(written).spec.model
    assert isinstance(shape, ModelShape), "a built-in model"
    model = build(shape, sequence=_TOKENS)
    initialize(model, seed=0)
    return model


def _passes(model: nn.Module, device: torch.device) -> Iterator[tuple[Hook, Work]]:
    tokens = torch.zeros(_SAMPLES, _TOKENS, dtype=torch.long, device=device)
    yield Hook.FORWARD_OPERATOR, lambda: model(tokens)
    output = model(tokens)
    gradient = torch.ones_like(output)
    yield Hook.BACKWARD_OPERATOR, lambda: output.backward(gradient, retain_graph=True)
