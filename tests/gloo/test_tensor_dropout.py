"""Dropout on tp: one mask for replicated activations, a different mask for every sequence shard;
one device with the masks of the ranks computes the same result."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import read_batch
from ptrain.interpreter.program import interpret
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from ptrain.train.loop import seed_dropout
from tests.gloo.runs import Report, train_on_rank
from tests.gloo.tensor_cases import tensor_spec
from tests.gloo.test_exact import failed_checks
from tests.ranks import Ranks
from tests.trajectories import FP64, one_device
from tests.trajectories import compare as compare_runs

pytestmark = pytest.mark.gloo

STEPS, DROPOUT, LAYERS = 3, 0.1, 2
HEADS_OR_TOKENS = 1  # the dimension of attention's heads, and of the residual stream's tokens
SEQUENCE = 16
Masks = list[torch.Tensor]
# user models: dropout in attention and after the MLP; in transformers after the embedding too
FOREIGN: dict[str, dict[str, Any]] = {
    "own": {"target": "tests.models_from_outside:dropping", "arguments": {"layers": LAYERS}},
    "gpt2": {"hf": "gpt2", "config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 260}},
}
nightly = partial(pytest.param, marks=pytest.mark.nightly)
ZERO3 = {"dp_shard": "zero3"}
MORE: list[tuple[str, dict[str, str]]] = [("R", ZERO3), ("S*", ZERO3), ("S*", {}), ("S", ZERO3)]


class MaskRecorder(TorchDispatchMode):
    """A mode that records every mask drawn in training, or replays the masks in `replayed` in their
    order. It does not record passes without gradients."""

    def __init__(self, replayed: Iterator[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.masks: Masks = []
        self.replayed = replayed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bernoulli_.float and torch.is_grad_enabled():
            if self.replayed is not None:
                mask = next(self.replayed, None)
                if mask is None:  # the first batch's loss again, after the last step
                    return result
                result.copy_(mask)
            own = result.to_local() if isinstance(result, DTensor) else result
            self.masks.append(own.to(torch.bool, copy=True))
        return result


def train_and_keep_masks(spec: Spec) -> tuple[Report, Masks]:
    with MaskRecorder() as drawn:
        report = train_on_rank(spec, STEPS)
    return report, drawn.masks


def train_on_ranks(
    ranks: Ranks, activations: str, data: dict[str, str], model: str = ""
) -> tuple[Spec, Any, list[Masks]]:
    """Return the spec, the trajectory of its first rank and every rank's masks."""
    what: dict[str, Any] = {"own": FOREIGN[model]} if model else {"shape": {"dropout": DROPOUT}}
    spec = tensor_spec("gpt", activations=activations, data=data, **what)
    reports = ranks.run(spec.world_size, train_and_keep_masks, spec)
    return spec, reports[0][0].trajectory, [masks for _, masks in reports]


def is_attention(mask: torch.Tensor) -> bool:
    return mask.dim() == 4  # samples, heads, tokens, tokens


def join_masks(masks: tuple[torch.Tensor, ...], *, is_sequence: bool) -> torch.Tensor:
    """Return the single-device mask of the masks that the ranks of tp drew. Before the blocks of a
    user's model, all ranks have all tokens."""
    has_slice = masks[0].shape[HEADS_OR_TOKENS] < SEQUENCE
    if is_attention(masks[0]) or (is_sequence and has_slice):
        return torch.cat(masks, dim=HEADS_OR_TOKENS)
    assert all(torch.equal(mask, masks[0]) for mask in masks[1:])
    return masks[0]


@pytest.mark.parametrize(
    ("activations", "data", "model"),
    [
        ("R", {}, ""),
        ("S", {}, ""),
        *(nightly(*case, "") for case in MORE),
        ("S", {}, "gpt2"),
        nightly("R", {}, "own"),
        *(nightly(*case, model) for case in MORE[:1] for model in FOREIGN),
        nightly("S", {}, "own"),
        nightly("R", {}, "gpt2"),
    ],
    ids=str,
)
def test_one_device_with_the_masks_of_the_ranks_computes_the_same(
    ranks: Ranks, activations: str, data: dict[str, str], model: str
) -> None:
    if "hf" in FOREIGN.get(model, {}):
        pytest.importorskip("transformers")
    spec, run, masks = train_on_ranks(ranks, activations, data, model)
    degree, is_sequence = 2, activations != "R"
    of_data_rank = [
        [
            join_masks(each, is_sequence=is_sequence)
            for each in zip(*masks[first : first + degree], strict=True)
        ]
        for first in range(0, spec.world_size, degree)
    ]
    per_step = len(of_data_rank[0]) // STEPS
    replayed = (
        mask.double()
        for step in range(STEPS)
        for masks_ in of_data_rank
        for mask in masks_[step * per_step : (step + 1) * per_step]
    )
    with MaskRecorder(replayed) as drawn:
        reference = one_device(spec, STEPS)
    assert len(drawn.masks) == STEPS * per_step * spec.data_degree
    assert not failed_checks(compare_runs(reference, run, FP64))
    assert failed_checks(compare_runs(one_device(spec, STEPS), run, FP64)), "dropout did something"


@pytest.mark.parametrize("activations", ["R", "S"])
def test_no_two_slices_have_the_same_mask(ranks: Ranks, activations: str) -> None:
    """Compare the masks of ranks with different activations, and of the layers of a rank."""
    spec, _, (first, second) = train_on_ranks(ranks, activations, {})
    assert spec.world_size == 2
    for mine, theirs in zip(first, second, strict=True):
        if is_attention(mine) or activations == "S":
            assert not torch.equal(mine, theirs)
    attention = [mask for mask in first if is_attention(mask)]
    assert len({mask.numpy().tobytes() for mask in attention}) == len(attention)
    rate = 1 - torch.cat([mask.flatten() for mask in attention]).float().mean().item()
    assert abs(rate - DROPOUT) < 0.02


def draw_masks_twice(spec: Spec) -> tuple[Masks, Masks]:
    """Return the masks of a step, and of the same step again."""
    program = interpret(spec, world=World.join(spec.timeout))
    drawn = []
    for _ in range(2):
        local = read_batch(open_corpus(spec.data), spec=spec, step=0, data_index=0, data_degree=1)
        seed_dropout(program, 3)
        with MaskRecorder() as masks:
            program.forward_backward(local)
        program.wrapped.clear_gradients()
        drawn.append(masks.masks)
    return drawn[0], drawn[1]


@pytest.mark.parametrize("activations", ["R", "S"])
def test_masks_depend_only_on_the_seed(ranks: Ranks, activations: str) -> None:
    spec = tensor_spec("gpt", activations=activations, shape={"dropout": DROPOUT})
    for first, again in ranks.run(spec.world_size, draw_masks_twice, spec):
        assert first and all(torch.equal(*pair) for pair in zip(first, again, strict=True))
