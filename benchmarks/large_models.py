"""Models of transformers at their real size, without a GPU: how long, and are the figures right?

Claim: Llama-3.1-8B and Llama-3-70B by their class are predicted with their peaks in at most 15 and
40 seconds the first time, and in at most one second from the cache; and every figure is that of
the program which runs on fake ranks, all blocks of it, 0 bytes off. By a few of their blocks, which
are proven to be equal, a simulation gives every figure that all blocks give.

Seconds are a whole process', imports and all, of a simulation with the facts in the cache. Prints;
writes a result only with --save. About five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _machine import conclude, header, this_command

GB = 10**9
AGAIN = 1.0  # seconds, from the cache


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published model, its shape, and the seconds that its first prediction may take."""

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    ranks: int
    seconds: float

    @property
    def words(self) -> tuple[str, ...]:
        """What is typed behind a command."""
        config = (
            f"{{hidden_size: {self.hidden}, intermediate_size: {self.ffn}, "
            f"num_hidden_layers: {self.layers}, num_attention_heads: {self.heads}, "
            "num_key_value_heads: 8, vocab_size: 128256, max_position_embeddings: 8192}"
        )
        return (
            "fsdp-mixed",
            f"model={{hf: LlamaForCausalLM, config: {config}}}",
            f"mesh.dp_shard={self.ranks}",
            f"batch={{global: {2 * self.ranks}, micro: 1, sequence: 4096}}",
            "cluster={preset: h100-64}" if self.ranks > 8 else "cluster={preset: h100-8}",
        )


CASES = (
    Case(
        name="Llama-3.1-8B", hidden=4096, ffn=14336, layers=32, heads=32, ranks=8, seconds=15.0
    ),
    Case(
        name="Llama-3-70B", hidden=8192, ffn=28672, layers=80, heads=64, ranks=64, seconds=40.0
    ),
)  # fmt: skip


def ran(verb: str, case: Case, cache: Path, *flags: str) -> tuple[dict, float]:
    """Return the record of a command, and its seconds."""
    began = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-m", "ptrain", verb, *case.words, *flags, "--json"],
        env={**os.environ, "PTRAIN_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout), time.perf_counter() - began


def simulated(case: Case, cache: Path, *flags: str) -> tuple[dict, float]:
    """Return what a simulation's record says of its rank, and the seconds that it took."""
    record, seconds = ran("simulate", case, cache, *flags)
    (rank,) = record["simulation"]["ranks"]
    rows = {name: record[name] for name in ("memory", "peak", "traffic", "operations")}
    return {**rank, **rows, "host_bytes": record["simulation"]["host_bytes"]}, seconds


def unlike(few: dict, every: dict) -> list[str]:
    """Return what a few blocks say otherwise than every block, but for how it was found out."""
    how = ("seconds", "replayed_blocks", "host_bytes")
    return [name for name in every if name not in how and few[name] != every[name]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    head = header("models of transformers at their real size", this_command())
    lines = [
        "| model | ranks | weights | peak, GB | first, s | again, s |",
        "|---|---|---|---|---|---|",
    ]
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            record, first = ran("predict", case, Path(folder))
            same, again = ran("predict", case, Path(folder))
            peak = record["fit"]["peak_bytes"]
            cells = (
                case.name, case.ranks, f"{record['parameters'] / 1e9:.2f}e9",
                f"{peak / GB:.2f}" if peak else "–", f"{first:.1f}", f"{again:.2f}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
            if peak is None:
                failed.append(f"{case.name}: no peak")
            if same != record:
                failed.append(f"{case.name}: the cache gives another record")
            if first > case.seconds:
                failed.append(f"{case.name}: {first:.1f} s, more than {case.seconds:g}")
            if again > AGAIN:
                failed.append(f"{case.name}: {again:.2f} s from the cache, more than {AGAIN:g}")
        lines += [
            "",
            "| simulated, rank 0 of | every block, s | figures off | memory of it, MB "
            "| blocks repeated | by a few, s | figures off | unlike every block's |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for case in CASES:
            every, every_seconds = simulated(case, Path(folder), "--every-block")
            few, seconds = simulated(case, Path(folder))
            failed += [f"{case.name}: {row['name']} differs" for row in every["differing"]]
            failed += [f"{case.name}: of few blocks {name} differs" for name in unlike(few, every)]
            if few["replayed_blocks"] != case.layers:
                failed.append(f"{case.name}: no blocks were repeated")
            if seconds > every_seconds:
                failed.append(f"{case.name}: by few blocks slower, {seconds:.0f} s")
            cells = (
                case.name, f"{every_seconds:.0f}", len(every["differing"]),
                f"{every['host_bytes'] / 1e6:.0f}", few["replayed_blocks"], f"{seconds:.0f}",
                len(few["differing"]), len(unlike(few, every)),
            )  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return conclude(
        "large_models",
        [head, *lines],
        failed=failed,
        not_covered="cuda's kernels; other ranks; models whose code reads values",
        is_saved=args.save,
    )


if __name__ == "__main__":
    raise SystemExit(main())
