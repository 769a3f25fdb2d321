"""Where a step's tokens go: how many choices fall on each expert of a layer, how many find no
place, and how undecided the routers are.

The routers of built-in models, and experts of other models that are given other ranks' rows, are
watched by hooks, outside of what other meters see: what is counted is counted beside the step, on
the device, and read when the step is over. A pass that runs again in backward chooses what it chose
before, and counts once.

Legend of shape suffixes: N tokens of all samples, E experts, K experts of a token, B samples, T
tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.cost import Phase
from ptrain.internals.dispatch import without_modes
from ptrain.interpreter.program import Program
from ptrain.models.moe import ExpertPlaces, Gate, RoutedRows
from ptrain.models.watch import After, listening, runs_again, watching
from ptrain.report.routing import LayerRouting
from ptrain.spec.placement import without
from ptrain.spec.routing import Histogram
from ptrain.spec.routing import histogram as histogram_of
from ptrain.spec.spec import positions

Placed = tuple[int, dict[str, list[list[int]]]]  # by layer choices of each expert, by micro-batch
Rows = dict[str, list[float]]  # by layer: choices of each expert, then what else is summed
X = TypeVar("X", bound=nn.Module)
_OTHERS = 3  # choices that found no place, entropy of all tokens, tokens


class RoutingMeter:
    """Counts on one rank; `gather` sums over the ranks."""

    def __init__(self, program: Program) -> None:
        self._gates = dict(_of_layers(program, Gate))
        self._places = dict(_of_layers(program, ExpertPlaces))
        self._experts = dict(_of_layers(program, RoutedRows))
        self._numbers = {layer: _num_experts(gate) for layer, gate in self._gates.items()} | {
            layer: experts.num_all for layer, experts in self._experts.items()
        }
        # of ranks that route the same tokens one counts
        alike = without(program.plan.loss_axes, program.spec.routing_axes)
        self._counts = not any(map(program.mesh.coordinate, alike))
        self._place = positions(program.spec, program.spec.routing_axes)[program.world.rank]
        self._observers, self._micro_batch = program.observers, 0
        self._sums: dict[str, Tensor] = {}
        self._choices: dict[str, list[Tensor]] = {}  # by layer those of each micro-batch
        self._size = program.plan.accumulate.micro_batches

    @property
    def has_routers(self) -> bool:
        """Whether it is watched where tokens of this rank go."""
        return bool(self._numbers)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is chosen within."""
        self._sums, self._choices = {}, {}
        watched: tuple[tuple[dict[str, Any], Callable[..., None]], ...] = (
            ({layer: gate.score for layer, gate in self._gates.items()}, self._scored),
            (self._gates, lambda layer, _, output: self._count(layer, output[1])),
            (self._places, self._placed),
            (self._experts, lambda layer, _, chosen_NK, *__: self._count(layer, chosen_NK)),
        )
        with ExitStack() as stack:
            stack.enter_context(listening(self._observers, self))
            for modules, count in watched if self._counts else ():
                stack.enter_context(watching(modules.items(), after=_beside(count)))
            yield

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """The program enters a pass of a micro-batch."""
        self._micro_batch = micro_batch

    def choices(self) -> Placed:
        """Return the place of this rank's tokens, and what they chose since the last step began."""
        return self._place, {
            layer: [counts_E.tolist() for counts_E in of_layer]
            for layer, of_layer in self._choices.items()
        }

    def rows(self) -> Rows:
        """Return what this rank has counted since the last step began."""
        return {layer: sums.tolist() for layer, sums in self._sums.items()}

    def _of(self, layer: str, device: torch.device) -> Tensor:
        if layer not in self._sums:
            size = self._numbers[layer] + _OTHERS
            self._sums[layer] = torch.zeros(size, dtype=torch.float64, device=device)
        return self._sums[layer]

    def _scored(self, layer: str, _: Tensor, scores_NE: Tensor) -> None:
        shares_NE = (scores_NE / scores_NE.sum(-1, keepdim=True)).double()
        entropy = torch.special.entr(shares_NE).sum()
        sums = self._of(layer, entropy.device)
        sums[-2] += entropy
        sums[-1] += len(scores_NE)

    def _count(self, layer: str, chosen_NK: Tensor) -> None:
        counts_E = F.one_hot(chosen_NK, self._numbers[layer]).sum((0, 1))
        sums = self._of(layer, counts_E.device)
        of_layer = self._choices.setdefault(layer, [sums.new_zeros(0)] * self._size)
        of_layer[self._micro_batch] = counts_E
        sums[:-_OTHERS] += counts_E

    def _placed(self, layer: str, chosen_BTK: Tensor, places_NK: Tensor) -> None:
        num_places = self._places[layer].number(*chosen_BTK.shape[:2])
        self._of(layer, places_NK.device)[-_OTHERS] += (places_NK == num_places).sum()


def _of_layers(program: Program, kind: type[X]) -> Iterator[tuple[str, X]]:
    """Yield a module of each layer that has one of the kind, by the layer's name."""
    for piece in program.pieces:
        yield from (
            (name.rpartition(".")[0], module)
            for name, module in piece.module.named_modules()
            if isinstance(module, kind)
        )


def _num_experts(gate: Gate) -> int:
    assert gate.shape.experts is not None, "the model has experts"
    return gate.shape.experts


def _beside(count: Callable[..., None]) -> After:
    """Return a hook whose operators nobody else sees."""

    def hook(layer: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if runs_again() or not torch.is_grad_enabled():
            return
        with torch.no_grad(), without_modes():
            count(layer, *args, output)

    return hook


def summed(everyone: Sequence[Rows]) -> tuple[LayerRouting, ...]:
    """Return the layers in the order of their numbers, with what all ranks counted of them."""
    layers = sorted({layer for its in everyone for layer in its}, key=_number)
    return tuple(
        _joined(layer, [its[layer] for its in everyone if layer in its]) for layer in layers
    )


def histogram(everyone: Sequence[Placed]) -> Histogram:
    """Return what the tokens of all ranks chose, in one step."""
    by_layer: dict[str, dict[int, list[list[int]]]] = {}
    for place, choices in everyone:
        for layer, of_layer in choices.items():
            by_layer.setdefault(layer, {})[place] = of_layer
    layers = sorted(by_layer, key=_number)
    return histogram_of(
        {layer: [by_layer[layer][place] for place in sorted(by_layer[layer])] for layer in layers}
    )


def _joined(layer: str, rows: Sequence[list[float]]) -> LayerRouting:
    *tokens, dropped, entropy, num_tokens = map(sum, zip(*rows, strict=True))
    return LayerRouting(
        layer=layer,
        tokens=tuple(map(int, tokens)),
        dropped=int(dropped),
        entropy=entropy / num_tokens if num_tokens else None,
    )


def _number(layer: str) -> tuple[int, ...]:
    return tuple(int(part) for part in layer.split(".") if part.isdecimal())
