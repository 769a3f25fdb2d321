"""What the tensor axis offers to a search: degrees that divide a model's operators, with
activations whole between the blocks, in slices of the tokens, or saved so too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd

from ptrain.axes.candidates import AxisChoice, AxisSpace, Written, divisors
from ptrain.axes.tensor.cost import cut_sizes
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import S_STAR, Axis, Factor, Placement, R, S
from ptrain.spec.spec import Spec

_TUPLES = tuple(
    Placement(parameters=S, optimizer=S, gradients=S, activations=activations)
    for activations in (R, S, S_STAR)
)


def _sizes(spec: Spec, devices: int, written: Written) -> Iterable[int]:
    """Return the sizes within a node: every operator of a block waits for what they send. Larger
    ones must be written."""
    cluster, shape = spec.cluster, spec.model
    most = min(devices, cluster.devices_per_node) if cluster else devices
    common = gcd(*cut_sizes(shape).values()) if isinstance(shape, ModelShape) else most
    within = (size for size in divisors(common) if size <= most and devices % size == 0)
    return written.sizes(Axis.TP, devices, within)


def _choices(spec: Spec, ranks: int, written: Written) -> Iterator[AxisChoice]:
    if ranks == 1:
        yield AxisChoice()
        return
    for (placement,), _ in written.held((Axis.TP,), (((offered,), ()) for offered in _TUPLES)):
        yield AxisChoice(factors=(Factor(axis=Axis.TP, degree=ranks, placement=placement),))


SPACE = AxisSpace(axes=(Axis.TP,), sizes=_sizes, choices=_choices, tuples={Axis.TP: _TUPLES})
