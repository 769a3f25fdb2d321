"""Moving averages of the parameters (torch.optim.swa_utils.AveragedModel, or a copy by hand) beside
one device's after every step, and what an update of one that differs was made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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

Rows = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageMove:
    """This rank's elements of one side, all in a row: the average before and after a step, and the
    parameters after it."""

    before: Tensor
    after: Tensor
    run_after: Tensor

    @property
    def way(self) -> Tensor:
        return self.after - self.before

    @property
    def rounding(self) -> float:
        """Return how far roundings bring it."""
        is_single = torch.equal(self.after.float().double(), self.after)
        eps = torch.finfo(torch.float32 if is_single else torch.float64).eps
        return _ROUNDINGS * eps * norm(self.after)

    @property
    def stands_still(self) -> bool:
        return norm(self.way) <= self.rounding / 2

    @property
    def weight(self) -> float | None:
        """Return the weight with which the parameters were mixed into it; None where they were not,
        or no parameter parts from the average."""
        step = self.run_after - self.before
        if not (bool(step.any()) and bool(self.way.any())):
            return None
        fit = multiple(self.way, step)
        left = norm(self.way - fit.factor * step)
        return fit.factor if left <= _FITS * norm(self.way) + self.rounding else None


class Averages:
    """`begin` once, then `before` and `compare` around every step."""

    def __init__(
        self, reference: Job, loop: Job, holds: Mapping[str, ParameterShard],
        wholes: Mapping[str, ParameterShard],
    ) -> None:  # fmt: skip
        self._sides = (loop, holds), (reference, wholes)
        self._origin: Rows = {}
        self._before: tuple[Rows, Rows] = {}, {}
        self.moves: tuple[AverageMove, AverageMove] | None = None
        self._repeated: Tensor | None = None  # updated as one device's, with the loop's parameters
        self.left = 0.0

    def before(self) -> None:
        """Take the averages before a step."""
        self._before = self._values()
        self._origin = self._origin or self._before[1]

    def compare(self, differences: Differences, limit: Tolerance) -> None:
        """Add a mismatch of each average that is not one device's."""
        now, wholes = self._values()
        names = [name for name in now if name in wholes]
        for name in names:
            right = wholes[name]
            way = norm(right.double() - self._origin[name].double())
            own = now[name]
            size = _size(own, right, way, limit)
            stood = torch.equal(own, self._before[0][name])
            if stood and 2 * int((right != self._before[1][name]).sum()) > right.numel():
                size = max(size, 1.0)
            differences.compare(
                Moment.UPDATE, Subject.AVERAGE, name, difference=size, tolerance=limit.updates
            )
        self.moves = _moves(names, self._before, (now, wholes), self._parameters())
        self._repeat()

    def _repeat(self) -> None:
        """Update the average that the loop began with as one device updates its own."""
        if self.moves is None:
            return
        own, right = self.moves
        average = own.before if self._repeated is None else self._repeated
        weight = right.weight or 0.0
        self._repeated = average + weight * (own.run_after - average)
        self.left = norm(self._repeated - right.after) / (norm(right.way) or 1.0)

    def _values(self) -> tuple[Rows, Rows]:
        """Return the loop's averages on this rank, and the same elements of one device's."""
        own, whole = {}, {}
        for name, shard, right in self._shards():
            own[name], whole[name] = shard.value().clone(), shard.of(right.detach()).clone()
        return own, whole

    def _parameters(self) -> tuple[Rows, Rows]:
        """Return the loop's parameters at the elements of its averages, and one device's."""
        (_, holds), (_, wholes) = self._sides
        own, whole = {}, {}
        for name, shard, _ in self._shards():
            whole[name] = shard.of(wholes[name].value().view(wholes[name].shape)).clone()
            value = holds[name].value()
            own[name] = value.clone() if shard.value().numel() == value.numel() else whole[name]
        return own, whole

    def _shards(self) -> Iterator[tuple[str, ParameterShard, Tensor]]:
        """Yield which elements of one device's average each of the loop's is of."""
        (loop, holds), (reference, _) = self._sides
        right = dict(_tensors(reference.average))
        for name, tensor in _tensors(loop.average):
            if name in right and name in holds:
                yield name, _shard(name, tensor, right[name].shape, holds[name]), right[name]


def _size(own: Tensor, right: Tensor, way: float, limit: Tolerance) -> float:
    """Return how far an average is from one device's, relative to its way or its roundings."""
    eps = torch.finfo(own.dtype).eps * _ROUNDINGS * norm(right)
    tight = beside_way(own, right, way, limit, _ROUNDINGS)
    loose = difference(own, right, max(way, eps / _LARGE))
    return max(tight, loose * limit.updates / _LARGE)


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


def _moves(
    names: Sequence[str], before: tuple[Rows, Rows], after: tuple[Rows, Rows],
    parameters: tuple[Rows, Rows],
) -> tuple[AverageMove, AverageMove] | None:  # fmt: skip
    if not names:
        return None
    rows = [
        [torch.cat([held(its[side][name]).double().flatten() for name in names]) for side in (0, 1)]
        for its in (before, after, parameters)
    ]
    own, right = (
        AverageMove(before=b, after=a, run_after=p) for b, a, p in zip(*rows, strict=True)
    )
    return own, right


def _made_of(moves: tuple[AverageMove, AverageMove] | None) -> tuple[str, str]:
    """Return what this rank's average is, as a factor and in words; nothing where that is not
    known."""
    own, right = moves or (None, None)
    weight = right.weight if right else None
    if own is None or right is None or weight is None:
        return "", ""
    if own.stands_still:
        return "not updated", "it is as before the step"
    now = own.weight
    if now is not None and abs(now - weight) > _SAME * weight:
        return "weight", (
            f"the parameters are mixed in with the weight {now:.4g} (decay {1 - now:.4g}), in the "
            f"reference with {weight:.4g} (decay {1 - weight:.4g})"
        )
    if norm(own.before - right.before) > _LARGE * norm(right.way):
        return "other values before the step", "it differs from the reference before the step"
    return "", ""


def explain_average(mismatches: Sequence[Mismatch], averages: Averages, ranks: Ranks) -> RootCause:
    """Explain averages that differ though the parameters do not. All ranks call it."""
    everyones = ranks.gather((*_made_of(averages.moves), averages.left), tuple[str, str, float])
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
