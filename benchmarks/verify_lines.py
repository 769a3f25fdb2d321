"""Count the lines that four public scripts need to call `ptrain.verify`, and run them.

python benchmarks/verify_lines.py --scripts FOLDER [--save]
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml
from _machine import ROOT, commit, environment
from _script import Script, table
from _standins import write_tokens

LIMIT, RANKS = 30, 2
SCRIPT = Script("verify_lines", limit=LIMIT)
CASES: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
Edit = dict[str, Any]


def at(lines: Sequence[str], part: str, after: int = 0) -> int:
    """Return the place of the first line with this part. Raises ValueError without one."""
    for place in range(after, len(lines)):
        if part in lines[place]:
            return place
    raise ValueError(f"no line has {part!r}")


def edited(lines: list[str], edits: Sequence[Edit]) -> list[str]:
    """Return the lines after these edits, one after the other."""
    lines = list(lines)
    for edit in edits:
        if "put" in edit:
            for old, new in edit["put"].items():
                place = at(lines, old)
                lines[place] = lines[place].replace(old, new)
            continue
        first, last = edit.get("move") or edit.get("drop") or ("", "")
        block: list[str] = []
        if first:
            start = at(lines, first)
            end = at(lines, last, start) + 1
            block = lines[start:end]
            del lines[start:end]
        if "drop" in edit:
            continue
        block = [_indented(line, edit.get("by", 0)) for line in block]
        place = at(lines, edit["before"])
        lines[place:place] = [*edit.get("add", "").splitlines(), *block]
    return lines


def _indented(line: str, by: int) -> str:
    return " " * by + line if by >= 0 else line.removeprefix(" " * -by)


def counts(old: Sequence[str], new: Sequence[str]) -> tuple[int, int, int]:
    """Return how many lines are added, moved and removed; a line that is indented differently is
    moved, an empty one is none."""
    gone: Counter[str] = Counter()
    come: Counter[str] = Counter()
    for kind, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            gone.update(filter(None, map(str.strip, old[i:j])))
            come.update(filter(None, map(str.strip, new[k:m])))
    moved = (gone & come).total()
    return come.total() - moved, moved, gone.total() - moved


def run(folder: Path, case: Edit, edits: Sequence[Edit]) -> str:
    """Run the script with these edits on two CPU processes; return what it prints."""
    source = folder / case["script"]
    text = "\n".join(edited(source.read_text(encoding="utf-8").splitlines(), edits))
    for old, new in case["cpu"].items():
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as work:
        for module in source.parent.glob("*.py"):
            shutil.copy(module, work)
        (Path(work) / source.name).write_text(text, encoding="utf-8")
        write_tokens(Path(work) / "data" / "tiny")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", source.name, *shlex.split(case["arguments"])]
        path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
        ended = subprocess.run(
            command, cwd=work, env=environment() | {"PYTHONPATH": path}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
    return ended.stdout if ended.returncode == 0 else ended.stdout + ended.stderr


def verdict_of(printed: str) -> list[str]:
    """Return the lines of the verdict that are no checks; all that was printed without one."""
    lines = printed[max(printed.find("verdict: "), 0) :].splitlines()
    return [line.strip() for line in lines if not line.startswith(("  ok ", "  FAIL "))]


def measured(folder: Path, case: Edit) -> dict[str, Any]:
    """Return the counts of a script, and the verdicts on it as it is and with the mistake."""
    old = (folder / case["script"]).read_text(encoding="utf-8").splitlines()
    lines = counts(old, edited(old, case["edits"]))
    sound = verdict_of(run(folder, case, case["edits"]))
    return {
        "commit": commit(folder),
        "size": len(old),
        "lines": lines,
        "sound": sound,
        "faulty": verdict_of(run(folder, case, [*case["edits"], case["fault"]])),
    }


def failures(name: str, its: dict[str, Any]) -> Iterator[str]:
    if its["lines"][0] > LIMIT:
        yield f"{name}: {its['lines'][0]} added lines"
    if not its["sound"][0].startswith("verdict: holds"):
        yield f"{name}: {its['sound'][0]}"
    if not its["faulty"][0].startswith("verdict: fails"):
        yield f"{name} with the mistake: {its['faulty'][0]}"


def page(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield from SCRIPT.method()
    columns = ["script", "commit", "lines", "added", "moved", "removed", "verdict"]
    yield table(
        columns,
        (
            [
                f"{CASES[name]['repository']} `{CASES[name]['script']}` ({name})", its["commit"],
                *map(str, (its["size"], *its["lines"])), its["sound"][0].removeprefix("verdict: "),
            ]
            for name, its in results.items()
        ),
    )  # fmt: skip
    for name, its in results.items():
        yield f"## {name}: {CASES[name]['fault']['what']}\n"
        yield "\n".join(["```text", *its["faulty"], "```", ""])


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--scripts", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    head = SCRIPT.head()
    results = {
        name: measured(args.scripts / case["repository"].partition("/")[2], case)
        for name, case in CASES.items()
    }
    failed = [text for name, its in results.items() for text in failures(name, its)]
    return SCRIPT.conclude([*head, *page(results)], failed, args)


if __name__ == "__main__":
    sys.exit(main())
