"""Moving averages of the parameters (torch.optim.swa_utils.AveragedModel, or a copy by hand) beside
one device's after every step, and what an update of one that differs was made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ptrain.report.finding import Mismatch, Moment, RootCause, Subject
from ptrain.verification.compare import Differences
from ptrain.verification.jobs.job import Average, Job, Ranks, Tolerance
from ptrain.verification.jobs.record import beside_way
from ptrain.verification.jobs.root_causes import root_cause
from ptrain.verification.jobs.shards import ParameterShard, shard_of
from ptrain.verification.parts import canonical_name, difference, held, multiple, norm

_ROUNDINGS = 4  # of an average, in its own dtype
_LARGE = 0.05  # of its way: a fault is larger, even where its way is not much more than roundings
_FITS = 1e-2  # relative to an update: of which it is made; roundings are added
_SAME = 0.02  # of two weights

# This rank's elements of the loop's average and of one device's, and of both sides' parameters.
Rows = dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]


class Averages:
    """`before` and `compare` around every step. `made_of`: what this rank's average was made of, as
    a factor and in words, and how far it is from one device's where it is updated as that is."""

    def __init__(
        self, reference: Job, loop: Job, holds: Mapping[str, ParameterShard],
        wholes: Mapping[str, ParameterShard],
    ) -> None:  # fmt: skip
        self._sides = (loop, holds), (reference, wholes)
        self._origin: Rows = {}
        self._before: Rows = {}
        self.made_of = "", "", 0.0

    def before(self) -> None:
        """Take the averages before a step."""
        self._before = self._values()
        self._origin = self._origin or self._before

    def compare(self, differences: Differences, limit: Tolerance) -> None:
        """Add a mismatch of each average that is not one device's."""
        now = self._values()
        for name, (own, right, *_) in now.items():
            was, its, *_ = self._before[name]
            way = norm(right.double() - self._origin[name][1].double())
            # relative to its way or to its roundings
            eps = torch.finfo(own.dtype).eps * _ROUNDINGS * norm(right)
            size = max(
                beside_way(own, right, way, limit, _ROUNDINGS),
                difference(own, right, max(way, eps / _LARGE)) * limit.updates / _LARGE,
            )
            if torch.equal(own, was) and 2 * int((right != its).sum()) > right.numel():
                size = max(size, 1.0)
            differences.compare(
                Moment.UPDATE, Subject.AVERAGE, name, difference=size, tolerance=limit.updates
            )
        if now:
            self.made_of = self._made_of(now)

    def _made_of(self, now: Rows) -> tuple[str, str, float]:
        own, right, own_run, right_run = (_in_a_row(now, side) for side in range(4))
        own_was, right_was = (_in_a_row(self._before, side) for side in range(2))
        weight, actual = _weight(right_was, right, right_run), _weight(own_was, own, own_run)
        repeated = own_was + (weight or 0.0) * (own_run - own_was)
        left = norm(repeated - right) / (norm(right - right_was) or 1.0)
        if norm(own - own_was) <= _rounding(own) / 2 and weight is not None:
            return "not updated", "it is as before the step", left
        if weight is not None and actual is not None and abs(actual - weight) > _SAME * weight:
            words = (
                f"the parameters are mixed in with the weight {actual:.4g} (decay {1 - actual:.4g})"
                f", in the reference with {weight:.4g} (decay {1 - weight:.4g})"
            )
            return "weight", words, left
        return "", "", left

    def _values(self) -> Rows:
        (loop, holds), (reference, wholes) = self._sides
        rights, rows = dict(_tensors(reference.average)), Rows()
        for name, tensor in _tensors(loop.average):
            if name not in rights or name not in holds:
                continue
            shard = _shard(name, tensor, rights[name].shape, holds[name])
            run = shard.of(wholes[name].value().view(shard.shape))
            own, value = shard.value(), holds[name].value()
            mine = value if value.numel() == own.numel() else run
            its = (own, shard.of(rights[name].detach()), mine, run)
            rows[name] = tuple(row.clone() for row in its)
        return rows


def _in_a_row(rows: Rows, side: int) -> Tensor:
    return torch.cat([held(its[side]).double().flatten() for its in rows.values()])


def _rounding(after: Tensor) -> float:
    """Return how far roundings bring an average."""
    is_single = torch.equal(after.float().double(), after)
    return _ROUNDINGS * torch.finfo(torch.float32 if is_single else after.dtype).eps * norm(after)


def _weight(before: Tensor, after: Tensor, run: Tensor) -> float | None:
    """Return the weight with which parameters were mixed into an average; None where they were not,
    or no parameter parts from the average."""
    way, step = after - before, run - before
    if not (bool(step.any()) and bool(way.any())):
        return None
    fit = multiple(way, step)
    left = norm(way - fit.factor * step)
    return fit.factor if left <= _FITS * norm(way) + _rounding(after) else None


def _shard(
    name: str, tensor: Tensor, shape: torch.Size, parameter: ParameterShard
) -> ParameterShard:
    """Return which elements of the whole an average is: as it says itself, all, or those that the
    rank has of the parameter."""
    if isinstance(tensor, DTensor):
        return shard_of(name, tensor, shape)
    if tensor.shape == shape:
        return ParameterShard(name, tensor, shape)
    return replace(parameter, parameter=tensor, within=None)


def _tensors(average: Average | None) -> Iterator[tuple[str, Tensor]]:
    if average is None:
        return
    rows = average.named_parameters() if isinstance(average, nn.Module) else average.items()
    for name, tensor in rows:
        if tensor.is_floating_point():
            yield canonical_name(name), tensor


def explain_average(mismatches: Sequence[Mismatch], averages: Averages, ranks: Ranks) -> RootCause:
    """Explain averages that differ though the parameters do not. All ranks call it."""
    everyones = ranks.gather(averages.made_of, tuple[str, str, float])
    who = sorted({mismatch.rank for mismatch in mismatches})
    known = {everyones[rank][:2] for rank in who}
    factor, what = known.pop() if len(known) == 1 else ("", "")
    left = max(everyones[rank][2] for rank in who)
    where = f"on rank {', '.join(map(str, who))}" if len(who) < ranks.size else "on every rank"
    largest = max(mismatch.difference for mismatch in mismatches)
    said = root_cause(
        mismatches, ranks, state=Subject.AVERAGE, factor=factor or f"differs by {largest:.3g}",
        sentence="The parameters match the reference, but their moving average does not"
        f"{what and f': {where} {what}'}.",
        fix="Update it once per step, from the parameters after the update, on every rank.",
    )  # fmt: skip
    if left > _FITS:
        return said if factor else said.unexplained("one update per step with the reference weight")
    return said.proven(
        "updated once per step with the reference weight and the parameters after the update, it "
        f"matches the reference to {left:.1e} of its step"
    )
