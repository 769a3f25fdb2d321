"""Trainings on the ranks of the pool: what `python -m ptrain.train` does on each, without the
seconds that starting it as a process costs. For what the loop and the folder do; who starts ranks
and watches them is tested with processes (tests/jobs.py)."""

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
class Ended:
    """How a rank's training ended."""

    code: int
    output: str
    error: str


def trained(words: tuple[str, ...]) -> Ended:
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as error:
        code = run_for_exit_code(lambda: train_rank(parse_options(words)))
    return Ended(code, output.getvalue(), error.getvalue())


def of_no_launcher(words: tuple[str, ...]) -> Ended:
    """The same, whatever a test before left in the environment: that every rank speaks for
    itself."""
    with MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        return trained(words)


def as_torchrun_starts(words: tuple[str, ...]) -> Ended:
    """The same, with the number of the rank and how many there are in the environment."""
    with MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(dist.get_rank()))
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        return trained(words)


def train(ranks: Ranks, size: int, *words: str, folder: Path) -> list[Ended]:
    """On `size` ranks, each with its own account."""
    return ranks.run(size, of_no_launcher, (*words, "--run-dir", str(folder)))
