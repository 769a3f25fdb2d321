"""Theorem 6: three conditions of tp with data axes, which a spec can break. Proposition 1: the cost
of tp across nodes, and of the order of pp and a data axis."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ptrain.algebra.legality import check, require_runnable
from ptrain.cli.main import main
from ptrain.cost import Collective
from ptrain.derivation.estimate import derive
from ptrain.derivation.interconnect import axis_link, tp_link_across_nodes
from ptrain.errors import SpecError
from ptrain.plan.composition import (
    are_consecutive,
    cuts_before_wraps,
    have_one_of_each,
    theorem_6,
)
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import ExecutedStep

LAYERS, HIDDEN, VOCAB, SEQUENCE, MICRO, K = 3, 64, 260, 32, 2, 4
SHAPE = {"layers": LAYERS, "hidden": HIDDEN, "heads": 8, "kv_heads": 8, "ffn": 128, "vocab": VOCAB}
TWO_NODES = {
    "devices": 8,
    "devices_per_node": 4,
    "device_memory": "80 GiB",
    "intra_node_bandwidth": "400 GB/s",
    "inter_node_bandwidth": "20 GB/s",
    "intra_node_latency": 2e-6,
    "inter_node_latency": 3e-5,
}


def tensor_spec(degree: int, activations: str = "R", **sections: object) -> Spec:
    """Return a spec with tp of `degree` ranks on two nodes of four."""
    mapping = {
        "model": SHAPE,
        "mesh": {"tp": degree},
        "placement": {"tp": f"S,S,S,{activations}"},
        "batch": {"global": K * MICRO, "micro": MICRO, "sequence": SEQUENCE},
        "optimizer": {"clip": 1.0},
        "cluster": TWO_NODES,
    }
    return require_runnable(load(mapping | sections))


def conditions_of(spec: Spec) -> dict[str, bool]:
    return {each.name: each.holds for each in theorem_6(spec, derive(spec).plan)}


@pytest.mark.parametrize("name", ["tp-dp", "tp-zero3", "70b-zero3-tp4", "8b-tp-dp"])
def test_a_product_of_tp_and_data_obeys_theorem_6(name):
    assert conditions_of(load(name).spec) == {f"Theorem 6.{i}": True for i in (1, 2, 3)}


def test_three_axes_do_too():
    changes = [
        "mesh={dp_replicate: 2, dp_shard: 2, tp: 2}",
        "placement={dp_replicate: ddp, dp_shard: zero3, tp: tp}",
    ]
    assert all(conditions_of(require_runnable(load("tp-zero3", changes))).values())


@pytest.mark.parametrize("name", ["tp", "zero3", "hsdp"])
def test_specs_without_the_product_have_no_conditions(name):
    assert conditions_of(load(name).spec) == {}


@pytest.mark.parametrize(
    ("mesh", "ranks", "last"),
    [
        ({"tp": 2, "dp_shard": 2}, "0 2", "mesh: {dp_shard: 2, tp: 2}"),
        ({"tp": 4, "dp_shard": 3}, "0 3 6 9", "mesh: {dp_shard: 3, tp: 4}"),
    ],
)
def test_tp_that_is_not_innermost_is_warned_of_with_theorem_and_price(mesh, ranks, last):
    placement = {"tp": "S,S,S,R", "dp_shard": "S*,S,S,R"}
    base = {"model": SHAPE, "placement": placement, "batch": {"sequence": SEQUENCE}}
    outer = load(base | {"mesh": mesh}).spec
    assert not check(outer)
    derived = derive(outer)
    (warning,) = derived.exact.warnings
    assert f"ranks {ranks} share operators, but Theorem 6.1 needs" in warning and last in warning
    calls = sum(row.calls for row in derived.exact.traffic if row.key.axes == ("tp",))
    assert f"{calls} tp collectives send" in warning
    assert not theorem_6(outer, derived.plan)[0].holds
    inner = load(base | {"mesh": {axis: mesh[axis] for axis in ("dp_shard", "tp")}}).spec
    assert derive(inner).exact.warnings == ()


def test_the_cost_of_tp_across_nodes_names_the_link_time():
    placement = {"tp": "S,S,S,R", "dp_shard": "S*,S,S,R"}
    base = {"model": SHAPE, "placement": placement, "batch": {"sequence": SEQUENCE}}
    cluster = {"preset": "h100-8", "devices": 4, "devices_per_node": 2}
    mesh = {"tp": 2, "dp_shard": 2}
    warnings = derive(load(base | {"mesh": mesh, "cluster": cluster}).spec).exact.warnings
    assert "a group then spans 1 node instead of 2 and waits" in warnings[0]


def test_an_axis_of_degree_one_within_tp_changes_nothing():
    mesh = {"tp": 2, "dp_shard": 1}
    placement = {"tp": "S,S,S,R"}
    base = {"model": SHAPE, "placement": placement, "batch": {"sequence": SEQUENCE}}
    assert not check(load(base | {"mesh": mesh}).spec)


def test_gradients_that_would_be_summed_within_a_tp_group_are_rejected():
    with pytest.raises(SpecError, match=r"\[Theorem 6\.3"):
        require_runnable(load("tp-zero3", ["placement.tp=S,S,R,R"]))
    with pytest.raises(SpecError, match=r"\[Theorem 4"):
        require_runnable(load("tp-zero3", ["placement.tp=S,R,S,R"]))


def test_a_product_in_the_wrong_order_breaks_the_first_condition_and_no_other():
    spec = load("tp-zero3").spec
    wrong = replace(spec, factors=tuple(reversed(spec.factors)))
    plan = derive(spec).plan
    assert theorem_6(wrong, plan)[0].why.endswith("[0 2] [1 3]")
    held = {each.name: each.holds for each in theorem_6(wrong, plan)}
    assert held == {"Theorem 6.1": False, "Theorem 6.2": True, "Theorem 6.3": True}


def wrap_before_sharding(plan: Plan) -> Plan:
    """Return the plan with units wrapped before their operators are sharded."""
    others = [step for step in plan.steps if step not in (plan.tensor, plan.wrap)]
    return replace(plan, steps=(others[0], plan.wrap, plan.tensor, *others[1:]))


def test_units_that_are_wrapped_before_their_operators_are_cut_break_the_second():
    spec = load("tp-zero3").spec
    plan = derive(spec).plan
    conditions = theorem_6(spec, wrap_before_sharding(plan))
    assert [each.holds for each in conditions] == [True, False, True]
    assert conditions[1].why.startswith("units are wrapped before operators are sharded")


def test_the_second_condition_is_that_of_every_stage_that_ran():
    plan = derive(load("tp-zero3").spec).plan
    cut, wrap = plan.tensor, plan.wrap
    assert cuts_before_wraps(
        [ExecutedStep(cut, 0), ExecutedStep(wrap, 0), ExecutedStep(cut, 2), ExecutedStep(wrap, 2)]
    )
    assert cuts_before_wraps(
        [ExecutedStep(cut, 0), ExecutedStep(cut, 2), ExecutedStep(wrap, 2), ExecutedStep(wrap, 0)]
    )
    assert not cuts_before_wraps(
        [ExecutedStep(cut, 0), ExecutedStep(wrap, 0), ExecutedStep(wrap, 2), ExecutedStep(cut, 2)]
    )
    assert not cuts_before_wraps(
        [ExecutedStep(cut, 0), ExecutedStep(wrap, 0), ExecutedStep(wrap, 2)]
    ), "one is not cut"
    assert not cuts_before_wraps([ExecutedStep(cut, 0)]), "nothing is wrapped"


def test_groups_are_judged_by_their_ranks_alone():
    assert are_consecutive([(2, 3), (0, 1)])
    assert not are_consecutive([(0, 2), (1, 3)])
    assert not are_consecutive([(1, 2), (3, 0)])
    assert have_one_of_each([(0, 2), (1, 3)], [(0, 1), (2, 3)])
    assert not have_one_of_each([(0, 1), (2, 3)], [(0, 1), (2, 3)])
    assert not have_one_of_each([(0,)], [(0, 1)])


@pytest.mark.parametrize("activations", ["R", "S"])
def test_tp_over_two_nodes_waits_for_each_of_its_collectives(activations):
    """2 row operators and 2 sub-blocks in a layer, the embedding and the head, the loss's three
    small sums, and one of the gradients' norm; of slices also the gradients of the norms."""
    spec = tensor_spec(8, activations)
    streams, small = 2 * LAYERS + 1, 3
    stream, loss, norm = MICRO * SEQUENCE * HIDDEN * 4, MICRO * SEQUENCE * 4, HIDDEN * 4
    if activations == "R":
        sums = [(stream, 2 * streams * K), (loss, small * K), (4, 1)]
        halves = 0
    else:
        sums = [(loss, small * K), (norm, (2 * LAYERS + 1) * K), (4, 1)]
        halves = 4 * streams * K  # an all-gather and a reduce-scatter, forward and backward
    num_sums = sum(times for _, times in sums)
    calls, hops = halves + num_sums, 7 * halves + 14 * num_sums
    sent = halves * -(-7 * stream // 8)
    sent += sum(times * -(-2 * 7 * size // 8) for size, times in sums)
    derivation = derive(spec)
    found = tp_link_across_nodes(spec, derivation.exact.traffic)
    assert found is not None
    assert (found.nodes, found.calls, found.hops, found.sent_bytes) == (2, calls, hops, sent)
    assert found.latency_seconds == pytest.approx(hops * 3e-5, rel=1e-12)
    assert found.transfer_seconds == pytest.approx(sent / 20e9, rel=1e-12)
    (warning,) = derivation.exact.warnings
    assert "tp spans 2 nodes" in warning
    assert f"its {calls} collectives wait {hops * 3e-5:.4g} s" in warning
    assert f"between nodes, {sent / 20e9:.4g} s at 20 GB/s" in warning


def test_tp_within_a_node_is_not_warned_of():
    for spec in (
        tensor_spec(4),
        tensor_spec(8, cluster={**TWO_NODES, "devices_per_node": 8}),
        tensor_spec(8, cluster=None),
        tensor_spec(
            4,
            mesh={"dp_replicate": 2, "tp": 4},
            placement={"dp_replicate": "ddp", "tp": "tp"},
            batch={"micro": 1, "sequence": SEQUENCE},
        ),
    ):
        derivation = derive(spec)
        assert not derivation.exact.warnings
        assert tp_link_across_nodes(spec, derivation.exact.traffic) is None


def test_a_group_that_begins_in_one_node_and_ends_in_the_next_is_warned_of():
    spec = tensor_spec(
        2,
        mesh={"dp_replicate": 3, "tp": 2},
        placement={"dp_replicate": "ddp", "tp": "tp"},
        batch={"micro": 1, "sequence": SEQUENCE},
        cluster={**TWO_NODES, "devices_per_node": 3},
    )
    assert derive(spec).exact.warnings


def test_only_the_traffic_of_tp_counts_in_a_product():
    spec = tensor_spec(
        4,
        mesh={"dp_replicate": 2, "tp": 4},
        placement={"dp_replicate": "ddp", "tp": "tp"},
        batch={"micro": 1, "sequence": SEQUENCE},
        cluster={**TWO_NODES, "devices_per_node": 2},
    )
    exact = derive(spec).exact
    found = tp_link_across_nodes(spec, exact.traffic)
    rows = [row for row in exact.traffic if row.key.axes == ("tp",)]
    assert found is not None and found.sent_bytes == sum(row.sent_bytes for row in rows)
    assert {row.key.collective for row in rows} == {Collective.ALL_REDUCE}


@pytest.mark.parametrize(
    ("mesh", "nodes"),
    [
        ({"pp": 2, "dp_shard": 4}, {Axis.PP: 2, Axis.DP_SHARD: 1}),  # Theorem 7
        ({"dp_shard": 4, "pp": 2}, {Axis.PP: 1, Axis.DP_SHARD: 2}),  # Remark 4
    ],
    ids=["pp outermost", "dp outermost"],
)
def test_the_order_of_pp_and_a_data_axis_decides_which_crosses_nodes(mesh, nodes):
    """Both orders have equal traffic: K activations per boundary and direction; gathers and
    reductions."""
    spec = tensor_spec(
        2,
        mesh=mesh,
        placement={"pp": "S,S,S,R", "dp_shard": "zero3"},
        batch={"micro": MICRO, "sequence": SEQUENCE, "accumulate": K},
        cluster={**TWO_NODES, "devices_per_node": 4},
    )
    cluster, traffic = spec.cluster, derive(spec).exact.traffic
    found = {axis: axis_link(spec, traffic, axis) for axis in nodes}
    assert {axis: each.nodes for axis, each in found.items()} == nodes
    boundary = found[Axis.PP]
    assert boundary.sent_bytes == 2 * K * MICRO * SEQUENCE * HIDDEN * 4 + 4  # and of the norm
    assert boundary.hops == 2 * K + 2
    for axis, each in found.items():
        is_apart = nodes[axis] > 1
        speed = cluster.inter_node_bandwidth if is_apart else cluster.intra_node_bandwidth
        wait = cluster.inter_node_latency if is_apart else cluster.intra_node_latency
        assert each.transfer_seconds == pytest.approx(each.sent_bytes / speed, rel=1e-12)
        assert each.latency_seconds == pytest.approx(each.hops * wait, rel=1e-12)


def test_of_several_specs_each_is_warned_of_by_its_name(capsys):
    assert main(["predict", "8b-tp", "cluster.devices_per_node=4", "mesh.tp=4,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (warning,) = (line for line in lines if "warning" in line)
    assert warning.startswith("warning: mesh.tp=8: tp spans 2 nodes")


@pytest.mark.parametrize("verb", ["predict", "plan"])
def test_predict_and_plan_name_the_conditions_and_warn(verb, capsys):
    apart = ["cluster.devices_per_node=1"]
    explained = ["--explain"] if verb == "predict" else []
    assert main([verb, "tp-zero3", *apart, *explained]) == 0
    text = capsys.readouterr().out
    assert [f"Theorem 6.{i} holds: " in text for i in (1, 2, 3)] == [True] * 3
    assert text.count("warning: tp spans 2 nodes") == 1
    assert main([verb, "tp-zero3", *apart, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["conditions"]] == [f"Theorem 6.{i}" for i in (1, 2, 3)]
    assert all(row["holds"] and row["why"] for row in told["conditions"])
    assert len(told["warnings"]) == 1
    assert main([verb, "tp-zero3"]) == 0
    assert "warning" not in capsys.readouterr().out
