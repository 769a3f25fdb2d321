"""Fake ranks: one process plays rank r of N; its collectives return at once and move nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptrain.internals.fakes import (
    LOGGER,
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from ptrain.rooms.world import World

_CPU = torch.device("cpu")
_LOG = logging.getLogger(LOGGER)
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def fake_world(
    rank: int, size: int, device: torch.device = _CPU, *, stands_in: bool = False
) -> World:
    """Rank `rank` of `size` over torch's fake process group; `stands_in` as a world has it.
    Under `fake_tensors` nothing is computed either: shapes, collectives and storages are those of
    the real run, values are not."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    return World(
        rank=rank,
        size=size,
        device=device,
        backend="fake",
        owns_group=True,
        stands_in=stands_in,
    )


def new_fakes() -> FakeTensorMode:
    """Return a mode in which `fake_tensors` are made."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_tensors(mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Tensors without data, but for the few integers that DDP's reducer reads back. What was made
    in a `mode` of `new_fakes` is used again in that mode: others take copies of it."""
    level = _LOG.level
    _LOG.setLevel(logging.CRITICAL)  # an operator that fails is logged, and raises the same
    try:
        with mode or new_fakes(), _AsOnDevices(), _seeds_on_host():
            yield
    finally:
        _LOG.setLevel(level)


class _AsOnDevices(TorchDispatchMode):
    """DDP's reducer writes the new order of its buckets into int32 tensors, sends them, and reads
    them in C++: these are real, and so is what is done with real tensors alone. What `torch.tensor`
    makes for a GPU, as a model's buffer, is not: no GPU is there that could copy it. What is
    awaited is there, as with real tensors, where torch's fake of waiting makes another one."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(argument, FakeTensor) for argument in args):  # most of all calls
            return args[0] if func is _WAIT else func(*args, **kwargs)
        tensors = [
            argument
            for argument in tree_leaves((args, kwargs))
            if isinstance(argument, torch.Tensor)
        ]
        if tensors:
            is_new_on_gpu = func is torch.ops.aten.lift_fresh.default and tensors[0].is_cuda
            is_fake = any(isinstance(argument, FakeTensor) for argument in tensors)
            is_real = not is_fake and not is_new_on_gpu
        else:
            empty = torch.ops.aten.empty.memory_format
            is_real = func is empty and kwargs.get("dtype") is torch.int32
        with unset_fake_temporarily() if is_real else nullcontext():
            return func(*args, **kwargs)


def _seeds_on_host() -> AbstractContextManager[object]:
    return _SeedsOnHost() if torch.cuda.is_available() else nullcontext()


class _SeedsOnHost(TorchDispatchMode):
    """Efficient attention leaves seed and offset of its dropout on the host (but in a captured
    graph), where fake tensors have them on the device: torch's shape functions (Note [Seed and
    Offset]) know no better. So they are real here. Seen on an H100, with torch 2.11."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten._scaled_dot_product_efficient_attention.default:
            return result
        output, statistics, *numbers = result
        with unset_fake_temporarily():
            return output, statistics, *(torch.zeros((), dtype=n.dtype) for n in numbers)
