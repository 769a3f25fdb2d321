"""The Python examples of the pages run as printed, with the output that the pages show."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
TOUR, VERIFY, PYTHON = "docs/tour.md", "docs/howto/verify-a-loop.md", "docs/howto/python.md"
TRAINERS = "docs/howto/verify-with-your-trainer.md"
ROUNDING = re.compile(r"\d\.\d+e-\d\d")  # a processor's own
EXAMPLES = [
    (VERIFY, "measured.py"),
    pytest.param(TOUR, "broken.py", marks=pytest.mark.nightly),
    pytest.param(PYTHON, "loop.py", marks=pytest.mark.nightly),
    pytest.param(VERIFY, "check.py", marks=pytest.mark.nightly),
]
# A recipe, its package, a line of it, a mistake in its place, and the finding of the verdict.
SUMMED = "it is not divided by the micro-batches (2) in the loss."
HALVED = "parameters is 0.5 times the reference."
RECIPES = [
    ("check_ddp.py", "torch", "part) / MICRO", "part)", SUMMED),
    ("check_fsdp2.py", "torch", "part) / MICRO", "part)", SUMMED),
    ("check_trainer.py", "transformers", "inputs, count)", "inputs, 2 * count)", HALVED),
    ("check_accelerate.py", "accelerate", "backward(loss)", "backward(loss / MICRO)", HALVED),
    ("check_fabric.py", "lightning_fabric", "backward(loss)", "backward(loss / MICRO)", HALVED),
]
RUN = {"loop.py", "measured.py", "check.py", "broken.py", *(recipe[0] for recipe in RECIPES)}


@pytest.fixture
def examples(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("_examples")


def example_text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "name"), EXAMPLES)
def test_an_example_prints_the_output_on_its_page(
    examples: ModuleType, page: str, name: str
) -> None:
    text = example_text(page)
    command = examples.launched(text)[name]
    printed = f"$ {command}\n{examples.printed(command, text)}\n```\n"
    assert ROUNDING.sub("ε", printed) in ROUNDING.sub("ε", text)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "package", "line", "mistake", "finding"), RECIPES)
def test_a_recipe_holds_and_its_verdict_names_a_wrong_scale(
    examples: ModuleType, name: str, package: str, line: str, mistake: str, finding: str
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    text = example_text(TRAINERS)
    command = examples.launched(text)[name]
    assert "verdict: holds" in examples.printed(command, text)
    code = examples.files(text)[name]
    assert code.count(line) == 1
    wrong = text.replace(code, code.replace(line, mistake))
    unclipped = wrong.replace("MICRO, CLIP = 2, 0.5", 'MICRO, CLIP = 2, float("inf")')
    assert finding in examples.printed(command, unclipped)


@pytest.mark.parametrize("page", [TOUR, PYTHON, VERIFY, TRAINERS])
def test_every_file_of_a_page_is_started_or_imported(examples: ModuleType, page: str) -> None:
    text = example_text(page)
    for name, code in examples.files(text).items():
        module = name.removesuffix(".py")
        others = (other for file, other in examples.files(text).items() if file != name)
        assert name in examples.launched(text) or any(f"from {module} " in o for o in others), name
        assert name in RUN or name not in examples.launched(text), f"{name} is not run"
        compile(code, name, "exec")
