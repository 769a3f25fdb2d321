"""Write the committed traces: `python -m ptrain.traces.write [--only PART/NAME] [--out FILE]`.

Writing all of them takes minutes. Tables that are not written are kept. Each written table is
reported as new, changed or unchanged.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from ptrain.derivation import archive
from ptrain.derivation.archive import Table, TablePart
from ptrain.derivation.tables import Setting
from ptrain.traces import attention_kernels, work_tables
from ptrain.traces.block_tables import BlockTable, PassTable
from ptrain.traces.settings import Make, fake_mesh, settings
from ptrain.traces.work_tables import LossTable, loss_settings


def block_settings() -> Iterator[Setting]:
    """Yield one setting for each way in each table of blocks."""
    part, seen = TablePart.BLOCK, dict[tuple[str, str], Setting]()
    for setting in settings():
        seen.setdefault((setting.name(part), setting.way(part)), setting)
    yield from seen.values()


MakerOf = Callable[[Setting, DeviceMesh | None], PassTable | BlockTable | LossTable]
MAKERS: dict[TablePart, tuple[MakerOf, Callable[[], Iterator[Setting]]]] = {
    TablePart.PASSES: (PassTable, settings),
    TablePart.BLOCK: (BlockTable, block_settings),
    TablePart.LOSS: (LossTable, loss_settings),
}


def tables(mesh: DeviceMesh | None) -> Iterator[tuple[TablePart, str, Make]]:
    """Yield part and name of every table, and the function that makes it."""
    for part, (maker, of_part) in MAKERS.items():
        by_name: dict[str, dict[str, Setting]] = {}
        for setting in of_part():
            by_name.setdefault(setting.name(part), {})[setting.way(part)] = setting
        for name, ways in by_name.items():
            yield part, name, partial(_table_of, maker, ways, mesh)
    yield from ((TablePart.CONTEXT, name, make) for name, make in work_tables.tables())
    yield from ((TablePart.KERNEL, name, make) for name, make in attention_kernels.table_makers())


def _table_of(
    maker: MakerOf, ways: dict[str, Setting], mesh: DeviceMesh | None
) -> dict[str, object]:
    """Return the table of a name, by way."""
    return {way: maker(setting, mesh).build() for way, setting in ways.items()}


def main() -> None:
    """Write every table, or those whose `part/name` starts with `--only`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help=("write only the tables whose part/name starts with this text")
    )
    parser.add_argument("--out", type=Path, default=archive.PATH)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # a trace of a loss starts with a collection, which would visit torch's objects
    mesh = fake_mesh()
    committed = archive.read_tables()
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
        parser.error(f"--only {options.only}: no table has a part/name that starts with this text")
    parts = {part for part, _ in content}
    for (part, name), table in committed.items():
        if part not in parts:  # attention kernels, on a machine without CUDA operators
            content[part, name] = table
            print(f"{part}/{name}: unchanged, cannot be made on this machine")
    archive.write(content, options.out)
    print(f"{options.out}: {len(content)} tables, {options.out.stat().st_size} bytes")


def _change(before: Table | None, after: Table) -> str:
    if before is None:
        return "new"
    return "unchanged" if before == after else "changed"


if __name__ == "__main__":
    main()
