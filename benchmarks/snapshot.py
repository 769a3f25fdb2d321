"""Whether the predictions of every spec equal the recorded ones."""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from _machine import ROOT
from _predictions import Data, changes, predictions
from _script import Script

from ptrain.algebra.legality import require_runnable
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from tests.adversary.covering_specs import random_specs

PAGE = ROOT / "tests" / "pure" / "snapshot.json.xz"
FOLDERS = ("strategies", "node", "paper")
WIDE: Mapping[str, list[str]] = {
    "405b-4096": [
        "specs/paper/70b-3d.yaml", "model.preset=llama3-405b",
        "mesh={pp: 16, dp_shard: 32, tp: 8}", "batch={global: 1024, micro: 1, sequence: 8192}",
        "cluster.devices=4096",
    ],
}  # fmt: skip


def named() -> dict[str, list[str]]:
    """Return the specs that have a file by name: the file's path and its overrides."""
    files = (path for name in FOLDERS for path in sorted((ROOT / "specs" / name).glob("*.yaml")))
    return {path.stem: [str(path.relative_to(ROOT))] for path in files} | dict(WIDE)


def predicted(name: str) -> Data:
    """Return the predictions of one named spec."""
    path, *overrides = named()[name]
    return predictions(resolve_auto(load(ROOT / path, overrides)))


def predicted_of_drawn(written: Mapping[str, Any]) -> Data:
    """Return the predictions of a random spec of the snapshot."""
    return predictions(require_runnable(load(dict(written))))


def frozen() -> Data:
    """Return the snapshot: `named` has predictions by spec, `drawn` by spec its text (`written`)
    and predictions (`predicted`)."""
    content: Data = json.loads(lzma.decompress(PAGE.read_bytes()))
    return content


def freeze(content: Data) -> None:
    """Write the snapshot if it changed: another liblzma may compress differently."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    if PAGE.exists() and lzma.decompress(PAGE.read_bytes()).decode() == text:
        return
    PAGE.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def current(specs: Mapping[str, Any]) -> Data:
    """Return a current snapshot of all named and these random specs."""
    return {
        "named": {name: predicted(name) for name in named()},
        "drawn": {
            name: {"written": written, "predicted": predicted_of_drawn(written)}
            for name, written in specs.items()
        },
    }


def listing(before: Data, after: Data) -> Iterator[str]:
    """Yield a line for each changed figure."""
    for kind in ("named", "drawn"):
        for name in dict.fromkeys([*before[kind], *after[kind]]):
            old, new = before[kind].get(name), after[kind].get(name)
            if old is None or new is None:
                yield f"{name}: {'removed' if new is None else 'new'}"
                continue
            if kind == "drawn":
                old, new = old["predicted"], new["predicted"]
            yield from lines(name, old, new)


def lines(name: str, before: Data, after: Data) -> list[str]:
    """Return the changes of one spec: `spec: row: before -> after`."""
    return [f"{name}: {row}: {old} -> {new}" for row, old, new in changes(before, after)]


def _drawn_specs() -> Data:
    return {f"drawn-{number:03}": written for number, written in enumerate(random_specs())}


def main() -> int:
    parser = Script("snapshot").parser(has_page=False)
    parser.add_argument("--write", action="store_true", help="keep what is predicted now")
    parser.add_argument("--draw", action="store_true", help="draw the specs anew as well")
    parser.add_argument("--spec", metavar="NAME", help="print a spec of the snapshot")
    args = parser.parse_args()
    before = frozen() if PAGE.exists() else {"named": {}, "drawn": {}}
    specs = {name: row["written"] for name, row in before["drawn"].items()}
    if args.spec:
        print(json.dumps(specs.get(args.spec) or named()[args.spec], indent=2, ensure_ascii=False))
        return 0
    after = current(_drawn_specs() if args.draw else specs)
    changed = list(listing(before, after))
    print("\n".join(changed or ["every prediction is what it was"]))
    if args.write:
        freeze(after)
        print(f"\nwritten: {PAGE.relative_to(ROOT)}")
        return 0
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
