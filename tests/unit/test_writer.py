"""What a trained model writes is what transformers' class of the same weights writes, and so is how
well it foresees a text."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ptrain.cli.main import main
from ptrain.convert.saved import TextGenerator, token_windows
from ptrain.data.vocabulary import ByteVocabulary
from ptrain.errors import PtrainError, SpecError
from tests.published_folders import saved
from tests.unit.test_pretrained import SEQUENCE, run_of

transformers = pytest.importorskip("transformers")
TEXT = "Once upon a time there was a tensor."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen3_moe", tmp_path_factory.mktemp("published") / "in")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return run_of(folder, folder.parent / "run")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()


def test_it_goes_on_as_the_class_of_transformers_does(run: Path, theirs: Any) -> None:
    prompt = "Once"
    tokens = ByteVocabulary().tokens(prompt)
    text = TextGenerator(run).generate(
        prompt, tokens=SEQUENCE - len(tokens), temperature=0, generator=torch.Generator()
    )
    begun = torch.tensor([tokens])
    there = theirs.generate(begun, max_length=SEQUENCE, do_sample=False, eos_token_id=257)
    assert text == ByteVocabulary().text(there[0, len(tokens) :].tolist())


def test_a_text_is_foreseen_as_the_class_of_transformers_does(run: Path, theirs: Any) -> None:
    tokens = ByteVocabulary().tokens(TEXT)
    assert len(tokens) > 2 * SEQUENCE, "several windows"
    sums = 0.0
    for window in token_windows(tokens, SEQUENCE):
        ids = torch.tensor([window])
        with torch.no_grad():
            sums += float(theirs(ids, labels=ids).loss) * (len(window) - 1)
    score = TextGenerator(run).score(TEXT)
    assert score.tokens == len(tokens) - 1
    assert score.loss == pytest.approx(sums / score.tokens, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(sums / score.tokens), rel=1e-5)
    assert score.bits == pytest.approx(sums / math.log(2) / len(TEXT), rel=1e-5)


@pytest.mark.parametrize("length", [1, 2, 5, 100])
def test_every_token_but_the_first_is_a_target_once(length: int) -> None:
    tokens = list(range(11))
    parts = [*token_windows(tokens, length)]
    assert [token for part in parts for token in part[1:]] == tokens[1:]
    assert all(2 <= len(part) <= length + 1 for part in parts)


def test_what_is_drawn_depends_on_the_seed_alone(run: Path, capsys: Any) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        words = ["sample", str(run), "a", "--tokens", "12", "--samples", "2", "--seed", seed]
        assert main([*words, "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["texts"])
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_tokens_are_those_of_the_tokenizer_that_is_named(run: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", "once", "upon", "a", "time"])}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    writer = TextGenerator(run, tokenizer=tmp_path / "tokenizer.json")
    assert writer.vocabulary.tokens("upon a time") == [2, 3, 4]
    assert writer.score("upon a time once").tokens == 3
    with pytest.raises(SpecError, match="the prompt has no tokens"):
        writer.generate("", tokens=1, temperature=0, generator=torch.Generator())


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (("--score", "nowhere"), "nowhere: No such file or directory"),
        (("--tokenizer", "nowhere"), "nowhere is not a tokenizer"),
        (("--chat",), "no chat template is known"),
        (("--chat", "--tokenizer", "nowhere"), "nowhere is not a tokenizer"),
        (("--chat", "--score", "nowhere"), "cannot be combined with --score"),
        (("--step", "9"), "does not have a checkpoint of step 9; steps with a checkpoint: 1"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_one_message(
    run: Path, words: tuple[str, ...], finding: str, capsys: Any
) -> None:
    assert main(["sample", str(run), "a", *words]) == 2
    assert finding in capsys.readouterr().err


def test_a_user_who_says_nothing_is_refused(run: Path, capsys: Any) -> None:
    assert main(["sample", str(run), "--chat"]) == 2
    assert "PROMPT: is missing" in capsys.readouterr().err


def test_a_text_without_a_target_is_refused(run: Path) -> None:
    with pytest.raises(PtrainError, match="fewer than two tokens"):
        TextGenerator(run).score("")


def test_tokens_of_a_file_say_nothing_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.zeros(500, dtype=np.uint16))
    run = run_of(folder, tmp_path / "run", f"data={{path: {path}}}")
    with pytest.raises(SpecError, match="its tokenizer is unknown"):
        TextGenerator(run)


def test_a_run_whose_spec_is_damaged_is_refused_in_one_message(
    run: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "spec.resolved.yaml").write_text("model: {")
    assert main(["sample", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "spec.resolved.yaml" in error and error.count("error:") == 1
