"""`ptrain help`: topics, sections as text, and the pages in a wheel."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from ptrain.cli import help
from ptrain.cli.help import PAGES, as_text, heading_anchor, page_sections, split_sections
from ptrain.cli.main import main
from ptrain.commands import COMMANDS
from ptrain.spec.check import schema

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


@pytest.mark.parametrize("columns", ["80", "200"])
def test_without_a_topic_all_of_them_are_listed_by_page(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["help"]) == 0
    listing = capsys.readouterr().out.partition("\n\n")[2].partition("\n\n")[0]
    for part in re.split(r"\n  (?=\S)", listing)[1:]:
        page, *topics = part.replace(",", "").split()
        assert topics == [section.anchor for section in page_sections(page)]
    assert max(map(len, listing.splitlines())) <= 100
    assert all(f"\n  {page}\n" in listing for page in PAGES)


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
    ("word", "line"),
    [
        ("launch", "Launch a training"),
        ("fit-a-model", "Fit a model into memory"),
        ("troubleshooting", "Troubleshooting"),
        ("Fit a model into memory", "Fit a model into memory"),
    ],
)
def test_a_page_is_a_topic_by_its_file_and_by_its_title(word, line, capsys):
    assert main(["help", *word.split()]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [line, ""]


@pytest.mark.parametrize(
    "word",
    [
        *("oom", "fsdp", "deepspeed", "autocast", "recipe", "theorems", "figures", "models"),
        *("gradient accumulation", "checkpoint", "NCCL", "gpus", "sbatch"),
    ],
)
def test_a_word_that_is_no_topic_is_answered(word, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["help", word]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and len(captured.out.splitlines()) > 2


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("models", "your-model"),  # a title
        ("gradient accumulation", "glossary"),
        ("sbatch", "starting-a-training"),
        ("NCCL", "glossary"),
    ],
)
def test_places_that_mention_a_word_have_a_line_each_and_a_command(
    word, first, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["help", word]) == 0
    title, _, *hits, _, command = capsys.readouterr().out.splitlines()
    assert (title, command) == (word, f"Next: ptrain help {first}")
    topics = [hit.split()[0] for hit in hits]
    assert topics[0] == first and set(topics) <= set(TOPICS) and len(topics) <= 10
    assert all(len(hit.split()) > 1 and len(hit) <= 100 for hit in hits)


def test_a_word_that_one_section_mentions_prints_it(capsys):
    assert main(["help", "expandable_segments"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("After an out-of-memory error\n\n  ptrain why-oom runs/latest\n")


def test_a_key_is_followed_by_the_sections_that_mention_it_in_their_title(capsys):
    assert main(["help", "checkpoint"]) == 0
    text = capsys.readouterr().out
    assert text.index("checkpoint.every") < text.index("\n  checkpoints ")


def test_a_command_is_a_topic(capsys):
    assert main(["help", "export"]) == 0
    assert "usage: ptrain export RUN --to FOLDER" in capsys.readouterr().out
    assert main(["help", "select"]) == 0  # a section
    assert capsys.readouterr().out.endswith("Next: ptrain select --help\n")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("checkpont", "Nearest topics: checkpoint, checkpoints, "),
        ("gate", "Nearest topics: gate-a-pull-request."),
        ("qqq", "`ptrain help` lists the topics."),
    ],
)
def test_a_word_that_no_page_mentions_is_one_message(word, hint, capsys):
    assert main(["help", word]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ptrain help: no page mentions '{word}'. {hint}")
    assert captured.err.count("\n") == 1


def test_every_topic_that_a_text_of_ptrain_names_has_an_answer():
    """A remedy that ends in an error is worse than none."""
    files = [*(ROOT / "ptrain").rglob("*.py"), *(ROOT / "specs").glob("*.yaml")]
    files += [*(ROOT / "docs").rglob("*.md")]
    topics = {
        match[1]
        for file in files
        for match in re.finditer(r"`ptrain help ([a-z][\w .-]*)`", file.read_text(encoding="utf-8"))
    }
    topics |= {topic for command in COMMANDS.values() for topic in command.topics}
    assert "several-nodes" in topics
    assert not [topic for topic in sorted(topics) if main(["help", *topic.split()])]


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
    first, second = split_sections(PAGE)
    assert (first.title, first.anchor) == ("First `part`", "first-part")
    assert first.text.startswith("Words") and "## no heading" in first.text
    assert first.text.endswith("### Below\n") and second.text.startswith("| a | b |")


def test_a_section_as_text_has_no_signs_of_markdown():
    first, second = split_sections(PAGE)
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


def test_a_table_that_is_too_wide_becomes_one_paragraph_per_row():
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


def test_an_anchor_equals_the_anchor_of_a_forge():
    assert heading_anchor("Who can connect?") == "who-can-connect"
    assert heading_anchor("A `x.y` of Θ, Ω") == "a-xy-of-θ-ω"
