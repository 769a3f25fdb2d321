"""Rewrite the generated blocks of the pages: `python docs/tools/pages.py [PAGE ...]`.

The pages are README.md and those of `ptrain help`. A block starts with a comment and ends with
`<!-- end -->`; everything else is written by hand. Four comments start a block:

- `<!-- output: COMMAND -->`: what the command prints. It runs as `python -m ptrain …` or `torchrun`
  in a folder that holds only the Python files of the page (`_examples.py`).
- `<!-- table: NAME -->`: a table of `TABLES`.
- `<!-- picture: FILE COMMAND -->`: a link to a picture. The block's text stays; the command writes
  the file with `--chart FILE`, or with its last option, `--timeline FILE`. A name in place of the
  command (`modes`, `tensor`, `expert`) writes a drawing of `_modes.py` or `_drawings.py`.
- `<!-- excerpt: PAGE | COMMAND | PATTERN -->`: the lines of another page's output that match.

`--check` exits with 1 if a block is out of date. It leaves out blocks that depend on the machine
(`train`, `validate`, `verify`, `simulate`, `playground`), on tests (`torchrun`) and on matplotlib
(pictures).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # _machine, _script

import _axes
import _costs
import _drawings
import _methods
import _modes
import _pipelines
import _playground
import _rooms
import _tables
from _examples import printed, run
from _machine import ROOT

from ptrain.charts.canvas import Format, draw_sheet
from ptrain.cli import help

PAGES = ("README.md", *help.PAGES)
BLOCK = re.compile(
    r"(<!-- (output|table|picture|excerpt): (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL
)
MEASURED = (
    "playground",
    "ptrain train",
    "ptrain validate",
    "ptrain verify",
    "ptrain simulate",
    "torchrun",
)
PICTURES = "docs/images/"
DRAWINGS = {**_modes.DRAWINGS, **_drawings.DRAWINGS}
TABLES = {
    **_costs.TABLES,
    **_axes.TABLES,
    **_methods.TABLES,
    **_pipelines.TABLES,
    **_playground.TABLES,
    **_rooms.TABLES,
    **_tables.TABLES,
}


@cache
def output(command: str, text: str) -> str:
    """Return a code block of the command and its output, run next to the files of the page."""
    return f"```\n$ {command}\n{printed(command, text)}\n```\n"


def excerpt(page: str, command: str, pattern: str) -> str:
    """Return a code block with the lines of a command's output on a page that match a pattern."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (printed,) = (match[4] for match in BLOCK.finditer(text) if match[3] == command)
    lines = [line for line in printed.splitlines() if re.match(pattern, line)]
    return "\n".join(["```", f"$ {command}", "…", *lines, "```", ""])


def paint(file: str, source: str) -> None:
    """Write a picture by a command with `--chart`, or a drawing by its name."""
    path = ROOT / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if source in DRAWINGS:
        path.write_bytes(draw_sheet(DRAWINGS[source](), Format.SVG))
    else:
        option = [] if source.endswith("--timeline") else ["--chart"]
        run([*source.split(), *option, str(path)], ROOT)


def rewritten(text: str, is_stale: Callable[[str], bool]) -> str:
    """Return the page with new content for the blocks that `is_stale` selects."""

    def block(match: re.Match[str]) -> str:
        head, kind, what, old, end = match.groups()
        if not is_stale(what):
            return head + old + end
        if kind == "picture":
            paint(*what.split(maxsplit=1))
            return head + old + end
        if kind == "excerpt":
            return head + excerpt(*what.split(" | ")) + end
        return head + (TABLES[what]() if kind == "table" else output(what, text)) + end

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="all, if none is named")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--predicted", action="store_true", help="leave out what needs a run")
    parser.add_argument("--only", metavar="COMMAND", help="one block, by its command or table")
    args = parser.parse_args()
    is_predicted = args.check or args.predicted

    def is_stale(what: str) -> bool:
        if args.only:
            return what == args.only
        if args.check and what.startswith(PICTURES):
            return False
        return not (is_predicted and what.startswith(MEASURED))

    return max(_page(page, is_stale, is_check=args.check) for page in args.pages or PAGES)


def _page(page: str, is_stale: Callable[[str], bool], *, is_check: bool) -> int:
    """Rewrite a page, or with `is_check` compare it. Return 1 if the page is out of date."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    new = rewritten(text, is_stale)
    if not is_check:
        path.write_text(new, encoding="utf-8")
    state = "up to date" if new == text else ("out of date" if is_check else "rewritten")
    print(f"{page}: {len(BLOCK.findall(text))} blocks, {state}")
    return int(is_check and new != text)


if __name__ == "__main__":
    sys.exit(main())
