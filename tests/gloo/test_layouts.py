"""Layouts compute the result of one device in the same dtypes; an overflow of a scaled loss on one
rank skips the update on all; ranks whose models differ do not start."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch

from ptrain.algebra.legality import require_runnable
from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import read_batch
from ptrain.errors import PtrainError, SpecError
from ptrain.interpreter.look import build_module
from ptrain.interpreter.program import Program, interpret, require_equal_models
from ptrain.models.initialize import initialize
from ptrain.plan.lower import lower
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.precision import INITIAL_SCALE, LAYOUTS
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import FullyShard
from ptrain.train.loop import local_batch
from ptrain.units import leaves
from ptrain.verification.reference import Trajectory
from tests.gloo import matrix
from tests.gloo.band import loss_band
from tests.gloo.cases import ODD
from tests.gloo.runs import train_on_rank
from tests.gloo.test_checkpoint import full_state
from tests.gloo.test_exact import failed_checks
from tests.ranks import Ranks
from tests.trajectories import FP64, Tolerances, compare, one_device

pytestmark = pytest.mark.gloo

NIGHTLY = pytest.mark.nightly
STEPS = 4
PLACEMENTS: Mapping[str, Mapping[str, str]] = {
    "whole": {"dp_replicate": "ddp"},
    "sharded update": {"dp_shard": "zero1"},
    "sharded gradients": {"dp_shard": "zero2"},
    "sharded": {"dp_shard": "zero3"},
}
HYBRID = {"dp_replicate": "ddp", "dp_shard": "zero3"}
CUSTOM: Mapping[str, Mapping[str, str]] = {
    "moments in bf16": {"moments": "bf16"},
    "all four differ": {
        "parameters": "bf16", "reduced": "fp16", "gradients": "fp32", "master": "fp64",
        "moments": "fp32",
    },
    "gradients finer than what is updated": {"parameters": "bf16", "gradients": "fp32"},
}  # fmt: skip


def layout_spec(
    precision: Mapping[str, str],
    placement: Mapping[str, str] | None = None,
    *,
    fp64: bool = False,
    sync: Mapping[str, str] | None = None,
    **optimizer: Any,
) -> Spec:
    """Return a spec with two micro-batches on each of two ranks, or four on one."""
    mapping: dict[str, Any] = {
        "name": "layouts",
        "model": dict(ODD),
        "precision": {**precision} | ({"compute": "fp64"} if fp64 else {}),
        "batch": {"global": 4, "micro": 1, "sequence": 16},
        "optimizer": {"name": "adamw", "lr": 1e-3, "clip": 1.0, **optimizer},
        "data": {"corpus": "python-docs", "tokenizer": "bytes"},
        "train": {"steps": STEPS, "seed": 0},
    }
    if sync:
        mapping["sync"] = dict(sync)
    ranks, placement = (2, placement) if placement else (1, PLACEMENTS["whole"])
    mapping |= {"mesh": dict.fromkeys(placement, ranks), "placement": dict(placement)}
    return require_runnable(load(mapping))


def layout_of(name: str) -> Mapping[str, str]:
    return {"layout": name} if name in LAYOUTS else CUSTOM[name]


def train_spec(ranks: Ranks, spec: Spec) -> Trajectory:
    found = ranks.run(spec.world_size, train_on_rank, spec, STEPS)[0].trajectory
    assert found is not None
    return found


def layouts_and_placements() -> list[Any]:
    """Yield the cases: all at night; by default every second layout, and all custom ones once."""
    every, usual = (pytest.mark.nightly,), ()
    by_default = {*[*LAYOUTS][::2], *CUSTOM}
    return [
        pytest.param(
            name,
            placement,
            marks=usual if placement == "sharded gradients" and name in by_default else every,
        )
        for name, placement in product((*LAYOUTS, *CUSTOM), PLACEMENTS)
    ]


@pytest.mark.parametrize(("name", "placement"), layouts_and_placements())
def test_every_layout_equals_one_device_in_fp64_and_in_its_dtypes(
    ranks: Ranks, name: str, placement: str
) -> None:
    for fp64 in (True, False):
        spec = layout_spec(layout_of(name), PLACEMENTS[placement], fp64=fp64)
        reference = one_device(spec, STEPS)
        tolerances = FP64 if fp64 else Tolerances(losses=loss_band(spec, reference))
        assert not failed_checks(compare(reference, train_spec(ranks, spec), tolerances))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("zero16", "all four differ") else NIGHTLY)
        for name in (*LAYOUTS, *CUSTOM)
    ],
)
def test_one_rank_accepts_every_layout(ranks: Ranks, name: str) -> None:
    spec = layout_spec(layout_of(name), fp64=True)
    assert not failed_checks(compare(one_device(spec, STEPS), train_spec(ranks, spec), FP64))


def muon_cases() -> list[Any]:
    """Yield every placement with one of the layouts; the others at night."""
    placements = (None, PLACEMENTS["whole"], {"dp_shard": "S*,S*,S*,R"}, {"dp_shard": "R,S*,R,R"})
    default = ("fp32", "zero16", "zero16", "fp32")
    return [
        pytest.param(placement, layout, marks=() if layout == usual else NIGHTLY)
        for placement, usual in zip(placements, default, strict=True)
        for layout in ("fp32", "zero16")
    ]


@pytest.mark.parametrize(("placement", "layout"), muon_cases(), ids=str)
def test_muon_equals_one_device_for_every_placement(
    ranks: Ranks, placement: Mapping[str, str] | None, layout: str
) -> None:
    for fp64 in (True, False):
        spec = layout_spec({"layout": layout}, placement, fp64=fp64, name="muon")
        reference = one_device(spec, STEPS)
        tolerances = FP64 if fp64 else Tolerances(losses=loss_band(spec, reference))
        assert not failed_checks(compare(reference, train_spec(ranks, spec), tolerances))


def program_of(spec: Spec) -> Program:
    return interpret(spec, world=World.join(spec.timeout))


def step(program: Program, index: int) -> torch.Tensor | None:
    local = local_batch(program, open_corpus(program.spec.data), index)
    program.forward_backward(local, 1e-3)
    return program.step(1e-3)


def differing_tensors(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return the names of the tensors whose bits differ."""
    assert before.keys() == after.keys()
    return [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]


def overflow_on_the_last_rank(spec: Spec) -> dict[str, Any]:
    """Train two steps, the second with an infinite gradient on one rank, then a third without."""
    program = program_of(spec)
    assert program.scaling is not None
    program.scaling.scale.fill_(1024.0)  # small enough that nothing overflows by itself
    step(program, 0)
    before = full_state(program)
    is_last = program.world.rank == program.world.size - 1

    def explode(module: object, args: object, output: torch.Tensor) -> None:
        if is_last:
            output.register_hook(lambda gradient: gradient * float("inf"))

    handle = program.model.register_forward_hook(explode)
    step(program, 1)
    handle.remove()
    skipped, found = full_state(program), float(program.scaling.found_inf)
    step(program, 2)
    return {
        "skipped": differing_tensors(before, skipped),
        "scale": float(program.scaling.scale),
        "found": found,
        "then": len(differing_tensors(skipped, full_state(program))),
        "steps": {float(value) for name, value in skipped.items() if name.endswith(".step")},
    }


@pytest.mark.parametrize(
    "placement",
    [  # by default DDP, FSDP2, and flat units whose states are on the host
        PLACEMENTS["whole"],
        PLACEMENTS["sharded"],
        {"dp_shard": "R,O,O,R"},
        pytest.param(PLACEMENTS["sharded update"], marks=NIGHTLY),
        pytest.param(PLACEMENTS["sharded gradients"], marks=NIGHTLY),
        pytest.param({"dp_shard": "O,O,S,R"}, marks=NIGHTLY),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(
    ranks: Ranks, placement: Mapping[str, str]
) -> None:
    spec = layout_spec({"layout": "fp16"}, placement)
    for seen in ranks.run(2, overflow_on_the_last_rank, spec):
        assert seen["skipped"] == ["scaling.scale", "scaling.growth_tracker"]
        assert seen["scale"] == 512.0 and seen["found"] == 1.0
        assert seen["steps"] == {1.0} and seen["then"] > 10


def test_checkpoints_contain_the_loss_scale(ranks: Ranks) -> None:
    spec = layout_spec({"layout": "fp16"}, {"dp_shard": "zero1"})
    states = ranks.run(2, scale_after_loading, spec)
    assert states == [(4096.0, 7)] * 2


def scale_after_loading(spec: Spec) -> tuple[float, int]:
    program = program_of(spec)
    assert program.scaling is not None and float(program.scaling.scale) == INITIAL_SCALE
    state = program.state_dict()
    state["scaling"] = {"scale": torch.tensor(4096.0), "growth_tracker": torch.tensor(7)}
    assert [name for name, _ in leaves(state)][-2:] == [
        "scaling.scale",
        "scaling.growth_tracker",
    ]
    program.load_state_dict(state)
    return float(program.scaling.scale), int(program.scaling.growth_tracker)


def masters_after_loading(spec: Spec, other: Spec) -> list[str]:
    """Return the differences after moving from one placement to another and back."""
    first, second = program_of(spec), program_of(other)
    step(first, 0)
    before = full_state(first)
    second.load_state_dict(first.state_dict())
    step(first, 1)
    first.load_state_dict(second.state_dict())
    return differing_tensors(before, full_state(first))


@pytest.mark.parametrize("placement", ["M,S,S,R", "M,O,S,R", "S*,S,S,R"])
def test_parameters_made_of_masters_are_kept_to_the_bit(ranks: Ranks, placement: str) -> None:
    spec = layout_spec({"layout": "fsdp-mixed"}, {"dp_shard": placement})
    other = layout_spec({"layout": "fsdp-mixed"}, {"dp_shard": "zero1"})
    assert ranks.run(2, masters_after_loading, spec, other) == [[], []]


def refuse_different_model(spec: Spec, what: str) -> str:
    """Return the message with which this rank rejects the model."""
    world = World.join(spec.timeout)
    module = build_module(spec).to_empty(device="cpu")
    initialize(module, 0)
    if world.rank == 1 and what != "nothing":
        name, parameter = next(iter(module.named_parameters()))
        owner = module.get_submodule(name.rpartition(".")[0])
        value = parameter.detach().double() if what == "dtype" else parameter.detach()[:-1].clone()
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(value))
    try:
        if what == "dtype":  # the program's model is cast to the spec's dtypes
            require_equal_models(module, spec.precision.layout, world)
        interpret(spec, module, world)
    except SpecError as error:
        assert error.exit_code == 2
        return str(error)
    return ""


def test_ranks_whose_dtypes_or_shapes_differ_reject_to_start(ranks: Ranks) -> None:
    spec = layout_spec({"layout": "fp32"}, {"dp_shard": "zero1"})
    for what, finding in (
        ("dtype", "its dtype is float32 on rank 0, float64 on rank 1"),
        ("shape", "its shape is [259, 42] on rank 0, [258, 42] on rank 1"),
    ):
        messages = ranks.run(2, refuse_different_model, spec, what)
        assert messages[0] == messages[1]
        assert finding in messages[0] and "embed.weight" in messages[0]
    assert ranks.run(2, refuse_different_model, spec, "nothing") == ["", ""]


def refusal_without_a_rate(spec: Spec) -> str:
    program = program_of(spec)
    local = read_batch(open_corpus(spec.data), spec=spec, step=0, data_index=0, data_degree=1)
    try:
        program.forward_backward(local)
    except PtrainError as error:
        return str(error)
    return ""


def test_an_update_in_backward_needs_its_learning_rate_before(ranks: Ranks) -> None:
    mapping = {
        "name": "consumed", "model": dict(ODD), "mesh": {"dp_replicate": 2},
        "placement": {"dp_replicate": "R,R,M,R"}, "precision": {"layout": "fp32"},
        "batch": {"global": 2, "micro": 1, "sequence": 16}, "optimizer": {"clip": None},
    }  # fmt: skip
    spec = require_runnable(load(mapping))
    for message in ranks.run(2, refusal_without_a_rate, spec):
        assert "Pass the learning rate" in message


@pytest.mark.parametrize("placement", [{"dp_shard": "zero3"}, HYBRID])
@pytest.mark.parametrize("sync", [{}, {"gradients": "last"}], ids=["every", "last"])
def test_fsdp2_reduces_gradients_in_a_wider_dtype_than_it_keeps(
    ranks: Ranks, placement: Mapping[str, str], sync: Mapping[str, str]
) -> None:
    """Check every predicted byte too."""
    spec = layout_spec({"layout": "zero16", "reduced": "fp32"}, placement, sync=sync)
    assert isinstance(lower(spec).wrap, FullyShard)
    result = matrix.run_spec(ranks, spec)
    assert not [*failed_checks(result.checks), *failed_checks(result.against)]
