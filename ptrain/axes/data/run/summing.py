"""DDP's communication hook, which passes full buckets to a receiver that sums them, and the buckets
of its first step.

torch reads the hook's annotations as objects, so this module does not postpone them.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ptrain.cost import State
from ptrain.internals.ddp import rebuilt_buckets
from ptrain.runtime.comm import TagRegistry

Hook = Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def handing_over(receive: Callable[[torch.Tensor], None], registry: TagRegistry) -> Hook:
    """Return a hook that calls `receive` with each full bucket, and makes DDP wait for nothing.

    Gradients are views of the buckets, so they are reduced when the buckets are. A completed future
    avoids a callback in the backend's thread.
    """

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = registry.tag(bucket.buffer(), State.GRADIENTS)
        receive(buffer)
        # A future accepts CUDA tensors only on the devices that it was created with.
        devices = [buffer.device] if buffer.is_cuda else []
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        done.set_result(buffer)
        return done

    return hook


def record_arrival(arrived: dict[int, None], index: int, _: torch.Tensor) -> None:
    """Record that the gradient of a parameter arrived after all gradients before."""
    arrived.pop(index, None)
    arrived[index] = None


def arranged_buckets(
    buckets: Sequence[torch.Tensor], arrived: Sequence[torch.Tensor], bucket_bytes: int | None
) -> list[torch.Tensor]:
    """Sort the gradients in buckets by arrival, and return the buckets that DDP will rebuild.

    Args:
        buckets: All buckets of DDP's first step. Every gradient is a view of one.
        arrived: The parameters, in the order in which their gradients arrived.
        bucket_bytes: The size of a bucket. None: DDP's default.

    Returns:
        Views of `buckets`.
    """
    # `_cdata` is the address of the StorageImpl, which all views of a bucket share.
    whole_of = {bucket.untyped_storage()._cdata: bucket for bucket in buckets}
    for key, bucket in whole_of.items():
        _sort_gradients(bucket, [p for p in arrived if _place_of(p)[0] == key])
    views = []
    for indices in rebuilt_buckets(arrived, bucket_bytes):
        key, start = _place_of(arrived[indices[0]])
        views.append(whole_of[key][start : start + sum(arrived[i].numel() for i in indices)])
    return views


def _place_of(parameter: torch.Tensor) -> tuple[int, int]:
    """Return the storage of a gradient and the offset in it."""
    gradient = parameter.grad
    assert gradient is not None, "buckets have all gradients"
    return gradient.untyped_storage()._cdata, gradient.storage_offset()


def _sort_gradients(bucket: torch.Tensor, arrived: Sequence[torch.Tensor]) -> None:
    """Sort the gradients in a bucket by arrival.

    Only those that change places among themselves are copied at a time, such as the gradients of a
    block: a copy of all may not fit beside the state of a resumed run.
    """
    moved: list[torch.Tensor] = []
    displaced: set[int] = set()  # parameters that are in only one of the two prefixes
    start = 0
    for old, new in zip(sorted(arrived, key=_place_of), arrived, strict=True):
        moved.append(new)
        displaced ^= {id(old)} ^ {id(new)}
        if displaced:
            continue
        places = [(_place_of(parameter)[1], parameter.numel()) for parameter in moved]
        if len(moved) > 1:
            flat = torch.cat([bucket[place : place + size] for place, size in places])
            bucket[start : start + flat.numel()] = flat
        for parameter in moved:
            assert parameter.grad is not None, "buckets have all gradients"
            # With the strides of the old view, which are the parameter's (reducer.cpp).
            parameter.grad = bucket.as_strided(parameter.shape, parameter.grad.stride(), start)
            start += parameter.numel()
        moved = []
