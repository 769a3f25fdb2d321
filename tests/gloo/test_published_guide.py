"""The guide to published models runs as it is printed: a training goes on where the one stopped
whose weights it begins with, and what it leaves transformers loads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.jobs import ROOT, losses, run

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.gloo, pytest.mark.nightly]

PAGE = ROOT / "launch" / "README.md"


def commands() -> list[list[str]]:
    """Return the words of the guide's commands."""
    section = PAGE.read_text(encoding="utf-8").partition("## Published models")[2]
    block = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert block, "the guide has commands"
    return [shlex.split(line)[1:] for line in block[1].splitlines()]


def test_the_guide_to_published_models_runs_as_it_is_printed(tmp_path: Path) -> None:
    for words in commands():
        code, job = run(words, cwd=tmp_path)
        assert code == 0, f"{words}: {job.output}{job.error}"
    first, second = (losses(tmp_path / "runs" / name) for name in ("first", "second"))
    assert abs(second[1] - first[max(first)]) < 0.5 < first[1] - second[1]
    for folder in ("published", "tuned"):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, output_loading_info=True
        )
        assert type(model).__name__ == "LlamaForCausalLM"
        assert not any(report[what] for what in ("missing_keys", "unexpected_keys"))
