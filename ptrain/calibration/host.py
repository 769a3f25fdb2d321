"""What the host takes around operators: tiny models' passes against the operators in them,
called by themselves. The rest is modules, autograd, and what only looks at a tensor. Beside a GPU
it is all that the host takes to issue them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ptrain.activations.run.apply import keep
from ptrain.axes.pipeline.run.passes import backward_input, backward_weight
from ptrain.calibration.bench import Bench, RateSheet
from ptrain.calibration.points import Points
from ptrain.models.build import build
from ptrain.models.initialize import initialize
from ptrain.models.ledger import OperatorMode
from ptrain.models.units import blocks_of
from ptrain.models.work import sizes_of
from ptrain.rates.pace import around
from ptrain.rooms.registry import Registry
from ptrain.rooms.tiers import Tiers
from ptrain.spec.activations import FULL, SELECTIVE, Kept
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Tier
from ptrain.spec.rates import Hook, OperatorKind
from ptrain.steps.step import Keep
from ptrain.timeline import Kind

_HIDDEN = 16  # so few features that operators compute next to nothing
_SHAPES: tuple[dict[str, object], ...] = (
    {"family": "llama", "layers": 2, "hidden": _HIDDEN, "heads": 2, "kv_heads": 2, "ffn": 16},
    {"family": "gpt", "layers": 2, "hidden": _HIDDEN, "heads": 2},
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


def host(bench: Bench, sheet: RateSheet, _: Points) -> None:
    """Of both families the mean."""
    of_pass = issuing_seconds if bench.device.type == "cuda" else _seconds_more
    excess: dict[Hook, list[float]] = {}
    for shape in _SHAPES:
        plain = _passes(_model(shape).to(bench.device), bench.device)
        for hook, before, work in (*plain, *_kept(shape, bench.device)):
            excess.setdefault(hook, []).append(of_pass(bench, before, work))
    for hook, seconds in excess.items():
        sheet.note("hooks", hook, seconds=statistics.fmean(seconds))


def _seconds_more(bench: Bench, before: Callable[[], Any], work: Callable[[Any], object]) -> float:
    """What a pass takes beside what its operators take, by their number."""
    called = _called(before, work)
    whole: float = bench.busy_seconds(lambda: work(before())) - bench.busy_seconds(before)
    alone = bench.busy_seconds(called.again)
    more: float = (whole - alone) / called.number
    return more


def issuing_seconds(
    bench: Bench, before: Callable[[], Any], work: Callable[[Any], object]
) -> float:
    """What the host takes to issue a pass, by the number of its operators."""
    called = _called(before, work)
    whole = bench.issuing_seconds(lambda: work(before())) - bench.issuing_seconds(before)
    return whole / called.number


def _called(before: Callable[[], Any], work: Callable[[Any], object]) -> _Called:
    work(before())  # gradients are there, to which backward adds
    called = _Called()
    output = before()
    with called:
        work(output)
    return called


def _model(fields: dict[str, object]) -> nn.Module:
    """It is given hidden states, as a stage in the middle."""
    written: dict[str, object] = {
        "model": {**fields, "vocab": _VOCAB, "tied": False},
        "mesh": {},
        "batch": {"micro": _SAMPLES, "sequence": _TOKENS},
    }
    shape = load(written).spec.model
    assert isinstance(shape, ModelShape), "a built-in model"
    model = build(shape, sequence=_TOKENS)
    initialize(model, seed=0)
    model.embed = nn.Identity()
    return model


def _passes(
    model: nn.Module, device: torch.device
) -> Iterator[tuple[Hook, Callable[[], Any], Callable[[Any], object]]]:
    """Each kind of pass, and what comes before it."""
    x = torch.randn(_SAMPLES, _TOKENS, _HIDDEN, device=device, requires_grad=True)
    gradient, parameters = torch.ones_like(model(x)), list(model.parameters())

    def halves(output: torch.Tensor) -> None:
        _, groups = backward_input(output, gradient, x, parameters)
        backward_weight(parameters, groups)

    yield Hook.FORWARD_OPERATOR, lambda: x, model
    yield Hook.BACKWARD_OPERATOR, lambda: model(x), lambda output: output.backward(gradient)
    yield Hook.HALVES_OPERATOR, lambda: model(x), halves


def _kept(
    fields: dict[str, object], device: torch.device
) -> Iterator[tuple[Hook, Callable[[], Any], Callable[[Any], object]]]:
    """Both passes of models whose layers' activations are kept in other ways."""
    x = torch.randn(_SAMPLES, _TOKENS, _HIDDEN, device=device, requires_grad=True)
    for kept in (Kept(policy=FULL), Kept(policy=SELECTIVE), Kept(tier=Tier.HOST)):
        model = _model(fields).to(device)
        blocks = tuple((name, kept) for name in blocks_of(model))
        keep(model, Keep(blocks=blocks), Tiers(device, Registry()))

        def passes(_: object, model: nn.Module = model) -> None:
            model(x).sum().backward()

        yield around(kept, Kind.FORWARD), lambda: None, passes
