"""README is one page, and its commands, links and excerpt are true."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ptrain.cli.help import PAGES
from ptrain.cli.main import VERBS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_LINES = 180


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_readme_stays_one_page():
    lines = TEXT.count("\n")
    assert lines <= MAX_LINES, f"README has {lines} lines. Move text to a page of docs/."


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


def test_four_questions_have_one_command_each():
    questions = re.findall(r"^- \*\*[^*]+\?\*\* `ptrain (\w+) [^`]+`", TEXT, re.MULTILINE)
    assert len(questions) == 4 and set(questions) <= set(VERBS)


def test_the_excerpt_ends_with_a_verdict_that_holds():
    (block,) = re.findall(r"<!-- excerpt: .+? -->\n```\n(.*?)```", TEXT, re.DOTALL)
    assert len(block.splitlines()) > 5 and block.splitlines()[-1].startswith("verdict: holds")


def test_every_page_is_reached_by_links_from_readme():
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or not page.endswith(".md") or not (ROOT / page).is_file():
            continue
        reached.add(page)
        links = re.findall(r"\]\((?!http)([^)#\s]+)", (ROOT / page).read_text(encoding="utf-8"))
        waiting += [os.path.normpath(Path(page).parent / link) for link in links]
    assert {*PAGES} <= reached


def test_every_picture_block_links_to_the_file_that_it_writes():
    picture = re.compile(r"<!-- picture: (\S+) .+? -->\n!\[[^\]]+\]\((\S+)\)\n<!-- end -->")
    for page in ("README.md", *PAGES):
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks = picture.findall(text)
        assert len(blocks) == text.count("<!-- picture: "), page
        for file, link in blocks:
            assert ((ROOT / page).parent / link).resolve() == (ROOT / file).resolve(), page
            assert (ROOT / file).is_file(), page
