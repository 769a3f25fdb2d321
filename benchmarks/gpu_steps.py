"""A step of ptrain's on one GPU against what one would write, in turns."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _by_hand import adamw, loop, zero_redundancy_adamw
from _script import Script, table_head, table_row
from _steps import legal, paired, program_steps, replicated, samples
from torch import nn
from torch.distributed import GradBucket

from ptrain.models.initialize import build_model, initialize
from ptrain.rooms.world import World, fake_world
from ptrain.spec.spec import Spec

SCRIPT = Script("gpu_steps")
LIMIT, SAME = 1.02, 1e-3
RANKS = 2
WARM_UP = 4
PAIRS = 20
Step = Callable[[], float]
SIZES = {  # name -> model, tokens of a micro-batch, whether a step is long
    "124M, 8 × 1024 tokens": ("model.preset=gpt2-124m", (8, 1024), True),
    "124M, 1 × 256 tokens": ("model.preset=gpt2-124m", (1, 256), False),
    "1.2B, 2 × 2048 tokens": (
        "model={family: llama, layers: 16, hidden: 2048, heads: 32, kv_heads: 8, ffn: 8192, "
        "vocab: 128256}",
        (2, 2048),
        True,
    ),
}
TINY = "model.preset=llama-tiny", (1, 32), True
STRATEGIES = {"ddp": "dp_replicate", "zero1": "dp_shard", "zero2": "dp_shard"}


def spec_of(strategy: str, model: str, tokens: tuple[int, int], device: str) -> Spec:
    micro, sequence = tokens
    batch = f"batch={{global: {RANKS * micro}, micro: {micro}, sequence: {sequence}}}"
    mesh = f"mesh.{STRATEGIES[strategy]}={RANKS}"
    words = (model, mesh, batch, f"device={device}", "precision.layout=bf16", "optimizer.lr=3e-4")
    return legal(strategy, words)


def by_hand(spec: Spec, strategy: str, device: torch.device) -> Step:
    """Return the next step of DDP with AdamW, or with its states cut by torch's own class."""
    model = build_model(spec.model, sequence=spec.batch.sequence)
    initialize(model, spec.train.seed)
    model = model.to(device=device, dtype=torch.bfloat16)
    wrapped = replicated(_Widened(model), spec)
    wrapped.register_comm_hook(None, _averaged)  # DDP's own takes no fake ranks' answer
    optimizer = (adamw if strategy == "ddp" else zero_redundancy_adamw)(spec, wrapped)
    rows = samples(spec, index=0, groups=RANKS)
    return loop(spec, wrapped, optimizer, rows_of=lambda number: rows(number).to(device))


def _averaged(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A sum over two ranks that moves nothing, divided as DDP divides it."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().div_(RANKS))
    return future


class _Widened(nn.Module):
    """A model whose logits are fp32, as a loss takes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens)
        return logits.float()


def turns(
    size: tuple[str, tuple[int, int], bool], strategy: str, world: World, pairs: int
) -> dict[str, dict[str, list[float]]]:
    """Return of both their seconds, the processor's seconds and their losses, step by step."""
    spec = spec_of(strategy, *size[:2], world.device.type)
    steps = {
        "ptrain": program_steps(spec, world),
        "by hand": by_hand(spec, strategy, world.device),
    }
    measured = {name: {"seconds": [], "processor": [], "losses": []} for name in steps}
    for turn in range(-WARM_UP, pairs):
        for name in sorted(steps, reverse=turn % 2 == 0):
            _await(world.device)
            began, busy = time.perf_counter(), time.process_time()
            loss = steps[name]()
            _await(world.device)
            took = time.perf_counter() - began, time.process_time() - busy
            measured[name]["losses"].append(loss)
            if turn >= 0:
                measured[name]["seconds"].append(took[0])
                measured[name]["processor"].append(took[1])
    return measured


def _await(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row(name: str, strategy: str, both: dict[str, Any], *, is_long: bool) -> tuple[str, list[str]]:
    """Return a table's row, and what of the claim it does not keep."""
    mine, theirs = both["ptrain"], both["by hand"]
    median, low, high = paired(mine["seconds"], theirs["seconds"])
    busy = statistics.median(mine["processor"]) / statistics.median(theirs["processor"])
    apart = max(abs(a - b) / b for a, b in zip(mine["losses"], theirs["losses"], strict=True))
    taken = (f"{1e3 * statistics.median(side['seconds']):.2f}" for side in (mine, theirs))
    cells = (
        name, strategy, *taken,
        f"{median:.3f}", f"{low:.3f} – {high:.3f}", f"{busy:.3f}", f"{apart:.1e}",
    )  # fmt: skip
    failed = [f"{name}, {strategy}: {median:.3f}"] if is_long and not median <= LIMIT else []
    first, its_first = mine["losses"][0], theirs["losses"][0]
    if not abs(first - its_first) <= SAME * its_first:
        failed.append(f"{name}, {strategy}: the first losses are {first} and {its_first}")
    return table_row(*cells), failed


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--out", type=Path, required=True, help="the measurements, as JSON")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--read", action="store_true", help="what --out has, measured before")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with a tiny model")
    args = parser.parse_args()
    if not (args.read or args.dry or torch.cuda.is_available()):
        print("no GPU was found; --dry tests the script on a CPU", file=sys.stderr)
        return 2
    sizes = {"tiny": TINY} if args.dry else SIZES
    is_long = {name: long for name, (*_, long) in {**SIZES, "tiny": TINY}.items()}
    if not args.read:
        device = torch.device("cpu" if args.dry else "cuda:0")
        world = fake_world(0, RANKS, device)
        taken: dict[str, Any] = {
            "device": "cpu" if args.dry else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "sizes": {},
        }
        for name, size in sizes.items():
            taken["sizes"][name] = {}
            for strategy in STRATEGIES:
                taken["sizes"][name][strategy] = turns(size, strategy, world, args.pairs)
                args.out.write_text(json.dumps(taken))
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        world.close()
    taken = json.loads(args.out.read_text())
    lines = [
        *SCRIPT.head(),
        f"\n{taken['device']}, torch {taken['torch']}, rank 0 of {RANKS} fake ranks\n",
    ]
    figures = ("ptrain, ms", "by hand, ms", "ratio", "95 %", "processor", "losses apart")
    lines += table_head("model", "strategy", *figures)
    failed: list[str] = []
    for name, strategies in taken["sizes"].items():
        for strategy, both in strategies.items():
            line, wrong = row(name, strategy, both, is_long=is_long[name])
            lines.append(line)
            failed += wrong
    return SCRIPT.conclude(lines, failed, args)


if __name__ == "__main__":
    raise SystemExit(main())
