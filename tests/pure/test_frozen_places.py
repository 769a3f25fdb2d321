"""A separate placement for frozen parameters: values of `frozen`, the wrappers that execute it, and
the paper's theorems."""

from __future__ import annotations

import re

import pytest

from ptrain.algebra.legality import check
from ptrain.axes.data.form import form_of, frozen_factors
from ptrain.cost import State
from ptrain.derivation.estimate import derive
from ptrain.derivation.paper import paper
from ptrain.errors import SpecError
from ptrain.facts.model import ModelFacts, TensorFacts, UnitFacts
from ptrain.plan.lower import lower
from ptrain.plan.show import format_plan
from ptrain.report.table import axes_text
from ptrain.spec.load import load
from ptrain.spec.placement import OFFLOADED, S_STAR, Axis, Mode, R, Tier
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import FlatUnits, Form, FrozenPlace, FullyShard

FACTS = ModelFacts.of_units((("layer",), ("",)))


def spec_of(strategy: str, *words: str) -> Spec:
    return load(strategy, ["model={target: package.module:build}", *words]).spec


def faults_of(*words: str) -> list[str]:
    with pytest.raises(SpecError) as error:
        spec_of("zero3", *words)
    return [f"{fault.place}: {fault.finding}; {fault.remedy}" for fault in error.value.faults]


def facts(frozen: int = 96, trained: int = 8) -> ModelFacts:
    """A layer of which some elements are frozen and some trained, within a frozen root."""
    layer = (
        TensorFacts(name="layer.base", shape=(frozen,), is_frozen=True),
        TensorFacts(name="layer.adapter", shape=(trained,)),
    )
    root = (TensorFacts(name="head", shape=(frozen,), is_frozen=True),)
    return ModelFacts(
        units=(UnitFacts(modules=("layer",), tensors=layer), UnitFacts(modules=("",), tensors=root))
    )


def test_one_mode_applies_to_all_data_axes_and_survives_resolution() -> None:
    spec = spec_of("hsdp", "frozen=R")
    assert spec.frozen.modes_by_axis() == {Axis.DP_REPLICATE: R, Axis.DP_SHARD: R}
    assert spec.resolved["frozen"] == {"dp_replicate": "R", "dp_shard": "R"}
    assert load(spec.resolved).spec.frozen == spec.frozen
    assert "frozen" not in spec_of("hsdp").resolved


def test_o_is_on_the_tier_of_the_offload() -> None:
    assert spec_of("ddp", "frozen=O").frozen.dp_replicate == OFFLOADED
    in_files = spec_of("ddp", "frozen=O", "offload={tier: file, path: /x}").frozen.dp_replicate
    assert in_files == Mode(OFFLOADED.distribution, Tier.FILE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frozen=S"], "frozen.dp_shard: must be a mode of Θ.*Did you mean `S\\*`"),
        (
            ["frozen=M"],
            "frozen.dp_shard: M is cast from the master copy.*Use `S\\*`, `R` or `O`\\.",
        ),
        (
            ["frozen=S*,S,S,R"],
            "frozen.dp_shard: .* has several modes; .* no optimizer state.*Use `S\\*`\\.",
        ),
        (["frozen.dp=R"], "frozen.dp: unknown key"),
    ],
)
def test_a_mode_that_is_none_of_theta_is_rejected_in_one_message(words, said) -> None:
    (fault,) = faults_of(*words)
    assert re.match(said, fault), fault


def test_a_place_on_an_axis_that_the_mesh_has_not_is_rejected() -> None:
    (fault,) = check(spec_of("zero3", "frozen.dp_replicate=R"))
    assert (
        fault.place == "frozen.dp_replicate"
        and "no dp_replicate axis with two or more ranks" in fault.finding
    )


def test_a_model_of_which_nothing_is_frozen_has_no_place_for_it() -> None:
    with pytest.raises(SpecError, match="frozen: the model has no frozen parameter"):
        derive(load("zero3", ["frozen=R"]).spec)


def test_the_place_of_all_others_changes_nothing() -> None:
    spec = spec_of("zero3", "frozen=S*")
    assert isinstance(lower(spec, FACTS).wrap, FullyShard)
    assert frozen_factors(spec) == spec.factors


def test_another_place_is_that_of_a_second_buffer_of_flat_units() -> None:
    spec = spec_of("ddp", "frozen=S*@host")
    plan = lower(spec, FACTS)
    assert form_of(spec) is Form.FLAT and isinstance(plan.wrap, FlatUnits)
    assert plan.wrap.frozen == FrozenPlace(axes=(Axis.DP_REPLICATE,), tier=Tier.HOST)
    own = plan.wrap.of_frozen
    assert (own.parameters, own.parameters_tier) == ((Axis.DP_REPLICATE,), Tier.HOST)
    assert not (own.optimizer or own.gradients or own.updated or own.materialized)
    assert "frozen parameters: Θ sharded over dp_replicate on the host" in format_plan(spec, plan)
    assert "frozen S*@host on dp_replicate" in axes_text(spec)


def test_without_frozen_the_frozen_parameters_follow_the_master_copies() -> None:
    (factor,) = frozen_factors(spec_of("fsdp-mixed"))
    assert factor.placement.parameters == S_STAR
    wrap = lower(
        spec_of("zero3", "placement.dp_shard=M,O,S,R", "precision.layout=zero16"),
        FACTS,
    )
    assert isinstance(wrap.wrap, FlatUnits)
    own = wrap.wrap.of_frozen
    assert (own.parameters, own.parameters_tier) == ((Axis.DP_SHARD,), Tier.HOST)
    assert not own.materialized


def bytes_of(spec: Spec) -> dict[State, tuple[int, int]]:
    rows = paper(spec, facts()).of_rank(0).memory
    return {row.state: (row.device_bytes, row.host_bytes) for row in rows}


def test_theorem_1_counts_frozen_parameters_by_their_placement() -> None:
    sharded, whole, on_host = (
        bytes_of(spec_of("zero3", *w)) for w in ([], ["frozen=R"], ["frozen=O"])
    )
    numel, trained = 2 * 96 + 8, 8  # of which two ranks have slices; fp32
    assert sharded[State.PARAMETERS] == (numel // 2 * 4, 0)
    assert whole[State.PARAMETERS] == (trained // 2 * 4 + 2 * 96 * 4, 0)
    assert on_host[State.PARAMETERS] == (trained // 2 * 4, 96 * 4)
    states = sharded[State.OPTIMIZER], sharded[State.GRADIENTS]
    assert states == ((trained // 2 * 8, 0), (trained // 2 * 4, 0))
    assert all((b[State.OPTIMIZER], b[State.GRADIENTS]) == states for b in (whole, on_host))
    assert sharded[State.TRANSIENT] == ((96 + 8) * 4, 0)  # s_unit: a layer
    assert whole[State.TRANSIENT] == (8 * 4, 0)


def test_theorem_2_gathers_sharded_frozen_parameters() -> None:
    spec = spec_of("ddp", "frozen=S*")
    rows = {
        (row.key.collective.value, row.key.phase.value): row.payload_bytes
        for row in paper(spec, facts()).traffic
    }
    assert rows == {
        ("all_reduce", "backward"): 8 * 4,
        ("all_gather", "forward"): 2 * 96 * 4,
        ("all_gather", "backward"): 2 * 96 * 4,
    }
