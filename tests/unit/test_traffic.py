"""The traffic meter counts copies between memory tiers by state and phase, and only those."""

from __future__ import annotations

import torch

from ptrain.cost import Collective, Phase, State
from ptrain.meters.traffic import TrafficMeter
from ptrain.models.ledger import set_tier
from ptrain.runtime.comm import TagRegistry
from ptrain.spec.placement import Tier


def tensor_on(tier: Tier, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.zeros(size, dtype=dtype)
    if tier is not Tier.DEVICE:
        set_tier(tensor, tier)
    return tensor


def test_each_direction_between_two_tiers_is_a_row():
    registry = TagRegistry()
    device, host, file = (tensor_on(tier, 10) for tier in (Tier.DEVICE, Tier.HOST, Tier.FILE))
    registry.tag(host, State.OPTIMIZER)
    meter = TrafficMeter(registry, {})
    meter.phase(Phase.UPDATE, 0)
    with meter:
        device.copy_(host)
        device[:4].copy_(host[:4])
        host.copy_(device)
        host.copy_(file)
        file.copy_(host)
    found = {row.key.collective: (row.calls, row.payload_bytes) for row in meter.rows()}
    assert found == {
        Collective.HOST_TO_DEVICE: (2, 56),
        Collective.DEVICE_TO_HOST: (1, 40),
        Collective.FILE_READ: (1, 40),
        Collective.FILE_WRITE: (1, 40),
    }
    for row in meter.rows():
        key = row.key
        assert (key.axes, key.state, key.phase) == ((), State.OPTIMIZER, Phase.UPDATE)
        assert row.sent_bytes == 0


def test_the_state_is_that_of_either_end_and_the_bytes_are_the_sources():
    registry = TagRegistry()
    target = registry.tag(tensor_on(Tier.DEVICE, 6), State.GRADIENTS)
    meter = TrafficMeter(registry, {})
    with meter:
        target.copy_(tensor_on(Tier.HOST, 6, torch.bfloat16))
        target.copy_(torch.zeros(6))
    (row,) = meter.rows()
    assert (row.key.state, row.calls, row.payload_bytes) == (State.GRADIENTS, 1, 12)


def test_a_list_copied_at_once_is_a_call_each():
    meter = TrafficMeter(TagRegistry(), {})
    with meter:
        torch._foreach_copy_(
            [tensor_on(Tier.DEVICE, 2), tensor_on(Tier.DEVICE, 3)],
            [tensor_on(Tier.HOST, 2), tensor_on(Tier.HOST, 3)],
        )
    (row,) = meter.rows()
    assert (row.calls, row.payload_bytes, row.key.state) == (2, 20, State.OTHER)
