"""Frozen weights in 4 or 8 bits: memory and traffic are exact, and training equals a single device
with the same quantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ptrain.convert.export import Adapters, export_checkpoint
from ptrain.convert.saved import SavedModel
from ptrain.errors import SpecError
from ptrain.models.quantized import quantize_frozen
from tests import jobs
from tests.gloo import sessions
from tests.gloo.test_frozen import require_the_same_training
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
nightly = pytest.mark.nightly

PLACED = [
    ("ddp", "nf4"),
    ("zero3", "nf4"),
    ("zero1", "int8"),
    *(
        pytest.param(strategy, "nf4", marks=nightly)
        for strategy in ("zero1", "zero2", "hsdp", "fsdp-mixed", "pp-1f1b", "pp-zero3")
    ),
    *(pytest.param(strategy, "int8", marks=nightly) for strategy in ("ddp", "zero3")),
]


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [("zero3", "nf4"), *(pytest.param(s, "nf4", marks=nightly) for s in ("pp-1f1b", "zero1"))],
)
def test_adapters_of_a_built_in_model_train_as_on_a_single_device(
    ranks: Ranks, strategy: str, dtype: str
) -> None:
    model = "{preset: llama-tiny, lora_rank: 4, layers: 2}"
    require_the_same_training(ranks, strategy, model, f"frozen.dtype={dtype}")


@pytest.mark.parametrize(("strategy", "dtype"), PLACED)
def test_quantized_weights_are_stored_and_gathered_as_bytes(
    ranks: Ranks, strategy: str, dtype: str
) -> None:
    require_the_same_training(ranks, strategy, "adapted", f"frozen.dtype={dtype}")


BATCH = "batch={accumulate: 2, micro: 1, sequence: 16}"
TRAINED = ["eval.every=0", "optimizer.schedule.warmup=0", "--allow-import", "log.every=1"]


def test_a_training_with_a_quantized_base_learns_resumes_and_exports_its_adapters(
    ranks: Ranks, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    words = ["model={target: tests.models_frozen:lora}", BATCH, "frozen.dtype=nf4", *TRAINED]
    words += ["optimizer.lr=0.05"]

    def train(strategy: str, name: str, *more: str) -> dict[int, float]:
        for end in sessions.train_on_ranks(
            ranks, 2, strategy, *words, *more, folder=tmp_path / name
        ):
            assert end.code == 0, end.error
        return jobs.losses(tmp_path / name)

    losses = train("zero3", "run", "train.steps=8", "checkpoint.at_end=true")
    assert losses[8] < losses[1] - 0.05
    resumed = train("ddp", "resumed", "train.steps=10", "--resume", str(tmp_path / "run"))
    at_once = train("ddp", "at-once", "train.steps=10")
    assert all(abs(resumed[step] - at_once[step]) < 1e-5 for step in (9, 10))
    saved = SavedModel(tmp_path / "run")
    module, _ = saved.build(allow_import=True)
    quantize_frozen(module, saved.spec)
    module.load_state_dict(saved.load(saved.parameters))
    tokens = torch.arange(12).view(1, 12)
    expected = module(tokens)
    for how in Adapters:
        export_checkpoint(tmp_path / "run", tmp_path / how, adapters=how, allow_import=True)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(input_ids=tokens).logits, expected, atol=1e-5, rtol=1e-5)
    alone = peft.PeftConfig.from_pretrained(tmp_path / "alone")
    assert alone.r == 2
    with pytest.raises(SpecError, match="exporting a base that is stored in nf4"):
        export_checkpoint(tmp_path / "run", tmp_path / "full", allow_import=True)
