"""Flat units of replicated parameters are merged until they fill a bucket, with predictions equal
to closed forms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from ptrain.algebra.legality import check
from ptrain.axes.data.units import buckets_of
from ptrain.derivation.flat import joined_units
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import lower
from ptrain.spec.dials import GatherAfterUpdate, GradientSync, Overlap, SyncPolicy, UnitSize
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.spec.precision import LAYOUTS
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits
from tests.pure.build import BY_HAND, make_spec, tuple_of
from tests.pure.closed_forms import MODELS, differences

ROOT = ("",)
UNITS = [*((f"blocks.{index}",) for index in range(5)), ROOT]
NUMELS = (3, 8, 2, 2, 4, 9)
FP32 = 4  # bytes
SAMPLE = 40  # of the settings
OF_TUPLES = {
    **dict.fromkeys(("R,S,R", "R,S,S", "R,R,S"), True),
    **dict.fromkeys(("S*,S,R", "M,S,R", "R@host,S,S", "R,S@host,S", "R,S,S@host"), False),
    **dict.fromkeys(("R,S*,S", "R,S,S*", "R,S,M"), False),
}
MESHES = [
    *({Axis.DP_SHARD: (2, tuple_of(f"R,{o},{g}"))} for o in "RS" for g in "RS" if o + g != "RR"),
    {Axis.DP_REPLICATE: (2, tuple_of("R,R,R")), Axis.DP_SHARD: (2, tuple_of("R,S,S"))},
    {Axis.DP_REPLICATE: (2, tuple_of("R,S,R")), Axis.DP_SHARD: (3, tuple_of("R,R,S"))},
]


def plan_of(size: int) -> Plan:
    spec = make_spec({Axis.DP_SHARD: (2, tuple_of("R,S,S"))}, bucket_bytes=size, unit=None)
    return lower(spec, ModelFacts.of_units(tuple(UNITS)))


@pytest.mark.parametrize(
    ("elements", "buckets"),
    [
        (1, [(0,), (1,), (2,), (3,), (4,), (5,)]),
        (6, [(0,), (1,), (2,), (3, 4), (5,)]),  # 2 + 4, then 2, for with 8 it had more
        (8, [(0,), (1,), (2, 3, 4), (5,)]),
        (15, [(0, 1), (2, 3, 4), (5,)]),
        (17, [(1, 2, 3, 4), (0, 5)]),
        (28, [(0, 1, 2, 3, 4, 5)]),
    ],
)
def test_blocks_fill_buckets_from_the_last_one_and_the_root_is_in_the_last(elements, buckets):
    units = [*zip(UNITS, NUMELS, strict=True)]
    assert [*buckets_of(plan_of(FP32 * elements), units)] == buckets


def test_fully_frozen_units_join_no_bucket():
    units = [*zip(UNITS, (3, 0, 2, 2, 4, 9), strict=True)]
    assert [*buckets_of(plan_of(2**40), units)] == [(1,), (0, 2, 3, 4, 5)]


@pytest.mark.parametrize(("modes", "are_joined"), OF_TUPLES.items())
def test_units_are_joined_where_nothing_is_brought_or_made_whole_by_unit(modes, are_joined):
    spec = make_spec({Axis.DP_SHARD: (2, tuple_of(modes))}, unit=None, layout=LAYOUTS["megatron18"])
    wrap = lower(spec, ModelFacts.of_units(())).wrap
    assert isinstance(wrap, FlatUnits) and (wrap.bucket_bytes > 0) is are_joined
    written = lower(replace(spec, unit=UnitSize()), ModelFacts.of_units(())).wrap
    assert isinstance(written, FlatUnits) and written.bucket_bytes == 0
    own = lower(replace(spec, model=BY_HAND), ModelFacts.of_units(())).wrap
    assert isinstance(own, FlatUnits) and own.bucket_bytes == 0, "it may skip a block"


def test_a_bucket_has_full_parameters_and_excludes_other_units():
    zero1 = ("zero1", ["mesh.dp_shard=2", "bucket=1MiB"])
    assert not check(load(*zero1).spec)
    for strategy, *more in (("zero3",), ("zero1", "unit=block"), ("zero-offload",)):
        spec = load(strategy, ["mesh.dp_shard=2", "bucket=1MiB", *more]).spec
        assert "bucket" in {fault.place for fault in check(spec)}


def test_parameters_shared_by_two_stages_are_reduced_separately():
    spec = load("pp-zero2", ["mesh={pp: 2, dp_shard: 2}", "model={preset: gpt-tiny}"]).spec
    plan = lower(spec)
    assert plan.pipeline is not None and plan.pipeline.shared
    units = [(("blocks.0",), 5), (("embed",), 7), (ROOT, 2)]
    assert [*buckets_of(plan, units)] == [(1,), (0, 2)]


def _settings() -> Iterator[Spec]:
    for mesh, elements in itertools.product(MESHES, (20, 30, 10**6)):
        for number, layout in enumerate(("fp32", "megatron18", "zero20")):
            sizes = {"bucket_bytes": elements * 4, "layout": LAYOUTS[layout], "unit": None}
            spec = make_spec(mesh, accumulate=1 + 2 * number, **sizes)
            yield spec
            yield replace(spec, overlap=Overlap.BACKWARD)
            yield replace(spec, overlap=Overlap.NONE, sync=SyncPolicy(gradients=GradientSync.LAST))
            for when in GatherAfterUpdate:
                if not check(late := replace(spec, gather_after_update=when)):
                    yield late


@pytest.mark.parametrize("name", [name for name in MODELS if name != "alone"])  # of two units
@pytest.mark.parametrize("is_fresh", [False, True])
def test_the_replay_of_buckets_equals_closed_forms(name, is_fresh):
    facts, compared = MODELS[name], 0
    for spec in Random(name).sample([*_settings()], SAMPLE):
        plan = lower(spec, facts)
        compared += len(joined_units(plan, facts.units)) < len(facts.units)
        assert not differences(spec, plan, facts, is_fresh=is_fresh)
    assert compared > SAMPLE // 4
