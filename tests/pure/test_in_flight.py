"""What micro-batches in flight leave on every rank of a pipeline, and the peaks: closed forms, sums
over stages against the whole model, and sends that outlive what they send."""

from __future__ import annotations

import time
from collections import Counter
from unittest.mock import patch

import pytest

from ptrain.costs import Phase, State
from ptrain.derivation import in_flight
from ptrain.derivation.estimate import derive, own_facts
from ptrain.derivation.pipeline import staged
from ptrain.derivation.stage_timeline import passes
from ptrain.derivation.timeline import model_timeline
from ptrain.facts.passes import Passes, net
from ptrain.spec.load import load
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.spec import Spec
from ptrain.timeline import Complete, Kind
from tests.pure.piped import FULLY, SHAPE, legal

GPT = {**SHAPE, "family": "gpt", "kv_heads": 6}
MODELS = {
    "llama": SHAPE,
    "llama, tied": SHAPE | {"tied": True},
    "gpt": GPT,
    "gpt, untied": GPT | {"tied": False},
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
every_layout = pytest.mark.parametrize("layout", ["fp32", "bf16"])
# of `piped.spec`: micro-batches of 1 sample of 32 tokens, in fp32
HIDDEN_STATES = 32 * SHAPE["hidden"] * 4
EVEN = {"split": "layers"}


def stages_of(spec: Spec) -> list[Passes]:
    """Each stage's passes, first to last."""
    plan, facts = derive(spec).plan, own_facts(spec)
    found = staged(spec, plan, facts)
    return [passes(spec, each.stage, len(found), each.facts.unit_modules, None) for each in found]


def saved(stage: Passes) -> int:
    """Bytes of one micro-batch between its forward and its backward, its input included."""
    return sum(map(net, stage.items[Kind.FORWARD])) + stage.hidden


def activations(name: str, ranks: int, microbatches: int, **sections: object) -> list[int]:
    """By rank of pp."""
    spec = legal(
        {"pp": ranks},
        {"schedule": name} | EVEN,
        batch={"sequence": 32, "accumulate": microbatches},
        **sections,
    )
    exact = derive(spec).exact
    return [exact.bytes_of(State.ACTIVATIONS, rank) for rank in range(ranks)]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_gpipe_holds_every_micro_batch_of_its_stage(microbatches):
    spec = legal({"pp": 4}, {"schedule": "gpipe"} | EVEN)
    *others, last = map(saved, stages_of(spec))
    found = activations("gpipe", 4, microbatches)
    # of the next stage's gradient the first has come when backward begins
    assert found[:-1] == [microbatches * each + HIDDEN_STATES for each in others]
    assert found[-1] == microbatches * last


@pytest.mark.parametrize("microbatches", [4, 5, 8, 12])
def test_1f1b_holds_as_many_as_there_are_stages_behind(microbatches):
    """min(m, p - i), a gradient that came (the last stage gets none), and one that was sent (the
    first stage sends none)."""
    spec = legal({"pp": 4}, {"schedule": "1f1b"} | EVEN)
    found = activations("1f1b", 4, microbatches)
    for place, each in enumerate(map(saved, stages_of(spec))):
        held = min(microbatches, 4 - place) * each
        assert found[place] == held + ((place < 3) + (place > 0)) * HIDDEN_STATES


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_interleaved_holds_chunks_by_its_closed_form(ranks, microbatches):
    """min(m·v, (v-1)·p + 2(p-1-i) + 1) chunks of a stage each, and a few hidden states."""
    spec = legal(
        {"pp": ranks}, {"schedule": "interleaved"} | EVEN, model=SHAPE | {"layers": 4 * ranks}
    )
    stages = stages_of(spec)
    found = activations("interleaved", ranks, microbatches, model=SHAPE | {"layers": 4 * ranks})
    middle = saved(stages[1])
    for place in range(1, ranks - 1):
        chunks = min(2 * microbatches, ranks + 2 * (ranks - 1 - place) + 1)
        more = found[place] - chunks * middle
        assert 0 <= more <= 4 * HIDDEN_STATES  # whatever the number of micro-batches


@every_model
@every_layout
def test_stages_save_what_the_model_saves_and_what_they_hand_on(model, layout):
    """The whole model keeps the hidden states between two layers where its norms take them as they
    are; stages have them at both ends of a boundary."""
    spec = legal({"pp": 4}, model=model, precision={"layout": layout})
    whole = model_timeline(spec, own_facts(spec)).saved_bytes
    stages = stages_of(spec)
    own = sum(saved(stage) - stage.output - stage.hidden for stage in stages)
    between = sum(stage.hidden for stage in stages)
    assert own in (whole, whole - between)
    assert (own == whole - between) is (layout == "fp32")


@every_model
@every_layout
def test_a_micro_batch_that_came_back_leaves_its_gradients_and_its_loss(model, layout):
    spec = legal({"pp": 4}, model=model, precision={"layout": layout})
    for place, stage in enumerate(stages_of(spec)):
        for backward in ([Kind.BACKWARD], [Kind.INPUT, Kind.WEIGHT]):
            items = [item for kind in (Kind.FORWARD, *backward) for item in stage.items[kind]]
            left = sum(map(net, items)) - stage.output - stage.hidden
            assert left == (4 if place == 3 else 0)


@every_model
def test_gradients_of_weights_are_complete_once_in_the_second_half_if_there_are_two(model):
    spec = legal({"pp": 4}, model=model)
    found = staged(spec, derive(spec).plan, own_facts(spec))
    for each, stage in zip(found, stages_of(spec), strict=True):
        names = Counter(tensor.name for tensor in each.facts.tensors)
        for kind, expected in (
            (Kind.BACKWARD, names),
            (Kind.INPUT, Counter[str]()),
            (Kind.WEIGHT, names),
        ):
            complete = (item for item in stage.items[kind] if isinstance(item, Complete))
            assert Counter(item.parameter for item in complete) == expected


@pytest.mark.parametrize("name", ScheduleName)
def test_more_micro_batches_raise_no_peak_but_where_all_are_in_flight(name):
    def peaks(microbatches: int) -> list[int]:
        batch = {"sequence": 32, "accumulate": microbatches}
        exact = derive(legal({"pp": 2}, {"schedule": str(name)}, batch=batch)).exact
        tokens = exact.bytes_of(State.OTHER)
        return [row.device_bytes - tokens for row in exact.peak if row.phase is Phase.BACKWARD]

    all_in_flight = name in (ScheduleName.GPIPE, ScheduleName.BFS)
    for few, many in zip(peaks(16), peaks(32), strict=True):
        assert many > 1.5 * few if all_in_flight else many == few


def test_of_one_micro_batch_gpipe_is_naive():
    batch = {"sequence": 32, "accumulate": 1}
    found = [derive(legal({"pp": 4}, {"schedule": each}, batch=batch)).exact for each in
             ("naive", "gpipe")]  # fmt: skip
    assert found[0].memory == found[1].memory
    assert found[0].peak == found[1].peak


@pytest.mark.parametrize("data", ["R,R,R,R", "R,S,R,R", "R,S,S,R", FULLY])
@pytest.mark.parametrize("name", ScheduleName)
def test_what_a_pass_is_known_to_do_is_what_it_does(name, data):
    """A pass that finds its wrap as an equal one did is not played again."""
    placement = {"pp": "S,S,S,R", "dp_shard": data}
    if data == "R,R,R,R":
        placement = {"pp": "S,S,S,R", "dp_replicate": data}
    mesh = dict.fromkeys(placement, 2)
    spec = legal(mesh, {"schedule": str(name)}, placement=placement)
    known = derive(spec).exact
    with patch("ptrain.derivation.stage_replay._Rank.known", lambda *_: None):
        assert derive(spec).exact == known


def test_ranks_with_the_same_stages_and_slices_are_played_once():
    spec = legal({"pp": 2, "dp_shard": 2, "tp": 2}, model=SHAPE | {"vocab": 264, "kv_heads": 6})
    with patch.object(in_flight, "play_rank", wraps=in_flight.play_rank) as played:
        exact = derive(spec).exact
    assert played.call_count == 2
    assert len(exact.peak) == 8 * 3


def test_70b_over_three_axes_is_derived_in_half_a_second():
    spec = load("specs/paper/70b-3d.yaml").spec
    start = time.process_time()
    exact = derive(spec).exact
    assert time.process_time() - start < 0.5
    assert exact.undefined == {}
    first, *_, last = (exact.bytes_of(State.ACTIVATIONS, rank) for rank in (0, 32, 64, 96))
    assert 3 * last < first < 4 * last
