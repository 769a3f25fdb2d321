"""The speed of one GPU, and step times of full trainings compared with it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _script import Script, table_head, table_row

from ptrain.cost import Column

SCRIPT = Script("gpu_rates")
MIB = 2**20
PRODUCTS = (  # rows, inner, columns: tokens and widths of GPT-2, Llama 3 8B and small ones
    (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (8192, 8192, 8192),
    (8192, 768, 3072), (8192, 3072, 768), (4096, 1600, 6400), (4096, 6400, 1600),
    (4096, 4096, 4096), (4096, 4096, 1024), (4096, 4096, 14336), (4096, 14336, 4096),
    (4096, 4096, 128256), (8192, 768, 50257), (512, 4096, 14336), (64, 4096, 14336),
)  # fmt: skip
ATTENTION = (  # batch, heads, sequence, head_dim
    (8, 12, 1024, 64), (1, 32, 4096, 128), (1, 32, 8192, 128), (4, 25, 1024, 64), (16, 8, 256, 64)
)  # fmt: skip
BYTES = (MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
TIMES = 9
LLAMA = (
    "model={family: llama, layers: 16, hidden: 2048, heads: 32, kv_heads: 8, ffn: 8192, "
    "vocab: 128256}"
)
ONE, BF16 = "mesh.dp_replicate=1", "precision.layout=bf16"
OF_1024 = "batch={global: 8, micro: %d, sequence: 1024}"
OF_4096 = "batch={global: %d, micro: 2, sequence: 4096}"
STEPS = (
    ("ddp", ONE, "model.preset=gpt2-124m", OF_1024 % 8, BF16),
    ("ddp", ONE, "model.preset=gpt2-124m", OF_1024 % 8),
    ("ddp", ONE, "model.preset=gpt2-1558m", OF_1024 % 4, BF16),
    ("ddp", ONE, LLAMA, OF_4096 % 2, BF16),
    ("fsdp-mixed", "mesh.dp_shard=1", LLAMA, OF_4096 % 4),
    ("fsdp-mixed", "mesh.dp_shard=1", LLAMA, OF_4096 % 2, "activations=M"),
)
BRIEFLY = (
    "device=cuda", "cluster.preset=h100-8", "train.steps=12", "eval.every=0",
    "checkpoint.at_end=false", "checkpoint.every=0", "profile=[]",
)  # fmt: skip


Rate = tuple[str, float, float, str]  # of what, seconds, so much a second, and its unit


def seconds_of(work: Callable[[], object], inner: int = 5) -> float:
    """Return the median seconds of one call, of several rounds."""
    for _ in range(3):
        work()
    rounds = []
    for _ in range(TIMES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            work()
        end.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(end) / 1e3 / inner)
    return statistics.median(rounds)


def products() -> Iterator[Rate]:
    for dtype in (torch.bfloat16, torch.float32):
        for rows, inner, columns in PRODUCTS:
            left = torch.randn(rows, inner, device="cuda", dtype=dtype)
            right = torch.randn(columns, inner, device="cuda", dtype=dtype)
            taken = seconds_of(lambda left=left, right=right: F.linear(left, right))
            name = f"{rows} × {inner} × {columns} {str(dtype).removeprefix('torch.')}"
            yield name, taken, 2 * rows * inner * columns / taken / 1e12, "TFLOP/s"


def attentions() -> Iterator[Rate]:
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ATTENTION:
            yield from attention(shape, dtype)


def attention(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Iterator[Rate]:
    """Yield the rates of a causal attention: half of its products are left out."""
    batch, heads, sequence, head_dim = shape
    parts = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(*parts, is_causal=True)

    output = forward()
    gradient = torch.randn_like(output)

    def backward() -> object:
        return torch.autograd.grad(output, parts, gradient, retain_graph=True)

    flops = 2 * batch * heads * sequence**2 * head_dim
    name = f"{shape} {str(dtype).removeprefix('torch.')}"
    with torch.no_grad():
        taken = seconds_of(forward)
    yield f"{name} forward", taken, flops / taken / 1e12, "TFLOP/s"
    taken = seconds_of(backward)
    yield f"{name} backward", taken, 2.5 * flops / taken / 1e12, "TFLOP/s"


def movements() -> Iterator[Rate]:
    for size in BYTES:
        yield from movements_of(size)


def movements_of(size: int) -> Iterator[Rate]:
    """Yield the rates of operators on `size` bytes, by the bytes that they read and write."""
    one = torch.randn(size // 2, device="cuda").to(torch.bfloat16)
    other, rows = torch.randn_like(one), one.view(-1, 1024)
    scale = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    host = torch.empty(size // 2, dtype=torch.bfloat16, pin_memory=True)
    works: tuple[tuple[str, Callable[[], object], int], ...] = (
        ("copy", lambda: other.copy_(one), 2),
        ("add", lambda: torch.add(one, other), 3),
        ("gelu", lambda: F.gelu(one), 2),
        ("layer_norm", lambda: F.layer_norm(rows, (1024,), scale, scale), 2),
        ("rms_norm", lambda: F.rms_norm(rows, (1024,), scale), 2),
        ("cast to fp32", one.float, 3),
        ("to host", lambda: host.copy_(one, non_blocking=True), 1),
        ("from host", lambda: one.copy_(host, non_blocking=True), 1),
    )
    for name, work, times in works:
        taken = seconds_of(work)
        yield f"{name} {size / MIB:g} MiB", taken, times * size / taken / 1e9, "GB/s"


def updates() -> Iterator[Rate]:
    for millions in (1, 16, 128, 512):
        for is_fused in (True, False):
            weight = torch.nn.Parameter(torch.randn(millions * 10**6, device="cuda"))
            weight.grad = torch.randn_like(weight)
            optimizer = torch.optim.AdamW([weight], fused=is_fused, foreach=not is_fused)
            taken = seconds_of(optimizer.step)
            name = f"AdamW {'fused' if is_fused else 'foreach'} {millions} M fp32"
            yield name, taken, 28 * millions * 10**6 / taken / 1e9, "GB/s"


def launches() -> Iterator[Rate]:
    small = torch.zeros(8, device="cuda")
    taken = seconds_of(lambda: small.add_(1), inner=200)
    yield "an operator of 8 numbers, queued", taken, 1 / taken / 1e3, "thousand a second"


def step_of(words: tuple[str, ...]) -> dict[str, Any]:
    """Return of one training on one GPU its median seconds a step, its verdict and its peaks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ptrain", "train", *words, *BRIEFLY, "--json"]
        ended = subprocess.run(
            [*command, "--run-dir", f"{folder}/run"], capture_output=True, text=True, check=False
        )
    if ended.returncode:
        return {"error": ended.stderr[-400:]}
    record = json.loads(ended.stdout)
    seconds = {row["column"]: row["value"] for row in record["step_seconds"]}
    return {
        "seconds": seconds[Column.MEASURED],
        "predicted": seconds.get(Column.EXACT),
        "verdict": record["verdict"],
        "peak": record["peak"],
    }


def step_line(words: str, step: dict[str, Any]) -> str:
    """Return a table row: a step's median seconds next to the prediction of the cluster's rates."""
    seconds, predicted = (step.get(name) or float("nan") for name in ("seconds", "predicted"))
    return f"| {words} | {seconds:.4f} | {predicted:.4f} | {predicted / seconds - 1:+.1%} |"


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--out", type=Path, required=True, help="the measurements, as JSON")
    parser.add_argument("--read", action="store_true", help="what --out has, measured before")
    args = parser.parse_args()
    if not args.read and not torch.cuda.is_available():
        print("no GPU was found; --read makes the page of what one measured", file=sys.stderr)
        return 2
    if not args.read:
        rates = [*products(), *attentions(), *movements(), *updates(), *launches()]
        measured = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "rates": rates,
            "steps": {},
        }
        args.out.write_text(json.dumps(measured))
        torch.cuda.empty_cache()
        for words in STEPS:
            measured["steps"][" ".join(words)] = step_of(words)
            args.out.write_text(json.dumps(measured, indent=1))
    measured = json.loads(args.out.read_text())
    lines = [*SCRIPT.head(), f"\n{measured['device']}, torch {measured['torch']}\n"]
    lines += table_head("work", "seconds", "rate")
    lines += [
        table_row(n, f"{s:.3e}", f"{rate:,.1f} {unit}") for n, s, rate, unit in measured["rates"]
    ]
    lines += ["", *table_head("training", "seconds a step", "predicted", "off")]
    lines += [step_line(words, step) for words, step in measured["steps"].items()]
    steps = measured["steps"].items()
    failed = [words for words, step in steps if step.get("verdict") != "holds"]
    return SCRIPT.conclude(lines, failed, args)


if __name__ == "__main__":
    raise SystemExit(main())
