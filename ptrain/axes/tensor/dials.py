"""Which spec obeys the dials of tp: one whose operators are cut. On one device they are free, as
all dials are."""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.axes.rule import SpecRule
from ptrain.errors import Fault
from ptrain.spec.axis import Axis
from ptrain.spec.model import ModelShape
from ptrain.spec.role import Role
from ptrain.spec.spec import Spec
from ptrain.spec.tensor import TensorSpec
from ptrain.spec.tuples import two_ranks


def _without_tp(spec: Spec) -> Iterator[Fault]:
    if spec.degree(Axis.TP) > 1 or spec.world_size == 1:
        return
    tensor, default = spec.tensor, TensorSpec()
    is_of_ep = spec.degree(Axis.EP) > 1 and {role for _, role in tensor.roles} == {Role.EXPERTS}
    has_roles = bool(tensor.roles) and not isinstance(spec.model, ModelShape)
    written = {
        "plan": (has_roles and not is_of_ep) or tensor.is_naive is not default.is_naive,
        "loss_parallel": tensor.loss_parallel is not default.loss_parallel,
        "experts": tensor.is_folded,
    }
    for key, is_written in written.items():
        if is_written:
            yield Fault(
                place=f"tensor.{key}",
                finding="nothing obeys it: no operator is cut, since tp has no two ranks",
                remedy=f"remove tensor.{key}"
                + (f", or write {two_ranks(Axis.TP)}" if key != "experts" else ""),
            )


DIALS = (
    SpecRule(
        name="the dials of tp need it",
        theorem="every key of a spec has an effect",
        faults=_without_tp,
    ),
)
