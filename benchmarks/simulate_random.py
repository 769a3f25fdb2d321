"""Is what was derived what is executed, at scale, of placements that nobody chose?

Claim: of 20 legal specs drawn at random (shapes of 8B and 70B; 8 to 4096 ranks over pp,
dp_replicate, dp_shard and tp; any tuple on the data axes; schedules, layouts, modes of activations,
batches), one rank each, `exact` and `simulated` have the same resident state and the same traffic,
to the byte. Peaks stand beside each other.

The draw is a function of --seed. Each spec runs in a process of its own. Prints; writes a result
only with --save. About 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _machine import conclude, environment, header, this_command

from ptrain.errors import SpecError
from ptrain.selection.recompute import settled
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

NUMBER, SEED = 20, 1
MODELS = ("llama3-8b", "llama3-70b", "llama-70e9")
PARAMETERS = ("R", "S*", "M", "O", "R@host")
OPTIMIZER = ("R", "S", "S*", "O", "R@host")
GRADIENTS = ("R", "S", "S*", "M", "O")
TENSOR = ("tp", "tp-sp", "tp-saved")
SCHEDULES = ("gpipe", "1f1b", "bfs", "interleaved", "zero-bubble", "zbv", "dualpipev")
LAYOUTS = ("fp32", "bf16", "zero16", "megatron18", "fsdp-mixed")
ACTIVATIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"activations": "M"},
    {"activations": "M", "recompute": "selective"},
    {"activations": "O"},
)
MOST_RANKS, LEAST_RANKS = 4096, 8
MOST_SECONDS = 600


def drawn(seed: int) -> Iterator[tuple[dict[str, Any], Spec, int]]:
    """Legal specs without end, as they would be written, each with a rank of its mesh."""
    draw = random.Random(seed)
    while True:
        written = _written(draw)
        try:
            spec = settled(load(written))
        except SpecError:
            continue
        if not LEAST_RANKS <= spec.world_size <= MOST_RANKS:
            continue
        yield written, spec, draw.randrange(spec.world_size)


def _written(draw: random.Random) -> dict[str, Any]:
    mesh: dict[str, int] = {}
    for axis, degrees in (
        ("pp", (1, 1, 2, 4, 8)),
        ("dp_replicate", (1, 1, 2, 8, 16)),
        ("dp_shard", (1, 4, 8, 32, 128)),
        ("tp", (1, 1, 2, 4, 8)),
    ):
        if (degree := draw.choice(degrees)) > 1:
            mesh[axis] = degree
    tuples = {axis: _tuple(draw, axis) for axis in mesh}
    micro_batches = draw.choice((1, 2, 4)) * (2 * mesh["pp"] if "pp" in mesh else 1)
    data = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    micro = draw.choice((1, 2))
    pipeline = {"pipeline": {"schedule": draw.choice(SCHEDULES)}} if "pp" in mesh else {}
    return {
        "name": "drawn",
        "model": {"preset": draw.choice(MODELS)},
        "mesh": mesh,
        "placement": tuples,
        "precision": {"layout": draw.choice(LAYOUTS)},
        "batch": {
            "global": micro_batches * micro * data,
            "micro": micro,
            "sequence": draw.choice((1024, 4096, 8192)),
        },
        "optimizer": {"name": "adamw", "lr": 3e-4, "clip": draw.choice((1.0, None))},
        "data": {"corpus": "python-docs", "tokenizer": "bytes"},
        "train": {"steps": 10, "seed": 0},
        **pipeline,
        **draw.choice(ACTIVATIONS),
    }


def _tuple(draw: random.Random, axis: str) -> str:
    if axis == "tp":
        return draw.choice(TENSOR)
    if axis == "pp":
        return "S,S,S,R"
    modes = (draw.choice(each) for each in (PARAMETERS, OPTIMIZER, GRADIENTS))
    return ",".join((*modes, "R"))


def simulated(written: dict[str, Any], rank: int, work: Path) -> tuple[dict[str, Any], float]:
    """The record of one rank, and the seconds of its process."""
    path = work / "drawn.yaml"
    path.write_text(json.dumps(written))
    command = [
        sys.executable, "-m", "ptrain", "simulate", str(path), "--rank", str(rank), "--json",
    ]  # fmt: skip
    began = time.perf_counter()
    try:
        ended = subprocess.run(
            command,
            check=False,
            timeout=MOST_SECONDS,
            capture_output=True,
            text=True,
            env=environment(),
        )
        failed = bool(ended.returncode)
        found = {"error": ended.stderr.strip()} if failed else json.loads(ended.stdout)
    except subprocess.TimeoutExpired:
        found = {"error": f"not done after {MOST_SECONDS} s"}
    return found, time.perf_counter() - began


def row(number: int, spec: Spec, found: dict[str, Any], rank: int, seconds: float) -> str:
    """A line of the table."""
    tuples = " ⊗ ".join(f"{each.axis} {each.degree} ({each.placement})" for each in spec.factors)
    if "error" in found:
        told = [f"error: {found['error']}", "", ""]
    else:
        told = [
            ", ".join(wrong(found)) or "0",
            _peaks(found["simulation"]["ranks"][0]),
            f"{int(found['simulation']['host_bytes']) / 1e6:.0f}",
        ]
    written = spec.resolved
    kept = json.dumps(written.get("activations", "R")).strip('"')
    cells = (
        str(number), f"{written['model'].get('preset')}", tuples,
        str((written.get("pipeline") or {}).get("schedule", "–")), spec.precision.layout.name, kept,
        f"{spec.batch.accumulate} x {spec.batch.micro} x {spec.batch.sequence}", str(rank),
        *told, f"{seconds:.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _peaks(of_rank: dict[str, Any]) -> str:
    """How far the phases' peaks are apart, as a share."""
    off = [
        each["simulated"] / each["exact"] - 1
        for each in of_rank["differing"]
        if "peak" in each["name"] and each["exact"] and each["simulated"]
    ]
    return f"{max(off, key=abs):+.3%}" if off else "0"


def wrong(found: dict[str, Any]) -> Sequence[str]:
    if "error" in found:
        return [str(found["error"])]
    (of_rank,) = found["simulation"]["ranks"]
    return [each["name"] for each in of_rank["differing"] if "peak" not in each["name"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, required=True, help="where specs are written meanwhile"
    )
    parser.add_argument("--number", type=int, default=NUMBER)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    head = header("simulate: exact and executed, of specs drawn at random", this_command())
    args.work.mkdir(parents=True, exist_ok=True)
    columns = (
        "", "model", "axes", "schedule", "layout", "A", "K x micro x tokens", "rank",
        "state and traffic off", "peak off", "host MB", "s",
    )  # fmt: skip
    lines = [head, f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    failed = []
    draws = drawn(args.seed)
    for number in range(1, args.number + 1):
        written, spec, rank = next(draws)
        found, seconds = simulated(written, rank, args.work)
        lines.append(row(number, spec, found, rank, seconds))
        print(lines[-1], file=sys.stderr, flush=True)
        failed += [f"spec {number}: {name}" for name in wrong(found)]
    return conclude(
        "simulate_random",
        lines,
        failed=failed,
        not_covered="offload to files, muon, models that are not built in",
        is_saved=args.save,
    )


if __name__ == "__main__":
    raise SystemExit(main())
