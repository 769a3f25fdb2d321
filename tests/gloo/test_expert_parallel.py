"""Expert-parallel ranks compute the result of one device, have exactly the predicted cost if
routing decides no size, and leave checkpoints that other meshes load."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from ptrain.data.corpus import open_corpus
from ptrain.interpreter.program import Program, interpret
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from ptrain.train import checkpoint, manifest, saving
from ptrain.train.exchange import Exchange
from ptrain.train.loop import local_batch
from ptrain.units import leaves
from tests.gloo.expert_cases import expert_spec
from tests.gloo.expert_rank_runs import MATRIX
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

REST = {
    "ddp": "R,R,R,R",
    "zero1": "R,S,R,R",
    "zero2": "R,S,S,R",
    "zero3": "S*,S,S,R",
}
APART = (
    "top-1",
    "top-2",
    "capacity-top-1",
    "balanced",
    "deep",
    "latent",
)  # their experts are even in number
BESIDE: tuple[dict[str, str], ...] = (
    {"dp_replicate": "ddp"},
    {"dp_shard": "zero1"},
    {"dp_shard": "zero2"},
    {"dp_shard": "zero3"},
    {"pp": "S,S,S,R"},
    {"cp": "S*,S,S,S"},
    {"tp": "S,S,S,R"},
    {"tp": "S,S,S,S"},
    {"tp": "S,S,S,S*"},
)
TWO_BESIDE: tuple[dict[str, str], ...] = (
    {"dp_replicate": "ddp", "dp_shard": "zero3"},
    {"dp_shard": "zero3", "tp": "S,S,S,S"},
    {"pp": "S,S,S,R", "tp": "S,S,S,R"},
    {"pp": "S,S,S,R", "dp_shard": "zero1"},
    {"cp": "S*,S,S,S", "tp": "S,S,S,R"},
    {"dp_shard": "zero2", "cp": "S*,S,S,S"},
    {"pp": "S,S,S,R", "cp": "S*,S,S,S"},
)
KEPT: tuple[dict[str, Any], ...] = (
    {"activations": "M"},
    {"activations": "M", "recompute": "selective"},
    {"activations": "O"},
    {"unit": "sub-block"},
    {"loss": {"chunk": 4}},
    {"batch": {"global": 8, "micro": 4, "sequence": 16}},
)
OVERLAP: dict[str, Any] = {"overlap_shared_experts": True}
TIERED = ("S*,S,S*,R", "R,S*,R,R", "O,O,O,R", "S*,O,S,R")
STEPS = 2


def nightly_except(cases: list[Any], default: Collection[Any]) -> list[Any]:
    """Mark all cases that are not in the default run as nightly."""
    nightly = pytest.mark.nightly
    return [case if case in default else pytest.param(*case, marks=nightly) for case in cases]


@pytest.mark.parametrize(
    ("model", "rest"),
    nightly_except([*product(APART, REST)], (("latent", "zero3"),)),
)
def test_ep_alone_is_exact_and_equals_one_device(ranks: Ranks, model: str, rest: str) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, {"ep": REST[rest]}))


def product_cases() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield ep with every other axis and every tuple for the dense parameters, rotating the
    models."""
    models = cycle(APART)
    for rest, beside in product(REST, BESIDE):
        yield next(models), rest, beside


PRODUCTS = [*product_cases()]
OTHERS = [case for case in product(APART, REST, BESIDE) if case not in PRODUCTS]


@pytest.mark.parametrize(
    ("model", "rest", "beside"),
    nightly_except(PRODUCTS, [case for case in PRODUCTS if case[1:] == ("zero3", BESIDE[3])]),
    ids=str,
)
def test_ep_with_another_axis_is_exact_and_equals_one_device(
    ranks: Ranks, model: str, rest: str, beside: dict[str, str]
) -> None:
    accumulate = 4 if "pp" in beside else 2
    spec = expert_spec(model, beside | {"ep": REST[rest]}, accumulate=accumulate)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "rest", "beside"), OTHERS, ids=str)
def test_ep_with_another_axis_is_exact_for_every_model(
    ranks: Ranks, model: str, rest: str, beside: dict[str, str]
) -> None:
    test_ep_with_another_axis_is_exact_and_equals_one_device(ranks, model, rest, beside)


@pytest.mark.nightly
@pytest.mark.parametrize("beside", TWO_BESIDE, ids=str)
@pytest.mark.parametrize("rest", ["zero2", "zero3"])
@pytest.mark.parametrize("model", ["top-2", "capacity-top-1"])
def test_ep_on_eight_ranks_is_exact_and_equals_one_device(
    ranks: Ranks, model: str, rest: str, beside: dict[str, str]
) -> None:
    test_ep_with_another_axis_is_exact_and_equals_one_device(ranks, model, rest, beside)


@pytest.mark.nightly
@pytest.mark.parametrize("rest", ["ddp", "zero3"])
@pytest.mark.parametrize("model", ["top-1", "top-2", "capacity-top-1", "balanced"])
def test_ep_on_four_ranks_is_exact_and_equals_one_device(
    ranks: Ranks, model: str, rest: str
) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, {"ep": REST[rest]}, degrees={"ep": 4}))


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("model", ["deep", "capacity-top-1"])
def test_ep_with_pp_is_exact_and_equals_one_device(ranks: Ranks, model: str, schedule: str) -> None:
    placement = {"pp": "S,S,S,R", "ep": REST["zero2"]}
    spec = expert_spec(model, placement, accumulate=4, pipeline={"schedule": schedule})
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.parametrize(
    ("model", "rest", "kept"),
    [
        pytest.param(
            *case, marks=[] if case == ("top-2", "zero2", KEPT[0]) else pytest.mark.nightly
        )
        for case in product(("top-2", "capacity-top-1"), ("zero2", "zero3"), KEPT)
    ],
    ids=str,
)
def test_ep_with_every_activation_mode_is_exact_and_equals_one_device(
    ranks: Ranks, model: str, rest: str, kept: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, {"ep": REST[rest]}, **kept))


@pytest.mark.parametrize(
    ("model", "more", "beside"),
    nightly_except(
        [
            *product(("top-2", "capacity-top-1"), ({}, {"activations": "M"}), ({},)),
            ("top-2", {"activations": "M", "recompute": "selective"}, {}),
            ("top-2", {"pipeline": {"schedule": "zero-bubble"}}, {"pp": "S,S,S,R"}),
            *product(("deep", "capacity-top-1"), ({},), ({"tp": "S,S,S,S"}, {"cp": "S*,S,S,S"})),
        ],
        (("top-2", {"activations": "M"}, {}),),
    ),
    ids=str,
)
def test_shared_experts_overlap_with_the_exchange(
    ranks: Ranks, model: str, more: dict[str, Any], beside: dict[str, str]
) -> None:
    spec = expert_spec(model, beside | {"ep": REST["zero3"]}, accumulate=4, **OVERLAP, **more)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
@pytest.mark.parametrize("states", TIERED)
def test_ep_with_offloaded_dense_states_is_exact_and_equals_one_device(
    ranks: Ranks, states: str
) -> None:
    assert not MATRIX.differences(ranks, expert_spec("top-2", {"ep": states}))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["bf16", "zero16", "fsdp-mixed"])
@pytest.mark.parametrize("model", ["top-2", "capacity-top-1"])
def test_ep_in_true_dtypes_is_exact(ranks: Ranks, model: str, layout: str) -> None:
    states = "M,S,S,R" if layout == "fsdp-mixed" else REST["zero3"]
    spec = expert_spec(model, {"ep": states}, precision={"layout": layout})
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
def test_ep_with_parameters_cast_from_masters_is_exact(ranks: Ranks) -> None:
    placement = {"dp_shard": "M,S,S,R", "ep": "M,S,S,R"}
    precision = {"layout": "fsdp-mixed", "compute": "fp64"}
    assert not MATRIX.differences(ranks, expert_spec("top-2", placement, precision=precision))


@pytest.mark.nightly
@pytest.mark.parametrize("experts", [2, 6])
def test_experts_that_shards_do_not_divide_are_exact_and_equal_one_device(
    ranks: Ranks, experts: int
) -> None:
    placement = {"dp_shard": "zero3", "ep": REST["zero3"]}
    assert not MATRIX.differences(
        ranks, expert_spec("top-2", placement, shape={"experts": experts})
    )


def train_and_save(spec: Spec, folder: str) -> tuple[dict[str, torch.Tensor], float, float]:
    """Save a checkpoint to `folder` after some steps. Return the full state, and the losses of an
    evaluation and a step on the next samples."""
    program = interpret(spec, world=World.join(spec.timeout))
    for index in range(STEPS):
        program.forward_backward(local_batch(program, open_corpus(spec.data), index))
        program.step(1e-3)
    saving.save_checkpoint(program, Path(folder), STEPS, Exchange(program.world))
    return full_state(program), *losses(program)


def load_and_continue(spec: Spec, folder: str) -> tuple[dict[str, torch.Tensor], float, float]:
    """Load the checkpoint and return what `train_and_save` returns."""
    program = interpret(spec, world=World.join(spec.timeout))
    exchange = Exchange(program.world)
    path, saved, _ = checkpoint.find_newest_sound(
        [Path(folder) / manifest.folder_name(STEPS)], exchange
    )
    assert path is not None and saved is not None
    checkpoint.load(program, path, saved, exchange)
    return full_state(program), *losses(program)


def losses(program: Program) -> tuple[float, float]:
    local = local_batch(program, open_corpus(program.spec.data), STEPS)
    shares = (program.evaluate(local).clone(), program.forward_backward(local).clone())
    evaluated, stepped = (sum(Exchange(program.world).gather(float(x))) for x in shares)
    return evaluated, stepped


def full_state(program: Program) -> dict[str, torch.Tensor]:
    """Return every full tensor of the state under its name in checkpoints."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in leaves(program.state_dict())
    }


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ({"ep": REST["zero3"]}, {"dp_shard": "zero2", "ep": REST["zero1"]}),
        pytest.param({"dp_shard": "zero3"}, {"ep": REST["zero3"]}, marks=pytest.mark.nightly),
        pytest.param({"ep": REST["ddp"]}, {"dp_replicate": "ddp"}, marks=pytest.mark.nightly),
        pytest.param(
            {"dp_shard": "zero3", "ep": REST["zero3"]},
            {"ep": REST["zero2"], "tp": "S,S,S,R"},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=str,
)
def test_a_checkpoint_is_bitwise_the_same_on_ranks_with_other_experts(
    ranks: Ranks, tmp_path: Path, saved: dict[str, str], resumed: dict[str, str]
) -> None:
    check_checkpoint(ranks, tmp_path, saved, resumed, "deep")


def test_a_checkpoint_is_bitwise_the_same_where_an_expert_is_sharded_by_its_features(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Two ranks of dp_shard share the one expert of each rank of ep."""
    saved = {"dp_shard": "zero3", "ep": REST["zero3"]}
    check_checkpoint(ranks, tmp_path, saved, {"dp_shard": "zero1"}, "top-1", {"experts": 2})


def check_checkpoint(
    ranks: Ranks,
    tmp_path: Path,
    saved: dict[str, str],
    resumed: dict[str, str],
    model: str,
    shape: dict[str, Any] | None = None,
) -> None:
    batch = {"global": 8, "micro": 1, "sequence": 16}
    first, then = (
        expert_spec(model, states, shape=shape, batch=batch) for states in (saved, resumed)
    )
    before = ranks.run(first.world_size, train_and_save, first, str(tmp_path))[0]
    after = ranks.run(then.world_size, load_and_continue, then, str(tmp_path))[0]
    assert before[0].keys() == after[0].keys()
    for name, value in before[0].items():
        assert torch.equal(after[0][name], value), name
    assert after[1:] == pytest.approx(before[1:], rel=1e-12)
    assert before[1] == pytest.approx(before[2], rel=1e-12), "an evaluation is a pass like any"
