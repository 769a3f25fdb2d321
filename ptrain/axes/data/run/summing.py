"""DDP's communication hook, which passes full buckets to a receiver that sums them.

torch reads the hook's annotations as objects, so this module does not postpone them.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from ptrain.cost import State
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
