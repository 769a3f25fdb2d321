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
            "what the mode O means in this spec",
            {"host": "S@host: a slice in the host's memory", "file": "S@file: a slice in a file"},
            slips=TIER_SLIPS,
            read=Tier,
        ),
    ] = None
    path: Annotated[
        str | None, Text("the folder of the files (NVMe); without: the temporary folder")
    ] = None
    update: Annotated[
        Tier,
        Choice(
            "where optimizer state that is not on the device is updated",
            {
                "host": "by the processor, where the state is (what is gathered for the update, "
                "S*, comes to the device all the same)",
                "device": "on the device, to which it is copied and from which it is copied back, "
                "unit by unit",
            },
            slips=TIER_SLIPS,
            read=Tier,
        ),
    ] = Tier.HOST
