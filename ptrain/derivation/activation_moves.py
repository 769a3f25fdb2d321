"""What the modes of activations move and send beside what every step does: saved tensors that leave
the device and come back, and the collectives that a recomputation repeats. What a data axis gathers
is not among them: its unit is there for the backward pass already.
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
    """Yield what the activations of one rank copy and send in a step: `moved` are (tier, bytes),
    `repeated` (collective, bytes of the whole tensor), of one micro-batch; so many `times`, None:
    of each micro-batch."""
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
        yield calls.over(group, size)


def activation_row(rank: int, device_bytes: int, moved: Moved) -> Footprint:
    """Return the row of A of one rank: its bytes on the device, and on the other tiers."""
    off = {tier: sum(size for name, size in moved if name == tier.value) for tier in COPIES}
    return Footprint(
        state=State.ACTIVATIONS,
        rank=rank,
        device_bytes=device_bytes,
        host_bytes=off[Tier.HOST],
        file_bytes=off[Tier.FILE],
    )
