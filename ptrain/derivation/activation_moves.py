"""Extra copies and collectives that the activation modes add to a step.

Offloaded tensors are copied off the device and back. A recomputation repeats the collectives of its
forward pass over tp. Parameters of a data axis are not gathered again: their unit is already
all-gathered for the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ptrain.axes.ring import Calls, Group
from ptrain.cost import Collective, Footprint, Phase, State, Traffic, TrafficKey
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan

Moved = Sequence[tuple[str, int]]
Repeated = Sequence[tuple[str, int]]

COPIES = {
    Tier.HOST: (Collective.DEVICE_TO_HOST, Collective.HOST_TO_DEVICE),
    Tier.FILE: (Collective.FILE_WRITE, Collective.FILE_READ),
}


def kept_traffic(
    spec: Spec, plan: Plan, moved: Moved, repeated: Repeated, times: int | None = None
) -> Iterator[Traffic]:
    """Yield the copies and collectives that one rank's activation modes add to a step.

    Args:
        spec: The spec, for the degree of the tensor axis.
        plan: The plan of the step.
        moved: (tier, bytes) of each tensor that leaves the device in one micro-batch.
        repeated: (collective, bytes of the full tensor) of each repeated call in one micro-batch.
        times: How many micro-batches to count. None counts all micro-batches of a step.
    """
    times = plan.accumulate.micro_batches if times is None else times
    for tier, (out, back) in COPIES.items():
        sizes = [size for name, size in moved if name == tier.value]
        for collective, phase in ((out, Phase.FORWARD), (back, Phase.BACKWARD)):
            if sizes:
                key = TrafficKey(
                    axes=(), collective=collective, state=State.ACTIVATIONS, phase=phase
                )
                payload = times * sum(sizes)
                yield Traffic(
                    key=key, calls=times * len(sizes), payload_bytes=payload, sent_bytes=0
                )
    if plan.tensor is None:
        assert not repeated, "what is sent over no axis by name is sent over tp"
        return
    group = Group((plan.tensor.axis,), spec.degree(plan.tensor.axis))
    for (name, size), number in Counter(repeated).items():
        calls = Calls(Collective(name), State.ACTIVATIONS, Phase.BACKWARD, number * times)
        yield calls.traffic(group, size)


def activation_row(rank: int, device_bytes: int, moved: Moved) -> Footprint:
    """Return one rank's memory row of activations.

    Args:
        rank: The rank of the row.
        device_bytes: Bytes of activations on the device.
        moved: (tier, bytes) of the activations on other tiers.
    """
    off = {tier: sum(size for name, size in moved if name == tier.value) for tier in COPIES}
    return Footprint(
        state=State.ACTIVATIONS,
        rank=rank,
        device_bytes=device_bytes,
        host_bytes=off[Tier.HOST],
        file_bytes=off[Tier.FILE],
    )
