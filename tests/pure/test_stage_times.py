"""Stages that take as long as each other: operations counted by hand, and where the head is."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.axes.pipeline.catalogue import count_operations, stages_of
from ptrain.axes.pipeline.stage_facts import stage_layers
from ptrain.plan.lower import built_in_facts
from ptrain.spec.spec import Spec
from tests.pure.pipeline_specs import SHAPE, legal

HIDDEN, FFN, VOCAB, SEQUENCE = 96, 240, 259, 32
KV_HIDDEN = HIDDEN // 2
MATRICES = {
    "llama": 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HIDDEN + 3 * HIDDEN * FFN,
    "gpt": 4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN,  # without the biases, which only add
}
BIG = {"vocab": 50_257, "tied": True}


def split_spec(model: dict[str, Any], split: object = "time", ranks: int = 4) -> Spec:
    return legal({"pp": ranks}, {"split": split}, model=SHAPE | model)


def counts(spec: Spec) -> list[int]:
    return [
        len(stage.layers) for stage in stages_of(spec, stage_layers(spec, built_in_facts(spec)))
    ]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", MATRICES)
def test_a_token_is_multiplied_by_every_matrix_three_times_and_meets_every_other(family, tied):
    model = {"family": family, "tied": tied} | ({"kv_heads": 6} if family == "gpt" else {})
    spec = split_spec(model)
    of_layers, ends = count_operations(spec, stage_layers(spec, built_in_facts(spec)))
    scores = 2 * SEQUENCE * HIDDEN  # keys, and values
    assert set(of_layers) == {3 * 2 * (MATRICES[family] + scores)}
    assert len(of_layers) == SHAPE["layers"]
    assert ends == (0, 3 * 2 * VOCAB * HIDDEN)


def test_the_head_moves_layers_to_earlier_stages():
    assert counts(split_spec({"vocab": 259, "layers": 12})) == [3, 3, 3, 3]
    first, *_, last = counts(split_spec({"vocab": 2_500, "layers": 12}))
    assert last < first


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_of_a_big_tied_vocabulary_only_the_head_takes_time(family):
    """By parameters both ends are heavy: the first stage has the embedding, the last its copy."""
    model = BIG | {"family": family, "layers": 40} | ({"kv_heads": 6} if family == "gpt" else {})
    by_time, by_size = counts(split_spec(model)), counts(split_spec(model, "parameters"))
    assert by_size[0] == by_size[-1] == 1
    assert by_time[-1] == 1 < by_time[0]
    assert max(by_time) < max(by_size)


def test_long_sequences_make_layers_expensive_compared_with_the_head():
    long = legal(
        {"pp": 4},
        {"split": "time"},
        model=SHAPE | {"layers": 12, "vocab": 2_500},
        batch={"sequence": 8192, "accumulate": 8},
    )
    assert counts(long) == [3, 3, 3, 3]
    assert counts(split_spec({"vocab": 2_500, "layers": 12})) != [3, 3, 3, 3]


def test_no_stage_is_slower_than_with_another_split():
    for vocab in (259, 2_500, 50_257):
        model = {"vocab": vocab, "layers": 12}
        assert slowest(split_spec(model)) <= min(
            slowest(split_spec(model, each)) for each in ("layers", [3] * 4)
        )


def slowest(spec: Spec) -> int:
    model = stage_layers(spec, built_in_facts(spec))
    each, (ahead, behind) = count_operations(spec, model)
    found = [number * each[0] for number in counts(spec)]
    found[0] += ahead
    found[-1] += behind
    return max(found)
