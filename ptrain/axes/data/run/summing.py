"""DDP's communication hook: it hands the buckets over, to be summed by whoever takes them.

Note: torch reads the hook's annotations as objects, so this module does not postpone them.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from ptrain.cost import State
from ptrain.rooms.comm import Registry

Hook = Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def handing_over(receive: Callable[[torch.Tensor], None], registry: Registry) -> Hook:
    """A hook that calls `receive` with each full bucket, and lets DDP wait for nothing: gradients
    are views of the buckets, so they are reduced when these are. A future that is done spares a
    callback in the backend's thread."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = registry.tag(bucket.buffer(), State.GRADIENTS)
        receive(buffer)
        devices = [buffer.device] if buffer.is_cuda else []
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        done.set_result(buffer)
        return done

    return hook
