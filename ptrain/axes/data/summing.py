"""DDP's communication hook that sums and does not average.

Note: torch reads the hook's annotations as objects, so this module does not postpone them.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from ptrain.costs import State
from ptrain.interpreter.registry import Registry


def summing_hook(
    group: dist.ProcessGroup, registry: Registry
) -> Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """A hook that all-reduces a bucket with SUM, asynchronously: the loss is divided by a global
    count already."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = registry.tag(bucket.buffer(), State.GRADIENTS)
        work = dist.all_reduce(buffer, group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    return hook
