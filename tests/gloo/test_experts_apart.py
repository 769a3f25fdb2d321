"""Ranks with experts of their own compute what one device computes, cost what is predicted to the
byte where routing decides no size, and leave checkpoints that any other ranks go on from."""

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
from ptrain.train import checkpoint, manifest
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


def some(cases: list[Any], default: Collection[Any]) -> list[Any]:
    """Those that do not run by default run at night."""
    nightly = pytest.mark.nightly
    return [case if case in default else pytest.param(*case, marks=nightly) for case in cases]


@pytest.mark.parametrize(
    ("model", "rest"),
    some([*product(APART, REST)], (("latent", "zero3"),)),
)
def test_by_themselves(ranks: Ranks, model: str, rest: str) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, {"ep": REST[rest]}))


def products() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield what stands beside ep with each tuple of the rest, the models in turn."""
    models = cycle(APART)
    for rest, beside in product(REST, BESIDE):
        yield next(models), rest, beside


PRODUCTS = [*products()]
OTHERS = [case for case in product(APART, REST, BESIDE) if case not in PRODUCTS]


@pytest.mark.parametrize(
    ("model", "rest", "beside"),
    some(PRODUCTS, [case for case in PRODUCTS if case[1:] == ("zero3", BESIDE[3])]),
    ids=str,
)
def test_on_two_axes(ranks: Ranks, model: str, rest: str, beside: dict[str, str]) -> None:
    accumulate = 4 if "pp" in beside else 2
    spec = expert_spec(model, beside | {"ep": REST[rest]}, accumulate=accumulate)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "rest", "beside"), OTHERS, ids=str)
def test_of_every_model_on_two_axes(
    ranks: Ranks, model: str, rest: str, beside: dict[str, str]
) -> None:
    test_on_two_axes(ranks, model, rest, beside)


@pytest.mark.nightly
@pytest.mark.parametrize("beside", TWO_BESIDE, ids=str)
@pytest.mark.parametrize("rest", ["zero2", "zero3"])
@pytest.mark.parametrize("model", ["top-2", "capacity-top-1"])
def test_on_eight_ranks(ranks: Ranks, model: str, rest: str, beside: dict[str, str]) -> None:
    test_on_two_axes(ranks, model, rest, beside)


@pytest.mark.nightly
@pytest.mark.parametrize("rest", ["ddp", "zero3"])
@pytest.mark.parametrize("model", ["top-1", "top-2", "capacity-top-1", "balanced"])
def test_on_four_ranks(ranks: Ranks, model: str, rest: str) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, {"ep": REST[rest]}, degrees={"ep": 4}))


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("model", ["deep", "capacity-top-1"])
def test_in_stages(ranks: Ranks, model: str, schedule: str) -> None:
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
def test_with_activations_kept_otherwise(
    ranks: Ranks, model: str, rest: str, kept: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, expert_spec(model, {"ep": REST[rest]}, **kept))


@pytest.mark.parametrize(
    ("model", "more", "beside"),
    some(
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
def test_with_shared_experts_while_rows_travel(
    ranks: Ranks, model: str, more: dict[str, Any], beside: dict[str, str]
) -> None:
    spec = expert_spec(model, beside | {"ep": REST["zero3"]}, accumulate=4, **OVERLAP, **more)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
@pytest.mark.parametrize("states", TIERED)
def test_with_states_of_the_rest_elsewhere(ranks: Ranks, states: str) -> None:
    assert not MATRIX.differences(ranks, expert_spec("top-2", {"ep": states}))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["bf16", "zero16", "fsdp-mixed"])
@pytest.mark.parametrize("model", ["top-2", "capacity-top-1"])
def test_in_true_dtypes(ranks: Ranks, model: str, layout: str) -> None:
    states = "M,S,S,R" if layout == "fsdp-mixed" else REST["zero3"]
    spec = expert_spec(model, {"ep": states}, precision={"layout": layout})
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
def test_masters_of_what_is_made_of_them(ranks: Ranks) -> None:
    placement = {"dp_shard": "M,S,S,R", "ep": "M,S,S,R"}
    precision = {"layout": "fsdp-mixed", "compute": "fp64"}
    assert not MATRIX.differences(ranks, expert_spec("top-2", placement, precision=precision))


@pytest.mark.nightly
@pytest.mark.parametrize("experts", [2, 6])
def test_experts_that_shards_do_not_divide(ranks: Ranks, experts: int) -> None:
    placement = {"dp_shard": "zero3", "ep": REST["zero3"]}
    assert not MATRIX.differences(
        ranks, expert_spec("top-2", placement, shape={"experts": experts})
    )


def trained(spec: Spec, folder: str) -> tuple[dict[str, torch.Tensor], float, float]:
    """Return the state in full after some steps, which are saved to `folder`, and then the losses
    of the next samples: of an evaluation, and of a step."""
    program = interpret(spec, world=World.join(spec.timeout))
    for index in range(STEPS):
        program.forward_backward(local_batch(program, open_corpus(spec.data), index))
        program.step(1e-3)
    checkpoint.save(program, Path(folder), STEPS, Exchange(program.world))
    return whole(program), *losses(program)


def loaded(spec: Spec, folder: str) -> tuple[dict[str, torch.Tensor], float, float]:
    """Return the same of a program that loads what was saved."""
    program = interpret(spec, world=World.join(spec.timeout))
    exchange = Exchange(program.world)
    path, saved, _ = checkpoint.find_newest_sound(
        [Path(folder) / manifest.folder_name(STEPS)], exchange
    )
    assert path is not None and saved is not None
    checkpoint.load(program, path, saved, exchange)
    return whole(program), *losses(program)


def losses(program: Program) -> tuple[float, float]:
    local = local_batch(program, open_corpus(program.spec.data), STEPS)
    shares = (program.evaluate(local).clone(), program.forward_backward(local).clone())
    evaluated, stepped = (sum(Exchange(program.world).gather(float(x))) for x in shares)
    return evaluated, stepped


def whole(program: Program) -> dict[str, torch.Tensor]:
    """Every tensor of the state in full, as a checkpoint names it."""
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
    before = ranks.run(first.world_size, trained, first, str(tmp_path))[0]
    after = ranks.run(then.world_size, loaded, then, str(tmp_path))[0]
    assert before[0].keys() == after[0].keys()
    for name, value in before[0].items():
        assert torch.equal(after[0][name], value), name
    assert after[1:] == pytest.approx(before[1:], rel=1e-12)
    assert before[1] == pytest.approx(before[2], rel=1e-12), "an evaluation is a pass like any"
