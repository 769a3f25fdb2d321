"""The loop once more from its start: what is not the same bit by bit cannot be judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ptrain.report.finding import Culprit, Subject
from ptrain.verification.jobs.compare import digests
from ptrain.verification.jobs.drawing import Drawing
from ptrain.verification.jobs.job import Job, Terms
from ptrain.verification.jobs.ranks import Ranks
from ptrain.verification.jobs.record import StepRecorder
from ptrain.verification.jobs.shards import ParameterShard, held_by
from ptrain.verification.jobs.words import families

Sums = dict[str, dict[str, list[str]]]


def repeated(
    job: Job,
    wholes: Mapping[str, Tensor],
    terms: Terms,
    *,
    shares: Sequence[Any],
    first: Sequence[Sums],
    drawing: Drawing,
) -> Culprit | None:
    """Runs as many steps as `first` has checksums of, which begins with those of the start."""
    holds, ranks = held_by(job.model, wholes, terms.part), drawing.ranks
    differing = _gathered(ranks, _differing(first[0], {"parameters": _sums(holds)}))
    if differing:
        return _culprit(
            differing,
            0,
            "Built anew, the loop has other weights: seed what builds it, on every rank.",
        )
    for step, (share, expected) in enumerate(zip(shares, first[1:], strict=True)):
        with StepRecorder(job.model, holds) as seen, drawing.recorded(job.model):
            job.step(share)
        now = {"gradients": digests(holds, seen.gradients), "parameters": _sums(holds)}
        differing = _gathered(ranks, _differing(expected, now))
        if differing:
            return _culprit(
                differing, step,
                "Run again from the same weights on the same batch, the loop gives other bits: "
                "an unseeded dropout or draw, or an operator that is not deterministic "
                "(torch.use_deterministic_algorithms).",
            )  # fmt: skip
    return None


def start_sums(holds: Mapping[str, ParameterShard]) -> Sums:
    return {"parameters": _sums(holds)}


def _sums(holds: Mapping[str, ParameterShard]) -> dict[str, list[str]]:
    return digests(holds, {name: shard.value() for name, shard in holds.items()})


def _differing(expected: Sums, now: Sums) -> dict[str, list[str]]:
    """Return what differs, by kind; gradients before parameters."""
    return {
        kind: [name for name, checksum in sums.items() if expected[kind].get(name) != checksum]
        for kind, sums in now.items()
    }


def _gathered(ranks: Ranks, mine: dict[str, list[str]]) -> list[tuple[int, str, list[str]]]:
    """(rank, kind, names) of the first kind that differs on any rank."""
    everyones = ranks.gather(mine)
    for kind in mine:
        rows = [(rank, kind, its[kind]) for rank, its in enumerate(everyones) if its[kind]]
        if rows:
            return rows
    return []


def _culprit(differing: Sequence[tuple[int, str, list[str]]], step: int, sentence: str) -> Culprit:
    names = dict.fromkeys(name for _, _, group in differing for name in group)
    return Culprit(
        state=Subject(differing[0][1]),
        axis="",
        factor="not the same twice",
        place=families(names),
        step=step,
        ranks=tuple(rank for rank, _, _ in differing),
        sentence=sentence,
    )
