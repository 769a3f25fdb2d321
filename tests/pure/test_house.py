"""What is counted of the sources: rooms, what they import, who names an axis or a wrap's kind."""

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
def house(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("house")


def test_a_room_is_a_package_without_those_below_it(root):
    tree = SourceTree(root)
    assert {room: len(modules) for room, modules in tree.rooms.items()} == {
        "axes": 1, "axes/data": 2, "axes/data/run": 2, "base": 2, "plan": 2
    }  # fmt: skip
    assert tree.room_of("ptrain") is None
    assert tree.room_of("ptrain.axes.data.run.flat") == "axes/data/run"


def test_rooms_that_import_each_other_are_one_pair_and_one_way_is_none(root):
    assert SourceTree(root).mutual_imports() == {("axes/data", "plan")}


def test_a_class_name_stands_twice_by_its_modules(root):
    classes = SourceTree(root).repeated_classes()
    assert classes == {"Stage": ["ptrain.axes.data.form", "ptrain.errors"]}


def test_files_that_name_an_axis_stand_outside_its_room(house, root):
    files = house.House(root).axis_files
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
def test_an_axis_is_named_by_member_part_import_or_key(house, text, axis, names):
    assert any(house.names_axis(node, axis) for node in ast.walk(ast.parse(text))) is names


def test_a_place_that_asks_for_a_kind_counts_once_and_not_at_home(house, root):
    assert house.House(root).wrap_places() == [("ptrain/report.py", 2), ("ptrain/report.py", 6)]


def test_a_tier_a_table_and_lines_are_counted(house, root):
    rows = {row.measure: row.value for row in house.House(root).rows()}
    assert rows["files that name a tier"] == "1"
    assert rows["files that name a mode"] == "0"
    assert (rows["tables: files"], rows["tables: bytes"]) == ("1", "2")
    assert rows["tables: classes of settings"] == rows["tables: files that read the archive"] == "1"
    assert rows["longest function"] == "1 (ptrain/errors.py, size)"
    assert rows["lines of ptrain/"] == str(sum(text.count("\n") for text in FILES.values()))


def test_two_commits_stand_side_by_side(house, root, tmp_path):
    git = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x@x.invalid"]
    for command in (["init", "-q"], ["add", "ptrain"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    (root / "ptrain/axes/data/form.py").write_text("", encoding="utf-8")
    before = house.unpacked("HEAD", tmp_path / "before", root)
    rows = list(house.table({"before": before, "after": house.House(root)}))
    assert "| pairs of rooms that import each other | 1 | 0 | 0 |" in rows
    assert "| class names that stand twice | 1 | 0 | ≤ 15 |" in rows
    assert "| lines of axes/data | 7 | 0 | |" in rows
