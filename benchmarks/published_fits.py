"""Compare `ptrain predict`'s "fits" with published jobs that trained or ran out of memory.

Each row is a public report with its source: its authors trained the job on the cards that they
name, or their run ended with CUDA's out-of-memory error. The spec of a row places the states as the
reported program does (FSDP, FSDP2, DeepSpeed ZeRO). Kernels and loss are ptrain's eager ones.

Claim: no job that ran out of memory is predicted to fit, and no job that trained is predicted not
to fit. Prints the answer and the headroom of every row; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _machine import conclude, header, this_command

from ptrain.cli.predict import predicted
from ptrain.selection.fit import Fit
from ptrain.units import format_bytes

# Capacities that torch reported in out-of-memory messages or logs of the same card.
H100_96 = "cluster.device_memory=95.0 GiB"  # torchtitan pull request 1884: 33.21 GiB is 34.95 %
A100_40 = "cluster.device_memory=39.59 GiB"  # meta-llama/llama issue 52
RTX_6000_ADA = "cluster.device_memory=47.48 GiB"  # torchtitan issue 620
RTX_3090 = "cluster.device_memory=23.70 GiB"  # GaoLii/DSP issue 10

TITAN_PAGE = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "torchtitan, docs/performance.md"
ALPACA = "stanford_alpaca, README"
LLAMA_FACTORY = "LlamaFactory issue 5977"
OPENRLHF = "OpenRLHF issue 698"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A published job: `trained` is False if it ran out of memory."""

    name: str
    trained: bool
    source: str
    settings: tuple[str, ...]
    published: str = ""  # the memory that the source states, if it does


def fsdp(model: str, gpus: int, micro: int, sequence: int, *settings: str) -> tuple[str, ...]:
    """Return settings of FSDP with fp32 shards, bf16 compute and fp32 reduction."""
    batch = f"batch={{global: {micro * gpus}, micro: {micro}, sequence: {sequence}}}"
    mesh = (f"mesh.dp_shard={gpus}", "precision.reduced=fp32")
    return ("fsdp-mixed", f"model.preset={model}", *mesh, batch, *settings)


def deepspeed(model: str, gpus: int, sequence: int, *settings: str) -> tuple[str, ...]:
    """Return settings of DeepSpeed ZeRO with recomputation.

    The layout has 18 bytes per parameter, as DeepSpeed's estimate_zero3_model_states_mem_needs has:
    16-bit parameters, fp32 gradients and fp32 optimizer state.
    """
    batch = f"batch={{global: {gpus}, micro: 1, sequence: {sequence}}}"
    mesh = (f"mesh.dp_shard={gpus}", "precision.layout=megatron18", "activations=M")
    return ("zero3", f"model.preset={model}", *mesh, batch, *settings)


A100, H100 = "cluster.preset=a100-64", "cluster.preset=h100-64"
FULL, SELECTIVE = ("activations=M",), ("activations=M", "recompute=selective")
RTX_3090_NODE = ("cluster.preset=a100-8", RTX_3090)

JOBS = (
    Job(
        name="Llama 3.1 8B, FSDP on 8 H100 96GB, batch 2, selective",
        trained=True,
        source=TITAN_PAGE,
        settings=fsdp("llama3.1-8b", 8, 2, 8192, *SELECTIVE, "cluster.preset=h100-8", H100_96),
        published="82.4 GiB reserved",
    ),
    Job(
        name="Llama 3.1 8B, FSDP on 128 H100 96GB, batch 2, selective",
        trained=True,
        source=TITAN_PAGE,
        settings=fsdp("llama3.1-8b", 128, 2, 8192, *SELECTIVE, "cluster.preset=h100-128", H100_96),
        published="67.0 GiB reserved",
    ),
    Job(
        name="Llama 3 8B, FSDP on 8 H100, batch 1, selective",
        trained=True,
        source="torchtitan pull request 996",
        settings=fsdp("llama3-8b", 8, 1, 8192, *SELECTIVE, "cluster.preset=h100-8"),
        published="49.58 GiB reserved",
    ),
    Job(
        name="Llama 3 8B, FSDP on 64 A100 80GB, batch 1, selective",
        trained=True,
        source=TITAN_A100,
        settings=fsdp("llama3-8b", 64, 1, 8192, *SELECTIVE, A100),
    ),
    Job(
        name="Llama 3 70B, FSDP on 64 A100 80GB, batch 1, full recomputation",
        trained=True,
        source=TITAN_A100,
        settings=fsdp("llama3-70b", 64, 1, 8192, *FULL, A100),
    ),
    Job(
        name="Llama 3 8B, FSDP on 2 RTX 6000 Ada 48GB, batch 1, full recomputation",
        trained=False,
        source="torchtitan issue 620",
        settings=fsdp("llama3-8b", 2, 1, 8192, *FULL, "cluster.preset=a100-8", RTX_6000_ADA),
    ),
    Job(
        name="LLaMA 7B, 1 A100 80GB, batch 4",
        trained=False,
        source="stanford_alpaca issues 56 and 220",
        settings=fsdp("llama2-7b", 1, 4, 512, "cluster.preset=a100-8"),
    ),
    Job(
        name="LLaMA 7B, FSDP on 2 A100 80GB, batch 4",
        trained=True,
        source="stanford_alpaca issue 56",
        settings=fsdp("llama2-7b", 2, 4, 512, "cluster.preset=a100-8"),
    ),
    Job(
        name="LLaMA 7B, FSDP on 4 A100 80GB, batch 4",
        trained=True,
        source=ALPACA,
        settings=fsdp("llama2-7b", 4, 4, 512, "cluster.preset=a100-8"),
    ),
    Job(
        name="Vicuna 7B, FSDP on 4 A100 40GB, batch 2, full recomputation",
        trained=True,
        source="FastChat, README",
        settings=fsdp("llama2-7b", 4, 2, 2048, *FULL, "cluster.preset=a100-8", A100_40),
    ),
    Job(
        name="Llama 2 13B, tp 2 on 2 A800 80GB, batch 1, recomputation",
        trained=False,
        source="LLaMA2-Accessory issue 26",
        settings=(
            *("tp", "model.preset=llama2-13b", "mesh.tp=2", "precision.layout=zero16"),
            *("batch={global: 1, micro: 1, sequence: 512}", *FULL, "cluster.preset=a100-8"),
        ),
    ),
    Job(
        name="Llama 3 8B, ZeRO-2 on 1 A100 80GB, batch 1",
        trained=False,
        source=OPENRLHF,
        settings=deepspeed("llama3-8b", 1, 128, "cluster.preset=a100-8"),
    ),
    Job(
        name="Llama 3 8B, ZeRO-3 on 8 RTX 3090 24GB, batch 1",
        trained=False,
        source=LLAMA_FACTORY,
        settings=deepspeed("llama3-8b", 8, 1024, *RTX_3090_NODE),
    ),
    Job(
        name="Llama 3 8B, ZeRO-3 with offload on 8 RTX 3090 24GB, batch 1",
        trained=True,
        source=LLAMA_FACTORY,
        settings=deepspeed("llama3-8b", 8, 1024, "placement=fsdp-offload", *RTX_3090_NODE),
        published="13 GB per card",
    ),
)


def predict_fit(job: Job) -> Fit:
    """Return the fit of a job, as `ptrain predict` derives it."""
    return predicted(job.settings[0], job.settings[1:], allow_import=False).fit


def answer(fit: Fit) -> str:
    """Return the answer of `ptrain predict` as one word."""
    if fit.fits is None:
        return "unknown"
    if not fit.fits:
        return "does not fit"
    return "tight" if fit.is_tight else "fits"


def is_wrong(job: Job, fit: Fit) -> bool:
    """Return True if the answer contradicts the published outcome."""
    return fit.fits is not None and fit.fits is not job.trained


def table(fits: Sequence[Fit]) -> Iterator[str]:
    """Yield the rows of the table."""
    columns = ("job", "source", "published", "answer", "peak", "usable", "headroom")
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for job, fit in zip(JOBS, fits, strict=True):
        outcome = "trained" if job.trained else "out of memory"
        published = f"{outcome}, {job.published}" if job.published else outcome
        headroom = f"{'−' if fit.spare_bytes < 0 else ''}{format_bytes(abs(fit.spare_bytes))}"
        sizes = (format_bytes(fit.peak_bytes or 0), format_bytes(fit.usable_memory or 0), headroom)
        yield f"| {' | '.join((job.name, job.source, published, answer(fit), *sizes))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    head = header("fit: answers for published jobs", this_command())
    fits = [predict_fit(job) for job in JOBS]
    wrong = [job.name for job, fit in zip(JOBS, fits, strict=True) if is_wrong(job, fit)]
    return conclude(
        "published_fits",
        [head, *table(fits)],
        failed=[f"{name}: the answer contradicts the published outcome" for name in wrong],
        not_covered="the kernels, fused losses and communication buffers of the reported programs",
        is_saved=args.save,
    )


if __name__ == "__main__":
    raise SystemExit(main())
