"""What all ranks know of a step whose gradients depart, on every rank: of each parameter a sample
of its elements as one device has them, as each rank's optimizer got them, and as each rank's
micro-batches contribute to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ptrain.verification.factors import are_alike, factor_text, multiple, share_of_sum
from ptrain.verification.jobs.probe import ProbeResult
from ptrain.verification.jobs.ranks import Ranks
from ptrain.verification.jobs.record import StepRecorder
from ptrain.verification.jobs.samples import Samples, ledger_of, rows_of
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import held

_SAMPLE = 256  # elements of a parameter: half of them its largest, half evenly spread
_MOST = 16  # micro-batches whose contributions are told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Of one parameter with S sampled elements: `truth` [S], `before` [S] (the reference's gradient
    of the step before; zeros where there is none), `gradients` [ranks, S] and `basis`
    [ranks, micro-batches, S], NaN for what a rank has not."""

    truth: Tensor
    before: Tensor
    gradients: Tensor
    basis: Tensor

    def scaled(self, factor: float) -> Sample:
        """The sample with its gradients divided by a factor."""
        return Sample(
            truth=self.truth,
            before=self.before,
            gradients=self.gradients / factor,
            basis=self.basis,
        )

    def holders(self) -> list[int]:
        """Ranks that have any of these elements."""
        return [rank for rank, row in enumerate(self.gradients) if bool((~row.isnan()).any())]

    def of(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return what this rank has of the sample, and what it should have."""
        has = ~self.gradients[rank].isnan()
        return self.gradients[rank][has], self.truth[has]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvidence:
    """`norms`: of each rank's gradients, all parameters together; `norm`: the reference's.
    `micro_batches` is the most that any rank ran; `ledger` the samples that they saw."""

    samples: dict[str, Sample]
    norms: tuple[float, ...]
    norm: float
    micro_batches: int
    ledger: Samples | None


def evidence(
    ranks: Ranks,
    holds: Mapping[str, ParameterShard],
    *,
    reference: StepRecorder,
    run: StepRecorder,
    probe: ProbeResult,
    before: Mapping[str, Tensor],
) -> JobEvidence:
    """Gather samples of the gradients of both sides on all ranks. All ranks call it."""
    names = list(reference.gradients)
    places = _places(ranks, {name: reference.gradients[name].flatten() for name in names})
    micro_batches = max(ranks.gather(len(probe.gradients)))
    rows: list[Tensor] = []
    for name in names:
        truth, where = reference.gradients[name].flatten(), places[name]
        old = before.get(name, torch.zeros_like(truth)).flatten()
        rows.append(torch.stack([truth[where], old[where]]))
        rows[-1] = torch.cat(
            [
                rows[-1].double(),
                _at_elements(truth, run.gradients.get(name), holds.get(name))[where].unsqueeze(0),
                _basis(truth, probe, name, min(micro_batches, _MOST))[:, where],
            ]
        )
    everyones = ranks.stack(torch.cat(rows, dim=1))
    samples, start = {}, 0
    for name in names:
        size = places[name].numel()
        mine = everyones[:, :, start : start + size]
        samples[name] = Sample(
            truth=mine[0, 0], before=mine[0, 1], gradients=mine[:, 2], basis=mine[:, 3:]
        )
        start += size
    squares = sum(float(gradient.double().square().sum()) for gradient in run.gradients.values())
    total = sum(
        float(gradient.double().square().sum()) for gradient in reference.gradients.values()
    )
    return JobEvidence(
        samples=samples,
        norms=tuple(ranks.gather(math.sqrt(squares))),
        norm=math.sqrt(total),
        micro_batches=micro_batches,
        ledger=ledger_of(rows_of(reference.calls), ranks.gather(rows_of(run.calls))),
    )


def _places(ranks: Ranks, truths: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rank 0 chooses which elements are sampled."""
    chosen = {}
    for name, truth in truths.items():
        count = min(truth.numel(), _SAMPLE)
        if count == truth.numel():
            chosen[name] = torch.arange(count)
            continue
        largest = truth.abs().topk(count // 2).indices.cpu()
        spread = torch.linspace(0, truth.numel() - 1, count - count // 2).long()
        chosen[name] = torch.cat([largest, spread])
    together = ranks.first(torch.cat([indices.long() for indices in chosen.values()]))
    sizes = [indices.numel() for indices in chosen.values()]
    return dict(zip(chosen, together.split(sizes), strict=True))


def _at_elements(truth: Tensor, gradient: Tensor | None, shard: ParameterShard | None) -> Tensor:
    """Return this rank's gradient at the elements of the whole: NaN where it holds none of them,
    zero where the optimizer was given none."""
    row = torch.full(truth.shape, math.nan, dtype=torch.float64, device=truth.device)
    if shard is None:
        return row
    value = torch.zeros(()) if gradient is None else gradient
    if shard.at is None:
        row[:] = value.to(row)
    else:
        row[shard.at.to(row.device)] = value.to(row)
    return row


def _basis(truth: Tensor, probe: ProbeResult, name: str, count: int) -> Tensor:
    """[micro-batches, elements]: zeros of a micro-batch that this rank has not, NaN of one that
    could not be run again."""
    rows = torch.zeros(count, truth.numel(), dtype=torch.float64, device=truth.device)
    for number, gradients in enumerate(probe.gradients[:count]):
        if not gradients:
            rows[number] = math.nan
        elif name in gradients:
            rows[number] = gradients[name].double().flatten()
    return rows


def shared_output(
    ranks: Ranks, truth: Tensor | None, output: Tensor | None, tolerance: float
) -> tuple[str, str]:
    """The axis and the factor of a module's output (or its gradient) that departs: a sum over an
    axis that is missing, or a multiple. Empty strings where it is neither. All ranks call it."""
    alike = truth is not None and output is not None and truth.shape == held(output).shape
    shapes = ranks.gather(list(truth.shape) if alike and truth is not None else None)
    if any(shape != shapes[0] or shape is None for shape in shapes):
        return "", ""
    assert truth is not None and output is not None
    row = truth.flatten()
    (where,) = _places(ranks, {"": row}).values()
    both = torch.stack([row[where], held(output).flatten()[where].to(row)])
    everyones = ranks.stack(both)
    for axis, groups in ranks.axes.items():
        fits = []
        for group in groups:
            truths, parts = everyones[list(group), 0], everyones[list(group), 1]
            if not are_alike(list(truths), 1e-6) or are_alike(list(parts), 1e-6):
                break
            fits.append(share_of_sum(list(parts), truths[0]))
        if len(fits) == len(groups) and all(fit.holds(tolerance) for fit in fits):
            return axis, "missing all-reduce"
    fit = multiple(everyones[:, 1], everyones[:, 0])
    return "", factor_text(fit.factor, ranks.degrees) if fit.holds(tolerance) else ""
