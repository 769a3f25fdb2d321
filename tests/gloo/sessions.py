"""Trainings on pooled ranks: they run `python -m ptrain.train` on each rank without starting
processes.

They test the loop and the run folder. tests/jobs.py tests the launcher with processes."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch.distributed as dist
from pytest import MonkeyPatch

from ptrain.train.options import parse_options
from ptrain.train.rank_exit import run_for_exit_code
from ptrain.train.session import train_rank
from tests.ranks import Ranks


@dataclass(frozen=True)
class RankResult:
    """The result of a rank's training."""

    code: int
    output: str
    error: str


def train_on_rank(words: tuple[str, ...]) -> RankResult:
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as error:
        code = run_for_exit_code(lambda: train_rank(parse_options(words)))
    return RankResult(code, output.getvalue(), error.getvalue())


def train_without_launcher(words: tuple[str, ...]) -> RankResult:
    """Train with launcher variables removed from the environment, so that every rank prints."""
    with MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        return train_on_rank(words)


def train_as_torchrun(words: tuple[str, ...]) -> RankResult:
    """Train with rank and world size in the environment, as torchrun sets them."""
    with MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(dist.get_rank()))
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        return train_on_rank(words)


def train_on_ranks(ranks: Ranks, size: int, *words: str, folder: Path) -> list[RankResult]:
    """Train on `size` ranks and return each rank's result."""
    return ranks.run(size, train_without_launcher, (*words, "--run-dir", str(folder)))
