"""The routing meter: choices per expert and layer, dropped choices, and the routers' entropy.

Hooks watch the routers of built-in models, and the experts of other models that receive other
ranks' rows. The counting operators run outside all dispatch modes, so other meters do not see them.
They run on the device and are read when the step is over. A forward pass that is recomputed in
backward repeats its choices and is not counted again.

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
from ptrain.internals.dispatch import disable_modes
from ptrain.interpreter.program import Program
from ptrain.models.ledger import After, add_listeners, is_recomputing, watch_modules
from ptrain.models.moe import ExpertPlaces, Gate, RoutedRows
from ptrain.report.routing import LayerRouting
from ptrain.spec.placement import exclude_axes
from ptrain.spec.routing import Histogram
from ptrain.spec.routing import parse_histogram as histogram_of
from ptrain.spec.spec import indices_in_groups

Placed = tuple[int, dict[str, list[list[int]]]]  # by layer choices of each expert, by micro-batch
Rows = dict[str, list[float]]  # by layer: choices of each expert, then what else is summed
X = TypeVar("X", bound=nn.Module)
_NUM_OTHER_SUMS = 3  # choices that found no place, entropy of all tokens, tokens


class RoutingMeter:
    """The meter of a rank's expert choices. `sum_routing` and `sum_histograms` add the ranks."""

    def __init__(self, program: Program) -> None:
        self._gates = dict(_modules_by_layer(program, Gate))
        self._places = dict(_modules_by_layer(program, ExpertPlaces))
        self._experts = dict(_modules_by_layer(program, RoutedRows))
        self._numbers = {layer: _num_experts(gate) for layer, gate in self._gates.items()} | {
            layer: experts.num_all for layer, experts in self._experts.items()
        }
        # Ranks that differ only along these axes route identical tokens, so only the first of them
        # counts.
        alike = exclude_axes(program.plan.loss_axes, program.spec.routing_axes)
        self._counts = not any(map(program.mesh.coordinate, alike))
        self._place = indices_in_groups(program.spec, program.spec.routing_axes)[program.world.rank]
        self._observers, self._micro_batch = program.observers, 0
        self._sums: dict[str, Tensor] = {}
        self._choices: dict[str, list[Tensor]] = {}  # choices of each micro-batch, by layer
        self._size = program.plan.accumulate.micro_batches

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Temporarily count the choices of the forward passes."""
        self._sums, self._choices = {}, {}
        watched: tuple[tuple[dict[str, Any], Callable[..., None]], ...] = (
            ({layer: gate.score for layer, gate in self._gates.items()}, self._add_entropy),
            (self._gates, lambda layer, _, output: self._add_choices(layer, output[1])),
            (self._places, self._add_dropped),
            (self._experts, lambda layer, _, chosen_NK, *__: self._add_choices(layer, chosen_NK)),
        )
        with ExitStack() as stack:
            stack.enter_context(add_listeners(self._observers, self))
            for modules, count in watched if self._counts else ():
                stack.enter_context(watch_modules(modules.items(), after=_uncounted_hook(count)))
            yield

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Note the micro-batch whose pass begins."""
        self._micro_batch = micro_batch

    def choices(self) -> Placed:
        """Return this rank's position among the batch's tokens, and the counts of the last step.

        Returns:
            The position over the routing axes, and by layer the choices of each expert, by
                micro-batch.
        """
        return self._place, {
            layer: [counts_E.tolist() for counts_E in of_layer]
            for layer, of_layer in self._choices.items()
        }

    def rows(self) -> Rows:
        """Return the sums of the last step by layer.

        A row has the choices of each expert, dropped choices, entropy and number of tokens.
        """
        return {layer: sums.tolist() for layer, sums in self._sums.items()}

    def _layer_sums(self, layer: str, device: torch.device) -> Tensor:
        """Return the sums of a layer, zeros on its first use."""
        if layer not in self._sums:
            size = self._numbers[layer] + _NUM_OTHER_SUMS
            # fp64 counts exactly up to 2^53, and also holds the entropy.
            self._sums[layer] = torch.zeros(size, dtype=torch.float64, device=device)
        return self._sums[layer]

    def _add_entropy(self, layer: str, _: Tensor, scores_NE: Tensor) -> None:
        """Add the entropy of the normalized scores, in nats."""
        shares_NE = (scores_NE / scores_NE.sum(-1, keepdim=True)).double()
        entropy = torch.special.entr(shares_NE).sum()
        sums = self._layer_sums(layer, entropy.device)
        sums[-2] += entropy
        sums[-1] += len(scores_NE)

    def _add_choices(self, layer: str, chosen_NK: Tensor) -> None:
        """Add the choices of each expert."""
        counts_E = F.one_hot(chosen_NK, self._numbers[layer]).sum((0, 1))
        sums = self._layer_sums(layer, counts_E.device)
        of_layer = self._choices.setdefault(layer, [sums.new_zeros(0)] * self._size)
        of_layer[self._micro_batch] = counts_E
        sums[:-_NUM_OTHER_SUMS] += counts_E

    def _add_dropped(self, layer: str, chosen_BTK: Tensor, places_NK: Tensor) -> None:
        """Add the choices that exceed the expert capacity: their place is one past the last."""
        num_places = self._places[layer].count_places(*chosen_BTK.shape[:2])
        self._layer_sums(layer, places_NK.device)[-_NUM_OTHER_SUMS] += (
            places_NK == num_places
        ).sum()


def _modules_by_layer(program: Program, kind: type[X]) -> Iterator[tuple[str, X]]:
    """Yield the modules of a type, each under the name of the module that contains it."""
    for piece in program.pieces:
        yield from (
            (name.rpartition(".")[0], module)
            for name, module in piece.module.named_modules()
            if isinstance(module, kind)
        )


def _num_experts(gate: Gate) -> int:
    """Return the number of experts that a gate chooses from."""
    assert gate.shape.experts is not None, "the model has experts"
    return gate.shape.experts


def _uncounted_hook(count: Callable[..., None]) -> After:
    """Return a forward hook that counts outside all dispatch modes, without gradients."""

    def hook(layer: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_recomputing() or not torch.is_grad_enabled():
            return
        with torch.no_grad(), disable_modes():
            count(layer, *args, output)

    return hook


def sum_routing(everyone: Sequence[Rows]) -> tuple[LayerRouting, ...]:
    """Return the routing of each layer, summed over ranks, in layer order."""
    layers = sorted({layer for its in everyone for layer in its}, key=_layer_number)
    return tuple(
        _join_rows(layer, [its[layer] for its in everyone if layer in its]) for layer in layers
    )


def sum_histograms(everyone: Sequence[Placed]) -> Histogram:
    """Return the choices of all ranks' tokens in one step."""
    by_layer: dict[str, dict[int, list[list[int]]]] = {}
    for place, choices in everyone:
        for layer, of_layer in choices.items():
            by_layer.setdefault(layer, {})[place] = of_layer
    layers = sorted(by_layer, key=_layer_number)
    return histogram_of(
        {layer: [by_layer[layer][place] for place in sorted(by_layer[layer])] for layer in layers}
    )


def _join_rows(layer: str, rows: Sequence[list[float]]) -> LayerRouting:
    """Return one layer's routing from the rows of all ranks."""
    *tokens, dropped, entropy, num_tokens = map(sum, zip(*rows, strict=True))
    return LayerRouting(
        layer=layer,
        tokens=tuple(map(int, tokens)),
        dropped=int(dropped),
        entropy=entropy / num_tokens if num_tokens else None,
    )


def _layer_number(layer: str) -> tuple[int, ...]:
    """Return the numbers in a layer's name, as a sort key."""
    return tuple(int(part) for part in layer.split(".") if part.isdecimal())
