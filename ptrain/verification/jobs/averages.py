"""Moving averages of the parameters (torch.optim.swa_utils.AveragedModel, or a copy by hand) beside
one device's after every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ptrain.report.finding import Moment, Subject
from ptrain.verification.compare import Differences
from ptrain.verification.jobs.job import Average, Job, Tolerance
from ptrain.verification.jobs.record import beside_way
from ptrain.verification.jobs.shards import ParameterShard, shard_of
from ptrain.verification.parts import canonical_name, difference, norm

_ROUNDINGS = 4  # of an average, in its own dtype
_LARGE = 0.05  # of its way: a fault is larger, even where its way is not much more than roundings

# This rank's elements of the loop's average and of one device's.
Rows = dict[str, tuple[Tensor, Tensor]]


class Averages:
    """`before` and `compare` around every step."""

    def __init__(self, reference: Job, loop: Job, holds: Mapping[str, ParameterShard]) -> None:
        self._reference, self._loop, self._holds = reference, loop, holds
        self._origin, self._before = Rows(), Rows()

    def before(self) -> None:
        """Take the averages before a step."""
        self._before = self._values()
        self._origin = self._origin or self._before

    def compare(self, differences: Differences, limit: Tolerance) -> None:
        """Add a mismatch of each average that is not one device's."""
        now = self._values()
        for name, (own, right) in now.items():
            was, its = self._before[name]
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

    def _values(self) -> Rows:
        rights, rows = dict(_tensors(self._reference.average)), Rows()
        for name, tensor in _tensors(self._loop.average):
            if name not in rights or name not in self._holds:
                continue
            shard = _shard(name, tensor, rights[name].shape, self._holds[name])
            rows[name] = shard.value().clone(), shard.of(rights[name].detach()).clone()
        return rows


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
