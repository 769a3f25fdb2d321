"""How large the package may be: statements by package, and how many modules are small.

    python -m tests.budgets [--write]

Prints the figures of the checkout as this file has them; --write puts them here. A budget is the
number of statements, rounded up to the next ten. A commit that raises a figure says what for.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.source_tree import SourceTree

WRITE = "python -m tests.budgets --write"
ROUNDED_TO = 10  # statements
# By how much a budget may be above the statements of its package: a small change leaves the table
# as it is, and what a larger one deletes does not come back unnoticed.
SLACK, SLACK_SHARE = 40, 0.02
SMALL = 80  # lines

# begin
BUDGETS: dict[str, int] = {
    "ptrain": 56080,
    "ptrain/activations": 430,
    "ptrain/algebra": 170,
    "ptrain/axes": 160,
    "ptrain/axes/context": 1170,
    "ptrain/axes/data": 2400,
    "ptrain/axes/expert": 560,
    "ptrain/axes/pipeline": 1550,
    "ptrain/axes/tensor": 740,
    "ptrain/calibration": 1040,
    "ptrain/charts": 1340,
    "ptrain/cli": 2650,
    "ptrain/convert": 450,
    "ptrain/data": 1180,
    "ptrain/derivation": 5050,
    "ptrain/facts": 870,
    "ptrain/internals": 500,
    "ptrain/interpreter": 1100,
    "ptrain/meters": 1470,
    "ptrain/models": 5300,
    "ptrain/optimizers": 700,
    "ptrain/plan": 520,
    "ptrain/rates": 370,
    "ptrain/report": 2540,
    "ptrain/runtime": 1030,
    "ptrain/selection": 2770,
    "ptrain/simulation": 1050,
    "ptrain/spec": 4760,
    "ptrain/steps": 470,
    "ptrain/traces": 2200,
    "ptrain/train": 3460,
    "ptrain/verification": 6120,
    "ptrain/xray": 1010,
}
ONE_IMPORTER = 49  # modules that exactly one other imports
SMALL_MODULES = 35  # modules with fewer lines than SMALL
# end


def over_or_under(figures: Mapping[str, int], budgets: Mapping[str, int]) -> Iterator[str]:
    """Yield what is wrong with each package: it has more statements than its budget or many fewer,
    it has no budget, or it is no more."""
    for package in sorted(figures.keys() | budgets.keys()):
        if package not in budgets:
            yield f"{package} has {figures[package]} statements and no budget: {WRITE} adds it"
            continue
        if package not in figures:
            yield f"{package} has a budget and is no more: {WRITE} takes it off"
            continue
        number, budget = figures[package], budgets[package]
        if number > budget:
            yield (
                f"{package} has {number} statements, {number - budget} more than its budget of "
                f"{budget}: delete as many, or raise the budget ({WRITE}) and say in the commit "
                "what for"
            )
        elif budget - number > max(SLACK, SLACK_SHARE * budget):
            yield (
                f"{package} has {number} statements, {budget - number} fewer than its budget of "
                f"{budget}: {WRITE} lowers it to {round_up(number)}"
            )


def not_as_held(name: str, what: str, number: int, held: int) -> str | None:
    """Return what is wrong with a number that may only become smaller; None where it is `held`."""
    if number == held:
        return None
    if number < held:
        return f"{what}: {number}, {held - number} fewer than before: {WRITE}, or {name} = {number}"
    return (
        f"{what}: {number}, {number - held} more than {name} = {held}: put a module into the one "
        f"that imports it, or raise the number ({WRITE}) and say in the commit what for"
    )


def round_up(number: int) -> int:
    """Return the budget for so many statements."""
    return -(-number // ROUNDED_TO) * ROUNDED_TO


def table(tree: SourceTree) -> str:
    """Return the figures of a checkout as lines of this file."""
    budgets = [
        f'    "{package}": {round_up(number)},\n'
        for package, number in tree.statements_by_package().items()
    ]
    return (
        f"BUDGETS: dict[str, int] = {{\n{''.join(budgets)}}}\n"
        f"ONE_IMPORTER = {len(tree.modules_with_one_importer())}"
        "  # modules that exactly one other imports\n"
        f"SMALL_MODULES = {len(tree.modules_below(SMALL))}"
        "  # modules with fewer lines than SMALL\n"
    )


def with_table(text: str, lines: str) -> str:
    """Return the text of this file with another table."""
    return re.sub(r"(?<=^# begin\n).*?(?=^# end$)", lines, text, flags=re.DOTALL | re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the figures into this file")
    path = Path(__file__)
    lines = table(SourceTree(path.parents[1]))
    if parser.parse_args().write:
        path.write_text(with_table(path.read_text(encoding="utf-8"), lines), encoding="utf-8")
    print(lines, end="")


if __name__ == "__main__":
    main()
