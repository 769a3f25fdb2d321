"""The modes of the states determine the wrapper, independent of the strategy's name."""

from __future__ import annotations

import pytest

from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import lower
from ptrain.spec.placement import Axis
from ptrain.steps.wraps import FlatUnits, FullyShard, LocalGradients, Replicate
from tests.pure.build import GATHERED, WHOLE, ZERO_1, ZERO_2, make_spec, tuple_of

FACTS = ModelFacts.of_units((("blocks.0",), ("blocks.1",), ("",)))


def test_one_device_wraps_nothing():
    plan = lower(make_spec({}), FACTS)
    assert plan.wrap == LocalGradients()
    assert plan.mesh.axes == () and plan.clip is not None and plan.clip.axes == ()


def test_everything_replicated_is_replicate_over_all_data_axes():
    spec = make_spec({Axis.DP_REPLICATE: (2, WHOLE), Axis.DP_SHARD: (2, WHOLE)})
    wrap = lower(spec, FACTS).wrap
    assert isinstance(wrap, Replicate)
    assert wrap.axes == (Axis.DP_REPLICATE, Axis.DP_SHARD)


@pytest.mark.parametrize(
    ("mesh", "shard", "replicate"),
    [
        ({Axis.DP_SHARD: (4, GATHERED)}, (Axis.DP_SHARD,), ()),
        (
            {Axis.DP_REPLICATE: (2, WHOLE), Axis.DP_SHARD: (2, GATHERED)},
            (Axis.DP_SHARD,),
            (Axis.DP_REPLICATE,),
        ),
        (
            {Axis.DP_REPLICATE: (2, GATHERED), Axis.DP_SHARD: (2, GATHERED)},
            (Axis.DP_REPLICATE, Axis.DP_SHARD),
            (),
        ),
    ],
)
def test_gathered_parameters_with_other_states_on_the_same_shards_are_fully_sharded(
    mesh, shard, replicate
):
    wrap = lower(make_spec(mesh), FACTS).wrap
    assert isinstance(wrap, FullyShard)
    assert (wrap.shard_axes, wrap.replicate_axes) == (shard, replicate)


@pytest.mark.parametrize("placement", [ZERO_1, ZERO_2, tuple_of("S*,R,S"), tuple_of("R,R,S")])
def test_any_other_tuple_becomes_flat_units(placement):
    assert isinstance(
        lower(make_spec({Axis.DP_SHARD: (2, placement)}), FACTS).wrap,
        FlatUnits,
    )


def test_replicas_inside_shards_are_flat_units_for_fully_shard_wants_them_outside():
    mesh = {Axis.DP_REPLICATE: (2, GATHERED), Axis.DP_SHARD: (2, WHOLE)}
    assert isinstance(lower(make_spec(mesh), FACTS).wrap, FlatUnits)


def test_an_optimizer_sharded_over_both_axes_is_flat_units():
    mesh = {Axis.DP_REPLICATE: (2, ZERO_1), Axis.DP_SHARD: (2, GATHERED)}
    plan = lower(make_spec(mesh), FACTS)
    assert isinstance(plan.wrap, FlatUnits)
    assert plan.wrap.parameters == (Axis.DP_SHARD,)
    assert plan.wrap.optimizer == (Axis.DP_REPLICATE, Axis.DP_SHARD)
    assert plan.wrap.gradients == (Axis.DP_SHARD,)
    assert plan.clip is not None and plan.clip.axes == (Axis.DP_REPLICATE, Axis.DP_SHARD)


def test_an_axis_of_degree_1_changes_nothing():
    alone = lower(make_spec({Axis.DP_SHARD: (2, ZERO_2)}), FACTS)
    spec = make_spec({Axis.DP_REPLICATE: (1, ZERO_1), Axis.DP_SHARD: (2, ZERO_2)})
    assert lower(spec, FACTS) == alone


def test_without_a_maximum_norm_there_is_no_clip_step():
    plan = lower(make_spec({Axis.DP_SHARD: (2, ZERO_2)}, clip=None), FACTS)
    assert plan.clip is None and len(plan.steps) == 4
