"""The counts of names and docstrings to be reworded, and the message if one rises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import wording
from tests.source_tree import SourceTree
from tests.wording import WRITE, Words

ROOT = Path(wording.__file__).parents[1]
TEXT = '''"""Of what a spec says."""

class Row:
    """A row."""

    kept: int  # bytes
    num_rows: int

    @property
    def total(self) -> int:
        """What it adds up to."""
        return self.kept

    def held(self) -> int:
        """Return what it holds."""
        made = self.kept
        return made

    def read_rows(self, own: int) -> int:
        """Return the rows."""
        return own
'''


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "ptrain" / "spec" / "rows.py"
    path.parent.mkdir(parents=True)
    path.write_text(TEXT, encoding="utf-8")
    return SourceTree(tmp_path)


def test_functions_fields_fillers_and_fragments_are_counted_and_properties_are_values(small):
    assert wording.files(small) == {"ptrain/spec/rows.py": Words(one_word=1, bare=3, fragments=3)}
    assert wording.comments(small) == {"ptrain/spec": 1000 // TEXT.count("\n")}


@pytest.mark.parametrize("name", ["kept", "_named", "of", "_alike", "sliced", "why"])
def test_a_bare_name_is_neither_a_thing_nor_an_action(name):
    assert wording.is_bare(name)


@pytest.mark.parametrize(
    "name", ["seed", "load", "is_sent", "kept_bytes", "split", "token", "rows"]
)
def test_nouns_verbs_and_names_of_several_words_are_not_bare(name):
    assert not wording.is_bare(name)


def test_a_figure_above_the_table_and_a_file_without_one_are_named():
    figures = {"a.py": Words(2, 0, 0), "b.py": Words(0, 1, 0), "c.py": Words(0, 0, 0)}
    assert [*wording.above(figures, {"a.py": Words(2, 1, 0), "c.py": Words(1, 0, 0)})] == [
        "b.py: bare = 1, 1 more than 0"
    ]
    assert not [*wording.below({"p": 18}, {"p": 20, "gone": 9})]
    assert "1.7 % of the lines are comments, 2.0 % before" in next(
        wording.below({"p": 17}, {"p": 20})
    )


def test_no_file_has_more_names_and_docstrings_to_reword_than_before():
    tree = SourceTree(ROOT)
    wrong = [*wording.above(wording.files(tree), wording.FILES)]
    wrong += wording.below(wording.comments(tree), wording.COMMENTS)
    assert not wrong, f"reword these, or after a move run {WRITE}:\n" + "\n".join(wrong)


def test_the_command_writes_the_table_that_the_test_reads(small):
    text = Path(wording.__file__).read_text(encoding="utf-8")
    written = wording.with_table(text, wording.table(small))
    assert '    "ptrain/spec/rows.py": Words(1, 3, 3),\n' in written
    assert written.count("# begin") == text.count("# begin")
