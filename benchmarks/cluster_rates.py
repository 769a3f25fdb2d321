"""Writes specs/rates: the H100's from the page that measured one, those of other GPUs from it."""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from _machine import ROOT
from _script import Script

from ptrain.derivation.estimate import derive
from ptrain.derivation.work import model_work
from ptrain.facts.model import Operator
from ptrain.rates.measured import MeasuredPace
from ptrain.spec.cluster import Cluster, Hook, OperatorKind, Rates
from ptrain.spec.leaf import Leaf, section_keys
from ptrain.spec.load import load
from ptrain.spec.precision import DType
from ptrain.spec.write import to_yaml

PAGE = ROOT / "benchmarks" / "results" / "gpu_rates_hbm3_2026-11-24.md"
STEPS = ROOT / "benchmarks" / "results" / "gpu_steps_hbm3_2026-11-26.md"
FOLDER = ROOT / "specs" / "rates"
MIB = 2**20
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
LATENCIES = {"within": (14.0e-6, 1.9e-6), "between": (14.0e-6, 4.0e-6)}
TABLES = ("products", "attention", "operators", "updates", "copies")
DISPATCH = 1.5  # what takes less than so many dispatches is not bound by the device
BOUND = 0.15
# Kinds of what the page names, and how many times its size they read and write.
MOVED = {
    "copy": ("copy", "bf16", 2),
    "cast to fp32": ("copy", "fp32", 3),
    "add": ("pointwise", "bf16", 3),
    "gelu": ("activation", "bf16", 2),
    "layer_norm": ("norm", "bf16", 2),
    "rms_norm": ("norm", "bf16", 2),
}
COPIED = {"to host": "device_to_host", "from host": "host_to_device"}
# A step whose host is slower than its device, by strategy: what it takes is the host's time. The
# units of `zero2` are flat; FSDP2's have as many gathers and reductions and were not measured.
HOST_BOUND = "124M, 1 × 256 tokens"
HOST_WORDS = (
    "model.preset=gpt2-124m", "batch={global: 2, micro: 1, sequence: 256}",
    "precision.layout=bf16", "cluster.preset=h100-8", "cluster.devices=2",
)  # fmt: skip
LATER = 19  # operators that the loss has had since the steps were measured
OPERATORS = (Hook.FORWARD_OPERATOR, Hook.BACKWARD_OPERATOR, Hook.HALVES_OPERATOR,
             Hook.RECOMPUTED_OPERATOR, Hook.SELECTED_OPERATOR, Hook.MOVED_OPERATOR)  # fmt: skip
WRAPPERS = (Hook.FLAT_GATHER, Hook.FLAT_REDUCE, Hook.FSDP2_GATHER, Hook.FSDP2_REDUCE)
# Bytes of an element that an update reads and writes: parameter, gradient, moments.
UPDATED = {("adamw", "fp32"): 28, ("adamw", "bf16"): 14, ("sgd", "fp32"): 20, ("sgd", "bf16"): 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The GB/s of a link by data sheet, and the share that reaches a collective, by NCCL's
    maintainers."""

    name: str
    effective: float
    line: float
    source: str

    @property
    def share(self) -> float:
        return round(self.effective / self.line, 2)

    def __str__(self) -> str:
        return f"{self.effective:g} of {self.line:g} GB/s of {self.name} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Published peaks of a GPU: operations per second by dtype, bytes per second of its memory and
    host bus, and its links within a node and between nodes."""

    title: str
    source: str
    flops: dict[str, float]
    memory: float
    host: float
    within: Link
    between: Link

    @property
    def half(self) -> str:
        """Return the 16-bit dtype of its matrix units: bf16, or fp16 on older ones."""
        return "bf16" if "bf16" in self.flops else "fp16"


def published() -> dict[str, Gpu]:
    """Return the GPUs of gpus.yaml, by name."""
    file = Path(__file__).with_name("gpus.yaml")
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    links = {name: Link(**link) for name, link in content["links"].items()}
    return {
        name: Gpu(**gpu | {tier: links[gpu[tier]] for tier in LATENCIES})
        for name, gpu in content["gpus"].items()
    }


GPUS = published()
H100 = GPUS["h100"]

Rows = list[list[Any]]
Tables = dict[str, Rows]


def read(page: str) -> Tables:
    """Return the page's rows as tables of rates."""
    tables: Tables = {key: [] for key in TABLES}
    norms: dict[int, list[float]] = {}
    for name, seconds in re.findall(r"^\| (.+?) \| (\d\.\d+e[-+]\d+) \|", page, re.MULTILINE):
        key, row = _row(name)
        if key == "norms":
            norms.setdefault(row[-1], []).append(float(seconds))
        elif key:
            tables[key].append([*row, float(seconds)])
    tables["operators"] += [
        ["norm", "bf16", size, _rounded(statistics.mean(taken))] for size, taken in norms.items()
    ]
    tables["updates"] = list(_updates(tables["updates"]))
    return tables


def _row(name: str) -> tuple[str, list[Any]]:
    """Return the table of a row of the page and its measurement; none for other rows."""
    if match := re.fullmatch(r"(\d+) × (\d+) × (\d+) (\w+)", name):
        rows, inner, columns, dtype = match.groups()
        return "products", [DTYPES[dtype], 1, int(rows), int(inner), int(columns)]
    if match := re.fullmatch(r"\((\d+), (\d+), (\d+), (\d+)\) (\w+) (forward|backward)", name):
        samples, heads, sequence, features = map(int, match.groups()[:4])
        kind = "attention" if match[6] == "forward" else "attention_backward"
        return "attention", [
            kind, DTYPES[match[5]], samples, heads, sequence, sequence, features
        ]  # fmt: skip
    if match := re.fullmatch(r"(.+) ([\d.]+) MiB", name):
        size = round(float(match[2]) * MIB)
        if match[1] in COPIED:
            return "copies", [COPIED[match[1]], size]
        kind, dtype, times = MOVED[match[1]]
        return "norms" if kind == "norm" else "operators", [kind, dtype, times * size]
    if match := re.fullmatch(r"AdamW fused (\d+) M fp32", name):
        return "updates", ["adamw", "fp32", int(match[1]) * 10**6, 1]
    return "", []


def _updates(rows: Rows) -> Iterator[list[Any]]:
    for (rule, dtype), size in UPDATED.items():
        for _, _, elements, tensors, seconds in rows:
            yield [rule, dtype, elements * UPDATED["adamw", "fp32"] // size, tensors, seconds]


def hooks() -> Rows:
    """Return the host's seconds of an operator, and of a unit's gather and reduction: those of a
    step of `ddp` by its operators, and what a step of `zero2` takes longer by its units."""
    text = STEPS.read_text(encoding="utf-8")
    taken = {
        strategy: float(milliseconds) / 1e3
        for strategy, milliseconds in re.findall(
            rf"^\| {HOST_BOUND} \| (\w+) \| ([\d.]+) \|", text, re.MULTILINE
        )
    }
    derivation = derive(load("ddp", HOST_WORDS).spec, is_timed=False)
    work = model_work(derivation.spec, derivation.plan, derivation.facts)
    assert work is not None, "a built-in model"
    ends = [layer for layer in (work.front, work.behind) if layer is not None]
    items = (item for layer in (*work.layers, *ends) for item in layer.forward + layer.backward)
    operators = sum(item.times for item in items if isinstance(item, Operator))
    of_unit = (taken["zero2"] - taken["ddp"]) / (len(work.layers) + 1) / 2
    return [
        *([hook.value, _rounded(taken["ddp"] / (operators - LATER))] for hook in OPERATORS),
        *([hook.value, _rounded(of_unit)] for hook in WRAPPERS),
    ]


def derived(measured: Tables, gpu: Gpu) -> Tables:
    """Return another GPU's seconds, derived from the H100's. No product is closer to its roofline
    than the H100's closest one."""
    tables: Tables = {}
    reached = max(_roofline(_work("products", row), H100) / row[-1] for row in measured["products"])
    for key, rows in measured.items():
        share = reached if key == "products" else 1.0
        least: dict[object, float] = {}
        for row in rows:
            least[row[0]] = min(row[-1], least.get(row[0], math.inf))
        tables[key] = [
            [
                *(gpu.half if cell == "bf16" else cell for cell in row[:-1]),
                _rounded(_elsewhere(row[-1], least[row[0]], _work(key, row), gpu, share)),
            ]
            for row in rows
        ]
    return tables


def _elsewhere(
    seconds: float, least: float, work: tuple[str, float, float], gpu: Gpu, share: float
) -> float:
    """Return the seconds on another GPU. `work`: the dtype, its operations and memory bytes;
    `share`: the highest share of its roofline."""
    here, there = (_roofline(work, known) for known in (H100, gpu))
    if seconds < DISPATCH * least:
        return max(seconds, there / share)
    return max(least, seconds * there / here)


def _roofline(work: tuple[str, float, float], gpu: Gpu) -> float:
    dtype, flops, size = work
    if dtype == "host":
        return size / gpu.host
    return max(flops / gpu.flops[gpu.half if dtype == "bf16" else dtype], size / gpu.memory)


def _work(key: str, row: list[Any]) -> tuple[str, float, float]:
    match key:
        case "products":
            dtype, matrices, rows, inner, columns, _ = row
            size = DType(dtype).itemsize * (rows * inner + inner * columns + rows * columns)
            return dtype, 2.0 * matrices * rows * inner * columns, matrices * size
        case "attention":
            kind, dtype, *shape, _ = row
            products = 2 if kind == "attention" else 5  # causal: of half the section_keys
            return dtype, products * math.prod(shape), 0.0
        case "updates":
            rule, dtype, elements, *_ = row
            return dtype, 0.0, elements * UPDATED[rule, dtype]
        case "copies":
            return "host", 0.0, row[1]
        case _:
            return row[1], 0.0, row[2]


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def text(name: str, page: str) -> str:
    """Return the file of one GPU."""
    measured = read(page)
    source = f"benchmarks/results/{PAGE.name}, by benchmarks/cluster_rates.py"
    gpu, head = H100, {"source": source, **_head(page)}
    if name != "h100":
        gpu = GPUS[name]
        peaks = f"{gpu.flops[gpu.half] / 1e12:g} TFLOP/s {gpu.half}, {gpu.memory / 1e12:g} TB/s"
        said = (
            f"derived: published peaks ({gpu.source}, {peaks}) x the H100's efficiency in {source}"
        )
        head, measured = {"source": said}, derived(measured, gpu)
    head["source"] += (
        f"; hooks: {STEPS.name}, by operators and units; links: NCCL src/graph/tuning.cc, "
        f"{gpu.within}, {gpu.between}"
    )
    links = [
        [tier, *LATENCIES[tier], link.share]
        for tier, link in (("within", gpu.within), ("between", gpu.between))
    ]
    return f"# {gpu.title}\n" + to_yaml({**head, **measured, "links": links, "hooks": hooks()})


def _head(page: str) -> dict[str, str]:
    cells = dict(re.findall(r"^\| ([\w ]+) \| (.+) \|$", page, re.MULTILINE))
    torch = re.search(r"torch ([\d.]+)", cells["packages"])
    assert torch, "the page names torch's version"
    return {
        "date": cells["date"][:10],
        "machine": f"{cells['accelerator'].partition(',')[0]}, {cells['machine']}",
        "torch": torch[1],
    }


def errors(page: str) -> Iterator[tuple[str, float]]:
    """Yield for each shape of a product its prediction from the others relative to its
    measurement."""
    tables = read(page)
    for dtype in DTYPES.values():
        rows = [row for row in tables["products"] if row[0] == dtype]
        for left in rows:
            rest = [row for row in tables["products"] if row is not left]
            pace = _pace({**tables, "products": rest})
            operator = Operator(OperatorKind.PRODUCT, DType(dtype), tuple(left[1:-1]))
            name = " × ".join(map(str, left[2:-1]))
            yield f"{name} {dtype}", pace.operator_seconds(operator) / left[-1]


def _pace(tables: Tables) -> MeasuredPace:
    rows: dict[str, Any] = {}
    for key, table in tables.items():
        leaf = section_keys(Rates)[key][1]
        assert isinstance(leaf, Leaf), "a table"
        rows[key] = leaf.convert(table)
    cluster = Cluster(kind="cuda", devices=1, device_memory=1, intra_node_bandwidth=1.0)
    return MeasuredPace(cluster, Rates(**rows), 1)


def leave_out(page: str) -> int:
    """Print the prediction of each shape from the others; return 1 if the claim fails."""
    ratios = dict(errors(page))
    for name, ratio in ratios.items():
        print(f"{ratio:6.3f}  {name}")
    median = statistics.median(abs(ratio - 1) for ratio in ratios.values())
    verdict = "holds" if median <= BOUND else "fails"
    print(f"{len(ratios)} shapes, median error {median:.1%}: {verdict}")
    return int(median > BOUND)


def main() -> int:
    parser = Script("cluster_rates").parser(has_page=False)
    parser.add_argument("--check", action="store_true", help="exit 1 if a file is out of date")
    parser.add_argument("--leave-out", action="store_true", help="errors of what lies between")
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    if args.leave_out:
        return leave_out(page)
    stale = 0
    for name in GPUS:
        path, new = FOLDER / f"{name}.yaml", text(name, page)
        is_stale = not path.exists() or path.read_text(encoding="utf-8") != new
        stale += is_stale
        if not args.check:
            path.write_text(new, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'out of date' if args.check else 'written anew'}"
              if is_stale else f"{path.relative_to(ROOT)}: up to date")  # fmt: skip
    return int(args.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
