"""Where states are that are not on the device, and who updates them there."""

from typing import Annotated

from ptrain.spec.leaf import Choice, Text
from ptrain.spec.placement import Tier
from ptrain.spec.section import section
from ptrain.spec.slips import TIER_SLIPS


@section
class Offload:
    """Where the mode O is, and who updates optimizer state that is not on the device."""

    tier: Annotated[
        Tier | None,
        Choice(
            "Memory tier that mode O stands for in this spec.",
            {"host": "S@host: a shard in host memory", "file": "S@file: a shard in a file"},
            slips=TIER_SLIPS,
            read=Tier,
        ),
    ] = None
    path: Annotated[
        str | None,
        Text("Folder of the offload files (NVMe). Default: the folder for temporary files."),
    ] = None
    update: Annotated[
        Tier,
        Choice(
            "Where optimizer state that is not on the device is updated.",
            {
                "host": "on the CPU; S* states that are gathered for the update still move to "
                "the device",
                "device": "on the device: states are copied there and back, unit by unit",
            },
            slips=TIER_SLIPS,
            read=Tier,
        ),
    ] = Tier.HOST
