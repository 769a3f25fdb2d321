"""A search by hand: a job whose machine has a pace that can be added up."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from ptrain.derivation.machine import Machine
from ptrain.selection import choose
from ptrain.selection.choose import Chooser
from ptrain.selection.job import searched_job
from ptrain.selection.ranking import PlacementRanking
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from tests.pure.hand_made_paces import HandPace, model

PACE = HandPace(byte=2e-9, sent=5e-9, copied=1e-8, element=1e-8)
FORWARD, BACKWARD = 16, 32


def machine(spec: Spec, *_: object, pace: HandPace = PACE) -> Machine:
    """Of a hand-made pace: a layer's passes are 32 and 64 seconds for each sample, divided among
    the ranks of tp; what is recomputed is another 32."""
    samples, cut = spec.batch.micro, spec.degree(Axis.TP)
    again = FORWARD * (spec.activations.default.policy is not None)
    work = model(
        2 * FORWARD * samples // cut,
        2 * (BACKWARD + again) * samples // cut,
        layers=spec.model.layers or 1,
        behind=(8 * samples, 16 * samples),
    )
    return Machine(pace=pace, work=lambda index: work)


def chooser(*words: str, devices: int = 8, cluster: str = "h100-8", **options: object) -> Chooser:
    """One for llama3-8b in samples of 4096 tokens; words with an operator are constraints."""
    where = [word for word in words if "<" in word or ">" in word or "==" in word]
    others = [word for word in words if word not in where]
    job = searched_job(
        "llama3-8b", ["batch.global=64", *others], cluster=cluster, devices=devices, where=where
    )
    return Chooser(job, machine=machine, **options)  # type: ignore[arg-type]


def without_known(search: Callable[[], PlacementRanking]) -> PlacementRanking:
    """Search without a look at why known placements lost, which is half of a search's time."""
    with mock.patch.object(choose, "KNOWN", {}):
        return search()
