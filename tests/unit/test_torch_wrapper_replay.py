"""The replay of torch's wrappers compared with torch: FSDP2, DistributedDataParallel and
ZeroRedundancyOptimizer run on a rank of a fake world with the collectives, sizes and memory of the
replay."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from ptrain.axes.data.cost import assign_owners, bucket_caps, bucket_sizes, local_rows, padded_rows
from ptrain.axes.data.run.apply import FullyShardedWrap
from ptrain.axes.data.run.flat_target import ZeroRedundancyUpdate
from ptrain.cost import Collective, Phase, State
from ptrain.data.sampler import LocalBatch
from ptrain.derivation import in_flight
from ptrain.derivation.ghosts import wrapping
from ptrain.derivation.tape import Account, Tape
from ptrain.internals.dtensor import clear_shape_caches
from ptrain.internals.fsdp2 import parameter_groups
from ptrain.interpreter.program import Program, interpret
from ptrain.meters.memory import MemoryMeter
from ptrain.meters.traffic import SILENT, TrafficMeter
from ptrain.models.ledger import local_tensor
from ptrain.runtime.world import fake_world
from ptrain.spec.dials import GradientSync, ReduceScatterVia, Reshard, SyncPolicy
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import FP32, ZERO16
from ptrain.spec.spec import Spec
from ptrain.timeline import Complete
from ptrain.traces.facts import facts_of
from tests.covering import covering
from tests.pure.build import GATHERED, WHOLE, ZERO_1, make_spec, tuple_of
from tests.pure.replayed_steps import flight
from tests.resident import resident

CHANGED = f"torch {torch.__version__} is not what its ghost imitates: "
_BASE = (State.PARAMETERS, State.OPTIMIZER, State.OTHER)

# A collective: what is sent, of how many bytes; how many live above those that live for the whole
# step, and how many did at most since the one before.
Event = tuple[Collective, int, int, int]


class Recorder(Tape):
    """A tape that records each collective with the memory before and after it."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(account=Account(spec))
        self.events: dict[Phase, list[Event]] = {phase: [] for phase in Phase}
        self.highest = 0

    def add(self, size: int) -> None:
        super().add(size)
        self.highest = max(self.highest, self.level)

    def spike(self, size: int) -> None:
        super().spike(size)
        self.highest = max(self.highest, self.level + size)

    def record_collective(self, collective: Collective, *args: Any, **options: Any) -> None:
        payload = args[2]
        self.events[self.phase].append((collective, payload, self.level, self.highest))
        self.highest = self.level


class Watcher(MemoryMeter):
    """A meter that records the memory before and after each collective."""

    def __init__(self, program: Program, rank: int) -> None:
        super().__init__(program, rank=rank, waits=False)
        self.levels: list[tuple[int, int]] = []
        self.highest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = function._schema.name.partition("::")[2]
        if function.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            self._count_pending()
            self.levels.append((self.live, max(self.highest, self.live)))
            self.highest = self.live
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _add_live_bytes(self, key: int, size: int) -> None:
        super()._add_live_bytes(key, size)
        self.highest = max(self.highest, self.live)

    def _add_to_all(self, key: int, size: int) -> None:
        """It has lived all along."""
        before = self.live
        super()._add_to_all(key, size)
        more = self.live - before
        self.levels = [(level + more, highest + more) for level, highest in self.levels]
        self.highest += more


def step(program: Program, tokens: torch.Tensor) -> None:
    program.forward_backward(LocalBatch(tokens=tokens, global_tokens=1000, sample_ids=()))
    program.step(1e-3)


def torch_collectives(spec: Spec) -> dict[Phase, list[Event]]:
    """Return a steady step's collectives by phase."""
    world = fake_world(0, spec.world_size)
    try:
        program = interpret(spec, world=world)
        samples = spec.batch.micro * spec.batch.accumulate
        tokens = torch.randint(0, 37, (samples, spec.batch.sequence + 1))
        for _ in range(2):
            step(program, tokens)
        watcher = Watcher(program, 0)
        traffic = TrafficMeter(program.registry, program.mesh.axes_by_group())
        program.observers += [watcher, traffic]
        with watcher, traffic:
            step(program, tokens)
        held = resident(program)
    finally:
        world.close()
    base = sum(held[state][Tier.DEVICE] for state in _BASE)
    events: dict[Phase, list[Event]] = {phase: [] for phase in Phase}
    for call, (level, highest) in zip(traffic.calls(), watcher.levels, strict=True):
        event = call.key.collective, call.payload_bytes, level - base, highest - base
        events[call.key.phase].append(event)
    return events


def of_ghost(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> dict[Phase, list[Event]]:
    recorder = Recorder(spec)
    facts = facts_of(spec)
    monkeypatch.setattr(in_flight, "Tape", lambda clock, most: recorder)
    flight(spec, facts)
    return recorder.events


def agree(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    real, ghost = torch_collectives(spec), of_ghost(spec, monkeypatch)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for number, pair in enumerate(zip(real[phase], ghost[phase], strict=False)):
            assert pair[0] == pair[1], f"{CHANGED}call {number} of {phase}"
        assert len(real[phase]) == len(ghost[phase]), f"{CHANGED}calls of {phase}"
        assert real[phase] or phase is Phase.FORWARD


FULLY = {Axis.DP_SHARD: (2, GATHERED)}
HYBRID = {Axis.DP_REPLICATE: (2, WHOLE), Axis.DP_SHARD: (2, GATHERED)}
MESHES = {"fully": FULLY, "hybrid": HYBRID}
LAYOUTS = {"fp32": FP32, "zero16": ZERO16}
REPLICAS = {Axis.DP_REPLICATE: (2, WHOLE)}


@covering("mesh, layout, accumulate", MESHES, LAYOUTS, [1, 3])
def test_fsdp2_allocates_and_sends_in_the_replayed_order(mesh, layout, accumulate, monkeypatch):
    spec = make_spec(MESHES[mesh], layout=LAYOUTS[layout], accumulate=accumulate, clip=None)
    agree(spec, monkeypatch)


@pytest.mark.parametrize("sync", GradientSync)
@pytest.mark.parametrize("forward", [True, False, Reshard.NON_ROOT, 2])
def test_fsdp2_follows_the_replayed_policies(sync, forward, monkeypatch):
    policy = SyncPolicy(gradients=sync, reshard_after_forward=forward)
    mesh = {Axis.DP_SHARD: (4, GATHERED)}
    agree(make_spec(mesh, accumulate=2, sync=policy, clip=None), monkeypatch)


def test_fsdp2_gathers_casts_of_master_copies(monkeypatch):
    mesh = {Axis.DP_SHARD: (2, tuple_of("M,S,S"))}
    layout = replace(ZERO16, name="masters", gradients=FP32.gradients)
    agree(make_spec(mesh, layout=layout, accumulate=2, clip=None), monkeypatch)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_fsdp2_peaks_no_higher_than_its_replay_with_small_activations(mesh, monkeypatch):
    agree(make_spec(mesh, micro=1, sequence=2, accumulate=2, clip=None), monkeypatch)


def test_fsdp2_uses_an_exchange_for_its_reductions(monkeypatch):
    spec = make_spec(FULLY, reduce_scatter=ReduceScatterVia.ALL_TO_ALL, clip=None)
    agree(spec, monkeypatch)


@pytest.mark.parametrize(("accumulate", "bucket"), [*product((1, 3), (50_000, 25 * 2**20))])
def test_ddp_reduces_its_buckets_in_the_replayed_order(accumulate, bucket, monkeypatch):
    spec = make_spec(REPLICAS, accumulate=accumulate, bucket_bytes=bucket, clip=None)
    agree(spec, monkeypatch)


def test_zero_redundancy_broadcasts_the_replayed_buckets(monkeypatch):
    spec = make_spec({Axis.DP_REPLICATE: (3, ZERO_1)}, clip=None)
    agree(spec, monkeypatch)
    real, ghost = torch_collectives(spec), of_ghost(spec, monkeypatch)
    sizes = [(collective, payload) for collective, payload, *_ in real[Phase.UPDATE]]
    shards = [(collective, payload) for collective, payload, *_ in ghost[Phase.UPDATE]]
    assert sizes, f"{CHANGED}the owners send nothing"
    assert shards == sizes, f"{CHANGED}what the owners broadcast"


@given(
    st.lists(st.integers(min_value=1, max_value=60), min_size=1, max_size=20),
    st.integers(min_value=4, max_value=200),
    st.integers(min_value=4, max_value=200),
)
def test_ddp_fills_its_buckets_as_replayed(numels: list[int], first: int, later: int):
    tensors = [torch.empty(numel) for numel in numels]
    assigned, _ = dist._compute_bucket_assignment_by_size(tensors, [first, later])
    sizes = [sum(4 * numels[index] for index in bucket) for bucket in assigned]
    assert bucket_sizes([4 * numel for numel in numels], [first, later]) == sizes, CHANGED


def test_ddp_starts_with_a_small_bucket():
    caps = bucket_caps(25 * 2**20)
    first = dist._DEFAULT_FIRST_BUCKET_BYTES
    assert caps == (first, 25 * 2**20), f"{CHANGED}DDP's first bucket has {first} bytes"


@settings(max_examples=20)
@given(st.lists(st.integers(min_value=1, max_value=9), min_size=1, max_size=12))
def test_zero_redundancy_distributes_tensors_as_replayed(numels: list[int]):
    world = fake_world(0, 3)
    try:
        parameters = [nn.Parameter(torch.zeros(numel)) for numel in numels]
        optimizer = ZeroRedundancyOptimizer(
            parameters, torch.optim.SGD, parameters_as_bucket_view=True, lr=0.1
        )
        owners = [optimizer._param_to_rank[parameter] for parameter in parameters]
        buckets = [bucket.numel() for of_device in optimizer._buckets for bucket in of_device]
    finally:
        world.close()
    assert assign_owners(numels, 3) == owners, f"{CHANGED}_partition_parameters"
    held = [sum(n for n, o in zip(numels, owners, strict=True) if o == rank) for rank in range(3)]
    assert buckets == [size or 1 for size in held], f"{CHANGED}_build_param_buckets"


@pytest.mark.parametrize("rank", range(4))
def test_fsdp2_shards_rows_as_replayed(rank: int):
    spec = make_spec({Axis.DP_SHARD: (4, GATHERED)})
    clear_shape_caches()  # of the rank before
    world = fake_world(rank, 4)
    try:
        program = interpret(spec, world=world)
        wrap = program.wrapped
        assert isinstance(wrap, FullyShardedWrap)
        parts = [
            part
            for module in wrap.sharded
            for group in parameter_groups(module)
            for part in group.fsdp_params
        ]
        for part in parts:
            shape, held = tuple(part._orig_size), local_tensor(part.sharded_param.detach())
            assert held.numel() == local_rows(shape, 4, rank), f"{CHANGED}rows of {shape}"
            padded = part._sharded_param_data.numel()
            assert padded == padded_rows(shape, 4), f"{CHANGED}padding of {shape}"
    finally:
        world.close()
        clear_shape_caches()
    assert len(parts) > 10


@pytest.mark.parametrize("is_named", [False, True])
def test_autograd_takes_or_clones_a_gradient_as_replayed(is_named: bool):
    leaf = torch.zeros(5, requires_grad=True)
    named: list[torch.Tensor] = []
    storages: list[int] = []

    class HandsOn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.sum()

        @staticmethod
        def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
            gradient = torch.ones(5)
            storages.append(gradient.untyped_storage().data_ptr())
            if is_named:
                named.append(gradient)
            return gradient

    HandsOn.apply(leaf).backward()
    assert leaf.grad is not None
    is_stolen = leaf.grad.untyped_storage().data_ptr() == storages[0]
    gradient = Complete("leaf", 20, cloned=is_named)
    assert wrapping.kept_bytes(gradient) == (0 if is_stolen else 20), (
        f"{CHANGED}AccumulateGrad takes over"
    )
    assert is_stolen is not is_named, f"{CHANGED}AccumulateGrad takes over"
    kept = leaf.grad.data_ptr()
    HandsOn.apply(leaf).backward()
    assert leaf.grad.data_ptr() == kept, f"{CHANGED}AccumulateGrad adds in place"


def test_a_unit_of_fsdp2_has_the_attributes_that_its_wrapper_reads():
    world = fake_world(0, 2)
    try:
        program = interpret(make_spec(FULLY), world=world)
        tokens = torch.randint(0, 37, (2, 17))
        step(program, tokens)
        wrap = program.wrapped
        assert isinstance(wrap, FullyShardedWrap)
        context = wrap.sharded[-1]._get_fsdp_state()._comm_ctx
        assert hasattr(context, "post_forward_order"), f"{CHANGED}the order of backward's gathers"
        for group in parameter_groups(wrap.sharded[0]):
            assert hasattr(group, "post_forward_mesh_info"), f"{CHANGED}reshard to smaller groups"
            for part, name in product(
                group.fsdp_params,
                ("sharded_param", "_unsharded_param", "unsharded_accumulated_grad"),
            ):
                assert hasattr(part, name), f"{CHANGED}a parameter of FSDP2 has no {name}"
    finally:
        world.close()


def test_a_spread_update_states_its_owner():
    world = fake_world(0, 2)
    try:
        program = interpret(make_spec({Axis.DP_REPLICATE: (2, ZERO_1)}), world=world)
        assert isinstance(program.update, ZeroRedundancyUpdate)
        for name in ("_buckets", "optim", "param_groups"):
            assert hasattr(program.update.optimizer, name), f"{CHANGED}no {name}"
    finally:
        world.close()
