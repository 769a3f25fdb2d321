"""What the job runs on: devices, their memory, and links by tier. Used by fit and legality."""

from typing import Annotated, Any

from ptrain.spec.leaf import Choice, Leaf, Real, Size, Text, Whole, describe, refuse
from ptrain.spec.model import NAME_OR_FILE
from ptrain.spec.rates import Rates
from ptrain.spec.section import Section, section


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


@section
class Cluster:
    """What the job runs on: a preset and fields that override it. Bandwidths in bytes per second;
    what is None nobody says."""

    preset: Annotated[
        str | None, Text("a cluster of specs/clusters, or a file of its fields", NAME_OR_FILE)
    ] = None
    name: Annotated[str, Text("what reports call it")] = "cluster"
    devices: Annotated[int, _Count("devices in all", 1, 2**17)]
    devices_per_node: Annotated[
        int, _Count("devices of one node; without: all of them", 1, 2**17, follows=True)
    ] = 0
    device_memory: Annotated[int, _Bytes("memory of one device (80 GiB)")]
    host_memory: Annotated[
        int | None, _Bytes("memory of one node's host for offloaded states, shared by its devices")
    ] = None
    intra_node_bandwidth: Annotated[
        float,
        _Bytes(
            "bytes per second of one device within a node (450 GB/s)",
            rate=True,
            read=float,
            write=round,
        ),
    ]
    inter_node_bandwidth: Annotated[
        float,
        _Bytes(
            "bytes per second of one device between nodes (50 GB/s); without: as within one",
            rate=True,
            follows=True,
            read=float,
            write=round,
        ),
    ] = 0.0
    intra_node_latency: Annotated[float, _Figure("seconds per message", 0.0, 60.0)] = 5e-6
    inter_node_latency: Annotated[float, _Figure("seconds per message", 0.0, 60.0)] = 10e-6
    kind: Annotated[
        str | None,
        Choice(
            "what its devices are: whose kernels compute",
            {"cpu": "processors: ranks are processes on them", "cuda": "GPUs"},
            slips={"gpu": "cuda"},
        ),
    ] = None
    sm: Annotated[
        int | None,
        _Count(
            "compute capability of its GPUs (80: A100, 90: H100, 100: B200): which of CUDA's "
            "kernels compute",
            50,
            200,
        ),
    ] = None
    price: Annotated[
        float | None,
        _Figure("money for one device for an hour, in any currency", 0.0, 1e9),
    ] = None
    flops: Annotated[
        float, _Figure("operations per second of one device; 0: nobody says it", 0.0, 1e20)
    ] = 0.0
    rates: Annotated[
        Rates | None,
        Section(
            Rates,
            "what operators, collectives and updates take on it, for step_seconds",
            null=True,
            is_partial=True,
            is_sparse=True,
        ),
    ] = None
