"""The hardware of a job: devices, their memory, and links by tier; and measured rates: seconds
of operators, collectives, copies, updates and hooks.

A table is a list of rows: a key, and the seconds for each number of ranks per node that computed at
the same time. CPU ranks share cores, so a matrix product of one of four ranks on two cores takes
twice as long as with two ranks. Each rank on GPUs has a device.
"""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, NamedTuple

from ptrain.cost import Collective
from ptrain.spec.job import FUSED
from ptrain.spec.leaf import (
    Choice,
    Integer,
    Leaf,
    Numbers,
    Real,
    Section,
    Shape,
    Size,
    Text,
    check_part,
    describe,
    grammar_dataclass,
    reject,
    section_dataclass,
    to_yaml_value,
)
from ptrain.spec.model import NAME_OR_FILE
from ptrain.spec.precision import DType
from ptrain.word import Word


class OperatorKind(Word):
    """A class of operators whose time depends on the same dimensions; one table measures each
    class."""

    PRODUCT = "product"  # dimensions: (matrices, rows, inner, columns)
    ATTENTION = "attention"  # fused, forward: (samples, heads, queries, keys, features of a head)
    ATTENTION_BACKWARD = "attention_backward"  # the same dimensions
    VIEW = "view"  # views and allocations, which run no kernel
    # The only dimension of the following kinds is the bytes read and written.
    POINTWISE = "pointwise"  # sums, products, masks
    ACTIVATION = "activation"  # elementwise exponentials: GELU, SiLU, tanh
    NORM = "norm"  # of rows: layer and RMS norms, sums, means
    SOFTMAX = "softmax"  # softmax and cross-entropy, and their gradients
    COPY = "copy"  # copies, casts, concatenations
    INDEX = "index"  # rows by number: an embedding, its gradient
    DRAW = "draw"  # random numbers

    @property
    def is_of_bytes(self) -> bool:
        """True if the time depends on the bytes read and written, not on shapes."""
        return self not in (
            OperatorKind.PRODUCT,
            OperatorKind.ATTENTION,
            OperatorKind.ATTENTION_BACKWARD,
            OperatorKind.VIEW,
        )


class Hook(Word):
    """A host-side overhead per event.

    The first members are the code of wrappers besides communication. The others are the cost of
    modules, autograd and dispatch per traced operator, besides its computation.
    """

    FSDP2_GATHER = "fsdp2_gather"  # a unit's all-gather: copy in, issue, copy out, as views
    FSDP2_REDUCE = "fsdp2_reduce"  # a unit's reduction and the shard's gradient
    DDP_BUCKET = "ddp_bucket"
    FLAT_GATHER = "flat_gather"
    FLAT_REDUCE = "flat_reduce"
    PIPELINE_PASS = "pipeline_pass"  # a forward or backward pass of a stage, with its stand-ins
    CUT_PRODUCT = "cut_product"  # sharded operands: DTensor dispatch, and issuing its collectives
    # Around any operator, views included; on a GPU, the time to issue it:
    FORWARD_OPERATOR = "forward_operator"
    BACKWARD_OPERATOR = "backward_operator"
    HALVES_OPERATOR = "halves_operator"  # in the halves of a backward pass, which search its graph
    # In both passes of a layer:
    RECOMPUTED_OPERATOR = "recomputed_operator"  # in full recomputation
    SELECTED_OPERATOR = "selected_operator"  # selective: a dispatch mode decides per operator
    MOVED_OPERATOR = "moved_operator"  # its activations are offloaded


class LinkTier(Word):
    """The position of a collective's slowest link."""

    WITHIN = "within"  # devices of one node
    BETWEEN = "between"  # nodes


CALIBRATED = "ptrain calibrate"  # how the source of measured rates begins
CLIP = "clip"  # a row of `updates`: the norm of all gradients, and their scaling


class RateRow(NamedTuple):
    """A row of a rate table.

    `key` identifies the measurement. `figures` are seconds by number of concurrent ranks, in the
    order of `Rates.at_once` (None: not measured); for links, the columns that the table names.
    """

    key: tuple[Any, ...]
    figures: tuple[float | None, ...]


@grammar_dataclass
class Rows(Leaf):
    """A table: a list of rows with the `columns`, followed by figures.

    The figures are those named in `figures`, or seconds for each number of concurrent ranks.
    """

    columns: Mapping[str, Leaf] = field(kw_only=False)
    figures: tuple[str, ...] = ()

    def describe_values(self) -> str:
        figures = ", ".join(self.figures) or "seconds by ranks at once"
        return f"rows [{', '.join(self.columns)}, {figures}]"

    def convert(self, value: Any) -> object:
        if not isinstance(value, list):
            reject(f"must be a list of {self.describe_values()}; got {describe(value)}")
        rows = tuple(self._parse_row(number, row) for number, row in enumerate(value, 1))
        numbers: dict[tuple[Any, ...], int] = {}
        for number, row in enumerate(rows, 1):
            if numbers.setdefault(row.key, number) != number:
                reject(f"row {number} repeats row {numbers[row.key]}", "Remove one of the two.")
        return rows

    def _parse_row(self, number: int, row: object) -> RateRow:
        """Parse one row. Raises Refused if it has the wrong length or a wrong cell."""
        cells = row if isinstance(row, list) else []
        width, num_figures = len(self.columns), len(self.figures)
        if len(cells) <= width or (num_figures and len(cells) != width + num_figures):
            shown = row if isinstance(row, list) else describe(row)
            reject(f"row {number} must be {self.describe_values()[5:]}; got {shown}")
        names = (*self.columns, *(self.figures or ("seconds",) * (len(cells) - width)))
        leaves = (*self.columns.values(), *[_FIGURE] * (len(cells) - width))
        # an unknown word without a similar one probably comes from another version
        taken = tuple(
            check_part(leaf.parse, cell, f"row {number}, {name}", _ANEW * isinstance(leaf, Choice))
            for name, leaf, cell in zip(names, leaves, cells, strict=True)
        )
        return RateRow(taken[:width], taken[width:])

    def dump(self, value: object) -> object:
        assert isinstance(value, tuple), "rows"
        return [[to_yaml_value(cell) for cell in (*row.key, *row.figures)] for row in value]

    def value_schemas(self) -> tuple[Shape, ...]:
        least = len(self.columns) + max(1, len(self.figures))
        return ({"type": "array", "items": {"type": "array", "minItems": least}},)


# Rates are measurements of one version: a new kind of operator has no row in an older file.
_ANEW = "If another version of ptrain wrote the file, run `ptrain calibrate` again."
_FIGURE = Real("seconds, or a share", 0.0, 1e6, excludes_low=True, accepts_null=True)
_BYTES = Size("bytes", high=2**50)
_DTYPE = Choice("dtype", {dtype.value: f"{dtype.itemsize} bytes" for dtype in DType}, read=DType)


def _word_choice(about: str, kinds: type[Word], *members: Word) -> Choice:
    words = {kind.value: kind.name for kind in (members or tuple(kinds))}
    return Choice(about, words, read=kinds)


def _integer_columns(*names: str) -> dict[str, Leaf]:
    return {name: Integer(name, 1, 2**40) for name in names}


COLLECTIVES = tuple(kind for kind in Collective if not kind.is_copy and kind is not Collective.RECV)
_COPIES = tuple(kind for kind in Collective if kind.is_copy)
_OF_BYTES = tuple(kind for kind in OperatorKind if kind.is_of_bytes)
_ATTENTION = (OperatorKind.ATTENTION, OperatorKind.ATTENTION_BACKWARD)


@section_dataclass
class Rates:
    """Measured times of a cluster's operators, collectives and hooks, as `ptrain calibrate` writes
    them: seconds, by the number of ranks of a node that compute at the same time."""

    preset: Annotated[
        str | None,
        Text("Name of a file in specs/rates, or a YAML file with its fields.", NAME_OR_FILE),
    ] = None
    source: Annotated[
        str | None, Text("Who measured or published the rates, and how.", accepts_null=True)
    ] = None
    date: Annotated[
        str | None,
        Text(
            "Date of the measurement.", r"\d{4}-\d\d-\d\d", "a date, 2026-11-24", accepts_null=True
        ),
    ] = None
    machine: Annotated[str | None, Text("Machine of the measurement.", accepts_null=True)] = None
    torch: Annotated[str | None, Text("torch version of the measurement.", accepts_null=True)] = (
        None
    )
    ptrain: Annotated[str | None, Text("ptrain version of the measurement.", accepts_null=True)] = (
        None
    )
    at_once: Annotated[
        tuple[int, ...],
        Numbers(
            "Numbers of ranks that compute on a node at the same time, one per column of "
            "seconds in the rows below; [1] for GPUs.",
            1,
            2**17,
            is_integer=True,
        ),
    ] = (1,)
    threads: Annotated[
        tuple[int, ...],
        Numbers(
            "Threads per rank on CPUs, one number per entry of `at_once`.",
            1,
            2**12,
            is_integer=True,
        ),
    ] = ()
    spread: Annotated[
        tuple[float, ...],
        Numbers(
            "Relative spread of repeated measurements, one number per entry of `at_once`.", 0, 1e3
        ),
    ] = ()
    products: Annotated[
        tuple[RateRow, ...],
        Rows(
            "Times of matrix products.",
            {"dtype": _DTYPE, **_integer_columns("matrices", "rows", "inner", "columns")},
        ),
    ] = ()
    attention: Annotated[
        tuple[RateRow, ...],
        Rows(
            "Times of torch's fused causal attention, forward and backward.",
            {
                "pass": _word_choice("pass", OperatorKind, *_ATTENTION),
                "dtype": _DTYPE,
                **_integer_columns("samples", "heads", "queries", "keys", "features"),
            },
        ),
    ] = ()
    operators: Annotated[
        tuple[RateRow, ...],
        Rows(
            "Times of memory-bound operators, by the bytes they read and write.",
            {
                "kind": _word_choice("kind", OperatorKind, *_OF_BYTES),
                "dtype": _DTYPE,
                "bytes": _BYTES,
            },
        ),
    ] = ()
    updates: Annotated[
        tuple[RateRow, ...],
        Rows(
            "Times of optimizer steps, by number of elements and tensors, and of gradient "
            "clipping.",
            {
                "update": Choice(
                    "update",
                    {
                        **dict.fromkeys(FUSED, "torch's, fused"),
                        CLIP: "the norm of all gradients, and their scaling",
                    },
                ),
                "dtype": _DTYPE,
                **_integer_columns("elements", "tensors"),
            },
        ),
    ] = ()
    collectives: Annotated[
        tuple[RateRow, ...],
        Rows(
            "Times of collectives, by number of ranks and nodes and by the bytes of the full "
            "tensor.",
            {
                "collective": _word_choice("collective", Collective, *COLLECTIVES),
                **_integer_columns("ranks", "nodes"),
                "bytes": _BYTES,
            },
        ),
    ] = ()
    lateness: Annotated[
        tuple[RateRow, ...],
        Rows(
            "Extra time of a collective whose ranks computed for the given time since the "
            "previous one.",
            {"microseconds": Integer("microseconds that were computed", 1, 10**9)},
        ),
    ] = ()
    links: Annotated[
        tuple[RateRow, ...],
        Rows(
            "For collectives that were not measured: time per call and per hop, and the usable "
            "fraction of the link bandwidth.",
            {"tier": _word_choice("tier", LinkTier)},
            figures=("seconds of a call", "seconds of a hop", "share of the bandwidth"),
        ),
    ] = ()
    copies: Annotated[
        tuple[RateRow, ...],
        Rows(
            "Times of copies between a rank's memory tiers.",
            {"copy": _word_choice("copy", Collective, *_COPIES), "bytes": _BYTES},
        ),
    ] = ()
    hooks: Annotated[
        tuple[RateRow, ...],
        Rows(
            "Times that wrappers add besides communication.", {"hook": _word_choice("hook", Hook)}
        ),
    ] = ()


def are_calibrated(rates: Rates) -> bool:
    """Return True if `ptrain calibrate` measured the rates."""
    return (rates.source or "").startswith(CALIBRATED)


def find_incomplete_tables(rates: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, finding, remedy) for each table whose rows lack a figure for a number of
    `at_once`.

    Only the fields in `rates` are checked.
    """
    at_once = rates.get("at_once", (1,))
    if not at_once or list(at_once) != sorted(set(at_once)):
        yield (
            "at_once",
            f"{list(at_once)} is not in ascending order",
            ("Use ascending numbers, for example `[1, 2, 4]`."),
        )
        return
    for key in ("threads", "spread"):
        if len(rates.get(key, ())) not in (0, len(at_once)):
            yield key, *_describe_uneven("it", len(rates[key]), at_once)
    for number, row in enumerate(rates.get("links", ()), 1):
        if isinstance(row, RateRow) and None in row.figures:
            finding = f"row {number} has a null; the times per call, hop and byte are required"
            yield "links", finding, "Fill in all three values, or remove the row."
    for key, rows in rates.items():
        if key == "links" or not isinstance(rows, tuple):
            continue
        for number, row in enumerate(rows, 1):
            if isinstance(row, RateRow) and len(row.figures) != len(at_once):
                yield key, *_describe_uneven(f"row {number}", len(row.figures), at_once)
                break


def _describe_uneven(subject: str, num_figures: int, at_once: tuple[int, ...]) -> tuple[str, str]:
    figures = "1 figure" if num_figures == 1 else f"{num_figures} figures"
    numbers = ", ".join(map(str, at_once))
    finding = f"{subject} has {figures}, but at_once has {numbers}"
    return finding, "Use one value per entry of `at_once`, or null if it was not measured."


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
