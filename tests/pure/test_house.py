"""The counts of benchmarks/house.py: packages, their imports, and files that name an axis or a
wrapper kind."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.source_tree import SourceTree

FILES = {
    "ptrain/__init__.py": "from ptrain.plan import lower\n",
    "ptrain/errors.py": "class Stage:\n    def size(self): ...\n",
    "ptrain/plan/__init__.py": "",
    "ptrain/plan/lower.py": (
        "from ptrain.axes.data import form\n\nkey = 'tp'\n\n\n"
        "class TableSetting: ...\n\n\narchive.read_table(key)\n"
    ),
    "ptrain/axes/__init__.py": "",
    "ptrain/axes/data/__init__.py": "",
    "ptrain/axes/data/form.py": (
        "from ptrain.plan.lower import key\n\n\nclass Stage: ...\n\n\n"
        "assert isinstance(key, FlatUnits)\n"
    ),
    "ptrain/axes/data/run/__init__.py": "",
    "ptrain/axes/data/run/flat.py": (
        "import ptrain.axes.data.form\nfrom ptrain.errors import Stage\n\nAxis.DP_SHARD\n"
    ),
    "ptrain/report.py": (
        "match wrap:\n    case FlatUnits() | FullyShard():\n        axes = self.plan.tensor\n"
        "    case str():\n        tier = Tier.HOST\nis_flat = isinstance(wrap, int | Replicate)\n"
    ),
    "ptrain/plan/table.json": "{}",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def house_counts(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("house")


def test_a_package_excludes_its_subpackages(root):
    tree = SourceTree(root)
    assert {room: len(modules) for room, modules in tree.rooms.items()} == {
        "axes": 1, "axes/data": 2, "axes/data/run": 2, "base": 2, "plan": 2
    }  # fmt: skip
    assert tree.room_of("ptrain") is None
    assert tree.room_of("ptrain.axes.data.run.flat") == "axes/data/run"


def test_packages_that_import_each_other_count_as_one_pair(root):
    assert SourceTree(root).mutual_imports() == {("axes/data", "plan")}


def test_a_repeated_class_name_is_listed_with_its_modules(root):
    classes = SourceTree(root).repeated_classes()
    assert classes == {"Stage": ["ptrain.axes.data.form", "ptrain.errors"]}


def test_files_outside_an_axis_package_that_name_it_are_listed(house_counts, root):
    files = house_counts.House(root).axis_files
    assert files["data"] == ["ptrain/plan/lower.py"]  # its import; the torch half is at home
    assert files["tensor"] == ["ptrain/plan/lower.py", "ptrain/report.py"]
    assert files["pipeline"] == []


@pytest.mark.parametrize(
    ("text", "axis", "names"),
    [
        ("Axis.PP", "pipeline", True),
        ("Axis.PP", "data", False),
        ("spec.pipeline.stages", "pipeline", True),
        ("pp.pipeline", "pipeline", False),
        ("torch.tensor", "tensor", False),
        ("from ptrain.axes.data.form import form_of", "data", True),
        ("from ptrain.axes import tensor", "tensor", True),
        ("import_of = 'dp_shard'", "data", True),
        ("text = 'tp of 2'", "tensor", False),
        ("DATA_AXES", "data", True),
        ("REDUCED_AXES", "data", True),
    ],
)
def test_an_axis_is_named_by_member_part_import_or_key(house_counts, text, axis, names):
    assert any(house_counts.names_axis(node, axis) for node in ast.walk(ast.parse(text))) is names


def test_a_check_of_a_kind_counts_once_and_not_in_its_package(house_counts, root):
    assert house_counts.House(root).wrap_places() == [
        ("ptrain/report.py", 2),
        ("ptrain/report.py", 6),
    ]


def test_a_tier_a_table_and_lines_are_counted(house_counts, root):
    rows = {row.measure: row.value for row in house_counts.House(root).rows()}
    assert rows["files that name a tier"] == "1"
    assert rows["files that name a mode"] == "0"
    assert (rows["tables: files"], rows["tables: bytes"]) == ("1", "2")
    assert rows["tables: classes of settings"] == rows["tables: files that read the archive"] == "1"
    assert rows["longest function"] == "1 (ptrain/errors.py, size)"
    assert rows["lines of ptrain/"] == str(sum(text.count("\n") for text in FILES.values()))


def test_two_commits_are_adjacent_columns(house_counts, root, tmp_path):
    git = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x@x.invalid"]
    for command in (["init", "-q"], ["add", "ptrain"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    (root / "ptrain/axes/data/form.py").write_text("", encoding="utf-8")
    before = house_counts.unpacked("HEAD", tmp_path / "before", root)
    rows = list(house_counts.table({"before": before, "after": house_counts.House(root)}))
    assert "| pairs of rooms that import each other | 1 | 0 | 0 |" in rows
    assert "| class names that stand twice | 1 | 0 | ≤ 15 |" in rows
    assert "| lines of axes/data | 7 | 0 | |" in rows
