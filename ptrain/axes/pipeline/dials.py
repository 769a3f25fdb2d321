"""Which spec obeys the dials of pp: one whose model is cut into stages. On one device they are
free, as all dials are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from ptrain.axes.rule import SpecRule
from ptrain.errors import Fault
from ptrain.spec.axis import Axis
from ptrain.spec.pipeline import PipelineSpec
from ptrain.spec.spec import Spec
from ptrain.spec.tuples import two_ranks


def _without_pp(spec: Spec) -> Iterator[Fault]:
    if spec.degree(Axis.PP) > 1 or spec.world_size == 1:
        return
    default = PipelineSpec()
    for field in fields(PipelineSpec):
        if getattr(spec.pipeline, field.name) != getattr(default, field.name):
            yield Fault(
                place=f"pipeline.{field.name}",
                finding="nothing obeys it: the model is not cut into stages, since pp has no two "
                "ranks",
                remedy=f"remove pipeline.{field.name}, or write {two_ranks(Axis.PP)}",
            )


DIALS = (
    SpecRule(
        name="the dials of pp need it",
        theorem="every key of a spec has an effect",
        faults=_without_pp,
    ),
)
