"""`benchmarks/against.py` compares two commits in one run: order of rounds, verdicts, and
cleanup."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
ROUNDS = 6  # the fewest of which an interval of the median is made


@pytest.fixture(scope="module")
def page(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("against")


def sides_of(page, ratio: float, **others: float):
    """Return two trees that predict in times of the given `ratio` in every round."""
    row = page.Row("predict", "zero3", "CPU")
    mine, its = page.Side(), page.Side()
    for number in range(ROUNDS):
        its.note(row, 1.0 + number)  # a machine that becomes slower: only pairs can be compared
        mine.note(row, ratio * (1.0 + number))
        for spec, seconds in others.items():
            mine.note(page.Row("derive", spec, "CPU", "ms"), seconds)
    return mine, its


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.7, "slower"), (1.06, "slower"), (1.04, "holds"), (0.9, "faster")]
)
def test_a_commit_is_judged_by_the_ratios_of_its_pairs(page, ratio, verdict):
    lines, failed = page.compared(*sides_of(page, ratio), page.MEASURES)
    (line,) = lines
    assert line.endswith(f"| {ratio:.3f} | {ratio:.3f} – {ratio:.3f} | {verdict} |")
    slower = f"predict of zero3, CPU time: lower bound {ratio:.3f}, at most 1.05"
    assert failed == ([slower] if verdict == "slower" else [])


def test_one_slow_round_of_six_is_not_slower(page):
    mine, its = sides_of(page, 1.7)
    (row,) = mine.times
    mine.times[row][3] = its.times[row][3]
    lines, failed = page.compared(mine, its, page.MEASURES)
    assert lines[0].endswith("| 1.700 | 1.000 – 1.700 | holds |")
    assert not failed


def test_benchmarks_that_a_commit_lacks_are_not_judged(page):
    lines, failed = page.compared(*sides_of(page, 1.0, young=7.0), page.MEASURES)
    assert lines[1] == "| derive | `young` | CPU | 7.000 ms | not there |  |  | no claim |"
    assert not failed
    lines, _ = page.compared(*sides_of(page, 1.0, young=7.0), ["predict"])
    assert len(lines) == 1


def test_trees_take_turns_and_the_first_round_is_left_out(page, monkeypatch):
    taken = []

    def take(tree, side):
        taken.append(tree.name)
        side.note(page.Row("steps", "zero3", "wall"), 1.0)

    monkeypatch.setattr(page, "TAKEN", {"steps": take, "start-up": take})
    trees = [page.Tree(name, FOLDER) for name in ("mine", "its")]
    sides = page.in_turns(trees, ("steps", "start-up"), 3)
    assert taken == ["mine", "its", "its", "mine", "mine", "its", "its", "mine"]
    assert [len(times) for side in sides for times in side.times.values()] == [3, 3]


def test_the_results_of_two_trees_are_adjacent_columns(page):
    mine, its = page.Side(), page.Side()
    mine.results = {("derive", "a"): "1 B", ("derive", "b"): "2 B", ("derive", "c"): "3 B"}
    its.results = {("derive", "a"): "1 B", ("derive", "b"): "4 B"}
    assert page.works(mine, its) == [
        "| derive | `a` | 1 B | 1 B | the same |",
        "| derive | `b` | 2 B | 4 B | another |",
        "| derive | `c` | 3 B | not there |  |",
    ]


def test_a_commit_is_checked_out_in_a_temporary_folder(page, tmp_path, monkeypatch):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    page.git(tmp_path, "init", "--quiet")
    for text in ("before", "after"):
        (tmp_path / "file").write_text(text)
        page.git(tmp_path, "add", "file")
        page.git(tmp_path, "commit", "--quiet", "--message", text)
    assert page.is_commit("HEAD~1", tmp_path)
    assert not page.is_commit("no-such-commit", tmp_path)
    with pytest.raises(KeyError), page.checked_out("HEAD~1", tmp_path) as tree:
        assert (tree.root / "file").read_text() == "before"
        assert tree.name and "+" not in tree.name
        raise KeyError
    assert not tree.root.exists()
    assert list((tmp_path / ".git").glob("worktrees/*")) == []
    assert (tmp_path / "file").read_text() == "after"
