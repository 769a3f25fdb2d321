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
from ptrain.verification.jobs.root_causes import families, root_cause
from ptrain.verification.jobs.shards import ParameterShard, shard_of
from ptrain.verification.parts import canonical_name, difference, held, multiple, norm

_ROUNDINGS = 4  # of an average, in its own dtype
_LARGE = 0.05  # of its way: a fault is larger, even where its way is not much more than roundings
_FITS = 1e-2  # relative to an update: of which it is made; roundings are added
_SAME = 0.02  # of two weights
_KEPT = 3  # steps before, whose parameters a stale copy may have
_BEFORE, _STALE = "from before the update", "from a copy that is {} updates old"

Rows = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageMove:
    """This rank's elements of one side, all in a row: the average before and after a step, the
    parameters, and these as they were before `earlier` steps, the last first."""

    before: Tensor
    after: Tensor
    run_before: Tensor
    run_after: Tensor
    earlier: tuple[Tensor, ...] = ()

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

    def weight(self, parameters: Tensor) -> float | None:
        """Return the weight with which these parameters were mixed into it; None where they were
        not, or no parameter parts from the average."""
        step = parameters - self.before
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
        self._parameters: tuple[Rows, Rows] = {}, {}
        self._earlier: list[Rows] = []  # the loop's, before earlier steps, the last first
        self.moves: tuple[AverageMove, AverageMove] | None = None
        self._repeated: Tensor | None = None  # updated as one device's, with the loop's parameters
        self.left = 0.0
        self.stood = False  # in a step in which one device's was updated

    def before(self) -> None:
        """Take the averages, and the parameters, before a step."""
        self._before = self._values()
        self._earlier = [self._parameters[0], *self._earlier][:_KEPT]
        self._parameters = self._own_parameters()
        self._origin = self._origin or self._before[1]

    def compare(self, differences: Differences, limit: Tolerance) -> None:
        """Add a mismatch of each average that is not one device's."""
        now, wholes = self._values()
        parameters = self._own_parameters()
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
        self.moves = _moves(
            names, self._before, (now, wholes), self._parameters, parameters, self._earlier
        )
        self._repeat()

    def _repeat(self) -> None:
        """Update the average that the loop began with as one device updates its own."""
        if self.moves is None:
            return
        own, right = self.moves
        self.stood |= own.stands_still and not right.stands_still
        average = own.before if self._repeated is None else self._repeated
        weight = right.weight(right.run_after) or 0.0
        self._repeated = average + weight * (own.run_after - average)
        self.left = norm(self._repeated - right.after) / (norm(right.way) or 1.0)

    def _values(self) -> tuple[Rows, Rows]:
        """Return the loop's averages on this rank, and the same elements of one device's."""
        own, whole = {}, {}
        for name, shard, right in self._shards():
            own[name], whole[name] = shard.value().clone(), shard.of(right.detach()).clone()
        return own, whole

    def _own_parameters(self) -> tuple[Rows, Rows]:
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
    run_before: tuple[Rows, Rows], run_after: tuple[Rows, Rows], earlier: Sequence[Rows],
) -> tuple[AverageMove, AverageMove] | None:  # fmt: skip
    if not names:
        return None

    def together(rows: Rows) -> Tensor:
        return torch.cat([held(rows[name]).double().flatten() for name in names])

    both = []
    for side in range(2):
        rows = [together(its[side]) for its in (before, after, run_before, run_after)]
        both.append(
            AverageMove(before=rows[0], after=rows[1], run_before=rows[2], run_after=rows[3])
        )
    known = tuple(together(its) for its in earlier if its)
    return replace(both[0], earlier=known), both[1]


def cause_of(moves: tuple[AverageMove, AverageMove]) -> tuple[str, float, float]:
    """Return what the loop's average was made of, the weight of the parameters in it, and in one
    device's."""
    own, right = moves
    weight = right.weight(right.run_after)
    if weight is None:
        return "", 0.0, 0.0
    if own.stands_still:
        return "not updated", 0.0, weight
    if torch.equal(own.after, own.run_after) and weight < 1 - _SAME:
        return "equal to the parameters", 1.0, weight
    now = own.weight(own.run_after)
    if now is None:
        return _of_earlier(own, weight)
    if abs(now - weight) > _SAME * weight:
        twice = 1 - (1 - weight) ** 2
        return ("twice" if abs(now - twice) <= _SAME * twice else "weight"), now, weight
    elsewhere = norm(own.before - right.before) > _LARGE * norm(right.way)
    return "other initial values" if elsewhere else "", now, weight


def _of_earlier(own: AverageMove, weight: float) -> tuple[str, float, float]:
    """Return which parameters of before were mixed in: those of before the update, or of before a
    step before it."""
    for back, parameters in enumerate((own.run_before, *own.earlier)):
        old = own.weight(parameters)
        if old is not None and abs(old - weight) <= _SAME * weight:
            return (_STALE.format(back + 1) if back else _BEFORE), old, weight
    return "", 0.0, weight


def is_undecided(moves: tuple[AverageMove, AverageMove] | None) -> bool:
    """Return whether an average that stands still may have been mixed with the parameters of before
    the update, or of before a step before it: these are what it is."""
    if moves is None:
        return True
    own, _ = moves
    return own.stands_still and any(
        norm(own.before - parameters) <= own.rounding
        for parameters in (own.run_before, *own.earlier)
    )


def explain_average(
    mismatches: Sequence[Mismatch],
    averages: Averages,
    ranks: Ranks,
) -> RootCause:
    """Explain averages that differ though the parameters do not. All ranks call it."""
    mine = ("", 0.0, 0.0) if averages.moves is None else cause_of(averages.moves)
    if mine[0] == "other initial values" and averages.stood:
        mine = "left out in a step", *mine[1:]
    everyones = ranks.gather([*mine, averages.left])
    who = sorted({mismatch.rank for mismatch in mismatches})
    causes = {everyones[rank][0] for rank in who}
    largest = max(mismatch.difference for mismatch in mismatches)
    cause = causes.pop() if len(causes) == 1 else ""
    _, now, weight, _ = everyones[who[0]]
    left = max(everyones[rank][3] for rank in who)
    place = families(mismatch.name for mismatch in mismatches)
    where = f"on rank {', '.join(map(str, who))}" if len(who) < ranks.size else "on every rank"
    sentences = {
        "other initial values": f"{where} it has other initial values than the reference. Copy "
                            "the initial weights of the model into it, on every rank, or "
                            "load it with the checkpoint",
        "left out in a step": f"{where} it was not updated in an earlier step. Update it in "
                              "every step",
        "not updated": f"{where} it is as before the step. Update it on every rank, from the "
                       "parameters themselves and not from a copy that was made once",
        "equal to the parameters": f"{where} it equals the parameters. Keep copies of them "
                          "(deepcopy); the first update of AveragedModel copies them",
        _BEFORE: f"{where} it is mixed with the parameters from before the update. Update it "
                 "after optimizer.step()",
        "twice": f"{where} it is updated twice in a step: the parameters have the weight "
                 f"{now:.4g}, which two updates with {weight:.4g} give. Update it once",
        "weight": f"{where} the parameters are mixed in with the weight {now:.4g} (decay "
                  f"{1 - now:.4g}), in the reference with {weight:.4g} (decay "
                  f"{1 - weight:.4g})",
    }  # fmt: skip
    if cause.startswith(_STALE.partition("{")[0]):
        sentences[cause] = (
            f"{where} it is mixed with parameters {cause}. Refresh that copy after each "
            "optimizer.step(), before the average is updated"
        )
    is_proven = bool(cause) and (left <= _FITS or cause == "other initial values")
    said = root_cause(
        mismatches, ranks, state=Subject.AVERAGE, factor=cause or f"differs by {largest:.3g}",
        sentence=f"The parameters match the reference, but their moving average ({place}) "
                 "does not"
        + (f": {sentences[cause]}." if cause else "."),
    )  # fmt: skip
    if not is_proven:
        return said.unexplained(
            f"another decay, two updates, the parameters before the update and {_KEPT} steps "
            "before it"
        )
    if cause == "other initial values":
        return said
    return said.proven(
        f"updated once per step, with the reference weight ({weight:.4g} now) and the "
        f"parameters after the update, it matches the reference to {left:.1e} of its step"
    )
