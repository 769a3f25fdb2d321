"""The section of a spec about what the job runs on."""

from typing import Annotated, Any

from ptrain.spec.leaf import Choice, Leaf, Real, Size, Text, Whole, declared, describe, refuse

_NAME_OR_FILE = r"[^\x00-\x1f]{1,300}"


class _Alike(Leaf):
    """One figure for all devices of a cluster: a list of theirs is told why."""

    def check(self, value: Any) -> object:
        if isinstance(value, list | dict):
            refuse(
                f"must be one figure for all devices; got {describe(value)}",
                "every device is like the others: a rank of an axis gets as much as its peers, and "
                "the slowest and smallest decides; write its figure",
            )
        return super().check(value)


class _Count(_Alike, Whole):
    pass


class _Bytes(_Alike, Size):
    pass


class _Figure(_Alike, Real):
    pass


@declared
class ClusterRaw:
    """What the job runs on: a preset and fields that override it."""

    preset: Annotated[
        str | None, Text("a cluster of specs/clusters, or a file of its fields", _NAME_OR_FILE)
    ] = None
    name: Annotated[str | None, Text("what reports call it")] = None
    devices: Annotated[int | None, _Count("devices in all", 1, 2**17)] = None
    devices_per_node: Annotated[int | None, _Count("devices of one node", 1, 2**17)] = None
    device_memory: Annotated[int | None, _Bytes("memory of one device (80 GiB)")] = None
    host_memory: Annotated[
        int | None, _Bytes("memory of one node's host for offloaded states, shared by its devices")
    ] = None
    intra_node_bandwidth: Annotated[
        int | None, _Bytes("bytes per second of one device within a node (450 GB/s)", rate=True)
    ] = None
    inter_node_bandwidth: Annotated[
        int | None, _Bytes("bytes per second of one device between nodes (50 GB/s)", rate=True)
    ] = None
    intra_node_latency: Annotated[float | None, _Figure("seconds per message", 0.0, 60.0)] = None
    inter_node_latency: Annotated[float | None, _Figure("seconds per message", 0.0, 60.0)] = None
    kind: Annotated[
        str | None,
        Choice(
            "what its devices are: whose kernels compute",
            {"cpu": "processors: ranks are processes on them", "cuda": "GPUs"},
        ),
    ] = None
    flops: Annotated[float | None, _Figure("operations per second of one device", 0.0, 1e20)] = None
