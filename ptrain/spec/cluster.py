"""The hardware of a job: devices, their memory, and links by tier."""

from typing import Annotated, Any

from ptrain.spec.leaf import (
    Choice,
    Integer,
    Leaf,
    Real,
    Section,
    Size,
    Text,
    describe,
    reject,
    section_dataclass,
)
from ptrain.spec.model import NAME_OR_FILE
from ptrain.spec.rates import Rates


class _HomogeneousLeaf(Leaf):
    """A leaf for one value that holds for all devices of a cluster; it rejects a list with a
    reason."""

    def check(self, value: Any) -> object:
        if isinstance(value, list | dict):
            reject(
                f"must be one value for all devices; got {describe(value)}",
                "Use the value of the slowest or smallest device: all ranks of an axis get "
                "the same share.",
            )
        return super().check(value)


class _HomogeneousCount(_HomogeneousLeaf, Integer):
    pass


class _HomogeneousSize(_HomogeneousLeaf, Size):
    pass


class _HomogeneousFigure(_HomogeneousLeaf, Real):
    pass


# The default reserve of a GPU. `device_memory` is the full capacity that torch reports. The figures
# are from torch's reports of CUDA out-of-memory errors ("process has X in use, Y allocated by
# PyTorch, Z reserved but unallocated"), NCCL's issues and our measurements: - CUDA's context and
# loaded kernels: 0.4 to 0.7 GiB (X - Y - Z of jobs on one GPU, as in   HiDream-ai/VAREdit#6). -
# NCCL: 0.5 to 0.7 GB for each communicator (NVIDIA/nccl#964); in one report 1.6 GB with one and 6
# GB with three or more (NVIDIA/nccl#864); in another 4.3 GB once all-to-all has run
# (NVIDIA/nccl#1685). X - Y - Z of training jobs on several GPUs is 1.4 GiB
# (wbfwonderful/Vad-R1#11) to 5.8 GiB. A job with many groups needs a larger reserve. - Workspaces
# of cuBLAS and other kernels, which no derived peak contains: at most 0.39 GB
# (benchmarks/results/gpu_hbm3_2026-11-26.md, the column "allocated - lives"). 0.6 + 2 + 0.4 GiB
# make the constant part.
_GPU_RESERVE = 3 * 2**30
# Fragmentation is a share, as it grows with the memory. Z is 0.2 to 1 GiB in 8 of 13 reports of
# cards with 80 to 141 GB, and 3.5 GiB in one. In four it is 14 GiB or more: this reserve does not
# cover that. Cached blocks of whole free segments are not reserved: the allocator returns these
# before it fails.
_GPU_FRAGMENTS = 40
# Factors of a step's time on GPUs.
# - Interference: on an H100 a product of 132 blocks falls from 80 % to 47 % of the peak next to an
#   all-gather, which takes 24 of the 132 multiprocessors, so that a second wave is needed
#   (NVIDIA developer forum, thread 337991): 0.80 / 0.47 - 1.
# - Stragglers and congestion together: the median of the published jobs that ran on several numbers
#   of nodes, without the time that their collectives take longer (`python
#   benchmarks/published_seconds.py --factors`).
_GPU_INTERFERENCE = 0.7
_GPU_STRAGGLERS = 0.014
# A process that has imported torch and joined a gloo group has 280 MiB resident (torch 2.13).
PROCESS_BYTES = 300 * 2**20


@section_dataclass
class Cluster:
    """The hardware of the job: a preset and the fields that override it. Bandwidths are in bytes
    per second; None means unknown, or the default of the device type."""

    preset: Annotated[
        str | None,
        Text("Name of a cluster in specs/clusters, or a YAML file with its fields.", NAME_OR_FILE),
    ] = None
    name: Annotated[str, Text("Name of the cluster in reports.")] = "cluster"
    devices: Annotated[int, _HomogeneousCount("Total number of devices.", 1, 2**17)]
    devices_per_node: Annotated[
        int,
        _HomogeneousCount(
            "Devices per node. Default: all devices in one node.",
            1,
            2**17,
            has_derived_default=True,
        ),
    ] = 0
    device_memory: Annotated[
        int,
        _HomogeneousSize("Memory of one device, as torch reports it (79.1 GiB for an 80 GB card)."),
    ]
    reserve: Annotated[
        int | None,
        _HomogeneousSize(
            "Memory of one device that tensors cannot use: CUDA context, NCCL, libraries, "
            "fragmentation. Default for GPUs: 3 GiB + 1/40 of the memory; 0 compares bare "
            "peaks.",
            low=0,
            example="5 GiB",
            has_derived_default=True,
        ),
    ] = None
    host_memory: Annotated[
        int | None,
        _HomogeneousSize(
            "Host memory of one node, shared by its devices, for offloaded states. Default: "
            "unknown, and then it is also unknown whether offloaded states fit.",
            example="2 TB",
        ),
    ] = None
    intra_node_bandwidth: Annotated[
        float,
        _HomogeneousSize(
            "Bandwidth of one device within a node, in bytes per second.",
            rate=True,
            read=float,
            write=round,
        ),
    ]
    inter_node_bandwidth: Annotated[
        float,
        _HomogeneousSize(
            "Bandwidth of one device between nodes, in bytes per second. Default: as within a "
            "node.",
            rate=True,
            has_derived_default=True,
            read=float,
            write=round,
        ),
    ] = 0.0
    intra_node_latency: Annotated[
        float, _HomogeneousFigure("Latency of a message within a node, in seconds.", 0.0, 60.0)
    ] = 5e-6
    inter_node_latency: Annotated[
        float, _HomogeneousFigure("Latency of a message between nodes, in seconds.", 0.0, 60.0)
    ] = 10e-6
    kind: Annotated[
        str | None,
        Choice(
            "Device type, which decides the kernels.",
            {"cpu": "CPUs", "cuda": "GPUs"},
            slips={"gpu": "cuda"},
        ),
    ] = None
    sm: Annotated[
        int | None,
        _HomogeneousCount(
            "Compute capability of the GPUs (80: A100, 90: H100, 100: B200), which decides the "
            "CUDA kernels.",
            50,
            200,
        ),
    ] = None
    interference: Annotated[
        float | None,
        _HomogeneousFigure(
            "How much longer compute takes while a collective runs on the same GPU; 0.7 means 70 % "
            "longer. Default: 0.7 for GPUs, otherwise 0.",
            0.0,
            100.0,
            has_derived_default=True,
        ),
    ] = None
    stragglers: Annotated[
        float | None,
        _HomogeneousFigure(
            "How much longer a step takes with each doubling of the number of nodes, because of "
            "slow nodes and shared links; 0.01 means 1 %. Default: 0.014 for GPUs, otherwise 0.",
            0.0,
            1.0,
            has_derived_default=True,
        ),
    ] = None
    host_bandwidth: Annotated[
        float | None,
        _HomogeneousSize(
            "Memory bandwidth of one node's host, in bytes per second, shared by its devices, for "
            "updates on the host. Default: unknown, and then their time is unknown.",
            rate=True,
            has_derived_default=True,
            read=float,
            write=round,
        ),
    ] = None
    price: Annotated[
        float | None, _HomogeneousFigure("Price of one device per hour, in any currency.", 0.0, 1e9)
    ] = None
    flops: Annotated[
        float,
        _HomogeneousFigure("Peak operations per second of one device; 0 if unknown.", 0.0, 1e20),
    ] = 0.0
    rates: Annotated[
        Rates | None,
        Section(
            Rates,
            "Measured or published speeds of operators, collectives and updates, used for step "
            "times.",
            accepts_null=True,
            is_partial=True,
            is_sparse=True,
        ),
    ] = None

    @property
    def reserved_bytes(self) -> int:
        """The bytes of one device that tensors cannot use: `reserve`, or the default for the kind.
        A device of unknown kind has the GPU default, which is the larger one."""
        if self.reserve is not None:
            return self.reserve
        if self.kind == "cpu":
            return PROCESS_BYTES
        return _GPU_RESERVE + self.device_memory // _GPU_FRAGMENTS

    @property
    def slowdown_beside_collectives(self) -> float:
        """The relative slowdown of compute while a collective runs: `interference`, or the default
        of the device type."""
        default = _GPU_INTERFERENCE if self.kind == "cuda" else 0.0
        return default if self.interference is None else self.interference

    @property
    def slowdown_per_doubling(self) -> float:
        """The relative slowdown of a step per doubling of the nodes: `stragglers`, or the default
        of the device type."""
        default = _GPU_STRAGGLERS if self.kind == "cuda" else 0.0
        return default if self.stragglers is None else self.stragglers

    @property
    def usable_memory(self) -> int:
        """The bytes of one device that a predicted peak may fill; 0 or negative if there
        are none."""
        return self.device_memory - self.reserved_bytes
