"""Rewrites the generated blocks of the pages: `python benchmarks/pages.py [PAGE ...]`.

The pages are README.md and those of `ptrain help`. A block stands between
`<!-- output: COMMAND -->` (or `<!-- table: NAME -->`) and `<!-- end -->`; all else is written by
hand. Commands run as `python -m ptrain …` (and `torchrun`) in a folder that has the page's own
Python files (`_examples.py`) and nothing else. `--check` exits 1 if a block is not what it would be
now, but for those of `train`, `validate`, `verify` and `simulate`, which tell of a machine, and of
`torchrun`, which tests run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import cache

import _axes
import _costs
import _methods
import _pipelines
import _rooms
import _tables
from _examples import printed
from _machine import ROOT

from ptrain.cli import help

PAGES = ("README.md", *help.PAGES)
BLOCK = re.compile(r"(<!-- (output|table): (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
MEASURED = ("ptrain train", "ptrain validate", "ptrain verify", "ptrain simulate", "torchrun")
TABLES = {
    **_costs.TABLES,
    **_axes.TABLES,
    **_methods.TABLES,
    **_pipelines.TABLES,
    **_rooms.TABLES,
    **_tables.TABLES,
}


@cache
def output(command: str, text: str) -> str:
    """The command and what it prints beside the files of a page, as a code block."""
    return f"```\n$ {command}\n{printed(command, text)}\n```\n"


def rewritten(text: str, is_stale: Callable[[str], bool]) -> str:
    """The page with those of its blocks made anew whose command or table `is_stale` names."""

    def block(match: re.Match[str]) -> str:
        head, kind, what, old, end = match.groups()
        if not is_stale(what):
            return head + old + end
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
        return not (is_predicted and what.startswith(MEASURED))

    return max(_page(page, is_stale, is_check=args.check) for page in args.pages or PAGES)


def _page(page: str, is_stale: Callable[[str], bool], *, is_check: bool) -> int:
    """Writes a page anew, or says whether it is what it would be now; 1 if it is not."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    new = rewritten(text, is_stale)
    if not is_check:
        path.write_text(new, encoding="utf-8")
    state = "up to date" if new == text else ("out of date" if is_check else "written anew")
    print(f"{page}: {len(BLOCK.findall(text))} blocks, {state}")
    return int(is_check and new != text)


if __name__ == "__main__":
    sys.exit(main())
