"""DDP's communication hooks that sum and do not average, at once or later.

Note: torch reads the hooks' annotations as objects, so this module does not postpone them.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from ptrain.costs import State
from ptrain.rooms.registry import Registry

Hook = Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def summing_hook(group: dist.ProcessGroup, registry: Registry) -> Hook:
    """A hook that all-reduces a bucket with SUM, asynchronously: the loss is divided by a global
    count already."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = registry.tag(bucket.buffer(), State.GRADIENTS)
        work = dist.all_reduce(buffer, group=group, async_op=True)
        return work.get_future().then(lambda done: buffer)  # a fake rank's future has no value

    return hook


def keeping_hook(kept: list[torch.Tensor], registry: Registry) -> Hook:
    """A hook that reduces nothing and puts the bucket into `kept`: the gradients are views of it,
    so they are reduced when it is."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = registry.tag(bucket.buffer(), State.GRADIENTS)
        kept.append(buffer)
        devices = [buffer.device] if buffer.is_cuda else []
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        done.set_result(buffer)
        return done

    return hook
