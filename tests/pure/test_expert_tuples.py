"""The forms of tuples on ep in a file: for the experts, and for all other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ptrain.errors import Fault, SpecError
from ptrain.spec.load import Document, expand_sweeps, load
from ptrain.spec.placement import MODES, Axis, Placement, S
from ptrain.spec.shorthand import fault_of_experts
from tests.pure.build import GATHERED, WHOLE, ZERO_1, tuple_of

EXPERTS = {"parameters": "S", "optimizer": "S", "gradients": "S", "activations": "S"}
ZERO3 = {"parameters": "S*", "optimizer": "S", "gradients": "S", "activations": "R"}


def document(placement: object, *overrides: str, mesh: Mapping[str, int] | None = None) -> Document:
    written: dict[str, Any] = {
        "model": {"preset": "moe-tiny"},
        "mesh": dict(mesh or {"ep": 2}),
        "batch": {"global": 16, "micro": 2, "sequence": 32},
    }
    if placement is not None:
        written["placement"] = placement
    return load(written, overrides)


def faults(placement: object, *, mesh: Mapping[str, int] | None = None) -> list[Fault]:
    with pytest.raises(SpecError) as refused:
        document(placement, mesh=mesh)
    return list(refused.value.faults)


@pytest.mark.parametrize(
    ("written", "rest"),
    [
        ("zero3", GATHERED),
        ("ddp", WHOLE),
        ("S*,S,S,R", GATHERED),
        (["R", "S", "R", "R"], ZERO_1),
        (ZERO3, GATHERED),
        ({"rest": "zero1"}, ZERO_1),
        ({"experts": "S,S,S,S", "rest": "zero3"}, GATHERED),
        ({"experts": ["S", "S", "S", "S"], "rest": ZERO3}, GATHERED),
        ({"experts": EXPERTS, **ZERO3}, GATHERED),
    ],
)
def test_each_form_places_all_tensors_and_experts_in_one_way(written, rest):
    spec = document({"ep": written}).spec
    (factor,) = spec.factors
    assert (factor.axis, factor.degree, factor.placement) == (Axis.EP, 2, rest)
    modes = dict(zip(EXPERTS, str(rest).split(","), strict=True))
    assert spec.resolved["placement"] == {"ep": {"experts": EXPERTS, "rest": modes}}
    assert load(spec.resolved).spec == spec


@pytest.mark.parametrize("written", ["zero3", "S*,S,S,R", {"rest": "zero3"}, ZERO3])
def test_one_state_is_set_whatever_form_the_file_has(written):
    for override in ("placement.ep.rest.optimizer=R", "placement={ep: [S*, R, S, R]}"):
        (factor,) = document({"ep": written}, override).spec.factors
        assert factor.placement == tuple_of("S*,R,S,R")


def test_a_tuple_of_all_but_the_experts_is_no_sweep_and_a_mode_of_it_is_one():
    assert len([*expand_sweeps(["placement.ep.rest=S*,S,S,R"])]) == 1
    assert len([*expand_sweeps(["placement.ep=S*,S,S,R"])]) == 1
    assert len([*expand_sweeps(["placement.ep.rest.optimizer=S,R"])]) == 2
    assert len([*expand_sweeps(["placement.ep.rest=zero3,ddp"])]) == 2


@pytest.mark.parametrize(
    ("placement", "place", "finding", "remedy"),
    [
        ({"ep": {"experts": "S,S,S,S"}}, "placement.ep.rest",
         "the placement of all non-expert tensors is missing",
         "Add `rest`: a strategy name or four modes."),
        ({"ep": {"experts": "zero3", "rest": "ddp"}}, "placement.ep.experts",
         "experts need four modes, not a strategy name; got 'zero3'",
         "Use `experts: [S, S, S, S]`, or remove it."),
        ({"ep": {"experts": ["S", "S"], "rest": "ddp"}}, "placement.ep.experts",
         "a placement has 4 modes (parameters, optimizer, gradients, activations); got 2",
         "Use four modes: `experts: [S, S, S, S]`."),
        ({"ep": {"rest": ["S", "S"]}}, "placement.ep.rest",
         "a placement has 4 modes (parameters, optimizer, gradients, activations); got 2",
         "Use four modes: `rest: [R, R, R, R]`."),
        ({"ep": "tp"}, "placement.ep", "tp belongs to tp, not to ep",
         "Use `placement: {tp: tp}` and `mesh: {tp: N}`."),
        ({"ep": "zero3-keep"}, "placement.ep", "zero3-keep sets more than a placement",
         "Use `placement.ep: [S*, S, S, R]` and `sync: {reshard_after_forward: false}`."),
        ({"ep": {"rest": "ddp", "optimizer": "S"}}, "placement.ep.optimizer",
         "contradicts rest, which is the same placement: that of all non-expert tensors",
         "Remove it, or use `placement.ep.rest.optimizer=S`."),
        ({"ep": {"rest": "ddp", "tokens": 3}}, "placement.ep.tokens", "unknown key 'tokens'",
         "Keys here: experts, rest."),
        ({"ep": {"rest": {**ZERO3, "optimizer": "Q"}}}, "placement.ep.rest.optimizer",
         "must be a mode: R, S, S*, M or O, or with a tier (R@host, S@file); got the string 'Q'",
         ""),
        ("zero3", "placement", "zero3 needs the axis dp_shard; the mesh has ep",
         "Use `mesh: {dp_shard: 2}`, or `placement: {ep: zero3}`."),
        (None, "mesh.ep", "the mesh has ep: 2, but the placement has no entry for ep",
         ("Add `placement.ep=R,R,R,R`, four other modes, or a strategy name for all "
         "non-expert tensors.")),
    ],
)  # fmt: skip
def test_an_invalid_tuple_is_rejected_by_one_message(placement, place, finding, remedy):
    (fault,) = faults(placement)
    assert (fault.place, fault.finding, fault.remedy) == (place, finding, remedy)


def test_ep_with_a_strategy_of_another_axis_gives_one_message():
    (fault,) = faults("zero3", mesh={"dp_shard": 2, "ep": 2})
    assert fault.remedy == (
        "Use `mesh: {dp_shard: 2}`, or `placement: {dp_shard: zero3, ep: zero3}`."
    )
    (fault,) = faults("tp", mesh={"ep": 2, "tp": 2})
    assert fault.remedy == "Use `mesh: {tp: 2}`, or one placement per axis."


def test_modes_after_a_comma_within_braces_are_no_keys(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(
        "model: {preset: moe-tiny}\nmesh: {ep: 2}\nbatch: {sequence: 32}\n"
        "placement: {ep: {rest: S*,S,M,R}}\n"
    )
    with pytest.raises(SpecError) as refused:
        load(file)
    (fault,) = refused.value.faults
    assert fault.place == "placement.ep" and fault.text[fault.column - 1 :].startswith("S*,S,M,R")
    assert fault.remedy == "Use a list: `{rest: [S*, S, M, R]}`."


def test_a_wrong_mode_is_located_in_every_form(tmp_path):
    file = tmp_path / "spec.yaml"
    for tuples in ("{rest: %s}", "%s"):
        modes = "{parameters: S*, optimizer: Q, gradients: S, activations: R}"
        file.write_text(
            "model: {preset: moe-tiny}\nmesh: {ep: 2}\nbatch: {sequence: 32}\n"
            f"placement: {{ep: {tuples % modes}}}\n"
        )
        with pytest.raises(SpecError) as refused:
            load(file)
        (fault,) = refused.value.faults
        assert fault.line == 4 and fault.text[fault.column - 1] == "Q"


# ---- the experts' own


def test_of_625_tuples_one_is_that_of_experts():
    tuples = [
        Placement(parameters=theta, optimizer=omega, gradients=gradients, activations=kept)
        for theta in MODES for omega in MODES for gradients in MODES for kept in MODES
    ]  # fmt: skip
    legal = [placement for placement in tuples if fault_of_experts(placement) is None]
    assert len(tuples) == 625 and legal == [tuple_of("S,S,S,S")]


@pytest.mark.parametrize(
    ("written", "theorem", "reason"),
    [
        ("S*,S,S,S", "Definition 2", "each rank holds some experts in full"),
        ("R,R,R,R", "Definition 2", "each rank holds some experts in full"),
        ("S,R,S,S", "Theorem 4, state consistency", "only the rank that holds an expert"),
        ("S,O,S,S", "Theorem 4, state consistency", "only the rank that holds an expert"),
        ("S,S,R,S", "Theorem 3, gradient integrity", "sees all of its tokens"),
        ("S,S,S,R", "Definition 2", "tokens that were sent to the expert"),
    ],
)
def test_another_tuple_of_experts_is_rejected_with_its_theorem_and_the_nearest(
    written, theorem, reason
):
    (fault,) = faults({"ep": {"experts": written, "rest": "ddp"}})
    assert fault.place == "placement.ep.experts"
    assert fault.finding.startswith(f"({written}) for experts: ") and reason in fault.finding
    assert fault.finding.endswith(f"[{theorem}]")
    assert fault.remedy.startswith("Use `placement.ep.experts=S,S,S,S`.")
    is_of_parameters = tuple_of(written).parameters.distribution is not S.distribution
    assert ("dp_shard instead of ep" in fault.remedy) is is_of_parameters
