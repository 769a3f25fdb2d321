"""README is one page to begin with, and what it says of commands, torch and tests is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ptrain.cli.help import PAGES, page_sections
from ptrain.version import TORCH_RANGE

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 250


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_readme_stays_one_page():
    lines = TEXT.count("\n")
    assert lines <= MOST_LINES, f"README has {lines} lines: what is added belongs on another page"


def test_the_cpu_build_of_torch_comes_before_the_package():
    install, train = section("Install and run").split("```")[1].strip().splitlines()
    index = "--index-url https://download.pytorch.org/whl/cpu"
    assert install.endswith(f"pip install 'torch{TORCH_RANGE}' {index}")
    assert train == ".venv/bin/pip install -e . && .venv/bin/ptrain train"


def test_ci_runs_readmes_test_command():
    command = next(line for line in TEXT.splitlines() if line.endswith("-m pytest"))
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert command.startswith("python3 -m venv .venv && ")


@pytest.mark.parametrize(
    "title", ["Does my model fit?", "Is my training right?", "My model, my loop"]
)
def test_a_question_has_one_command(title):
    code = re.findall(r"^```(\w*)\n(.*?)^```", section(title), re.DOTALL | re.MULTILINE)
    (commands,) = (text for language, text in code if not language and "torchrun" not in text)
    assert "ptrain " in commands.splitlines()[0]


def test_readme_leads_to_every_page_and_names_a_topic_of_it():
    for page in PAGES:
        (row,) = (line for line in TEXT.splitlines() if f"| [{page}]({page}) |" in line)
        topic = re.findall(r"`ptrain help ([\w-]+)`", row)
        assert set(topic) <= {section.anchor for section in page_sections(page)} and topic, row
