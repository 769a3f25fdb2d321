"""State outside of pipeline steps: checkpoints that other placements continue, and the held-out
loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import Split, read_batch
from ptrain.errors import PtrainError
from ptrain.interpreter.program import Program, interpret
from ptrain.models.cross_entropy import token_loss_sum
from ptrain.models.initialize import build_model
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from ptrain.train import checkpoint, manifest, saving
from ptrain.train.exchange import Exchange
from ptrain.train.loop import local_batch, seed_dropout
from ptrain.train.loop_inputs import learning_rate
from ptrain.verification.reference import Trajectory
from tests.gloo.pipeline_cases import pipeline_spec
from tests.gloo.runs import full_parameters
from tests.gloo.test_exact import failed_checks
from tests.ranks import Ranks
from tests.trajectories import FP64, one_device
from tests.trajectories import compare as compare_runs

pytestmark = pytest.mark.gloo

SAMPLES, STEPS, HELD_OUT = 8, 2, 3  # of a batch, of each placement, and which held-out batch
Placement = tuple[str, dict[str, int], str]  # a schedule, a mesh, the tuple of dp_shard
ZBV_ZERO3: Placement = ("zbv", {"pp": 2, "dp_shard": 2}, "zero3")
ALONE: Placement = ("1f1b", {}, "")
WAYS: list[Any] = [
    ("gpt-tied", [ZBV_ZERO3, ("1f1b", {"dp_shard": 4}, "zero3"), ("bfs", {"pp": 2}, ""), ALONE]),
    pytest.param(
        "llama-tied",
        [
            ALONE,
            ("dualpipev", {"pp": 2, "dp_shard": 2}, "zero2"),
            ("zero-bubble", {"dp_replicate": 2, "pp": 2}, ""),
            ("interleaved", {"pp": 2, "tp": 2}, ""),
            ("gpipe", {"pp": 4}, ""),
            ("zbv", {"dp_shard": 2, "pp": 2}, "zero1"),
            ("1f1b", {"dp_shard": 2}, "zero1"),
        ],
        marks=pytest.mark.nightly,
    ),
]


@dataclass(frozen=True, kw_only=True)
class TrainingLeg:
    """The results of one placement: losses, final parameters, and the held-out loss."""

    losses: tuple[float, ...]
    parameters: Mapping[str, torch.Tensor]
    held_out: float


def placed_spec(model: str, placement: Placement, **sections: Any) -> Spec:
    schedule, mesh, data = placement
    data_ranks = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    accumulate = {"accumulate": SAMPLES // data_ranks}
    return pipeline_spec(
        model, schedule, mesh=mesh, data=data or "zero3", batch=accumulate, **sections
    )


def sum_over_ranks(share: torch.Tensor) -> float:
    total = share.detach().double().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def resume_program(spec: Spec, folder: str, step: int) -> tuple[Program, Exchange]:
    """Return the program of a spec, loaded from `step` unless that is the start."""
    program = interpret(spec, world=World.join(spec.timeout))
    exchange = Exchange(program.world)
    if step:
        path = Path(folder) / manifest.folder_name(step)
        checkpoint.load(program, path, checkpoint.verify_files(path, exchange), exchange)
    return program, exchange


def continue_and_save(spec: Spec, folder: str, first: int) -> TrainingLeg:
    program, exchange = resume_program(spec, folder, first)
    source, losses = open_corpus(spec.data), []
    for step in range(first, first + STEPS):
        seed_dropout(program, step)
        lr = learning_rate(spec.optimizer, step)
        losses.append(
            sum_over_ranks(program.forward_backward(local_batch(program, source, step), lr))
        )
        program.step(lr)
    saving.save_checkpoint(program, Path(folder), first + STEPS, exchange)
    held_out = sum_over_ranks(
        program.evaluate(local_batch(program, source, HELD_OUT, Split.HELD_OUT))
    )
    found = TrainingLeg(
        losses=tuple(losses), parameters=full_parameters(program), held_out=held_out
    )
    exchange.close()
    return found


@torch.no_grad()
def held_out_loss(spec: Spec, parameters: Mapping[str, torch.Tensor]) -> float:
    """Return the held-out loss of a plain module with these parameters."""
    module = build_model(spec.model, sequence=spec.batch.sequence, seed=0).double()
    assert not module.load_state_dict(dict(parameters), strict=False).unexpected_keys
    whole = read_batch(
        open_corpus(spec.data),
        spec=spec,
        step=HELD_OUT,
        data_index=0,
        data_degree=1,
        split=Split.HELD_OUT,
    )
    inputs, targets = whole.tokens[:, :-1], whole.tokens[:, 1:]
    return float(token_loss_sum(module(inputs), targets)) / whole.global_tokens


@pytest.mark.parametrize(("model", "placements"), WAYS, ids=["four-placements", "seven-placements"])
def test_a_training_that_moves_between_placements_equals_one_device(
    ranks: Ranks, tmp_path: Path, model: str, placements: list[Placement]
) -> None:
    losses: tuple[float, ...] = ()
    for index, placement in enumerate(placements):
        spec, first = placed_spec(model, placement), index * STEPS
        leg = ranks.run(spec.world_size, continue_and_save, spec, str(tmp_path), first)[0]
        truth = one_device(spec, first + STEPS)
        losses += leg.losses
        run = Trajectory(
            losses=losses, gradient_norms=(), parameters=leg.parameters, moved_distance=1.0
        )
        assert not failed_checks(compare_runs(truth, run, FP64)), placement
        assert leg.held_out == pytest.approx(held_out_loss(spec, truth.parameters), rel=1e-12)


def load_without_model_name(spec: Spec, folder: str) -> str:
    """Return a program's message for a checkpoint without a model description."""
    program = interpret(spec, world=World.join(spec.timeout))
    exchange = Exchange(program.world)
    path = Path(folder) / manifest.folder_name(1)
    found = replace(checkpoint.verify_files(path, exchange), trained={})
    with pytest.raises(PtrainError) as caught:
        checkpoint.load(program, path, found, exchange)
    exchange.close()
    return str(caught.value)


def save_at_once(spec: Spec, folder: str) -> None:
    program, exchange = resume_program(spec, folder, 0)
    saving.save_checkpoint(program, Path(folder), 1, exchange)
    exchange.close()


@pytest.mark.parametrize(
    ("layers", "finding"),
    [
        (5, "tensors that this model or optimizer does not have, for example model.blocks.4."),
        (3, "has no model.blo"),
    ],
)
def test_a_checkpoint_of_more_or_fewer_layers_is_rejected_on_every_rank(
    ranks: Ranks, tmp_path: Path, layers: int, finding: str
) -> None:
    saved = placed_spec("llama", ALONE, shape={"layers": layers})
    ranks.run(1, save_at_once, saved, str(tmp_path))
    said = ranks.run(
        2, load_without_model_name, placed_spec("llama", ("gpipe", {"pp": 2}, "")), str(tmp_path)
    )
    assert said[0] == said[1] and finding in said[0]
