"""One stage of a rank as torch's PipelineStage: what goes over its boundaries, and what surrounds
its forward and backward passes.

torch makes a buffer for each micro-batch to come and keeps it; here one is made when its receive
is posted and lives as long as its micro-batch is in flight, so that a schedule's memory is what
its order says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from ptrain.axes.data.run.wrapped import Wrapped
from ptrain.axes.pipeline.run.cut import apart
from ptrain.axes.pipeline.run.order import in_model_order
from ptrain.axes.pipeline.run.waits import Waits, named
from ptrain.costs import Phase, State
from ptrain.errors import RankFailed
from ptrain.rooms.registry import Registry
from ptrain.timeline import Kind

Enter = Callable[[Phase, int], None]


@dataclass(frozen=True, slots=True)
class Boundary:
    """What goes from stage to stage: hidden states of one micro-batch, [micro, tokens, hidden] (of
    this rank's slice of the tokens)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which stage of how many, between which ranks; `waits` is told what it asks of them."""

    index: int
    stages: int
    group: dist.ProcessGroup
    waits: Waits


class Called(nn.Module):
    """A wrapped stage under a plain module: torch's schedules have ways of their own with the
    wraps that they know, and here a stage's synchronization is its wrap's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return apart(self.inner(x))


class Stage(PipelineStage):
    """`enter` is told of every pass. Raises RankFailed where the module fails or gives something
    else than the next stage waits for."""

    def __init__(
        self,
        wrapped: Wrapped,
        place: Place,
        boundary: Boundary,
        tokens: torch.Tensor,
        registry: Registry,
        enter: Enter,
    ) -> None:
        given = boundary.empty() if place.index else tokens
        super().__init__(
            Called(wrapped.module),
            place.index,
            place.stages,
            boundary.device,
            input_args=(given,),
            output_args=(boundary.empty(),),
            group=place.group,
        )
        self.wrapped, self.boundary, self.registry, self.enter = wrapped, boundary, registry, enter
        self.waits = place.waits
        self.left = 0  # backward passes of the step
        self.done = 0  # micro-batches of the step before those that the schedule counts from 0
        self.newest = 0  # micro-batch, of those whose forward pass has begun
        self.around: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_forward_infra(*args, **kwargs)
        for chunk in self.args_recv_info:
            self._drop(self.args_recv_info[chunk])
        return made

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_backward_infra(*args, **kwargs)
        for chunk in self.grad_recv_info:
            self._drop(self.grad_recv_info[chunk])
        return made

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Torch 2.11 asks for strides as well, of which a micro-batch's slice of tokens has its
        own; what is sent is compared here."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """And for the logits of the last stage, which nobody is told of."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch 2.11 greets its neighbours first, itself too where it is one: gloo has no such
        connection."""
        greetings: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [each for each in greetings if each.group_peer != self.group_rank]

    def clear_runtime_states(self) -> None:
        """What the step before has left."""
        for left in (self.fwd_cache, self.bwd_cache, self.backward_state, self.dw_runner):
            left.clear()
        self.output_chunks.clear()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.waits.receives(self.stage_index - 1, self.done + fwd_chunk_id, Phase.FORWARD)
        self._open(self.args_recv_info[fwd_chunk_id], Phase.FORWARD)
        operators: list[dist.P2POp] = super().get_fwd_recv_ops(fwd_chunk_id)
        return operators

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self.waits.receives(self.stage_index + 1, self.done + bwd_chunk_id, Phase.BACKWARD)
        self._open(self.grad_recv_info[bwd_chunk_id], Phase.BACKWARD)
        operators: list[dist.P2POp] = super().get_bwd_recv_ops(bwd_chunk_id)
        return operators

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_last:
            self.waits.sends(self.stage_index + 1, self.done + fwd_chunk_id, Phase.FORWARD)
        return self._tagged(super().get_fwd_send_ops(fwd_chunk_id), Phase.FORWARD)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self.waits.sends(self.stage_index - 1, self.done + bwd_chunk_id, Phase.BACKWARD)
        return self._tagged(super().get_bwd_send_ops(bwd_chunk_id), Phase.BACKWARD)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.newest = self.done + fwd_chunk_id
        self.waits.has(self.stage_index - 1, self.newest, Phase.FORWARD)
        self.enter(Phase.FORWARD, self.newest)
        with (
            named(self.stage_index, self.newest),
            self.wrapped.forward_pass(),
            self.around(self.newest),
        ):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._drop(self.args_recv_info[fwd_chunk_id])
        self.require_boundary(output, self.newest)
        return output

    def require_boundary(self, output: torch.Tensor, micro_batch: int) -> None:
        """Raises RankFailed for anything else than the next stage waits for: it would take the
        bytes for what they are not."""
        wanted = self.boundary
        if self.is_last or (tuple(output.shape), output.dtype) == (wanted.shape, wanted.dtype):
            return
        raise RankFailed(
            f"stage {self.stage_index}, micro-batch {micro_batch}: hidden states of "
            f"{list(output.shape)} in {output.dtype}, and the next stage waits for "
            f"{list(wanted.shape)} in {wanted.dtype}"
        )

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        def run() -> None:
            super(Stage, self).backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

        if full_backward or not self.is_first:
            with self._backward(Kind.BACKWARD if full_backward else Kind.INPUT, bwd_chunk_id):
                run()
        else:  # nobody waits for gradients of tokens: the weights' half is the whole
            self.waits.has(self.stage_index + 1, self.done + bwd_chunk_id, Phase.BACKWARD)
            run()
        if not self.is_last:
            self._drop(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        kind = Kind.BACKWARD if self.is_first else Kind.WEIGHT
        groups = self.backward_state[bwd_chunk_id][1]
        if groups:
            in_model_order(groups, list(self.submod.parameters()))
        with self._backward(kind, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    @contextmanager
    def _backward(self, kind: Kind, chunk: int) -> Iterator[None]:
        is_last = kind is not Kind.INPUT and self.left == 1
        self.left -= kind is not Kind.INPUT
        number = self.done + chunk
        self.waits.has(self.stage_index + 1, number, Phase.BACKWARD)
        self.enter(Phase.BACKWARD, number)
        with named(self.stage_index, number), self.wrapped.backward_pass(kind, is_last):
            yield

    def _open(self, infos: tuple[Any, ...], phase: Phase) -> None:
        """A buffer for what is about to be received."""
        for info in infos:
            if hasattr(info, "buffer") and not getattr(info, "is_root_arg", False):
                info.buffer = self.boundary.empty()
                if phase is Phase.BACKWARD:
                    info.buffer.requires_grad_(False)
                self.registry.tag(info.buffer, State.ACTIVATIONS, phase=phase)

    def _drop(self, infos: tuple[Any, ...]) -> None:
        for info in infos:
            if hasattr(info, "buffer"):
                info.buffer = None

    def _tagged(self, operators: list[dist.P2POp], phase: Phase) -> list[dist.P2POp]:
        for operator in operators:
            self.registry.tag(operator.tensor, State.ACTIVATIONS, phase=phase)
        return operators
