"""Stage boundaries: every tensor on one stage, tied ones on both ends; balanced splits compared
with all others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptrain.errors import SpecError
from ptrain.facts.parameters import facts
from ptrain.facts.stages import Layers, balanced_counts, divide_into_stages, even_counts, layers_of
from ptrain.spec.model import Family, ModelShape
from tests.pure.build import ODD_SHAPE

LLAMA = replace(ODD_SHAPE, layers=7)
GPT = ModelShape(family=Family.GPT, layers=5, hidden=42, heads=3, kv_heads=3, ffn=101, vocab=259)
SHAPES = [replace(shape, tied=tied) for shape in (LLAMA, GPT) for tied in (False, True)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def layers(shape: ModelShape) -> Layers:
    tied = (("embed.weight", "head.weight"),) if shape.tied else ()
    return layers_of(facts(shape, 16).units, tied=tied)


def refusal(raised: pytest.ExceptionInfo[SpecError]) -> tuple[str, str, str]:
    (fault,) = raised.value.faults
    return fault.place, fault.finding, fault.remedy


@every_shape
def test_every_tensor_is_on_one_stage_and_a_tied_one_also_on_the_last(shape):
    model, whole = layers(shape), facts(shape, 16)
    for count in range(1, shape.layers + 1):
        stages = divide_into_stages(model, balanced_counts(model.weights, count, model.ends))
        copies = Counter(name for stage in stages for name in stage.tensors)
        is_shared = shape.tied and count > 1
        copy = {"head.weight"} if is_shared else set()
        assert set(copies) == {tensor.name for tensor in whole.tensors} | copy
        assert set(copies.values()) == {1}
        for stage in stages:
            own = {0: {"embed.weight"}, count - 1: copy} if is_shared else {}
            assert set(stage.shared) == own.get(stage.index, set())
            pairs = [("embed.weight", name) for name in copy & {*stage.tensors}]
            assert list(stage.copied) == pairs
        copied = sum(t.numel for t in whole.tensors if t.name == "embed.weight" and is_shared)
        assert sum(stage.numel for stage in stages) == whole.numel + copied


@every_shape
def test_the_first_stage_has_the_embedding_and_the_last_norm_and_head(shape):
    first, middle, last = divide_into_stages(layers(shape), (1, shape.layers - 2, 1))
    front = ["embed.weight"] + ["positions.weight"] * (shape.family is Family.GPT)
    assert list(first.tensors[: len(front)]) == front
    norm = ["norm.weight"] + ["norm.bias"] * (shape.family is Family.GPT)
    head = ["head.weight", *norm] if shape.tied else [*norm, "head.weight"]
    assert list(last.tensors[-len(head) :]) == head
    assert first.layers == ("blocks.0",)
    assert last.layers == (f"blocks.{shape.layers - 1}",)
    assert all(name.startswith("blocks.") for name in middle.tensors)


def test_one_stage_has_a_tied_tensor_once():
    model = layers(SHAPES[1])
    (only,) = divide_into_stages(model, (7,))
    assert only.shared == ()
    assert only.tensors.count("embed.weight") == 1


def test_a_model_with_other_names_states_its_embedding():
    model = layers_of(facts(GPT, 16).units, front=("embed",))
    assert [tensor.name for tensor in model.front] == ["embed.weight"]
    assert "positions.weight" in divide_into_stages(model, (2, 3))[1].tensors


@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    ends=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    data=st.data(),
)
def test_no_cut_has_a_lighter_heaviest_stage_nor_is_more_even(weights, ends, data):
    stages = data.draw(st.integers(1, len(weights)))

    def cost(counts: tuple[int, ...]) -> tuple[int, int]:
        sums, start = [], 0
        for count in counts:
            sums.append(sum(weights[start : start + count]))
            start += count
        sums[0] += ends[0]
        sums[-1] += ends[1]
        return max(sums), sum(each * each for each in sums)

    found = balanced_counts(weights, stages, ends)
    assert len(found) == stages and sum(found) == len(weights)
    others = (
        tuple(b - a for a, b in zip((0, *inner), (*inner, len(weights)), strict=True))
        for inner in combinations(range(1, len(weights)), stages - 1)
    )
    assert cost(found) == min(map(cost, others))


def test_heavy_ends_get_fewer_layers():
    assert balanced_counts([1] * 12, 4) == (3, 3, 3, 3)
    assert balanced_counts([1] * 12, 4, (2, 2)) == (2, 4, 4, 2)


def test_slow_layers_are_on_stages_with_few_layers():
    seconds = [0.1] * 6 + [0.3] * 2
    assert balanced_counts(seconds, 3) == (4, 3, 1)


@pytest.mark.parametrize(
    ("count", "stages", "expected"),
    [
        (8, 4, (2, 2, 2, 2)),
        (10, 4, (2, 3, 3, 2)),
        (9, 4, (2, 3, 2, 2)),
        (11, 4, (3, 3, 3, 2)),
        (3, 3, (1, 1, 1)),
        (5, 1, (5,)),
    ],
)
def test_as_many_layers_in_each_and_one_more_in_the_middle(count, stages, expected):
    assert even_counts(count, stages) == expected


def test_more_stages_than_layers_are_rejected():
    for call in (lambda: even_counts(3, 4), lambda: balanced_counts([1, 1, 1], 4)):
        with pytest.raises(SpecError) as raised:
            call()
        assert refusal(raised) == (
            "pipeline.stages",
            "4 stages need at least one layer each; the model has 3",
            "Use at most 3 stages, or a model with more layers.",
        )


@pytest.mark.parametrize(
    ("counts", "finding"),
    [
        ((3, 3), "[3, 3] has 6 layers, but the model has 7"),
        ((4, 4), "[4, 4] has 8 layers, but the model has 7"),
        ((0, 7), "[0, 7] has a stage without layers"),
        ((8, -1), "[8, -1] has a stage without layers"),
        ((), "[] has a stage without layers"),
    ],
)
def test_a_list_that_is_not_the_models_is_rejected(counts, finding):
    with pytest.raises(SpecError) as raised:
        divide_into_stages(layers(SHAPES[0]), counts)
    place, found, remedy = refusal(raised)
    assert (place, found) == ("pipeline.split", finding)
    assert remedy.startswith("Use numbers of 1 or more with the sum 7")
    assert ("[" in remedy) is bool(counts)
