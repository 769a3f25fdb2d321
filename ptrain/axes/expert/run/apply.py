"""Applies the expert axis to a module: each rank keeps its experts' shard of tensors, and rows are
dispatched to the ranks of their experts.

Rows are exchanged with the ranks that have their experts: an all-to-all to them and one back, and
the same two in backward for gradients. An exchange can overlap other compute, in forward and in
backward. torch's functional all-to-all waits for its gradient where it starts, which leaves nothing
to overlap in backward.

Legend of shape suffixes: N ranks, E experts of all ranks, e experts of a rank, S places that an
expert has of one rank's samples, T places of all ranks, M rows of a rank's tokens, R rows that its
experts receive, C hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from ptrain.axes.context.run.slices import SampleSlices, route_slices
from ptrain.axes.tensor.run.styles import LocalShards, replace_parameters
from ptrain.cost import Phase
from ptrain.internals.dtensor import concatenate_meshes
from ptrain.internals.functional_collectives import (
    all_to_all,
    all_to_all_single_autograd,
    exchange_parts,
    wait_for,
)
from ptrain.models.moe import NUMBER, Journey, MoE, RoutedRows, route_rows
from ptrain.runtime.comm import Mesh
from ptrain.spec.placement import Axis
from ptrain.spec.routing import Choices
from ptrain.steps.experts import ExpertParallel, Loads


class RowExchange:
    """An exchange of rows over `group` in which this rank sends `left` and receives `arrived` rows,
    by rank."""

    def __init__(
        self, left: Sequence[int], arrived: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self._left, self._arrived, self._group = left, arrived, group
        self._leaving: Tensor | None = None  # keeps the tensor alive while the backend reads it
        self._coming: Tensor | None = None

    def exchange_during(self, x: Tensor, compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Exchange rows while something else is computed.

        Backward also overlaps: autograd runs nodes in reverse order of forward, and so runs the
        backward of `compute` between the two ends of the exchange.

        Returns:
            The received rows [arrived, ...], and the result of `compute`.
        """
        # Start and end are two nodes of autograd. The engine runs ready nodes with higher sequence
        # numbers first, so in backward `_ExchangeEnd` starts the exchange of gradients, then the
        # backward of `compute` runs, and `_ExchangeStart` waits.
        x = _ExchangeStart.apply(x, self)
        result = compute()
        return _ExchangeEnd.apply(x, self), result

    def start(self, x: Tensor) -> Tensor:
        """Start the exchange. The result must not be read before `finish`."""
        self._leaving = x
        return all_to_all(x, self._arrived, self._left, self._group)

    def finish(self, x: Tensor) -> Tensor:
        """Wait for the exchange, and return the received rows."""
        x, self._leaving = wait_for(x), None
        return x

    def depart_back(self, gradient: Tensor) -> None:
        """Start the exchange of gradients."""
        # The backend reads the memory as one block. The reference keeps a copy alive until the
        # wait.
        self._leaving = gradient.contiguous()
        self._coming = all_to_all(self._leaving, self._left, self._arrived, self._group)

    def arrive_back(self) -> Tensor:
        """Wait for the gradients of the rows that were sent, and return them."""
        assert self._coming is not None, "they have differed"
        gradient, self._leaving, self._coming = wait_for(self._coming), None, None
        return gradient


class _ExchangeStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.arrive_back(), None


class _ExchangeEnd(torch.autograd.Function):
    """The end of an exchange. Its backward returns its input as a placeholder, because autograd
    requires a gradient with the number of received rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.finish(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.depart_back(gradient)
        # Its values are never read: `_ExchangeStart.backward` returns the gradient that arrived.
        return gradient, None


Counts: TypeAlias = Sequence[Sequence[int]]  # rows, by rank and expert of the rank


class Assumption(Protocol):
    """A function that gives the routing on fake ranks.

    Args:
        rows: Rows of each rank.
        ranks: Ranks of the group.
        own: Experts of each rank.
        rank: The rank whose sent and received rows to return.
    """

    def __call__(self, rows: int, ranks: int, own: int, rank: int) -> RoutedRowCounts: ...


class JourneyOverRanks(Journey):
    """The dispatch of one forward pass over the ranks of `group`, which have equal numbers of
    experts in order. `assumed` gives the routing on fake ranks; None is an even one. With
    `overlaps`, other work may be computed while rows are sent to their experts."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        assumed: Assumption | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        super().__init__()
        self.group, self._assumed, self._overlaps = group, assumed or balanced_routing, overlaps
        self._routed: RoutedRowCounts | None = None
        self._computed: Tensor | None = None

    def overlapped_result(self) -> Tensor:
        return super().overlapped_result() if self._computed is None else self._computed

    def send_rows(self, x_MC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
        # The number of rows per expert depends on the data, so ranks exchange counts before rows. A
        # fixed number would need padding or would drop rows.
        counts_Ne = _counts_of(ends_E).unflatten(0, (self.group.size(), -1))
        received_Ne = exchange_parts(counts_Ne, self.group)
        self._routed = self._read_routing(len(x_MC), counts_Ne, received_Ne)
        x_RC = self._send_to_experts(x_MC, self._routed.sent, self._routed.received)
        del x_MC
        # Rows arrive by rank and then by expert. The grouped product needs all rows of an expert in
        # one piece.
        x_RC = self._routed.by_expert(x_RC)
        return x_RC, received_Ne.sum(0).cumsum(0, dtype=torch.int32)

    def _read_routing(self, rows: int, counts_Ne: Tensor, received_Ne: Tensor) -> RoutedRowCounts:
        """Return the routing. On a fake group it is the assumption, and the received counts are
        filled in."""
        both = torch.stack([counts_Ne, received_Ne])
        if dist.get_backend(self.group) != "fake":
            # One read for both, because each read waits for the device. all_to_all_single takes
            # split sizes from the host, so one wait cannot be avoided.
            return RoutedRowCounts(*both.tolist())
        ranks, own = counts_Ne.shape
        routed = self._assumed(rows, ranks, own, self.group.rank())
        # The received counts of a fake group are uninitialized. `send_rows` computes the experts'
        # ends from them.
        for of_rank, numbers in zip(received_Ne.unbind(), routed.received, strict=True):
            for place, number in zip(of_rank.unbind(), numbers, strict=True):
                place.fill_(number)
        return routed

    def return_rows(self, y_RC: Tensor) -> Tensor:
        assert self._routed is not None, "they have come"
        y_RC = self._routed.by_rank(y_RC)
        return self._exchange_rows(y_RC, self._routed.received, self._routed.sent)

    def send_places(self, x_ESC: Tensor) -> Tensor:
        places = self._places_of(x_ESC)
        x_NeSC = self._by_rank(self._send_to_experts(x_ESC, places, places))
        del x_ESC
        return x_NeSC.movedim(0, 1).flatten(1, 2)

    def return_places(self, y_eTC: Tensor) -> Tensor:
        y_ESC = y_eTC.unflatten(1, (self.group.size(), -1)).movedim(1, 0).flatten(0, 1)
        del y_eTC
        places = self._places_of(y_ESC)
        return self._by_rank(self._exchange_rows(y_ESC, places, places)).flatten(0, 1)

    def _by_rank(self, x_ESC: Tensor) -> Tensor:
        return x_ESC.unflatten(0, (self.group.size(), -1))

    def _places_of(self, x_ESC: Tensor) -> Counts:
        ranks = self.group.size()
        return [[len(x_ESC) // ranks]] * ranks

    def _send_to_experts(self, x: Tensor, left: Counts, arrived: Counts) -> Tensor:
        if not self._overlaps or self._beside is None:
            return self._exchange_rows(x, left, arrived)
        exchange = RowExchange(_sum_by_rank(left), _sum_by_rank(arrived), self.group)
        x, self._computed = exchange.exchange_during(x, self._beside)
        return x

    def _exchange_rows(self, x: Tensor, left: Counts, arrived: Counts) -> Tensor:
        return wait_for(
            all_to_all_single_autograd(x, _sum_by_rank(arrived), _sum_by_rank(left), self.group)
        )


@dataclass
class JourneyFactory:
    """A factory of a layer's journeys over the ranks of `group`, with the arguments of
    `JourneyOverRanks`."""

    group: dist.ProcessGroup
    overlaps: bool
    assumption: Assumption | None = None

    def __call__(self) -> JourneyOverRanks:
        return JourneyOverRanks(self.group, self.assumption, overlaps=self.overlaps)


class RoutedRowCounts:
    """The numbers of rows sent to each rank's experts, and received from each rank by local
    experts."""

    def __init__(self, sent: Counts, received: Counts) -> None:
        self.sent, self.received = sent, received

    def by_expert(self, x_RC: Tensor) -> Tensor:
        """Return received rows, ordered by rank and expert, reordered by expert and rank."""
        return _regroup_rows(x_RC, self.received)

    def by_rank(self, y_RC: Tensor) -> Tensor:
        """Return rows ordered by expert and rank, reordered by rank and expert to be sent back."""
        return _regroup_rows(y_RC, [*zip(*self.received, strict=True)])


def overloaded_routing(rows: int, ranks: int, own: int, rank: int, *, more: int) -> RoutedRowCounts:
    """Return an even routing in which this rank's experts receive `more` additional rows.

    Args:
        rows: Rows of each rank.
        ranks: Ranks of the group.
        own: Experts of each rank.
        rank: The rank whose rows to return.
        more: Additional rows.
    """
    routed = balanced_routing(rows, ranks, own, rank)
    received = [[*numbers] for numbers in routed.received]
    # The number of received rows decides the memory; the source is arbitrary.
    received[(rank + 1) % ranks][0] += more
    return RoutedRowCounts(routed.sent, received)


def balanced_routing(rows: int, ranks: int, own: int, rank: int) -> RoutedRowCounts:
    """Return an even routing, for ranks without data.

    Each expert receives an equal number of rows from each rank. A rank sends the remaining rows one
    by one to an expert of its rank, then of the next rank, and so on, so that all ranks receive the
    same number of rows.

    Args:
        rows: Rows of each rank.
        ranks: Ranks of the group.
        own: Experts of each rank.
        rank: The rank whose rows to return.
    """
    share, more = divmod(rows, ranks * own)

    def between(source: int, target: int) -> list[int]:
        first = (target - source) % ranks
        return [share + (expert * ranks + first < more) for expert in range(own)]

    return RoutedRowCounts(
        [between(rank, other) for other in range(ranks)],
        [between(other, rank) for other in range(ranks)],
    )


def _regroup_rows(x_RC: Tensor, counts: Counts) -> Tensor:
    """Return rows that are grouped by (outer, inner) of these sizes, regrouped by (inner,
    outer)."""
    if len(counts) == 1 or len(counts[0]) == 1:
        return x_RC
    # split and cat save nothing for backward; indexing would save the index
    pieces = x_RC.split([count for group in counts for count in group])
    inner = len(counts[0])
    return torch.cat([piece for place in range(inner) for piece in pieces[place::inner]])


def _sum_by_rank(counts: Counts) -> list[int]:
    return [sum(of_rank) for of_rank in counts]


def _counts_of(ends_E: Tensor) -> Tensor:
    """Return the number of rows of each expert."""
    return ends_E.to(torch.int64).diff(prepend=ends_E.new_zeros(1, dtype=torch.int64))


def parallelize_experts(model: nn.Module, step: ExpertParallel, mesh: Mesh) -> None:
    """Shard the experts of a model, or of a stage of it, over this rank's group.

    Tensors may be on meta. Tensors whose features another axis shards are then sharded over both
    axes. If that axis is folded, its ranks have shards of the tokens, and count choices together.

    Args:
        model: The model or stage, modified in place.
        step: How experts are sharded.
        mesh: The mesh.
    """
    group = mesh.group(step.axes)
    own = [(name, module) for name, module in model.named_modules() if name in step.modules]
    if not any(isinstance(module, MoE) for module in model.modules()):
        route_rows(model, [name for name, _ in own], step.number)
    for module in model.modules():
        if isinstance(module, (MoE, RoutedRows)):
            module.journey = JourneyFactory(group, step.overlaps)
    for _, experts in own:
        if isinstance(experts, RoutedRows):
            _shard_custom_experts(experts, step, mesh)
            continue
        for projection in experts.children():
            _shard_projection(projection, mesh.sort_axes(step.axes), mesh)
    if step.folded:
        # A folded axis shards the tokens of a sample, so capacities and balance losses need the
        # counts of all its ranks.
        tokens = SampleSlices(mesh.group(step.counting), mesh.registry, step.spans)
        route_slices(model, tokens, mesh.group_size(step.folded))


def set_routing(model: nn.Module, routing: Callable[[str], Assumption]) -> None:
    """Set the routing of rows on fake ranks. `routing` returns the assumption for a layer's
    name."""
    for name, module in model.named_modules():
        if isinstance(module, (MoE, RoutedRows)):
            assert isinstance(module.journey, JourneyFactory), "it has experts of other ranks"
            # A custom module holds the experts only; its layer is the module around it.
            is_layer = isinstance(module, MoE)
            module.journey.assumption = routing(name if is_layer else name.rpartition(".")[0])


def _shard_projection(projection: nn.Module, axes: Sequence[Axis], mesh: Mesh) -> None:
    """Shard the weight of all experts, and let its module read the local shard."""
    # a weight that another axis shards: its module reads the local shard already
    is_read = isinstance(projection.get_parameter("weight"), DTensor)
    _shard_experts(projection, axes, mesh)
    if not is_read:
        LocalShards().put_on(projection, mesh.submesh(axes))


def _shard_custom_experts(experts: RoutedRows, step: ExpertParallel, mesh: Mesh) -> None:
    """Shard all tensors of a module that is not built in, and set its number of local experts."""
    for module in experts.modules():
        _shard_experts(module, mesh.sort_axes(step.axes), mesh)
    experts.reading = _local_tensors
    if isinstance(getattr(experts, NUMBER, None), int):
        setattr(experts, NUMBER, step.number // mesh.group_size(step.axes))


@contextmanager
def _local_tensors(experts: nn.Module) -> Iterator[None]:
    """Temporarily replace the tensors of a module and its children by their local shards.

    This is not done by hooks of the module. Backward must run the conversion's backward before that
    of the module's inputs, where FSDP2 reduces; hooks of the module would run too early.
    """
    held = [
        (module, name, tensor)
        for module in experts.modules()
        for name, tensor in module.named_parameters(recurse=False)
    ]
    for module, name, tensor in held:  # instance attributes precede nn.Module.__getattr__
        vars(module)[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    try:
        yield
    finally:
        for module, name, _ in held:
            vars(module).pop(name, None)


def _shard_experts(module: nn.Module, axes: Sequence[Axis], mesh: Mesh) -> None:
    """Shard a module's tensors by their first dimension, the experts."""
    replace_parameters(module, lambda _, weight: _shard_tensor(weight, axes, mesh))


@torch.no_grad()
def _shard_tensor(weight: torch.Tensor, axes: Sequence[Axis], mesh: Mesh) -> DTensor:
    """Return the rank's shard of an expert tensor as a DTensor."""
    # The axes of experts come first, as in the mesh: DTensor applies shardings of one dimension
    # from left to right.
    held, meshes = weight, [mesh.submesh((axis,)) for axis in axes]
    placements: list[Placement] = [Shard(0)] * len(axes)
    if isinstance(weight, DTensor):
        meshes.append(weight.device_mesh)
        held, placements = weight.to_local(), [*placements, *weight.placements]
    own = len(held) // mesh.group_size(axes)
    return DTensor.from_local(
        # A clone, because the view would keep the experts of all ranks alive.
        held.narrow(0, own * mesh.position(axes), own).clone(),
        concatenate_meshes(*meshes) if len(meshes) > 1 else meshes[0],
        placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


# Routing as the spec states it, for a fake rank without peers.


class StatedRouting:
    """The routing that a spec states, for the fake rank at one place of the tokens.

    It observes the program to follow the current micro-batch.
    """

    def __init__(self, loads: Loads, place: int) -> None:
        self._loads, self._place, self._micro_batch = loads, place, 0

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Note that the program enters a pass of a micro-batch."""
        self._micro_batch = micro_batch

    def route_layers(self, model: nn.Module) -> None:
        """Route the rows of the model's layers as stated from now on."""
        set_routing(model, lambda layer: partial(self._routed_rows, layer))

    def _routed_rows(
        self, layer: str, rows: int, ranks: int, own: int, rank: int
    ) -> RoutedRowCounts:
        chosen = [
            self._loads.choices(layer, source)[self._micro_batch]
            for source in self._loads.group(self._place)
        ]
        assert (len(chosen), sum(chosen[rank])) == (ranks, rows), "a rule: counts fit the spec"
        sent = _by_rank(chosen[rank], own)
        return RoutedRowCounts(sent, [_by_rank(choices, own)[rank] for choices in chosen])


def _by_rank(choices: Choices, own: int) -> Counts:
    numbers: Sequence[int] = choices
    return [numbers[first : first + own] for first in range(0, len(numbers), own)]
