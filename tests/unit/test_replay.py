"""Replay compared with execution: one rank of a fake world runs the wrappers on real tensors, and
every state and every peak equals the prediction to the byte."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from ptrain.cost import State
from ptrain.data.sampler import LocalBatch
from ptrain.derivation.estimate import derive
from ptrain.interpreter.program import Program, interpret
from ptrain.meters.memory import MemoryMeter
from ptrain.runtime.world import World, fake_world
from ptrain.spec.dials import GradientSync, Overlap, ReduceScatterVia, Reshard, SyncPolicy
from ptrain.spec.model import ExternalModel, Family, ModelShape
from ptrain.spec.placement import Axis, Placement
from ptrain.spec.precision import FP32, ZERO16
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from tests.covering import covering
from tests.pure.build import GATHERED, WHOLE, ZERO_1, ZERO_2, make_spec, tuple_of

SEED = 20260
GPT = ModelShape(
    family=Family.GPT, layers=2, hidden=42, heads=3, kv_heads=3, ffn=101, vocab=259, tied=True
)
NECKS = ExternalModel(target="tests.models_external:necks")
DIALS = GradientSync, (True, False, Reshard.NON_ROOT), (True, False)
POLICIES = [
    SyncPolicy(gradients=sync, reshard_after_forward=forward, reshard_after_backward=backward)
    for sync, forward, backward in product(*DIALS)
]
FULLY = {Axis.DP_SHARD: (2, GATHERED)}
HYBRID = {Axis.DP_REPLICATE: (2, WHOLE), Axis.DP_SHARD: (2, GATHERED)}
BY_DEFAULT = 2  # of the drawn tuples
LAYOUTS = {"fp32": FP32, "zero16": ZERO16}
MESHES = {"fully": FULLY, "hybrid": HYBRID}


def step(program: Program, tokens: torch.Tensor) -> None:
    batch = LocalBatch(tokens=tokens, global_tokens=1000, sample_ids=())
    program.forward_backward(batch)
    program.step(1e-3)


def differences(spec: Spec, rank: int = 0) -> dict[str, int]:
    """Predicted minus measured, for every state and peak that differ on `rank`."""
    world = fake_world(rank, spec.world_size) if spec.world_size > 1 else World()
    try:
        program = interpret(spec, world=world, allow_import=True)
        samples = spec.batch.micro * spec.batch.accumulate
        tokens = torch.randint(0, 37, (samples, spec.batch.sequence + 1))
        for _ in range(2):
            step(program, tokens)
        meter = MemoryMeter(program, rank=rank)
        program.observers.append(meter)
        with meter:
            step(program, tokens)
    finally:
        world.close()
    exact = derive(spec, facts_of(spec)).exact
    predicted = {str(row.state): row.device_bytes for row in exact.memory if row.rank == rank}
    predicted |= {str(row.phase): row.device_bytes for row in exact.peak if row.rank == rank}
    found = {str(row.state): row.device_bytes for row in meter.footprints()}
    found |= {str(row.phase): row.device_bytes for row in meter.peaks()}
    assert len(found) == len(State) + 3
    return {name: predicted[name] - size for name, size in found.items() if predicted[name] != size}


@covering("placement, accumulate, layout", [None, ZERO_1, ZERO_2], [1, 3], LAYOUTS)
def test_one_device_and_flat_units(
    placement: Placement | None, accumulate: int, layout: str
) -> None:
    mesh = {Axis.DP_SHARD: (2, placement)} if placement else {}
    assert not differences(make_spec(mesh, accumulate=accumulate, layout=LAYOUTS[layout]))


@covering("mesh, sync, forward, backward", MESHES, *DIALS)
def test_every_sync_policy(
    mesh: str, sync: GradientSync, forward: bool | Reshard, backward: bool
) -> None:
    policy = SyncPolicy(
        gradients=sync, reshard_after_forward=forward, reshard_after_backward=backward
    )
    assert not differences(make_spec(MESHES[mesh], accumulate=3, sync=policy))


@covering("accumulate, mesh, layout", [1, 3], MESHES, LAYOUTS)
def test_fully_sharded_units(accumulate: int, mesh: str, layout: str) -> None:
    spec = make_spec(MESHES[mesh], accumulate=accumulate, layout=LAYOUTS[layout])
    assert not differences(spec)


@covering("overlap, bucket, accumulate", Overlap, [50_000, 25 * 2**20], [1, 3])
def test_replicas(overlap: Overlap, bucket: int, accumulate: int) -> None:
    spec = make_spec({Axis.DP_REPLICATE: (2, WHOLE)}, bucket_bytes=bucket, accumulate=accumulate)
    assert not differences(replace(spec, overlap=overlap))


@pytest.mark.nightly  # by default a rank on fake ranks (test_simulation.py, test_adversary.py)
@pytest.mark.parametrize("mesh", [FULLY, {Axis.DP_SHARD: (4, ZERO_2)}], ids=["fully", "flat"])
@pytest.mark.parametrize("model", [GPT, replace(GPT, dropout=0.1), NECKS], ids=repr)
def test_other_models(model, mesh) -> None:
    assert not differences(make_spec(mesh, model=model, accumulate=2))


@pytest.mark.parametrize(
    "setting",
    [
        {"micro": 1},
        {"clip": None},
        {"optimizer": "sgd"},
        {"compute_fp64": True},
        {"reduce_scatter": ReduceScatterVia.ALL_TO_ALL},
    ],
    ids=str,
)
@pytest.mark.parametrize("mesh", [FULLY, {Axis.DP_SHARD: (4, ZERO_2)}], ids=["fully", "flat"])
def test_other_settings(mesh, setting) -> None:
    assert not differences(make_spec(mesh, layout=ZERO16, **setting))


def test_small_activations_let_the_gathers_be_the_peak() -> None:
    assert not differences(make_spec(FULLY, micro=1, sequence=2, accumulate=4))


def _random_tuples(number: int) -> list[Spec]:
    """Tuples of R, S, S* on both data axes, with every dial drawn too."""
    chance = random.Random(SEED)
    modes = [",".join(each) for each in product(("R", "S*"), "RS", "RS")]
    specs: list[Spec] = []
    while len(specs) < number:
        replicate, shard = (tuple_of(chance.choice(modes)) for _ in range(2))
        mesh = {Axis.DP_REPLICATE: (2, replicate), Axis.DP_SHARD: (chance.choice((2, 4)), shard)}
        if {replicate, shard} <= {WHOLE, GATHERED}:
            continue
        policy = chance.choice(POLICIES)
        if str(replicate.gradients) == str(shard.gradients) == "R":
            policy = replace(policy, gradients=GradientSync.LAST)
        specs.append(
            make_spec(
                mesh,
                layout=chance.choice((FP32, ZERO16)),
                accumulate=chance.choice((1, 2, 4)),
                sync=policy,
                reduce_scatter=chance.choice(list(ReduceScatterVia)),
            )
        )
    return specs


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(
            spec,
            id=" x ".join(str(factor.placement) for factor in spec.factors),
            marks=() if number < BY_DEFAULT else pytest.mark.nightly,
        )
        for number, spec in enumerate(_random_tuples(16))
    ],
)
def test_drawn_tuples(spec: Spec) -> None:
    assert not differences(spec), f"seed {SEED}"
