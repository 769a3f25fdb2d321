"""Dropout on pp: stages draw different masks, and one device with these masks computes the same
result."""

from __future__ import annotations

import pytest

from ptrain.spec.load import load
from tests.gloo.test_exact import failed_checks
from tests.gloo.test_tensor_dropout import STEPS, MaskRecorder, is_attention, train_and_keep_masks
from tests.ranks import Ranks
from tests.trajectories import FP64, one_device
from tests.trajectories import compare as compare_runs

pytestmark = pytest.mark.gloo

MICRO_BATCHES = 3
GPT = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 4, "ffn": 48, "vocab": 260}


def test_one_device_with_the_masks_of_the_stages_computes_the_same(
    ranks: Ranks,
) -> None:
    spec = load(
        {
            "model": GPT | {"family": "gpt", "dropout": 0.1},
            "mesh": {"pp": 2},
            "placement": {"pp": "S,S,S,R"},
            "pipeline": {"schedule": "gpipe"},  # a rank draws micro-batch after micro-batch
            "batch": {"sequence": 16, "accumulate": MICRO_BATCHES, "micro": 2},
            "precision": {"compute": "fp64"},
        }
    ).spec
    (report, first), (_, second) = ranks.run(2, train_and_keep_masks, spec)
    attention = [mask for mask in (*first, *second) if is_attention(mask)]
    assert len({mask.numpy().tobytes() for mask in attention}) == len(attention)
    passes = STEPS * MICRO_BATCHES
    each, other = len(first) // passes, len(second) // passes
    replayed = (
        mask.double()
        for at in range(passes)
        for mask in (*first[at * each :][:each], *second[at * other :][:other])
    )
    with MaskRecorder(replayed) as drawn:
        reference = one_device(spec, STEPS)
    assert len(drawn.masks) == len(first) + len(second)
    assert report.trajectory is not None
    assert not failed_checks(compare_runs(reference, report.trajectory, FP64))
    assert failed_checks(compare_runs(one_device(spec, STEPS), report.trajectory, FP64))
