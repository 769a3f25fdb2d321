"""What the host takes around operators: tiny layers' passes against the operators in them, called
by themselves. The rest is modules, autograd, and what only looks at a tensor. Beside a GPU it is
all that the host takes to issue them.

It is shared out by the number of operators that a clock reckons with, so that what runs in a pass
beside these (a copy for each tensor that goes off the device, what torch looks at between the
halves of a backward pass) is in the seconds of those.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ptrain.activations.run.apply import keep
from ptrain.axes.pipeline.run.passes import backward_input, backward_weight
from ptrain.calibration.bench import Bench, Points, RateSheet
from ptrain.derivation.estimate import derive
from ptrain.derivation.work import model_work
from ptrain.facts.model import LayerWork, Operator, PassWork
from ptrain.models.initialize import build, initialize
from ptrain.models.ledger import OperatorMode
from ptrain.models.units import blocks_of
from ptrain.models.work import sizes_of
from ptrain.rates.pace import around
from ptrain.rooms.registry import Registry
from ptrain.rooms.torch import Tiers
from ptrain.spec.activations import FULL, PLAIN, SELECTIVE, Kept
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Tier
from ptrain.spec.rates import Hook, OperatorKind
from ptrain.spec.spec import ActivationSpec, Spec
from ptrain.steps.step import Keep
from ptrain.timeline import Kind

_HIDDEN = 16  # so few features that operators compute next to nothing
_SHAPES: tuple[dict[str, object], ...] = (
    {"family": "llama", "layers": 2, "hidden": _HIDDEN, "heads": 2, "kv_heads": 2, "ffn": 16},
    {"family": "gpt", "layers": 2, "hidden": _HIDDEN, "heads": 2},
)
_VOCAB, _SAMPLES, _TOKENS = 260, 2, 4

Work = Callable[[Any], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPass:
    """Passes of a tiny model: what comes `before` them, `work` of what that gives, and how many
    operators a clock counts in them. `computing` is called by itself to compute as much."""

    hook: Hook
    operators: int
    before: Callable[[], Any]
    work: Work
    computing: Callable[[], object]


class _Called(OperatorMode):
    """Operators that compute and ran while it was entered, to be called again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        ran = sizes_of(function, args, kwargs, result)
        if any(what.kind is not OperatorKind.VIEW for what in ran):
            self.calls.append(partial(function, *args, **kwargs))
        return result

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def again(self) -> None:
        """Call them."""
        for call in self.calls:
            call()


def host(bench: Bench, sheet: RateSheet, _: Points) -> None:
    """Of both families the mean."""
    seconds_of = issuing_seconds if bench.device.type == "cuda" else excess_seconds
    seconds: dict[Hook, list[float]] = {}
    for shape in _SHAPES:
        for passes in host_passes(shape, bench.device):
            seconds.setdefault(passes.hook, []).append(seconds_of(bench, passes))
    for hook, taken in seconds.items():
        sheet.note("hooks", hook, seconds=statistics.fmean(taken))


def excess_seconds(bench: Bench, passes: HostPass) -> float:
    """What they take beside what their operators take, by the number of these."""
    whole = bench.busy_seconds(lambda: passes.work(passes.before()))
    rest = bench.busy_seconds(passes.before) + bench.busy_seconds(passes.computing)
    more: float = (whole - rest) / passes.operators
    return more


def issuing_seconds(bench: Bench, passes: HostPass) -> float:
    """What the host takes to issue them, by the number of their operators."""
    whole = bench.issuing_seconds(lambda: passes.work(passes.before()))
    return (whole - bench.issuing_seconds(passes.before)) / passes.operators


def host_passes(fields: dict[str, object], device: torch.device) -> Iterator[HostPass]:
    """Yield all kinds of passes of a model."""
    spec = _spec(fields)
    yield from _passes(spec, device)
    for kept in (Kept(policy=FULL), Kept(policy=SELECTIVE), Kept(tier=Tier.HOST)):
        yield _kept(spec, kept, device)


def _spec(fields: dict[str, object]) -> Spec:
    written: dict[str, object] = {
        "model": {**fields, "vocab": _VOCAB, "tied": False},
        "mesh": {},
        "batch": {"micro": _SAMPLES, "sequence": _TOKENS},
    }
    return load(written).spec


def _model(spec: Spec, device: torch.device) -> nn.Module:
    """Its layers, and nothing around them: given and giving hidden states."""
    assert isinstance(spec.model, ModelShape), "a built-in model"
    model = build(spec.model, sequence=_TOKENS)
    initialize(model, seed=0)
    model.embed, model.norm, model.head = nn.Identity(), nn.Identity(), nn.Identity()
    return model.to(device)


def _hidden(device: torch.device) -> torch.Tensor:
    return torch.randn(_SAMPLES, _TOKENS, _HIDDEN, device=device, requires_grad=True)


def _passes(spec: Spec, device: torch.device) -> Iterator[HostPass]:
    """Each kind of pass of layers whose activations stay."""
    model, x = _model(spec, device), _hidden(device)
    gradient, parameters = torch.ones_like(model(x)), list(model.parameters())

    def halves(output: torch.Tensor) -> None:
        _, groups = backward_input(output, gradient, x, parameters)
        backward_weight(parameters, groups)

    works: dict[Hook, tuple[Callable[[], Any], Work, Callable[[LayerWork], PassWork]]] = {
        Hook.FORWARD_OPERATOR: (lambda: x, model, lambda layer: layer.forward),
        Hook.BACKWARD_OPERATOR: (
            lambda: model(x),
            lambda output: output.backward(gradient),
            lambda layer: layer.backward,
        ),
        Hook.HALVES_OPERATOR: (
            lambda: model(x),
            halves,
            lambda layer: layer.inputs + layer.weights,
        ),
    }
    for hook, (before, work, part) in works.items():
        yield HostPass(
            hook=hook,
            operators=_operators(spec, PLAIN, part),
            before=before,
            work=work,
            computing=_called(before, work).again,
        )


def _kept(spec: Spec, kept: Kept, device: torch.device) -> HostPass:
    """Both passes of layers whose activations are kept in another way. What copies compute is a
    copy's, by its bytes: to call them by themselves is to be of the layers alone."""
    x = _hidden(device)

    def passes(model: nn.Module) -> Work:
        return lambda _: model(x).sum().backward()

    plain, model = _model(spec, device), _model(spec, device)
    blocks = tuple((name, kept) for name in blocks_of(model))
    keep(model, Keep(blocks=blocks), Tiers(device, Registry()))
    counted = model if kept.tier is Tier.DEVICE else plain
    return HostPass(
        hook=around(kept, Kind.FORWARD),
        operators=_operators(spec, kept, lambda layer: layer.forward + layer.backward),
        before=_nothing,
        work=passes(model),
        computing=_called(_nothing, passes(counted)).again,
    )


def _nothing() -> None:
    """There is nothing to be done before."""


def _operators(spec: Spec, kept: Kept, part: Callable[[LayerWork], PassWork]) -> int:
    """How many operators of all layers a clock counts in a part of their work."""
    derivation = derive(spec.but(activations=ActivationSpec(default=kept)), is_timed=False)
    work = model_work(derivation.spec, derivation.plan, derivation.facts)
    assert work is not None, "a table has the layers of built-in models"
    items = (item for layer in work.layers for item in part(layer))
    return sum(item.times for item in items if isinstance(item, Operator))


def _called(before: Callable[[], Any], work: Work) -> _Called:
    work(before())  # gradients are there, to which backward adds
    called = _Called()
    output = before()
    with called:
        work(output)
    return called
