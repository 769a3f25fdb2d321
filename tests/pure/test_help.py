"""`ptrain help`: the topics, a section as text, and what a wheel carries of the pages."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from ptrain.cli import help
from ptrain.cli.help import PAGES, anchor, as_text, page_sections, sections
from ptrain.cli.main import main
from ptrain.spec.schema import schema

ROOT = Path(__file__).parents[2]
TOPICS = {section.anchor: page for page in PAGES for section in page_sections(page)}
PAGE = """\
# Title
before

## First `part`
Words that are **bold**, a [link](other.md#a-topic), a [file](x.py), S\\*.
<!-- output: ptrain x -->
```
## no heading
| no | table |

after a blank line
```
<!-- end -->
- one item
  of two lines
- another

### Below
## Second
| a | b |
|---|---|
| `x` | 1 |
"""


def test_a_topic_is_of_one_page_only():
    topics = Counter(section.anchor for page in PAGES for section in page_sections(page))
    assert {topic for topic, times in topics.items() if times > 1} == set()


def test_without_a_topic_all_of_them_are_listed_by_page(capsys):
    assert main(["help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for topic, page in TOPICS.items():
        (row,) = (line for line in lines if line.startswith(f"  {page} "))
        assert topic in row.removeprefix(f"  {page}").strip().split(", ")


@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_is_printed_within_the_terminal_but_for_code(topic, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["help", topic]) == 0
    text = capsys.readouterr().out
    assert "<!--" not in text and "](" not in text and "```" not in text
    wide = [line for line in text.splitlines() if len(line) > 80 and not line.startswith("  ")]
    assert not [line for line in wide if " " in line], wide


def test_a_topic_may_be_written_as_its_title(capsys):
    assert main(["help", "Exit codes"]) == 0
    assert capsys.readouterr().out.startswith("Exit codes\n\n")


def test_a_key_of_a_spec_is_a_topic_with_all_that_is_in_it(capsys):
    assert main(["help", "optimizer.clip"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["optimizer.clip", ""]
    assert main(["help", "optimizer"]) == 0
    assert "optimizer.schedule.min_lr_ratio" in capsys.readouterr().out


def test_every_key_of_a_spec_has_help(capsys):
    for key in schema()["properties"]:
        assert main(["help", key]) == 0, key


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("checkpont", "did you mean 'checkpoints'?"),
        ("parallelism", "did you mean 'data-parallelism'?"),
        ("specs", "its options: ptrain specs --help"),
        ("qqq", "is no topic\n"),
    ],
)
def test_an_unknown_topic_names_the_nearest_and_all(word, hint, capsys):
    assert main(["help", word]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"ptrain help: '{word}' is no topic")
    assert hint in captured.err and ", ".join(TOPICS) in captured.err


@pytest.mark.parametrize(
    ("word", "topic"),
    [("sbatch", "slurm"), ("NCCL", "not-verified"), ("gpus", "simulate")],
)
def test_a_word_that_is_no_topic_is_found_in_the_sections_that_say_it(word, topic, capsys):
    assert main(["help", word]) == 2
    (row,) = (line for line in capsys.readouterr().err.splitlines() if "stands in: " in line)
    spoken = row.partition("stands in: ")[2].split(", ")
    assert topic in spoken and set(spoken) < set(TOPICS)


def test_a_word_that_nobody_says_is_in_no_section(capsys):
    assert main(["help", "qqq"]) == 2
    assert "stands in" not in capsys.readouterr().err


def test_a_wheel_carries_every_page(tmp_path, monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["ptrain"]  # and so all that is in it
    for source, target in wheel["force-include"].items():
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copyfile
        copy(ROOT / source, tmp_path / target)
    in_checkout = {page: page_sections(page) for page in PAGES}
    monkeypatch.setattr(help, "_PACKAGE", tmp_path / "ptrain")
    assert {page: page_sections(page) for page in PAGES} == in_checkout


def test_sections_end_at_the_next_heading_of_their_depth_and_code_has_none():
    first, second = sections(PAGE)
    assert (first.title, first.anchor) == ("First `part`", "first-part")
    assert first.text.startswith("Words") and "## no heading" in first.text
    assert first.text.endswith("### Below\n") and second.text.startswith("| a | b |")


def test_a_section_as_text_has_no_signs_of_markdown():
    first, second = sections(PAGE)
    assert as_text(first.text, 80) == (
        "Words that are bold, a link [a-topic], a file, S*.\n\n"
        "  ## no heading\n  | no | table |\n\n  after a blank line\n\n"
        " • one item of two lines\n • another\n\nBelow"
    )
    assert as_text(second.text, 20).split() == ["a", "b", "────", "x", "1"]


def test_a_narrow_table_wraps_its_cells_and_cuts_no_word_short():
    table = "| key | means |\n|---|---|\n| `optimizer.lr` | one two three |\n"
    lines = as_text(table, 28).splitlines()
    assert [line.split() for line in lines[-2:]] == [["optimizer.lr", "one", "two"], ["three"]]


def test_a_table_whose_longest_words_are_too_wide_is_a_paragraph_a_row():
    table = "| key | values | default |\n|---|---|---|\n| `x` | one two | – |\n| `y` | 3 | 4 |\n"
    assert as_text(table, 16) == "x\n  values: one\n  two\ny\n  values: 3\n  default: 4"


def test_code_keeps_its_lines():
    line = "ptrain train zero1 checkpoint.at_end=true --run-dir runs/first"
    assert as_text(f"```\n{line}\n```\n", 20) == f"  {line}"


def test_a_terminal_gets_colours_unless_no_color_forbids_them(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = re.compile(r"\x1b\[[\d;]*3\d")
    assert coloured.search(as_text("a `key`", 80))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured.search(as_text("a `key`", 80))


def test_an_anchor_is_what_a_forge_makes_of_a_title():
    assert anchor("Who can connect?") == "who-can-connect"
    assert anchor("A `x.y` of Θ, Ω") == "a-xy-of-θ-ω"
