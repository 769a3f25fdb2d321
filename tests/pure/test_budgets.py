"""The statement budgets of the package, and the messages for violations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import budgets
from tests.budgets import SMALL, WRITE
from tests.source_tree import SourceTree

FILES = {
    "ptrain/__init__.py": '"""A package."""\n',
    "ptrain/units.py": "import math\n\nMORE = 1\n" + "# a line\n" * SMALL,
    "ptrain/spec/__init__.py": '"""What is said."""\n',
    "ptrain/spec/load.py": '"""Reads."""\nfrom ptrain.units import MORE\n\n\ndef f():\n'
    '    """Read."""\n    if MORE:\n        return 1\n    return 2\n',
    "ptrain/axes/rule.py": "from ptrain.spec import load\n",
    "ptrain/axes/data/cost.py": "import ptrain.units\nimport ptrain.spec.load\n",
    "ptrain/axes/data/run/flat.py": "from ptrain.axes.data.cost import x\n",
}


@pytest.fixture
def small(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return SourceTree(tmp_path)


def test_statements_are_counted_without_docstrings_and_comments_by_package(small):
    assert small.statements_by_package() == {
        "ptrain": 2 + 5 + 1 + 2 + 1,
        "ptrain/axes": 1,
        "ptrain/axes/data": 2 + 1,
        "ptrain/spec": 5,
    }


def test_a_module_has_as_many_importers_as_modules_that_name_it(small):
    assert small.modules_with_one_importer() == ["ptrain.axes.data.cost"]
    assert "ptrain.units" not in small.modules_below(SMALL)
    assert len(small.modules_below(SMALL)) == 4


def test_a_package_above_its_budget_is_named_with_both_figures_and_the_fix():
    (wrong,) = budgets.over_or_under({"ptrain/report": 2171}, {"ptrain/report": 2160})
    assert wrong.startswith("ptrain/report has 2171 statements, 11 more than its budget of 2160:")
    assert WRITE in wrong


@pytest.mark.parametrize(
    ("number", "budget", "is_fine"),
    [(960, 1000, True), (959, 1000, False), (9800, 10000, True), (9799, 10000, False)],
)
def test_a_budget_far_above_its_package_is_to_be_lowered(number, budget, is_fine):
    wrong = [*budgets.over_or_under({"ptrain/spec": number}, {"ptrain/spec": budget})]
    assert (not wrong) is is_fine
    assert is_fine or f"lowers it to {budgets.round_up(number)}" in wrong[0]


def test_a_package_without_budget_and_a_budget_without_package_are_named():
    new, gone = budgets.over_or_under({"ptrain/new": 30}, {"ptrain/old": 30})
    assert "ptrain/new has 30 statements and no budget" in new
    assert "ptrain/old has a budget and is no more" in gone


def test_a_number_that_may_only_fall_is_held_exactly():
    assert budgets.not_as_held("N", "modules", 7, 7) is None
    assert "N = 6" in str(budgets.not_as_held("N", "modules", 6, 7))
    assert "1 more than N = 7" in str(budgets.not_as_held("N", "modules", 8, 7))


def test_the_command_writes_the_table_that_the_tests_read(small):
    text = Path(budgets.__file__).read_text(encoding="utf-8")
    before, _, after = text.partition("# begin\n")
    rest = after.partition("# end\n")[2]
    assert budgets.with_table(text, "N = 1\n") == f"{before}# begin\nN = 1\n# end\n{rest}"
    lines = budgets.table(small)
    assert lines.startswith('BUDGETS: dict[str, int] = {\n    "ptrain": 20,\n')
    assert "ONE_IMPORTER = 1 " in lines and "SMALL_MODULES = 4 " in lines
