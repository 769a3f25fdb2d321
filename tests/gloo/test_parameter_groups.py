"""Parameter groups: bytes are the predicted ones, and losses are those of one device and of a loop
that is written by hand with torch.optim's parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptrain.algebra.legality import require_runnable
from ptrain.data.corpus import open_corpus
from ptrain.interpreter.program import interpret
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.train.loop import local_batch
from ptrain.train.loop_inputs import learning_rate
from ptrain.verification.reference import ReferenceTraining
from tests.gloo.outcomes import MEASURED_STEP, Outcome
from tests.gloo.runs import train_on_rank
from tests.gloo.test_flat_state import require_a_move
from tests.gloo.test_optimizers import CASES, STEPS, mismatches
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

# the embeddings and the norms cut through the root's flat unit, the last through one block's
GROUPS: Mapping[str, Any] = {
    "name": "adamw",
    "decay": "matrices",
    "groups": [
        {"match": "embeddings", "lr_factor": 0.5, "betas": [0.8, 0.95]},
        {"match": "norms", "weight_decay": 0.3},
        {"match": "blocks.0.mlp", "lr": 4e-3},
    ],
}
BY_DEFAULT = ("ddp", "zero1", "zero3", "tp", "pp")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in BY_DEFAULT else pytest.mark.nightly) for c in CASES]
)
def test_groups_are_exact_and_equal_one_device(ranks: Ranks, case: str) -> None:
    assert not mismatches(ranks, CASES[case](optimizer=GROUPS))


@pytest.mark.parametrize(("before", "after"), [("zero1", "ddp")])
def test_the_state_of_groups_moves_to_another_placement(
    ranks: Ranks, tmp_path, before: str, after: str
) -> None:
    require_a_move(ranks, tmp_path, *(CASES[case](optimizer=GROUPS) for case in (before, after)))


@pytest.mark.parametrize("row", ["ddp", pytest.param("zero3", marks=pytest.mark.nightly)])
def test_optimizers_of_groups_have_different_state(ranks: Ranks, row: str) -> None:
    groups = [{"match": "vectors", "name": "sgd"}, {"match": "head", "name": "lion"}]
    spec = CASES[row](optimizer={"name": "adamw", "groups": groups})
    assert not mismatches(ranks, spec)


# The optimizers of three public repositories, each as a spec and as a loop with torch.optim.

MODEL = ["model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.ffn=64"]
BATCH = "batch={global: 4, micro: 1, sequence: 16}"
Named = dict[str, Tensor]


def adamw_with_decay_on_matrices(
    named: Named, *, fused: bool = False
) -> list[torch.optim.Optimizer]:
    """As nanoGPT and build-nanogpt: no decay for biases and norms."""
    matrices = [p for p in named.values() if p.dim() >= 2]
    vectors = [p for p in named.values() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-8, fused=fused)]


def muon_beside_adamw(named: Named) -> list[torch.optim.Optimizer]:
    """As nanochat: Muon for matrices in blocks, AdamW with its rates for embedding and head."""
    inner = [p for name, p in named.items() if name.startswith("blocks.") and p.dim() == 2]
    rest = [p for name, p in named.items() if p.dim() < 2]
    groups = [
        {"params": [named["embed.weight"]], "lr": 0.02},
        {"params": [named["head.weight"]], "lr": 4e-4},
        {"params": rest, "lr": 2e-3},
    ]
    common = {"betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    muon = torch.optim.Muon(
        inner, lr=2e-3, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    return [torch.optim.AdamW(groups, **common), muon]


def cosine(peak: float, step: int, *, warmup: int, total: int) -> float:
    """Return nanoGPT's learning rate, whose warm-up reaches the peak in its last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    return peak * 0.1 + 0.5 * (1 + math.cos(math.pi * progress)) * (peak - peak * 0.1)


def decaying(peak: float, step: int) -> float:
    return cosine(peak, step, warmup=2, total=4)


def constant(peak: float, step: int) -> float:
    return peak


ADAMW = [
    "optimizer.lr=6e-4", "optimizer.weight_decay=0.1", "optimizer.betas=[0.9, 0.95]",
    "optimizer.clip=1.0", "optimizer.decay=matrices",
    "optimizer.schedule={warmup: 2, decay_steps: 2, min_lr_ratio: 0.1}",
]  # fmt: skip
MUON = [
    "optimizer.name=muon", "optimizer.lr=2e-3", "optimizer.weight_decay=0", "optimizer.clip=null",
    "optimizer.betas=[0.8, 0.95]", "optimizer.eps=1e-10", "optimizer.schedule.warmup=0",
    "optimizer.groups=[{match: embeddings, lr: 0.02}, {match: head, lr: 4e-4}]",
]  # fmt: skip
Optimizers = Callable[[Named], list[torch.optim.Optimizer]]
SETUPS: Mapping[str, tuple[list[str], Optimizers, Callable[[float, int], float]]] = {
    "nanoGPT": (["model.preset=gpt-tiny", *ADAMW], adamw_with_decay_on_matrices, decaying),
    "build-nanogpt": (
        ["model.preset=gpt-tiny", "model.tied=true", "batch.micro=2", *ADAMW],
        adamw_with_decay_on_matrices, decaying,
    ),
    "nanochat": (MUON, muon_beside_adamw, constant),
}  # fmt: skip


def setup_spec(name: str, row: str, *more: str) -> Spec:
    return require_runnable(load(row, [*MODEL, BATCH, *SETUPS[name][0], *more]))


def losses_by_hand(spec: Spec, name: str) -> list[float]:
    """Train the model with torch.optim's parameter groups; the reference computes gradients."""
    device, (_, make, rate_at) = ReferenceTraining(spec), SETUPS[name]
    named = dict(device.module.named_parameters())
    optimizers = make(named)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    losses = []
    for step in range(STEPS):
        sums = device.accumulate(step)
        losses.append(sums.loss)
        for key, gradient in sums.sums.items():
            named[key].grad = gradient
        if spec.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(named.values(), spec.optimizer.clip)
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate_at(peak, step)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param("nanoGPT", "ddp", marks=pytest.mark.nightly),
        ("nanoGPT", "zero1"),
        ("build-nanogpt", "zero3"),
        ("nanochat", "ddp"),
    ],
)
def test_losses_are_those_of_a_loop_with_groups_of_torch(ranks: Ranks, name: str, row: str) -> None:
    spec = setup_spec(name, row)
    outcome = Outcome(spec, ranks.run(spec.world_size, train_on_rank, spec, STEPS, MEASURED_STEP))
    by_hand = losses_by_hand(spec, name)
    assert outcome.trajectory.losses == pytest.approx(by_hand, rel=2e-6)
    assert by_hand[-1] < by_hand[0]


@pytest.mark.parametrize("name", ["nanoGPT", "build-nanogpt"])
def test_on_one_device_parameters_are_those_of_the_loop_to_the_bit(name: str) -> None:
    spec = setup_spec(name, "ddp", "mesh={}", "placement={}", "optimizer.clip=null")
    device, source = ReferenceTraining(spec), open_corpus(spec.data)
    named, program = dict(device.module.named_parameters()), interpret(spec, world=World())
    (optimizer,) = adamw_with_decay_on_matrices(named, fused=True)
    for step in range(STEPS):
        rate = learning_rate(spec.optimizer, step)
        program.forward_backward(local_batch(program, source, step), rate)
        for key, gradient in device.accumulate(step).sums.items():
            named[key].grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate
        program.step(rate)
        optimizer.step()
        optimizer.zero_grad()
    trained = program.state_dict()["model"]
    assert all(torch.equal(trained[key], parameter) for key, parameter in named.items())
