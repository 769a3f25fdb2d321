"""A padded vocabulary trains like an unpadded one for every placement, and every byte is
predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch.nn.functional as F

from ptrain.algebra.legality import require_runnable
from ptrain.facts.parameters import OF_VOCABULARY
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from tests.gloo.matrix import STEPS, reference, run_spec
from tests.gloo.test_exact import failed_checks
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

STAGES, SLICES = "S,S,S,R", "S,S,S,S"
CASES: Mapping[str, Mapping[str, Any]] = {
    "zero3": {"placement": {"dp_shard": "S*,S,S,R"}},
    "tp": {"placement": {"tp": STAGES}, "tied": True},
    "tp-sp-chunked": {"placement": {"tp": SLICES}, "loss": {"chunk": 7}},
    "tp-gathered": {"placement": {"tp": STAGES}, "tensor": {"loss_parallel": False}},
    "pp-chunked": {"placement": {"pp": STAGES}, "tied": True, "loss": {"chunk": 7}},
}


def padded_spec(case: str) -> Spec:
    """Return a spec of 261 tokens in 272 rows, of which a second rank has the padding."""
    sections = dict(CASES[case])
    shape = {"family": "llama", "layers": 2, "hidden": 24, "heads": 4, "ffn": 48}
    shape |= {"vocab": 261, "vocab_multiple": 16, "tied": sections.pop("tied", False)}
    return require_runnable(
        load(
            {
                "name": case,
                "model": shape,
                "mesh": dict.fromkeys(sections["placement"], 2),
                "precision": {"layout": "fp32", "compute": "fp64"},
                "batch": {"accumulate": 2, "micro": 2, "sequence": 16},
                "optimizer": {"name": "adamw", "lr": 3e-3, "clip": 1.0},
                "data": {"corpus": "python-docs", "tokenizer": "bytes"},
            }
            | sections
        )
    )


@pytest.mark.parametrize("case", CASES)
def test_padding_changes_no_step_and_every_byte_is_predicted(ranks: Ranks, case: str) -> None:
    spec = padded_spec(case)
    assert isinstance(spec.model, ModelShape) and spec.model.vocab_padding == 11
    plain = reference(replace(spec, model=replace(spec.model, vocab_multiple=1)), STEPS)
    padding = (0, 0, 0, spec.model.vocab_padding)  # which stays zero
    padded = {
        name: F.pad(tensor, padding) if name in OF_VOCABULARY else tensor
        for name, tensor in plain.parameters.items()
    }
    result = run_spec(ranks, spec, truth=replace(plain, parameters=padded))
    assert not [*failed_checks(result.checks), *failed_checks(result.against)]
