"""Fine-tuning from a transformers folder to a transformers folder on chats: ranks learn the
answers, and transformers computes the same held-out loss from the exported folder."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ptrain.cli.main import main
from ptrain.data.vocabulary import START, TARGET, mask_path
from tests.chat_folders import CHATML, random_chats, save_tokenizer, write_chats
from tests.jobs import ROOT, TINY, losses, run_job
from tests.published_folders import save_folder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gloo

SEQUENCE, STEPS = 127, 24


def held_out_losses(run_folder: Path) -> list[float]:
    """Return the printed held-out losses by step."""
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["held_out_loss"] for row in rows if "held_out_loss" in row]


def transformers_loss(folder: Path, rows: Path) -> float:
    """Return the mean answer loss of the last twentieth of the rows, computed chat by chat with the
    class of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens, marks = np.load(rows), np.load(mask_path(rows))
    losses = 0.0
    first = len(tokens) - len(tokens) // 20
    for row, kinds in zip(tokens[first:], marks[first:], strict=True):
        for begin, end in pairwise([*np.flatnonzero(kinds == START), len(row)]):
            ids = torch.from_numpy(row[begin:end].astype(np.int64))
            targets = torch.from_numpy(kinds[begin:end] == TARGET)[1:]
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1]
            losses += F.cross_entropy(logits[targets], ids[1:][targets], reduction="sum").item()
    return losses / int((marks[first:] == TARGET).sum())


def test_a_folder_is_fine_tuned_on_chats_and_exported(tmp_path: Path, capsys: Any) -> None:
    folder = save_folder("llama", tmp_path / "in", vocab_size=320)
    save_tokenizer(folder)
    chats = write_chats(tmp_path / "chats.jsonl", random_chats(200, most=2))
    rows, words = tmp_path / "rows.npy", ["--sequence", str(SEQUENCE), "--json"]
    call = ["tokenize", str(chats), "--chat", "--tokenizer", str(folder), "--out", str(rows)]
    assert main([*call, *words]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    num_held_out = len(np.load(rows)) // 20  # a batch of twice as many has each of them twice
    keys |= {
        "batch.global": 2 * num_held_out,
        "batch.micro": num_held_out,
        "eval": "{every: 6, batches: 1}",
        "optimizer": "{lr: 0.01, weight_decay: 0.0}",
        "train.steps": STEPS,
        "checkpoint.at_end": "true",
    }
    settings = [f"{key}={value}" for key, value in keys.items()]
    started = ["train", "zero3", "mesh.dp_shard=2", "--run-dir", "run"]
    code, job = run_job([*started, *settings], cwd=tmp_path, is_forked=True)
    assert code == 0, f"{job.output}{job.error}"
    said = held_out_losses(tmp_path / "run")
    assert said[-1] < 0.7 * said[0]
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    assert transformers_loss(tmp_path / "out", rows) == pytest.approx(said[-1], rel=1e-5)
    assert transformers_loss(folder, rows) > said[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.get_chat_template() == CHATML
    question = ["what is red", "--temperature", "0", "--tokens", "12", "--json"]
    capsys.readouterr()
    assert main(["sample", str(tmp_path / "run"), "--chat", *question]) == 0
    ready = tokenizer.apply_chat_template(
        [{"role": "user", "content": question[0]}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = model.generate(**ready, max_new_tokens=12, do_sample=False, eos_token_id=0)
    answer = tokenizer.decode(ids[0, ready["input_ids"].shape[1] :], skip_special_tokens=True)
    assert json.loads(capsys.readouterr().out)["texts"] == [answer] != [""]


@pytest.mark.nightly
def test_weighted_chats_and_texts_resume_on_other_ranks(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    chats = write_chats(tmp_path / "chats.jsonl", random_chats(100, most=2))
    words = ["--tokenizer", str(folder), "--out"]
    text = ["tokenize", str(ROOT / "README.md"), *words, str(tmp_path / "text.npy")]
    assert main(text) == 0
    call = ["tokenize", str(chats), "--chat", "--sequence", str(SEQUENCE), *words]
    assert main([*call, str(tmp_path / "rows.npy")]) == 0
    mask = mask_path(tmp_path / "rows.npy")
    sources = f"[{{path: {tmp_path / 'rows.npy'}, weight: 2, loss_mask: {mask}}}, "
    settings = (
        *TINY,
        "model.vocab=320",
        "model.document_end=2",
        f"batch.sequence={SEQUENCE}",
        f"data.sources={sources}{{path: {tmp_path / 'text.npy'}}}]",
        "checkpoint.at_end=true",
    )
    starts = {
        "whole": ["zero3", "mesh.dp_shard=2", "train.steps=8"],
        "first": ["zero3", "mesh.dp_shard=2", "train.steps=5"],
        "second": ["zero1", "mesh.dp_shard=1", "train.steps=8", "--resume", "first"],
    }
    for name, start in starts.items():
        code, job = run_job(["train", *start, "--run-dir", name, *settings], cwd=tmp_path)
        assert code == 0, f"{job.output}{job.error}"
    whole, first, second = (losses(tmp_path / name) for name in starts)
    assert [*first, *second] == [*whole]
    assert [*first.values(), *second.values()] == pytest.approx([*whole.values()], rel=1e-5)
