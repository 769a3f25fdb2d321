"""README is one page to begin with, and what it says of commands, torch and tests is true."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ptrain.cli.help import PAGES, page_sections

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 250


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_readme_stays_one_page():
    lines = TEXT.count("\n")
    assert lines <= MOST_LINES, f"README has {lines} lines: what is added belongs on another page"


# With `torch<2.14` first, pip never looks at a newer CUDA build. As an extra of the package the
# bound comes after the package's wider range: pip 23.2 then downloads 539 MB only to read the
# metadata of a wheel that it does not install.
INSTALL = (
    "python3 -m venv .venv && .venv/bin/pip install 'torch<2.14' -e {} "
    "--extra-index-url https://download.pytorch.org/whl/cpu --retries 0 && "
)


def test_one_line_sets_up_and_trains():
    (command,) = section("Install and run").split("```")[1].strip().splitlines()
    assert command == INSTALL.format(".") + ".venv/bin/ptrain train"


def test_one_line_sets_up_and_tests():
    (command,) = section("Tests").split("```")[1].strip().splitlines()
    assert command == INSTALL.format("'.[test]'") + ".venv/bin/python -m pytest"


@pytest.mark.parametrize("title", ["Install and run", "Tests"])
def test_ci_runs_both_commands_of_readme(title):
    (command,) = section(title).split("```")[1].strip().splitlines()
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "title", ["Does my model fit?", "Is my training right?", "My model, my loop"]
)
def test_a_question_has_one_command(title):
    code = re.findall(r"^```(\w*)\n(.*?)^```", section(title), re.DOTALL | re.MULTILINE)
    (commands,) = (text for language, text in code if not language and "torchrun" not in text)
    assert "ptrain " in commands.splitlines()[0]


def test_readme_leads_to_every_page_and_names_a_topic_of_it():
    axes = (ROOT / "docs" / "axes" / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+\.md)", axes)
    one_further = {os.path.normpath(f"docs/axes/{link}") for link in links}
    for page in PAGES:
        if page in one_further:
            continue
        (row,) = (line for line in TEXT.splitlines() if f"| [{page}]({page}) |" in line)
        topic = re.findall(r"`ptrain help ([\w-]+)`", row)
        assert set(topic) <= {section.anchor for section in page_sections(page)} and topic, row
