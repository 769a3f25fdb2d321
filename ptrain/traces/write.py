"""Writes the committed traces: `python -m ptrain.traces.write [--only PART/NAME] [--out FILE]`.

Minutes for all of them. What is not written anew stays; of what is, it says whether it changed.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from ptrain.derivation import archive
from ptrain.derivation.archive import Table, TablePart
from ptrain.traces import (
    attention_kernels,
    block_tables,
    loss_tables,
    model_tables,
    stage_tables,
    tensor_tables,
)
from ptrain.traces.model_tables import Make
from ptrain.traces.tensor_tables import fake_mesh


def tables(mesh: DeviceMesh | None) -> Iterator[tuple[TablePart, str, Make]]:
    """Yield every table's part and name, and what makes it."""
    sources = {
        TablePart.MODEL: model_tables.tables(),
        TablePart.SLICES: tensor_tables.tables(mesh),
        TablePart.STAGE: stage_tables.whole_tables(),
        TablePart.STAGE_SLICES: stage_tables.cut_tables(mesh),
        TablePart.BLOCK: block_tables.tables(mesh),
        TablePart.LOSS: loss_tables.tables(mesh),
        TablePart.KERNEL: attention_kernels.tables(),
    }
    for part, makes in sources.items():
        for name, make in makes:
            yield part, name, make


def main() -> None:
    """Write every table, or those whose `part/name` begins with `--only`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="those whose part/name begins so")
    parser.add_argument("--out", type=Path, default=archive.PATH)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # a trace of a loss begins with a collection, of which torch's objects are most
    mesh = fake_mesh()
    committed = archive.tables()
    content: dict[tuple[TablePart, str], Table] = {}
    written = 0
    for part, name, make in tables(mesh):
        key = part, name
        if f"{part}/{name}".startswith(options.only):
            written += 1
            content[key] = json.loads(json.dumps(make()))
            print(f"{part}/{name}: {_change(committed.get(key), content[key])}", flush=True)
        elif key in committed:
            content[key] = committed[key]
    if not written:
        parser.error(f"--only {options.only}: no table's part/name begins so")
    parts = {part for part, _ in content}
    for (part, name), table in committed.items():
        if part not in parts:  # attention's kernels, on a machine without CUDA's operators
            content[part, name] = table
            print(f"{part}/{name}: not made here, stays")
    archive.write(content, options.out)
    print(f"{options.out}: {len(content)} tables, {options.out.stat().st_size} bytes")


def _change(before: Table | None, after: Table) -> str:
    if before is None:
        return "new"
    return "as it was" if before == after else "changed"


if __name__ == "__main__":
    main()
