"""The closed forms of the data axes compared with the replay of the same plan: resident memory,
traffic, gathered units and peaks, for models in which each unit in turn dominates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from ptrain import installed
from ptrain.axes.data.fsdp2 import BEHAVIORS, fsdp2_behavior
from ptrain.cost import Phase, State
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import lower
from ptrain.spec.dials import GradientSync, ReduceScatterVia, SyncPolicy
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis
from ptrain.spec.precision import FP32, LAYOUTS
from ptrain.spec.spec import Spec
from ptrain.steps.step import LONG_NORM, Pipeline
from ptrain.steps.wraps import FlatUnits, FullyShard, LocalGradients, Replicate
from ptrain.version import TESTED_TORCH
from tests.oracles.data.chain import NoClosedForm
from tests.oracles.data.optimizer import orthogonalization
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
from tests.pure.closed_forms import (
    MODELS,
    OVER_EXPERTS,
    OVER_TOKENS,
    SHARD,
    Choice,
    Setting,
    by_life,
    choices,
    differences,
    drawn_fully_sharded,
    drawn_setting,
    in_closed_form,
    plain_setting,
    with_experts,
)

SAMPLE = 60  # of each model's settings
DRAWN, DRAWN_AT_NIGHT = 250, 20_000
STRIDE = 50  # of the drawn settings: a test for so many, so that a difference is found soon


def report(
    name: str, settings: Iterable[Setting], facts: ModelFacts, *, is_fresh: bool
) -> list[str]:
    """One line for each figure on which the two differ."""
    return [
        f"{name}: {spec.name} {plan.wrap} {plan.update.layout.name} "
        f"{plan.accumulate.micro_batches} micro-batches: {line}"
        for spec, plan in settings
        for line in differences(spec, plan, facts, is_fresh=is_fresh)
    ]


def plain_settings(chosen: Iterable[Choice], name: str) -> Iterator[Setting]:
    settings = (plain_setting(choice, MODELS[name]) for choice in chosen)
    return (setting for setting in settings if setting is not None)


@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_sample_of_modes_meshes_layouts_and_overlap_has_its_closed_form(name, is_fresh):
    sample = Random(f"{name} {is_fresh}").sample(choices(), SAMPLE)
    assert not report(name, plain_settings(sample, name), MODELS[name], is_fresh=is_fresh)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
def test_all_modes_meshes_layouts_and_overlap_have_their_closed_form(name):
    assert not report(name, plain_settings(choices(), name), MODELS[name], is_fresh=False)


def random_differences(
    seed: int, settings: Callable[[Random, ModelFacts], Setting | None]
) -> list[str]:
    """Return the differences in the setting of this seed, if it makes a plan."""
    draw = Random(seed)
    name = draw.choice([*MODELS])
    is_fresh = draw.random() < 0.3
    setting = settings(draw, MODELS[name])
    known = [setting] if setting else []
    return report(f"seed {seed}, {name}", known, MODELS[name], is_fresh=is_fresh)


@pytest.mark.parametrize("start", range(0, DRAWN, STRIDE))
@pytest.mark.parametrize("settings", [drawn_setting, drawn_fully_sharded])
def test_drawn_degrees_optimizers_and_dials_have_their_closed_form(settings, start):
    assert not [
        line for seed in range(start, start + STRIDE) for line in random_differences(seed, settings)
    ]


@pytest.mark.parametrize("settings", [drawn_setting, drawn_fully_sharded])
def test_an_axis_over_tokens_is_another_data_axis_to_the_closed_forms(settings):
    settings = partial(settings, meshes=OVER_TOKENS)
    assert not [line for seed in range(2 * STRIDE) for line in random_differences(seed, settings)]


@pytest.mark.parametrize("settings", [drawn_setting, drawn_fully_sharded])
def test_units_of_experts_are_over_fewer_axes(settings):
    differ, compared = [], 0
    for seed in range(2 * STRIDE):
        draw = Random(seed)
        name = draw.choice([*MODELS])
        facts = with_experts(MODELS[name])
        setting = settings(draw, facts, meshes=OVER_EXPERTS)
        if setting is None:
            continue
        try:
            differ += report(f"seed {seed}, {name}", [setting], facts, is_fresh=seed % 3 == 0)
            compared += 1
        except NoClosedForm:  # of norms apart, and of what FSDP2 does not know of
            continue
    assert compared > STRIDE // 2
    assert not differ


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("settings", [drawn_setting, drawn_fully_sharded])
def test_many_drawn_degrees_optimizers_and_dials_have_their_closed_form(settings):
    assert not [
        line for seed in range(DRAWN, DRAWN_AT_NIGHT) for line in random_differences(seed, settings)
    ]


def sharded_spec(placement, degree: int = 2, **options) -> Spec:
    options = {"clip": None, "model": BY_HAND, **options}
    return make_spec({SHARD: (degree, placement)}, **options)


# Worked by hand, so that the two cannot be wrong together: one unit of 60 elements in fp32 on two
# ranks, and a root without parameters.
ALONE = make_facts(((5, 5), (3, 5), (20,)), ())
PART, ALL = 30 * 4, 60 * 4
COPY = 25 * 4  # of the largest tensor's first gradient, which is no tensor of its own


def figures(spec: Spec, wrap=None, facts: ModelFacts = ALONE, **dials):
    plan = lower(spec, facts)
    plan = plan.replace_steps(replace(plan.wrap, **dials))
    assert wrap is None or isinstance(plan.wrap, wrap)
    return in_closed_form(spec, plan, facts, is_fresh=False)


def peaks(*arguments, **options) -> tuple[object, ...]:
    rows = figures(*arguments, **options)
    return tuple(rows[f"peak {phase} 0"] for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE))


def test_zero_2_has_a_whole_gradient_and_its_shard_when_it_is_reduced():
    # update: the kept shard; the updated part is a view of Theta, gathered in place
    assert peaks(sharded_spec(ZERO_2), FlatUnits) == (0, ALL + PART, PART)


def test_an_exchange_for_the_reduce_scatter_has_one_whole_gradient_more():
    spec = sharded_spec(ZERO_2, reduce_scatter=ReduceScatterVia.ALL_TO_ALL)
    assert peaks(spec, FlatUnits) == (0, 2 * ALL + PART, PART)


def test_later_micro_batches_reduce_into_the_stored_shard():
    assert peaks(sharded_spec(ZERO_2, accumulate=3), FlatUnits) == (PART, ALL + 2 * PART, PART)


def test_a_sum_that_is_reduced_last_is_whole_in_every_forward_but_the_first():
    last = SyncPolicy(gradients=GradientSync.LAST)
    spec = sharded_spec(ZERO_2, accumulate=3, sync=last)
    assert peaks(spec, FlatUnits) == (ALL, ALL + PART, PART)


def test_zero_1_reduces_its_whole_gradient_for_the_update():
    assert peaks(sharded_spec(ZERO_1), FlatUnits) == (0, ALL + COPY, ALL + PART)


def test_a_gradient_is_gone_when_the_state_goes_back():
    """61 elements are padded for two ranks before their part is kept: while the first moment goes
    back it is there twice, beside the second and the master copy, but no longer beside the
    gradient in the updated dtype."""
    facts, kept, gradient, state = make_facts(((61,),), ()), 62 * 2, 61 * 4, 62 * 4
    spec = sharded_spec(
        tuple_of("R,S*,R"), layout=LAYOUTS["zero16"], optimizer="muon", momentum=0.9
    )
    update = kept + max(gradient + 3 * state, 4 * state)
    assert peaks(spec, FlatUnits, facts)[-1] == update
    plan = lower(spec, facts)
    assert by_life(spec, plan, facts, is_fresh=False)[f"peak {Phase.UPDATE} 0"] == update


@pytest.mark.parametrize("start", range(0, DRAWN, STRIDE))
def test_other_habits_of_fsdp2_have_their_closed_form(start, monkeypatch):
    """Those of torch 2.15; the tables' torch has the others."""
    monkeypatch.setattr(installed, "torch_minor", lambda: "2.15")
    assert fsdp2_behavior() not in (BEHAVIORS[other] for other in TESTED_TORCH if other != "2.15")
    seeds = range(start, start + STRIDE)
    assert not [line for seed in seeds for line in random_differences(seed, drawn_fully_sharded)]


TWO = make_facts(((4,),), ((4,),), ())


@pytest.mark.parametrize(("torch", "buffers"), [("2.13", 2), ("2.15", 1)])
def test_the_buffer_of_a_gather_stays_until_the_next_parameters_are_there(
    torch, buffers, monkeypatch
):
    # two blocks of 4 elements in fp32; the second is copied out beside one buffer or two, and the
    # gather itself is beside the one before in any case
    monkeypatch.setattr(installed, "torch_minor", lambda: torch)
    forward, *_ = peaks(sharded_spec(GATHERED), FullyShard, facts=TWO)
    assert forward == max(2, 1 + buffers) * 4 * 4


def test_fsdp2_gathers_into_a_buffer_and_copies_it_out():
    # 5 rows on 2 ranks are 3 + 3 of 5, and 3 rows are 2 + 2
    whole, part = (60 + 10) * 4, (30 + 5) * 4
    forward, backward, update = peaks(sharded_spec(GATHERED), FullyShard)
    assert forward == 2 * whole
    # autograd's gradients (60 elements), the input and the output of the reduction
    assert backward == max(2 * whole, whole + ALL, ALL + whole, 20 * 4 + whole + part)
    assert update == part


def test_ddp_holds_its_buckets_and_one_gradient():
    assert peaks(sharded_spec(WHOLE), Replicate) == (ALL, ALL + COPY, ALL)
    assert peaks(sharded_spec(WHOLE, accumulate=3), Replicate) == (ALL, ALL, ALL)


def test_one_device_has_its_gradients_from_its_first_backward_pass_on():
    assert peaks(sharded_spec(WHOLE, degree=1), LocalGradients) == (0, ALL, ALL)
    assert peaks(sharded_spec(WHOLE, degree=1, accumulate=2), LocalGradients) == (ALL, ALL, ALL)


@pytest.mark.parametrize("placement", [WHOLE, ZERO_1, ZERO_2, GATHERED])
@pytest.mark.parametrize("count", [1, 3])
def test_one_device_ddp_and_zero_redundancy_agree_with_their_replay(placement, count):
    for axis, degree in ((Axis.DP_REPLICATE, 3), (SHARD, 1), (SHARD, 3)):
        for name, facts in MODELS.items():
            for layout in LAYOUTS.values():
                spec = make_spec(
                    {axis: (degree, placement)},
                    clip=1.0,
                    model=BY_HAND,
                    layout=layout,
                    accumulate=count,
                    bucket_bytes=100,
                )
                if layout.keeps_both and count > 1:
                    continue
                plan = lower(spec, facts)
                assert not report(name, [(spec, plan)], facts, is_fresh=False)


def test_settings_without_a_closed_form_are_rejected_by_name():
    spec = sharded_spec(ZERO_2, clip=1.0)
    plan = lower(spec, ALONE)
    assert plan.clip is not None
    within_tp = plan.replace_steps(replace(plan.clip, operator_axes=(Axis.TP,)))
    with pytest.raises(NoClosedForm, match="clip within tp"):
        in_closed_form(spec, within_tp, ALONE, is_fresh=False)
    pipeline = Pipeline(axis=Axis.PP, schedule=ScheduleName.GPIPE, rank_of=(0,), layers=((),))
    with pytest.raises(NoClosedForm, match="pipeline"):
        in_closed_form(spec, replace(plan, steps=(*plan.steps, pipeline)), ALONE, is_fresh=False)
    long = make_facts(((LONG_NORM + 1,),), ())
    with pytest.raises(NoClosedForm, match="row by row"):
        in_closed_form(spec, lower(spec, long), long, is_fresh=False)


def test_muon_s_temporaries_are_a_gradient_two_matrices_and_two_grams():
    assert orthogonalization((8, 4), FP32) == 32 * 4 + 2 * 32 * 2 + 2 * 16 * 2
    assert orthogonalization((4, 8), FP32) == orthogonalization((8, 4), FP32)


def test_every_figure_of_a_plan_is_compared():
    """A comparison of nothing would always hold."""
    facts = MODELS["equal"]
    spec, plan = next(plain_settings(choices(), "equal"))
    names = in_closed_form(spec, plan, facts, is_fresh=False)
    assert {f"peak {phase} 0" for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)} <= {
        *names
    }
    assert {f"{state}@device 0" for state in (State.PARAMETERS, State.GRADIENTS)} <= {*names}
