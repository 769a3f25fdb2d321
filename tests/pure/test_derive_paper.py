"""The paper's figures by its theorems, and the actual traffic."""

from __future__ import annotations

from functools import partial

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.cost import PLACED, Collective, Phase, State
from ptrain.derivation.estimate import derive
from ptrain.derivation.paper import MODEL_STATES
from ptrain.facts.model import ModelFacts
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.spec.precision import FP32, ZERO16
from tests.pure.build import (
    BY_HAND,
    GATHERED,
    WHOLE,
    ZERO_1,
    ZERO_2,
    make_facts,
    make_spec,
    tuple_of,
)

GB = 10**9
approx = partial(pytest.approx, rel=1e-5)  # P = 70e9 up to rounding
STAGES = {"whole": WHOLE, "Ω": ZERO_1, "Ω, G": ZERO_2, "Θ, Ω, G": GATHERED}


def model_of(numel: int, layers: int = 70) -> ModelFacts:
    """`numel` parameters in equal layers and an empty root."""
    row = 10**6
    return make_facts(*[((numel // layers // row, row),)] * layers, ())


SEVENTY = model_of(70 * GB)


def derive_paper(placement, ranks=8, facts=SEVENTY, layout=ZERO16):
    spec = make_spec({Axis.DP_SHARD: (ranks, placement)}, layout=layout, clip=None, model=BY_HAND)
    return derive(spec, facts)


def states(estimate) -> int:
    return sum(estimate.bytes_of(state) for state in PLACED)


@pytest.mark.parametrize(
    ("placement", "memory", "traffic"),
    [
        (WHOLE, 1120 * GB, 245 * GB),
        (ZERO_1, 385 * GB, 245 * GB),
        (ZERO_2, 262.5 * GB, 122.5 * GB),
        (GATHERED, 140 * GB, 367.5 * GB),
    ],
    ids=list(STAGES),
)
def test_70b_on_8_devices_as_printed(placement, memory, traffic):
    paper = derive_paper(placement).paper
    assert states(paper) == memory
    assert paper.sent_bytes() == traffic


@pytest.mark.parametrize(
    ("name", "memory", "printed", "sent"),
    [
        ("70b-dp", 1120, 245, 245),
        ("70b-zero1", 385, 245, 245),
        ("70b-zero2", 262.5, 122.5, 245),
        ("70b-zero3", 140, 367.5, 367.5),
    ],
)
def test_the_committed_70b_specs_give_these_figures(name, memory, printed, sent):
    both = derive(require_runnable(load(name)))
    assert sum(both.paper.bytes_of(state) for state in MODEL_STATES) / GB == approx(memory)
    assert sum(both.exact.bytes_of(state) for state in MODEL_STATES) / GB == approx(memory)
    assert both.paper.sent_bytes() / GB == approx(printed)
    assert both.exact.sent_bytes() / GB == approx(sent)


@pytest.mark.parametrize(
    ("name", "limit"), [("7b5-dp", 16), ("7b5-zero1", 4), ("7b5-zero2", 2), ("7b5-zero3", 0)]
)
def test_a_sweep_of_the_committed_7_5b_specs_tends_to_its_limit(name, limit):
    axis = "dp_replicate" if limit == 16 else "dp_shard"
    for ranks in (2, 16, 64):  # the cluster has 64
        spec = require_runnable(load(name, [f"mesh.{axis}={ranks}", f"batch.global={ranks}"]))
        exact = derive(spec).exact
        held = sum(exact.bytes_of(state) for state in MODEL_STATES)
        assert held / 7.5e9 == pytest.approx(
            limit + (16 - limit) / ranks,
            rel=1e-5,
        )


@pytest.mark.parametrize("placement", [ZERO_1, ZERO_2], ids=["Ω", "Ω, G"])
def test_70b_with_a_sharded_optimizer_sends_245_gb_with_a_reason(placement):
    exact = derive_paper(placement).exact
    assert exact.sent_bytes() == 245 * GB
    assert any("updated parameters are all-gathered" in note for note in exact.notes)


@pytest.mark.parametrize("placement", list(STAGES.values()), ids=list(STAGES))
def test_exact_and_printed_memory_agree_up_to_step_counters(placement):
    both = derive_paper(placement)
    assert 0 <= states(both.exact) - states(both.paper) <= 4 * 70


def test_sharding_everything_takes_an_eighth_and_sends_half_more():
    whole, sharded = derive_paper(WHOLE), derive_paper(GATHERED)
    for column in ("paper", "exact"):
        before, after = getattr(whole, column), getattr(sharded, column)
        assert states(before) / states(after) == pytest.approx(8, rel=1e-6)
        assert after.sent_bytes() / before.sent_bytes() == pytest.approx(1.5)


def test_s_unit_is_one_layer_and_a_separate_row():
    paper = derive_paper(GATHERED).paper
    assert paper.bytes_of(State.TRANSIENT) == 2 * GB  # 1e9 parameters of 2 bytes
    assert derive_paper(ZERO_2).paper.bytes_of(State.TRANSIENT) == 0


def test_7_5b_takes_120_gb():
    facts = model_of(7_500 * 10**6, layers=30)
    assert states(derive_paper(WHOLE, ranks=64, facts=facts).paper) == 120 * GB


@pytest.mark.parametrize(
    ("placement", "limit"), list(zip(STAGES.values(), (16, 4, 2, 0), strict=True)), ids=list(STAGES)
)
def test_memory_per_parameter_tends_to_16_4_2_and_0(placement, limit):
    facts = model_of(2**16 * 10**6, layers=1)
    psi = facts.numel
    for ranks in (2, 16, 256, 4096):
        for column in ("paper", "exact"):
            per_parameter = states(getattr(derive_paper(placement, ranks, facts), column)) / psi
            assert per_parameter == pytest.approx(limit + (16 - limit) / ranks, rel=1e-4)


def test_fp32_counts_4_4_and_8_bytes():
    paper = derive_paper(WHOLE, layout=FP32).paper
    assert [paper.bytes_of(state) // (70 * GB) for state in PLACED[:3]] == [4, 8, 4]


def test_an_outer_axis_divides_the_result_of_the_inner_one():
    mesh = {Axis.DP_REPLICATE: (2, WHOLE), Axis.DP_SHARD: (4, GATHERED)}
    paper = derive(make_spec(mesh, layout=ZERO16, model=BY_HAND), SEVENTY).paper
    (reduced,) = [row for row in paper.traffic if row.key.collective is Collective.ALL_REDUCE]
    assert reduced.key.axes == ("dp_replicate",) and reduced.key.phase is Phase.BACKWARD
    assert reduced.payload_bytes == 140 * GB // 4
    assert states(paper) == 1120 * GB // 4


def test_offloaded_states_count_on_the_host():
    paper = derive_paper(tuple_of("O,O,S")).paper
    host = {row.state: row.host_bytes for row in paper.memory if row.rank == 0}
    assert host[State.OPTIMIZER] == 105 * GB and states(paper) == 17.5 * GB


def test_a_slice_in_a_file_is_offloaded_too():
    paper = derive_paper(tuple_of("S@file,S@file,S")).paper
    files = {row.state: row.file_bytes for row in paper.memory if row.rank == 0}
    assert files[State.OPTIMIZER] == 105 * GB and states(paper) == 17.5 * GB


@pytest.mark.parametrize("text", ["S*@host,O,O", "R@host,R,R", "R,S*@file,S"])
def test_where_definition_2_has_no_mode_theorem_1_gives_nothing(text):
    paper = derive_paper(tuple_of(text)).paper
    assert paper.memory == () and "Definition 2 has no mode" in paper.undefined["memory"]


@pytest.mark.parametrize(
    "placement",
    [tuple_of(text) for text in ("R,R,M", "M,S,S", "O,O,S", "S*,S*,S", "S*,S,S*", "R,O,O")],
)
def test_where_theorem_2_has_no_case_the_column_gives_a_reason(placement):
    paper = derive_paper(placement).paper
    assert paper.traffic == () and "Theorem 2" in paper.undefined["traffic"]


def test_another_axis_has_no_printed_volume():
    for name, axes in (
        ("tp", set()),
        ("tp-dp", {("dp_replicate",)}),
        ("tp-zero3", {("dp_shard",)}),
    ):
        paper = derive(load(name).spec).paper
        assert {row.key.axes for row in paper.traffic} == axes
        assert paper.undefined["traffic"] == "the paper gives no volume for the axis tp"


def test_a_group_of_4_that_shares_operators_takes_a_quarter_of_everything():
    """70b-zero3-tp4 on 32 ranks, beside data parallelism on 8."""
    whole, cut = derive(load("70b-dp").spec), derive(load("70b-zero3-tp4").spec)
    assert cut.paper.world_size == 32
    for state in MODEL_STATES:
        assert whole.paper.bytes_of(state) == 32 * cut.paper.bytes_of(state)
    assert sum(map(cut.paper.bytes_of, MODEL_STATES)) == approx(35 * GB)
    shares = {State.PARAMETERS: 2, State.OPTIMIZER: 12, State.GRADIENTS: 2}
    assert {s: cut.paper.bytes_of(s) * 32 // 70_000_058_368 for s in MODEL_STATES} == shares
    sent = {(row.key.collective, row.key.phase): row.sent_bytes for row in cut.paper.traffic}
    assert sent == {  # 7/8 of the quarter of 140 GB that tp leaves
        (Collective.ALL_GATHER, Phase.FORWARD): approx(30.625 * GB),
        (Collective.ALL_GATHER, Phase.BACKWARD): approx(30.625 * GB),
        (Collective.REDUCE_SCATTER, Phase.BACKWARD): approx(30.625 * GB),
    }


def test_tensors_replicated_over_tp_are_not_divided_by_4():
    """The norms: 2 per block and the last one, of 70b-zero3-tp4 on 32 ranks; and the sums of tp."""
    spec = load("70b-zero3-tp4").spec
    exact, shape = derive(spec).exact, spec.model
    norms = (2 * shape.layers + 1) * shape.hidden
    cut = (70_000_058_368 - norms) // 4
    assert exact.bytes_of(State.PARAMETERS) == 2 * (cut + norms) // 8
    rows = {
        (row.key.collective, row.key.phase): row for row in exact.traffic if row.key.axes == ("tp",)
    }
    forward = rows[Collective.ALL_REDUCE, Phase.FORWARD]
    backward = rows[Collective.ALL_REDUCE, Phase.BACKWARD]
    assert forward.calls == 2 * shape.layers + 1 + 3  # row operators, the embedding, the loss
    assert backward.calls == 2 * shape.layers + 1  # sub-blocks, the head
    stream = 4096 * shape.hidden * 2  # tokens x hidden in bf16
    assert backward.payload_bytes == backward.calls * stream
    assert forward.payload_bytes == (2 * shape.layers + 1) * stream + 3 * 4096 * 4


def test_the_paper_gives_no_peak_and_no_activations():
    assert set(derive_paper(WHOLE).paper.undefined) == {"activations", "peak"}
