"""Failures in a pipeline are reported with rank, stage and, if known, micro-batch; no rank waits
longer than the timeout, and no process is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ptrain.algebra.legality import require_runnable
from ptrain.data.corpus import open_corpus
from ptrain.errors import RankFailed
from ptrain.interpreter.program import interpret
from ptrain.models.transformer import Block
from ptrain.plan.lower import built_in_facts
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.train.loop import local_batch
from ptrain.units import format_count
from tests import jobs

pytestmark = pytest.mark.gloo

TIMEOUT = 1.0  # seconds, which the neighbours wait
BROKEN_AT = 2  # the micro-batch


class Fault(StrEnum):
    """A failure on one rank in the micro-batch BROKEN_AT."""

    FORWARD = "a layer raises in its forward pass"
    BACKWARD = "a layer raises in its backward pass"
    SHAPE = "a layer gives fewer tokens than it was given"
    DTYPE = "a layer gives another dtype than it was given"
    BATCH = "the batch has another size"
    SILENCE = "a layer takes longer than the timeout"


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken")


def breaking_hook(fault: Fault) -> Callable[..., torch.Tensor | None]:
    """Return a forward hook that fails."""
    calls = iter(range(1000))

    def hook(layer: nn.Module, given: object, x: torch.Tensor) -> torch.Tensor | None:
        if next(calls) != BROKEN_AT:
            return None
        match fault:
            case Fault.FORWARD:
                raise ValueError("broken")
            case Fault.BACKWARD:
                return Broken.apply(x)
            case Fault.SHAPE:
                return x[:, :-1]
            case Fault.DTYPE:
                return x.double()
            case Fault.SILENCE:
                time.sleep(2 * TIMEOUT)
            case Fault.BATCH:
                pass
        return None

    return hook


def faulty_spec(ranks: int, schedule: str, **replicas: int) -> Spec:
    stages = 2 if schedule in ("zbv", "interleaved", "zero-bubble", "bfs") else 1
    return require_runnable(
        load(
            {
                "model": {"layers": 4, "hidden": 32, "heads": 2, "ffn": 64, "vocab": 260},
                "mesh": {"pp": ranks} | replicas,
                "placement": {"pp": "S,S,S,R"} | dict.fromkeys(replicas, "R,R,R,R"),
                "pipeline": {"schedule": schedule, "stages": stages * ranks},
                "batch": {"sequence": 16, "accumulate": 4, "micro": 2},
                "timeout": {"step": TIMEOUT},
            }
        )
    )


def error_on_rank(spec: Spec, fault: Fault, broken: int, verb: str) -> str:
    """Run a step in which `fault` happens in the first layer of the rank `broken`; return this
    rank's error."""
    world = World.join(spec.timeout)
    program = interpret(spec, world=world)
    local = local_batch(program, open_corpus(spec.data), 0)
    if world.rank == broken:
        layer = next(m for m in program.model.modules() if isinstance(m, Block))
        layer.register_forward_hook(breaking_hook(fault))
        if fault is Fault.BATCH:
            local = replace(local, tokens=local.tokens[:6])
    dist.barrier()  # only the fault delays a rank
    try:
        getattr(program, verb)(local)
    except RankFailed as error:
        return str(error)
    return ""


RAISES = "stage {}, micro-batch 2: ValueError: broken"
SENDS = "stage {}, micro-batch 2: hidden states are {} in torch.{}, but the next stage expects "
LOGITS = "stage 1, micro-batch 2: ValueError: Expected input batch_size (30)"
TRAIN, EVALUATE = "forward_backward", "evaluate"


@pytest.mark.parametrize(
    ("schedule", "ranks_of_pp", "fault", "broken", "verb", "told"),
    [
        ("1f1b", 2, Fault.FORWARD, 0, TRAIN, RAISES.format(0)),
        ("1f1b", 4, Fault.BACKWARD, 2, TRAIN, RAISES.format(2)),
        ("zbv", 2, Fault.BACKWARD, 1, TRAIN, RAISES.format(1)),
        ("interleaved", 2, Fault.SHAPE, 0, TRAIN, SENDS.format(0, [2, 15, 32], "float32")),
        ("bfs", 2, Fault.DTYPE, 0, EVALUATE, SENDS.format(0, [2, 16, 32], "float64")),
        ("naive", 2, Fault.SHAPE, 1, TRAIN, LOGITS),
        ("gpipe", 2, Fault.BATCH, 1, TRAIN, "stage 1: the batch has [6, 17] tokens, but the "),
    ],
    ids=str,
)
def test_the_failing_rank_reports_place_and_cause_and_the_others_name_that_rank(
    ranks, schedule, ranks_of_pp, fault, broken, verb, told
):
    spec = faulty_spec(ranks_of_pp, schedule)
    said = ranks.run(ranks_of_pp, error_on_rank, spec, fault, broken, verb)
    assert said[broken].startswith(told)
    neighbours = [said[rank] for rank in (broken - 1, broken + 1) if 0 <= rank < ranks_of_pp]
    assert all(f": waiting for rank {broken} (stage " in each for each in neighbours), said


def test_a_silent_rank_is_named_after_the_step_timeout(ranks):
    """On a mesh of two axes, whose groups torch creates with a timeout of 30 minutes."""
    spec = faulty_spec(2, "1f1b", dp_replicate=2)
    said = ranks.run(4, error_on_rank, spec, Fault.SILENCE, 3, TRAIN)
    assert "stage 0: waiting for rank 3 (stage 1) to " in said[1], said
    assert f"Timed out waiting {TIMEOUT * 1000:g}ms" in said[1]


# -- as processes

IN_PROC = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="ranks are found in /proc"
)
TINY = tuple(each for each in jobs.TINY if not each.startswith("model.layers"))
ENDLESS = ("train.steps=1000000", "timeout.step=20")
TORCHRUN = ("--standalone", "--nproc-per-node", "2", "-m", "ptrain.train")
RAISES_ON_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    import ptrain.models.transformer as block
    forward, calls = block.Block.forward, iter(range(10**9))
    def broken(self, x, *more):
        if next(calls) == 41:
            raise ValueError("broken")
        return forward(self, x, *more)
    block.Block.forward = broken
"""


def pipeline_command(ranks: int, schedule: str) -> tuple[str, ...]:
    """Return a command with one layer per stage."""
    stages = 2 * ranks if schedule in ("zbv", "interleaved") else ranks
    mesh = (f"mesh={{pp: {ranks}}}", "placement={pp: [S, S, S, R]}", f"model.layers={stages}")
    return ("zero3", *mesh, f"pipeline.schedule={schedule}", *TINY)


@IN_PROC
@pytest.mark.parametrize(
    ("ranks_of_pp", "schedule", "rank", "number", "told"),
    [
        (2, "gpipe", 0, signal.SIGKILL, "error: rank 0 (stage 0) was killed by SIGKILL"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (
                    2,
                    "zbv",
                    0,
                    signal.SIGSTOP,
                    "error: rank 0 (stages 0 and 3) was stopped",
                ),
                (3, "1f1b", 1, signal.SIGKILL, "error: rank 1 (stage 1) was killed by SIGKILL"),
                (2, "interleaved", 1, signal.SIGKILL, "error: rank 1 (stages 1 and 3) was killed"),
                (3, "1f1b", 2, signal.SIGSTOP, "error: rank 2 (stage 2) was stopped (SIGSTOP)"),
            )
        ),
    ],
)
def test_a_rank_that_is_killed_or_stopped_in_a_pipeline_is_named_with_its_stages(
    tmp_path, ranks_of_pp, schedule, rank, number, told
):
    asked = ["train", *pipeline_command(ranks_of_pp, schedule), *ENDLESS]
    with jobs.job(asked, cwd=tmp_path, is_forked=True) as job:
        job.until("step 3/")
        ranks = job.ranks()
        os.kill(ranks[rank], number)
        assert job.wait(60) == 3
        assert jobs.have_ended(list(ranks.values())), "a rank outlives its job"
    assert job.error.startswith(told)
    assert "Traceback" not in job.error.split("last lines of")[0]


@IN_PROC
@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_under_torchrun_the_neighbour_names_the_rank_that_is_gone_or_silent(tmp_path, number):
    arguments = [*TORCHRUN, *pipeline_command(2, "1f1b"), *ENDLESS, "timeout.step=8"]
    with jobs.job(arguments, cwd=tmp_path, module="torch.distributed.run") as job:
        job.until("step 3/")
        ranks = job.ranks()
        os.kill(ranks[1], number)
        assert job.wait(120) != 0
        assert jobs.have_ended(list(ranks.values())), "a rank outlives its job"
    assert "stage 0: waiting for rank 1 (stage 1) to " in job.error


@pytest.mark.nightly  # by default the test above checks pooled ranks
@pytest.mark.parametrize("launcher", ["ptrain", "torch.distributed.run"])
def test_a_stage_that_raises_ends_the_job_with_its_message_only(tmp_path, launcher):
    (tmp_path / "sitecustomize.py").write_text(RAISES_ON_RANK_1)
    begin = ("train",) if launcher == "ptrain" else TORCHRUN
    asked = [*begin, *pipeline_command(2, "zero-bubble"), *ENDLESS]
    code, job = jobs.run_job(asked, cwd=tmp_path, module=launcher, first=tmp_path)
    assert "stage 1, micro-batch 1: ValueError: broken" in job.error
    assert "Full Schedule" not in job.error and "failed to run forward" not in job.error
    if launcher == "ptrain":
        assert code == 3
        assert job.error.startswith("error: rank 1 (stage 1) failed: stage 1, micro-batch 1: ")
    assert not list(tmp_path.rglob("checkpoints/*"))


@IN_PROC
def test_a_pipeline_that_is_interrupted_ends_its_step_and_saves_once(tmp_path):
    asked = [*pipeline_command(2, "interleaved"), "train.steps=1000000", "checkpoint.at_end=true"]
    with jobs.job(["train", *asked], cwd=tmp_path, is_forked=True) as job:
        job.until("step 3/")
        ranks = job.ranks()
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(60) == 143
        assert jobs.have_ended(list(ranks.values()))
    assert "interrupted by SIGTERM after step" in job.output
    again = "ptrain train runs/latest/spec.resolved.yaml --resume runs/latest"
    assert again in job.output
    folder = tmp_path / "runs" / "latest"
    whole = format_count(built_in_facts(load(folder / "spec.resolved.yaml").spec).numel)
    batch_of_all = "2 ranks gloo/cpu · batch 4 = 1 micro × 4 accumulated × 1 data"
    assert job.lines[0].startswith(f"zero3 · llama {whole} · {batch_of_all}")
    (saved,) = (folder / "checkpoints").iterdir()
    assert saved.name.startswith("step-")
