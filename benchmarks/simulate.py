"""The paper's scale on one processor: what the wrappers do at 8B, 70B and 405B, up to 16384 ranks.

Claims: (1) by execution, 70B on 8 ranks in zero16 has the model state and sends the bytes that the
paper states; there, for Llama 3 405B on 4096 ranks (first, middle and last stage) and for a model
of transformers by its class, what was derived is equal to what was executed, to the byte. (2) 70B
on 8 ranks takes at most 30 s and 1.5 GB of this machine's memory; the time of its steps is linear
in the layers, and that of the whole call, within 20 %, independent of the ranks, from 8 to 16384
(dp_shard up to 512, the rest on dp_replicate, tp and pp).

A row is one call of the command, in a process of its own: its wall time, that of the steps alone,
and the most memory that the process had. Rows of a series run in turns, the least time counts.
Prints; writes a result only with --save. About 25 minutes, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _machine import conclude, environment, header, this_command

from ptrain.costs import Phase
from ptrain.report.predict import MODEL_STATES

GB = 10**9
SECONDS, HOST_BYTES = 30.0, 1.5 * GB  # of 70B on 8 ranks
SPREAD = 0.2  # of a call's and its steps' time, by ranks
TURNS = 2
# Theorems 1 and 2 at 70e9 parameters: model state where stated, and bytes sent, in GB.
PAPER: Mapping[str, tuple[float | None, float]] = {
    "70b-dp": (1120.0, 245.0),
    "70b-zero1": (None, 245.0),
    "70b-zero2": (None, 245.0),
    "70b-zero3": (140.0, 367.5),
}
GIANT = (
    "70b-3d", "model.preset=llama3-405b", "mesh={pp: 16, dp_shard: 32, tp: 8}",
    "batch={global: 1024, micro: 1, sequence: 8192}", "cluster.devices=4096",
)  # fmt: skip
STAGE = 32 * 8  # ranks of a stage; its first stands for all of them
CLASS = (
    "8b-zero3",
    "model={hf: LlamaForCausalLM, config: {hidden_size: 4096, intermediate_size: 14336, "
    "num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 8, vocab_size: 128256, "
    "max_position_embeddings: 8192, rope_theta: 500000.0}}",
)
SHAPE = ("70b-3d", "batch.micro=1", "cluster.devices=16384")
WORLDS: Mapping[int, str] = {
    8: "{dp_shard: 8}",
    64: "{dp_shard: 64}",
    512: "{dp_shard: 512}",
    4096: "{dp_replicate: 8, dp_shard: 512}",
    16384: "{dp_replicate: 32, dp_shard: 512}",
}
COMPOSED: Mapping[int, str] = {
    64: "{pp: 2, dp_shard: 4, tp: 8}",
    1024: "{pp: 2, dp_shard: 64, tp: 8}",
    4096: "{pp: 2, dp_shard: 256, tp: 8}",
    16384: "{pp: 2, dp_replicate: 2, dp_shard: 512, tp: 8}",
}
WIDE: Mapping[int, str] = {4096: "{dp_shard: 4096}"}  # reported, not bounded
LAYERS = (20, 40, 80)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One call. `seconds` of the whole process, `steps` of what is executed after the wrapping."""

    arguments: tuple[str, ...]
    record: Mapping[str, Any]
    seconds: float

    @property
    def rank(self) -> Mapping[str, Any]:
        rank: Mapping[str, Any] = self.record["simulation"]["ranks"][0]
        return rank

    @property
    def host_bytes(self) -> int:
        return int(self.record["simulation"]["host_bytes"])

    @property
    def steps(self) -> float:
        return float(self.rank["seconds"]["steps"])

    def state_bytes(self) -> int:
        """Parameters, optimizer and gradients on the device."""
        states = set(map(str, MODEL_STATES))
        rows = [row for row in self.record["memory"] if row["column"] == "simulated"]
        return sum(row["device_bytes"] for row in rows if row["state"] in states)

    def sent_bytes(self) -> int:
        """In a steady step."""
        rows = [row for row in self.record["traffic"] if row["column"] == "simulated"]
        return sum(row["sent_bytes"] for row in rows if row["phase"] != Phase.SETUP)

    def differing(self) -> list[str]:
        """Figures of the two columns that are not equal, but for the peak."""
        return [each["name"] for each in self.rank["differing"] if "peak" not in each["name"]]


def call(arguments: Sequence[str], rank: int = 0) -> Row:
    """The command, as a user gives it."""
    options = ["--rank", str(rank), "--json"]
    command = [sys.executable, "-m", "ptrain", "simulate", *arguments, *options]
    began = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    seconds = time.perf_counter() - began
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ended.stderr}")
    row = Row(
        arguments=(*arguments, "--rank", str(rank)),
        record=json.loads(ended.stdout),
        seconds=seconds,
    )
    print(" ".join(row.arguments), f"{seconds:.1f} s", file=sys.stderr, flush=True)
    return row


def fastest(series: Mapping[Any, Sequence[str]], turns: int) -> dict[Any, Row]:
    """Of each call the one that took its steps fastest; they take turns."""
    found: dict[Any, Row] = {}
    for _ in range(turns):
        for key, arguments in series.items():
            row = call(arguments)
            found[key] = min(found.get(key, row), row, key=lambda each: each.steps)
    return found


def table(rows: Sequence[Row], headings: Sequence[str], more: Sequence[Sequence[str]]) -> list[str]:
    """Call, what is `more` of each, memory and time."""
    names = ("call", *headings, "peak GB", "s", "s of the steps", "host MB", "figures that differ")
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row, others in zip(rows, more, strict=True):
        peak = int(row.rank["peak"]["device_bytes"])
        cells = (
            f"`ptrain simulate {' '.join(_quoted(each) for each in row.arguments)}`",
            *others,
            f"{peak / GB:.4g}",
            f"{row.seconds:.1f}",
            f"{row.steps:.1f}",
            f"{row.host_bytes / 1e6:.0f}",
            ", ".join(each["name"] for each in row.rank["differing"]) or "0",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _quoted(argument: str) -> str:
    return f"'{argument}'" if set("{} ") & set(argument) else argument


def paper(turns: int) -> tuple[list[str], list[str]]:
    """70B on 8 ranks: page and failures."""
    rows = fastest({name: (name,) for name in PAPER}, turns)
    more, failed = [], []
    for name, row in rows.items():
        state, sent = PAPER[name]
        found = row.state_bytes() / GB, row.sent_bytes() / GB
        stated = [f"{value:.1f}" if value else "–" for value in (state, sent)]
        more.append((stated[0], f"{found[0]:.1f}", stated[1], f"{found[1]:.1f}"))
        for told, value in zip((state, sent), found, strict=True):
            if told is not None and f"{value:.1f}" != f"{told:.1f}":
                failed.append(f"{name}: {value:.1f} GB executed, {told:.1f} in the paper")
        if row.seconds > SECONDS or row.host_bytes > HOST_BYTES:
            failed.append(f"{name}: {row.seconds:.1f} s, {row.host_bytes / GB:.2f} GB of memory")
    headings = ("Θ + Ω + G, paper GB", "executed GB", "sent, paper GB", "executed GB")
    every = list(rows.values())
    return table(every, headings, more), [*failed, *_differing(every)]


def giants() -> tuple[list[str], list[str]]:
    """405B on 4096 ranks by stage, and 8B by its class."""
    rows = [call(GIANT, rank=stage * STAGE) for stage in (0, 8, 15)] + [call(CLASS)]
    more = [(f"{row.state_bytes() / GB:.2f}", f"{row.sent_bytes() / GB:.2f}") for row in rows]
    return table(rows, ("Θ + Ω + G GB", "sent GB"), more), _differing(rows)


def _differing(rows: Sequence[Row]) -> list[str]:
    return [
        f"{' '.join(row.arguments)}: {name} of exact and simulated differ"
        for row in rows
        for name in row.differing()
    ]


def worlds(turns: int) -> tuple[list[str], list[str]]:
    """The time of a step by the number of ranks, and by layers."""
    lines, failed = [], []
    for title, series in (("data axes", WORLDS), ("with tp and pp", COMPOSED)):
        rows = fastest({size: (*SHAPE, *_mesh(size, mesh)) for size, mesh in series.items()}, turns)
        lines += ["", f"70B by ranks, {title}:", ""]
        lines += table(list(rows.values()), ("ranks",), [(str(size),) for size in rows])
        whole, steps = (_spread(rows.values(), clock) for clock in ("seconds", "steps"))
        told = f"The slowest call takes {whole:.1%} longer than the fastest, its steps {steps:.1%}."
        lines += ["", told]
        if max(whole, steps) > SPREAD:
            failed.append(f"{title}: {told}")
        failed += _differing(list(rows.values()))
    wide = [call((*SHAPE, *_mesh(size, mesh))) for size, mesh in WIDE.items()]
    lines += ["", "Wider sharding (reported, not bounded):", ""]
    lines += table(wide, ("ranks",), [(str(size),) for size in WIDE])
    return lines, [*failed, *_differing(wide)]


def _spread(rows: Iterable[Row], clock: str) -> float:
    """By which part the slowest row takes longer than the fastest."""
    times = [float(getattr(row, clock)) for row in rows]
    return max(times) / min(times) - 1


def _mesh(size: int, mesh: str) -> tuple[str, ...]:
    parts = [part.split(":")[0].strip() for part in mesh.strip("{}").split(",")]
    tuples = {
        "dp_shard": "zero3", "dp_replicate": "ddp", "tp": "tp", "pp": "[S, S, S, R]",
    }  # fmt: skip
    placement = ", ".join(f"{axis}: {tuples[axis]}" for axis in parts)
    data = size // (8 if "tp" in parts else 1) // (2 if "pp" in parts else 1)
    samples = 2 * data if "pp" in parts else data  # a micro-batch for every stage
    return f"mesh={mesh}", f"placement={{{placement}}}", f"batch.global={samples}"


def layers(turns: int) -> tuple[list[str], list[str]]:
    rows = fastest({n: ("70b-zero3", f"model.layers={n}") for n in LAYERS}, turns)
    few, middle, many = (rows[n].steps for n in LAYERS)
    slope = (many - few) / (LAYERS[2] - LAYERS[0])
    expected = few + slope * (LAYERS[1] - LAYERS[0])
    off = middle / expected - 1
    lines = table(list(rows.values()), ("layers",), [(str(n),) for n in rows])
    lines += ["", f"{slope:.3f} s a layer; {LAYERS[1]} layers are {off:+.1%} from the line."]
    failed = [] if abs(off) <= SPREAD else [f"{LAYERS[1]} layers are {off:+.0%} from the line"]
    return lines, [*failed, *_differing(list(rows.values()))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("paper", "giants", "worlds", "layers"))
    parser.add_argument("--turns", type=int, default=TURNS, help="calls of each row of a series")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    head = header("simulate: the paper's scale by execution", this_command())
    parts = {
        "paper": ("70B on 8 ranks", lambda: paper(args.turns)),
        "giants": ("405B on 4096 ranks, and a model by its class", giants),
        "worlds": ("What a step takes", lambda: worlds(args.turns)),
        "layers": ("By layers", lambda: layers(args.turns)),
    }
    lines, failed = [head], []
    for name, (title, run) in parts.items():
        if args.only in (None, name):
            found, wrong = run()
            lines += ["", f"## {title}", "", *found]
            failed += wrong
    return conclude(
        "simulate",
        lines,
        failed=failed,
        not_covered="GPUs: their allocator's rounding, and what operators take within themselves",
        is_saved=args.save,
    )


if __name__ == "__main__":
    raise SystemExit(main())
