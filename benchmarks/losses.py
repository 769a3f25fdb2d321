"""Whether every strategy trains bitwise as recorded."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

import torch
from _machine import processor, result_path, version
from _script import Script, table_head, table_row

from ptrain.algebra.legality import require_runnable
from ptrain.spec.load import load
from ptrain.spec.names import list_files
from ptrain.spec.placement import Axis
from tests.gloo.runs import train_on_rank
from tests.ranks import Ranks

STEPS = 10
SCRIPT = Script("losses", steps=STEPS)
GLOBAL = 8  # samples of a step
MOST_SECONDS = 600.0  # of one strategy, on a busy machine
Row = dict[str, Any]


def overrides_of(name: str) -> list[str]:
    """Return overrides that make a strategy small: as many layers as its stages need, and one
    micro-batch if it has one."""
    spec = load(name).spec
    layers = 8 if spec.degree(Axis.PP) > 1 else 2
    micro = GLOBAL // spec.data_degree if spec.batch.accumulate == 1 else 1
    return [
        f"model={{layers: {layers}, hidden: 24, heads: 4, kv_heads: 2, ffn: 48, vocab: 260}}",
        f"batch={{global: {GLOBAL}, micro: {micro}, sequence: 32}}",
    ]


def trained(pool: Ranks, name: str, overrides: Sequence[str]) -> Row:
    """Return what `STEPS` steps of a strategy gave: hexadecimal losses and norms by step, and the
    digest of the parameters after them."""
    spec = require_runnable(load(name, list(overrides)))
    reports = pool.run(spec.world_size, train_on_rank, spec, STEPS, timeout=MOST_SECONDS)
    trajectory = reports[0].trajectory
    assert trajectory is not None, "rank 0 has one"
    return {
        "overrides": list(overrides),
        "ranks": spec.world_size,
        "losses": [loss.hex() for loss in trajectory.losses],
        "norms": [norm.hex() for norm in trajectory.gradient_norms],
        "parameters": digest(trajectory.parameters),
    }


def digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the tensors' names, dtypes and bytes, in the order of their names."""
    total = hashlib.sha256()
    for name, tensor in sorted(parameters.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def of_strategies(overrides: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Row, float]]:
    """Train each strategy, those of equally many ranks one after the other, and yield what it gave
    and how many seconds it took. A pool that waits would take time from the others."""
    pool, size = Ranks(), 0
    for name in sorted(overrides, key=lambda name: (load(name).spec.world_size, name)):
        if load(name).spec.world_size != size:
            pool.close()
            pool, size = Ranks(), load(name).spec.world_size
        began = time.perf_counter()
        row = trained(pool, name, overrides[name])
        yield name, row, time.perf_counter() - began
    pool.close()


def platform() -> dict[str, str]:
    """Return what bits depend on: the processor, its instructions that torch uses, and torch."""
    return {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": version("torch"),
        "threads": os.environ["OMP_NUM_THREADS"],
    }


def differences(name: str, before: Row, after: Row) -> Iterator[str]:
    """Yield the first step in which losses or norms differ, and whether parameters do."""
    for key, what in (("losses", "loss"), ("norms", "norm of the gradients")):
        pairs = zip_longest(before[key], after[key])
        for step, (old, new) in enumerate(pairs, start=1):
            if old != new:
                yield f"{name}: {what} of step {step}: {_written(old)} -> {_written(new)}"
                break
    if before["parameters"] != after["parameters"]:
        yield f"{name}: parameters after step {len(before['losses'])}"


def _written(hexadecimal: str | None) -> str:
    return "–" if hexadecimal is None else f"{float.fromhex(hexadecimal)!r} ({hexadecimal})"


def elsewhere(before: Mapping[str, str]) -> list[str]:
    """Return how this machine differs from the page's."""
    return [
        f"{key}: {before.get(key)} on the page, {here} here"
        for key, here in platform().items()
        if before.get(key) != here
    ]


def check(page: Path) -> int:
    """Train the strategies of a page again and print the differences; return 1 if there are any."""
    kept = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    others = elsewhere(kept["platform"])
    if others:
        print("not the page's machine, on which alone bits repeat: " + "; ".join(others))
    rows = kept["strategies"]
    changed = [
        f"{name}: no longer a strategy" for name in rows if name not in list_files("strategies")
    ]
    changed += [f"{name}: not on the page" for name in list_files("strategies") if name not in rows]
    overrides = {name: rows[name]["overrides"] for name in rows if name in list_files("strategies")}
    for name, row, _ in of_strategies(overrides):
        changed += differences(name, rows[name], row)
    print("\n".join(changed or [f"{len(overrides)} strategies give the same bits"]))
    return 1 if changed else 0


def line(name: str, result: Row, seconds: float) -> str:
    """Return a line of the table."""
    losses = [float.fromhex(text) for text in result["losses"]]
    norms = [float.fromhex(text) for text in result["norms"]]
    cells = (
        f"`{name}`", str(result["ranks"]), repr(losses[0]), repr(losses[-1]), result["losses"][-1],
        repr(norms[-1]) if norms else "–", result["parameters"][:16], f"{seconds:.1f}",
    )  # fmt: skip
    return table_row(*cells)


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument(
        "--check", type=Path, metavar="PAGE", help="compare with a result, to the bit"
    )
    args = parser.parse_args()
    if args.check:
        return check(args.check)
    head, began = SCRIPT.head(), time.time()
    names = (
        "strategy", "ranks", "loss 1", f"loss {STEPS}", f"loss {STEPS}, hexadecimal",
        f"norm {STEPS}", "parameters, SHA-256", "s",
    )  # fmt: skip
    facts = ", ".join(f"{name} {text}" for name, text in platform().items())
    lines = [*head, *SCRIPT.method(platform=facts), *table_head(*names)]
    strategies: dict[str, Row] = {}
    failed = []
    for name, result, seconds in of_strategies(
        {name: overrides_of(name) for name in list_files("strategies")}
    ):
        strategies[name] = result
        lines.append(line(name, result, seconds))
        print(lines[-1], file=sys.stderr, flush=True)
        if len(result["losses"]) != STEPS or not float.fromhex(
            result["losses"][-1]
        ) < float.fromhex(result["losses"][0]):
            failed.append(f"{name}: the loss does not fall")
    lines += ["", f"All together {time.time() - began:.0f} s."]
    if args.save:
        content = {"platform": platform(), "steps": STEPS, "strategies": strategies}
        text = json.dumps(content, indent=1)
        result_path("losses", "json").write_text(text + "\n", encoding="utf-8")
    return SCRIPT.conclude(lines, failed, args)


if __name__ == "__main__":
    sys.exit(main())
