"""The Python examples of the pages run as they are printed there, and print what the pages say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
TOUR, VERIFY, PYTHON = "docs/tour.md", "docs/howto/verify-a-loop.md", "docs/howto/python.md"
ROUNDING = re.compile(r"\d\.\d+e-\d\d")  # a processor's own
EXAMPLES = [
    (VERIFY, "measured.py"),
    pytest.param(TOUR, "broken.py", marks=pytest.mark.nightly),
    pytest.param(PYTHON, "loop.py", marks=pytest.mark.nightly),
    pytest.param(VERIFY, "check.py", marks=pytest.mark.nightly),
]
RUN = {"loop.py", "measured.py", "check.py", "broken.py"}


@pytest.fixture
def examples(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("_examples")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "name"), EXAMPLES)
def test_an_example_prints_what_its_page_says(examples: ModuleType, page: str, name: str) -> None:
    text = text_of(page)
    command = examples.launched(text)[name]
    printed = f"$ {command}\n{examples.printed(command, text)}\n```\n"
    assert ROUNDING.sub("ε", printed) in ROUNDING.sub("ε", text)


@pytest.mark.parametrize("page", [TOUR, PYTHON, VERIFY])
def test_every_file_of_a_page_is_started_or_imported(examples: ModuleType, page: str) -> None:
    text = text_of(page)
    for name, code in examples.files(text).items():
        module = name.removesuffix(".py")
        others = (other for file, other in examples.files(text).items() if file != name)
        assert name in examples.launched(text) or any(f"from {module} " in o for o in others), name
        assert name in RUN or name not in examples.launched(text), f"{name} is not run"
        compile(code, name, "exec")
