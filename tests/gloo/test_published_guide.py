"""The guides to published models run as printed: training continues from published weights, and
transformers loads the exported folder."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.chat_folders import random_chats, save_tokenizer, write_chats
from tests.jobs import ROOT, losses, run_job
from tests.published_folders import save_folder

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.gloo, pytest.mark.nightly]

GUIDES = ROOT / "docs" / "howto"


def commands(page: str, title: str) -> list[list[str]]:
    """Return the arguments of the commands in the first block of a section of a guide."""
    section = (GUIDES / page).read_text(encoding="utf-8").partition(f"## {title}\n")[2]
    block = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert block, "the guide has commands"
    return [shlex.split(line)[1:] for line in block[1].splitlines()]


def test_the_guide_to_published_models_runs_as_it_is_printed(tmp_path: Path) -> None:
    for words in (
        *commands("published-weights.md", "Published models"),
        *commands("published-weights.md", "Other model classes"),
    ):
        code, job = run_job(words, cwd=tmp_path)
        assert code == 0, f"{words}: {job.output}{job.error}"
    first, second = (losses(tmp_path / "runs" / name) for name in ("first", "second"))
    assert abs(second[1] - first[max(first)]) < 0.5 < first[1] - second[1]
    third = losses(tmp_path / "runs" / "third")
    assert abs(third[1] - first[max(first)]) < 0.5
    for folder in ("published", "tuned", "tuned-as-class"):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, output_loading_info=True
        )
        assert type(model).__name__ == "LlamaForCausalLM"
        assert not any(report[what] for what in ("missing_keys", "unexpected_keys"))


def test_the_guide_to_chats_runs_as_it_is_printed(tmp_path: Path) -> None:
    base = save_folder("llama", tmp_path / "base", vocab_size=320)
    save_tokenizer(base)
    write_chats(tmp_path / "chats.jsonl", random_chats(400))
    printed = []
    steps = commands("chats.md", "Fine-tuning on chats")
    for words in steps:
        code, job = run_job(words, cwd=tmp_path)
        assert code == 0, f"{words}: {job.output}{job.error}"
        printed.append(job.output)
    keys = re.search(r"train on it with (.*)", printed[0])
    assert keys and set(keys[1].split()) <= {*steps[1]}
    text = (tmp_path / "runs" / "chats" / "metrics.jsonl").read_text(encoding="utf-8")
    held_out = [json.loads(line).get("held_out_loss") for line in text.splitlines()]
    first, *_, last = [loss for loss in held_out if loss is not None]
    assert last < first
    folder = tmp_path / "tuned-on-chats"
    assert transformers.AutoTokenizer.from_pretrained(folder).get_chat_template()
    assert type(transformers.AutoModelForCausalLM.from_pretrained(folder)).__name__ == (
        "LlamaForCausalLM"
    )
